//! The keeper's work, on its own runtime: one waiting loop, one renewing loop.

use std::time::Duration;

use anyhow::Result;
use tokio::sync::mpsc::UnboundedReceiver;

use super::{Charge, News, Order, Teller};
use crate::backend::{Attempt, Backend, Ending, Lease, Released, Renewal, within};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Deadlines, Holder, Term};
use crate::mutant::{self, Mutant};
use crate::random;

pub struct Duty {
    pub backend: Box<dyn Backend>,
    pub charge: Charge,
    pub ordered: UnboundedReceiver<Order>,
    pub tell: Teller,
    pub push: Box<dyn Fn(Deadlines) + Send>,
}

/// For a request that only has to be on its way.
const LAST_WORD: Duration = Duration::from_millis(200);

/// How a lease stops being kept.
enum Kept {
    UntilReleased(Box<Ending>),
    /// Given up before anything was started under it; or the main thread is gone, and with it the process.
    Unused,
}

impl Duty {
    /// Until the lock is ours, or is not going to be.
    pub async fn begin(&mut self) -> Option<Lease> {
        match self.refuse_nested().await {
            Ok(None) => self.acquire().await,
            Ok(Some(holder)) => self.end(News::Nested(Box::new(holder))),
            Err(error) => self.end(News::Failed(error)),
        }
    }

    /// From there until it is not ours any more.
    pub async fn go_on(&mut self, mut lease: Lease) {
        match self.keep(&mut lease).await {
            Kept::UntilReleased(ending) => {
                let released = self.release(&lease, &ending).await;
                self.tell.tell(News::Released(released));
            }
            Kept::Unused => drop(self.withdraw().await),
        }
    }

    async fn refuse_nested(&mut self) -> Result<Option<Holder>> {
        if self.charge.ancestors.is_empty() {
            return Ok(None);
        }
        let state = within(self.charge.patience.connect, self.backend.inspect(&self.charge.ask.name)).await?;
        Ok(self.charge.ancestors.iter().find_map(|owner| state.holder(owner)).cloned())
    }

