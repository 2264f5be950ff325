//! The keeper's work: one waiting loop, one renewing loop.

use std::time::Duration;

use anyhow::Result;
use tokio::sync::mpsc::UnboundedReceiver;

use super::{KeeperConfig, KeeperEvent, Order, Teller};
use crate::backend::{Attempt, Backend, Ending, Lease, Released, Renewal, within};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Deadlines, Holder};

pub struct KeeperLoop {
    pub backend: Box<dyn Backend>,
    pub config: KeeperConfig,
    pub ordered: UnboundedReceiver<Order>,
    pub teller: Teller,
    pub push: Box<dyn Fn(Deadlines) + Send>,
}

/// For a request that only has to be on its way.
const LAST_WORD: Duration = Duration::from_millis(200);

/// How long after a grant the backend is not asked to watch for changes.
pub const QUIET: Duration = Duration::from_millis(20);

/// How a lease stops being kept.
enum Kept {
    UntilReleased(Box<Ending>),
    /// Given up before anything was started under it; or the main thread is gone, and with it the process.
    Unused,
}

impl KeeperLoop {
    pub async fn run(&mut self) {
        if let Some(mut lease) = self.begin().await {
            match self.keep(&mut lease).await {
                Kept::UntilReleased(ending) => {
                    let released = self.release(&lease, &ending).await;
                    self.teller.tell(KeeperEvent::Released(released));
                }
                Kept::Unused => drop(self.withdraw().await),
            }
        }
    }

    /// Until the lock is ours, or is not going to be.
    async fn begin(&mut self) -> Option<Lease> {
        match self.refuse_nested().await {
            Ok(None) => self.acquire().await,
            Ok(Some(holder)) => self.end(KeeperEvent::Nested(Box::new(holder))),
            Err(error) => self.end(KeeperEvent::Failed(error)),
        }
    }

    async fn refuse_nested(&mut self) -> Result<Option<Holder>> {
        if self.config.ancestors.is_empty() {
            return Ok(None);
        }
        let state = within(self.config.patience.connect, self.backend.inspect(&self.config.ask.name)).await?;
        Ok(self.config.ancestors.iter().find_map(|owner| state.holder(owner)).cloned())
    }