    /// The one waiting loop: try; if busy, sleep until something changes, our place needs a sign of life,
    /// or we are told to give up.
    async fn acquire(&mut self) -> Option<Lease> {
        let mut answered = false;
        let mut troubled = false;
        let mut pause = Pause::new();
        loop {
            let patience = if answered { self.charge.patience.attempt } else { self.charge.patience.connect };
            let attempt = tokio::select! {
                biased;
                _ = self.ordered.recv() => return self.withdraw().await,
                attempt = within(patience, self.backend.try_acquire(&self.charge.ask)) => attempt,
            };
            if attempt.is_ok() && std::mem::take(&mut troubled) {
                self.tell.tell(News::Recovered);
            }
            match attempt {
                Ok(Attempt::Granted(lease)) => return self.granted(lease).await,
                Ok(Attempt::Busy(busy)) => {
                    answered = true;
                    pause = Pause::new();
                    let ask_again = busy.ask_again;
                    self.tell.tell(News::Busy(busy));
                    tokio::select! {
                        biased;
                        _ = self.ordered.recv() => return self.withdraw().await,
                        () = hint(self.backend.as_mut()) => {}
                        () = clock::sleep_until(ask_again) => {}
                    }
                }
                Ok(Attempt::OtherTerms(why)) => return self.end(News::OtherTerms(why)),
                Ok(Attempt::AlreadyRan) => return self.end(News::AlreadyRan),
                Err(error) if !answered || !may_pass(&error) => {
                    // It may have been applied all the same. Whoever waited in vain need not wait for this as well.
                    let _ = within(LAST_WORD, self.backend.withdraw(&self.charge.ask)).await;
                    return self.end(News::Failed(error));
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        self.tell.tell(News::Trouble(format!("{error:#}")));
                    }
                    tokio::select! {
                        biased;
                        _ = self.ordered.recv() => return self.withdraw().await,
                        () = pause.next() => {}
                    }
                }
            }
        }
    }

    fn end(&self, news: News) -> Option<Lease> {
        self.tell.tell(news);
        None
    }

    /// A grant that took long on its way is renewed before anything is started under it.
    async fn granted(&mut self, mut lease: Lease) -> Option<Lease> {
        if mutant::is(Mutant::DeadlineFromReply) {
            lease.term.from = clock::now();
        }
        let terms = self.charge.terms.shortened_to(lease.term.ttl);
        if (lease.term.from + terms.renew_every()).has_passed() {
            match within(terms.attempt(), self.backend.renew(&lease)).await {
                Ok(Renewal::Held(term)) => lease.term = term,
                Ok(Renewal::Lost(why) | Renewal::Taken(why) | Renewal::Revoked(why)) => {
                    let lost = format!("granted, but lost again before the command could start: {why}");
                    let _ = within(terms.attempt(), self.backend.withdraw(&self.charge.ask)).await;
                    return self.end(News::Failed(Fault::NotOurs.because(lost)));
                }
                // The guardian sees for itself whether what is left is enough.
                Err(_) => {}
            }
        }
        let told = Lease { term: self.backend.full_term(&lease), ..lease.clone() };
        self.tell.tell(News::Granted(told, terms.deadlines(lease.term)));
        Some(lease)
    }

    async fn withdraw(&mut self) -> Option<Lease> {
        let _ = within(self.charge.patience.attempt, self.backend.withdraw(&self.charge.ask)).await;
        self.end(News::Withdrawn)
    }

    /// The one renewing loop. Unknown is neither lost nor held: it only fails to push the deadline.
    async fn keep(&mut self, lease: &mut Lease) -> Kept {
        let mut troubled = false;
        let mut pause = Pause::new();
        loop {
            let terms = self.charge.terms.shortened_to(lease.term.ttl);
            let due = lease.term.from + terms.renew_every();
            tokio::select! {
                biased;
                order = self.ordered.recv() => return kept(order),
                () = clock::sleep_until(due) => {}
                () = hint(self.backend.as_mut()) => {}
            }
            let renewal = tokio::select! {
                biased;
                order = self.ordered.recv() => return kept(order),
                renewal = within(terms.attempt(), self.backend.renew(lease)) => renewal,
            };
            let renewal = match renewal {
                _ if mutant::is(Mutant::RenewalIgnored) => Ok(Renewal::Held(Term { from: clock::now(), ..lease.term })),
                renewal => renewal,
            };
            if renewal.is_ok() && std::mem::take(&mut troubled) {
                pause = Pause::new();
                self.tell.tell(News::Recovered);
            }
            match renewal {
                Ok(Renewal::Held(term)) => {
                    lease.term = term;
                    let deadlines = self.charge.terms.deadlines(term);
                    (self.push)(deadlines);
                    self.tell.tell(News::Renewed(deadlines));
                }
                Ok(Renewal::Lost(why)) => {
                    self.tell.tell(News::Lost(why));
                    return kept(self.ordered.recv().await);
                }
                Ok(Renewal::Taken(reason)) => {
                    self.tell.tell(News::Taken(reason));
                    return kept(self.ordered.recv().await);
                }
                Ok(Renewal::Revoked(reason)) => {
                    self.tell.tell(News::Revoked(reason));
                    return kept(self.ordered.recv().await);
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        self.tell.tell(News::Trouble(format!("{error:#}")));
                    }
                    tokio::select! {
                        biased;
                        order = self.ordered.recv() => return kept(order),
                        () = pause.next() => {}
                    }
                }
            }
        }
    }

    /// Tries until it is done or the lease has run out by itself.
    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        const LONGEST: Duration = Duration::from_secs(5);
        let end = self.charge.terms.deadlines(lease.term).end;
        let until = end.min(clock::now() + LONGEST);
        let in_time = !end.has_passed();
        let mut unanswered = false;
        let mut pause = Pause::new();
        loop {
            match within(self.charge.patience.attempt, self.backend.release(lease, ending)).await {
                Err(error) if !may_pass(&error) || until.has_passed() => return Err(error),
                Err(_) => {
                    unanswered = true;
                    pause.next().await;
                }
                // One that went unanswered has done it, or the lease has run out since: the command had ended before.
                Ok(Released::NotOurs) if unanswered && in_time => return Ok(Released::Done),
                done => return done,
            }
        }
    }
}

fn kept(order: Option<Order>) -> Kept {
    match order {
        Some(Order::Release(ending)) => Kept::UntilReleased(ending),
        Some(Order::GiveUp) | None => Kept::Unused,
    }
}

/// Whether asking again may help.
fn may_pass(error: &anyhow::Error) -> bool {
    match Fault::of(error) {
        Fault::Unreachable | Fault::Internal => true,
        Fault::Usage | Fault::OtherTerms | Fault::Refused | Fault::Config | Fault::NotOurs | Fault::StaleToken => false,
    }
}

/// Resolves when the backend has a hint for us; never, if it cannot give any.
async fn hint(backend: &mut dyn Backend) {
    if backend.changed().await.is_err() {
        std::future::pending().await
    }
}

/// Growing pauses between attempts, none twice the same, so that many waiters do not come back as one.
struct Pause(Duration);

impl Pause {
    fn new() -> Pause {
        Pause(Duration::from_millis(20))
    }

    async fn next(&mut self) {
        let [random] = random::bytes().unwrap_or_default();
        let jitter = self.0.mul_f64(f64::from(random) / 255.0);
        tokio::time::sleep(self.0 + jitter).await;
        self.0 = (self.0 * 2).min(Duration::from_millis(500));
    }
}