    /// The one waiting loop: try; if busy, sleep until something changes, our place needs a sign of life,
    /// or we are told to give up.
    async fn acquire(&mut self) -> Option<Lease> {
        let mut answered = false;
        let mut troubled = false;
        let mut pause = Pause::new();
        loop {
            let patience = if answered { self.config.patience.attempt } else { self.config.patience.connect };
            let attempt = tokio::select! {
                biased;
                _ = self.ordered.recv() => return self.withdraw().await,
                attempt = within(patience, self.backend.try_acquire(&self.config.ask)) => attempt,
            };
            if attempt.is_ok() && std::mem::take(&mut troubled) {
                self.teller.tell(KeeperEvent::Recovered);
            }
            match attempt {
                Ok(Attempt::Granted(lease)) => return self.granted(lease).await,
                Ok(Attempt::Busy(busy)) => {
                    answered = true;
                    pause = Pause::new();
                    let ask_again = busy.ask_again;
                    self.teller.tell(KeeperEvent::Busy(busy));
                    tokio::select! {
                        biased;
                        _ = self.ordered.recv() => return self.withdraw().await,
                        () = hint(self.backend.as_mut()) => {}
                        () = clock::sleep_until(ask_again) => {}
                    }
                }
                Ok(Attempt::OtherSlots(why)) => return self.end(KeeperEvent::OtherSlots(why)),
                Ok(Attempt::AlreadyRan) => return self.end(KeeperEvent::AlreadyRan),
                Err(error) if !answered || !may_pass(&error) => {
                    // It may have been applied all the same. Whoever waited in vain need not wait for this as well.
                    let _ = within(LAST_WORD, self.backend.withdraw(&self.config.ask)).await;
                    return self.end(KeeperEvent::Failed(error));
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        self.teller.tell(KeeperEvent::Trouble(format!("{error:#}")));
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

    fn end(&self, news: KeeperEvent) -> Option<Lease> {
        self.teller.tell(news);
        None
    }

    /// A grant that took long on its way is renewed before anything is started under it.
    async fn granted(&mut self, mut lease: Lease) -> Option<Lease> {
        let timing = self.config.timing.shortened_to(lease.grant.ttl);
        if (lease.grant.from + timing.renew_every()).has_passed() {
            match within(timing.attempt(), self.backend.renew(&lease)).await {
                Ok(Renewal::Held(grant)) => lease.grant = grant,
                Ok(Renewal::Lost(why) | Renewal::ForceReleased(why) | Renewal::Revoked(why)) => {
                    let lost = format!("granted, but lost again before the command could start: {why}");
                    let _ = within(timing.attempt(), self.backend.withdraw(&self.config.ask)).await;
                    return self.end(KeeperEvent::Failed(Fault::NotOurs.because(lost)));
                }
                // The guardian sees for itself whether what is left is enough.
                Err(_) => {}
            }
        }
        self.teller.tell(KeeperEvent::Granted(lease.clone(), timing.deadlines(lease.grant)));
        Some(lease)
    }

    async fn withdraw(&mut self) -> Option<Lease> {
        let _ = within(self.config.patience.attempt, self.backend.withdraw(&self.config.ask)).await;
        self.end(KeeperEvent::Withdrawn)
    }

    /// The one renewing loop. Unknown is neither lost nor held: it only fails to push the deadline.
    async fn keep(&mut self, lease: &mut Lease) -> Kept {
        let mut troubled = false;
        let mut pause = Pause::new();
        // A command that is over by then costs the server nothing but the lock.
        tokio::select! {
            biased;
            order = self.ordered.recv() => return kept(order),
            () = tokio::time::sleep(QUIET) => {}
        }
        let mut noted = false;
        let mut renewed = true;
        loop {
            if !noted && std::mem::take(&mut renewed) {
                let attempt = self.config.timing.shortened_to(lease.grant.ttl).attempt();
                tokio::select! {
                    biased;
                    order = self.ordered.recv() => return kept(order),
                    // If it fails, the next renewal may find the server in a better state.
                    answer = within(attempt, self.backend.note_start(lease)) => noted = answer.is_ok(),
                }
            }
            let timing = self.config.timing.shortened_to(lease.grant.ttl);
            let due = lease.grant.from + timing.renew_every();
            tokio::select! {
                biased;
                order = self.ordered.recv() => return kept(order),
                () = clock::sleep_until(due) => {}
                () = hint(self.backend.as_mut()) => {}
            }
            let renewal = tokio::select! {
                biased;
                order = self.ordered.recv() => return kept(order),
                renewal = within(timing.attempt(), self.backend.renew(lease)) => renewal,
            };
            if renewal.is_ok() && std::mem::take(&mut troubled) {
                pause = Pause::new();
                self.teller.tell(KeeperEvent::Recovered);
            }
            match renewal {
                Ok(Renewal::Held(grant)) => {
                    lease.grant = grant;
                    renewed = true;
                    let deadlines = self.config.timing.deadlines(grant);
                    (self.push)(deadlines);
                    self.teller.tell(KeeperEvent::Renewed(deadlines));
                }
                Ok(Renewal::Lost(why)) => {
                    self.teller.tell(KeeperEvent::Lost(why));
                    return kept(self.ordered.recv().await);
                }
                Ok(Renewal::ForceReleased(reason)) => {
                    self.teller.tell(KeeperEvent::ForceReleased(reason));
                    return kept(self.ordered.recv().await);
                }
                Ok(Renewal::Revoked(reason)) => {
                    self.teller.tell(KeeperEvent::Revoked(reason));
                    return kept(self.ordered.recv().await);
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        self.teller.tell(KeeperEvent::Trouble(format!("{error:#}")));
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
        let end = self.config.timing.deadlines(lease.grant).end;
        let until = end.min(clock::now() + LONGEST);
        let in_time = !end.has_passed();
        let mut unanswered = false;
        let mut pause = Pause::new();
        loop {
            match within(self.config.patience.attempt, self.backend.release(lease, ending)).await {
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
        Fault::Usage
        | Fault::OtherSlots
        | Fault::Busy
        | Fault::Refused
        | Fault::Config
        | Fault::NotOurs
        | Fault::StaleToken => false,
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
        let random = getrandom::u32().unwrap_or_default();
        let jitter = self.0.mul_f64(f64::from(random) / f64::from(u32::MAX));
        tokio::time::sleep(self.0 + jitter).await;
        self.0 = (self.0 * 2).min(Duration::from_millis(500));
    }
}
