//! The keeper: acquire, keep, release. One background thread from the beginning to the end of a run, which alone speaks to
//! the backend, on a runtime of its own.
//!
//! It tells the main thread what happens, takes orders from it, and pushes the deadlines to the guardian. It knows no
//! process and no signal: if it hangs, the deadlines are simply not pushed.

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::backend::{Ask, Attempt, Backend, Busy, Ending, Lease, Patience, Released, Renewal, within};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::{Deadlines, Holder, LeaseTiming, OwnerId};

/// What the main thread hears.
#[derive(Debug)]
pub enum KeeperEvent {
    /// An ancestor of ours holds this very lock.
    Nested(Box<Holder>),
    Busy(Box<Busy>),
    Granted(Lease, Deadlines),
    AlreadyRan,
    /// Given up, as ordered.
    Withdrawn,
    Failed(anyhow::Error),
    /// The backend does not answer; what is done about it depends on whether we hold the lock.
    Trouble(String),
    Recovered,
    /// The lease was renewed; the guardian knows already.
    Renewed(Deadlines),
    Lost(String),
    /// Lost to an operator, for this reason.
    ForceReleased(String),
    Revoked(String),
    Released(Result<Released>),
}

#[derive(Debug)]
enum Order {
    GiveUp,
    Release(Box<Ending>),
}

/// The main thread's end.
pub struct Keeper {
    orders: UnboundedSender<Order>,
    events: Receiver<KeeperEvent>,
    /// Readable when there are events.
    wake: Arc<EventFd>,
}

/// Everything it needs to begin.
pub struct KeeperConfig {
    pub ask: Ask,
    /// Locks that our ancestors hold, by owner: asking for one of them would wait for ever.
    pub ancestors: Vec<OwnerId>,
    pub timing: LeaseTiming,
    pub patience: Patience,
}

impl Keeper {
    /// Starts the thread, which opens the backend and acquires the lock.
    pub fn begin(
        config: KeeperConfig,
        open: impl FnOnce() -> Result<Box<dyn Backend>> + Send + 'static,
        push: impl Fn(Deadlines) + Send + 'static,
    ) -> Result<Keeper> {
        let (orders, ordered) = unbounded_channel();
        let (tell, events) = channel();
        let wake = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let teller = Teller { events: tell, wake: Arc::clone(&wake) };
        let runtime =
            Builder::new_current_thread().enable_all().build().context("cannot start the keeper's runtime")?;
        let thread = move || {
            runtime.block_on(async {
                match open() {
                    Ok(backend) => KeeperLoop { backend, config, ordered, teller, push: Box::new(push) }.run().await,
                    Err(error) => teller.tell(KeeperEvent::Failed(error)),
                }
            });
            // Without waiting for a name that is still being looked up.
            runtime.shutdown_background();
        };
        std::thread::Builder::new().name("keeper".into()).spawn(thread).context("cannot start the keeper's thread")?;
        Ok(Keeper { orders, events, wake })
    }

    /// Leave the queue, and the lock should it have come at the last moment. Answered by `Withdrawn`.
    pub fn give_up(&self) {
        let _ = self.orders.send(Order::GiveUp);
    }

    /// Only after every process of the command is dead. Answered by `Released`.
    pub fn release(&self, ending: Ending) {
        let _ = self.orders.send(Order::Release(Box::new(ending)));
    }

    /// What has happened since, if anything.
    pub fn next(&self) -> Option<KeeperEvent> {
        self.events.try_recv().ok()
    }

    /// Readable when something may have happened, until [`heard`](Self::heard).
    pub fn events(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub fn heard(&self) {
        let _ = self.wake.read();
    }
}

struct Teller {
    events: Sender<KeeperEvent>,
    wake: Arc<EventFd>,
}

impl Teller {
    fn tell(&self, event: KeeperEvent) {
        // Nobody listens when the main thread has already decided how this ends.
        let _ = self.events.send(event);
        let _ = self.wake.write(1);
    }
}

/// The thread's side: one waiting loop, one renewing loop.
struct KeeperLoop {
    backend: Box<dyn Backend>,
    config: KeeperConfig,
    ordered: UnboundedReceiver<Order>,
    teller: Teller,
    push: Box<dyn Fn(Deadlines) + Send>,
}

/// For a request that only has to be on its way.
const LAST_WORD: Duration = Duration::from_millis(200);

/// How long after a grant the backend is not asked to watch for changes.
const QUIET: Duration = Duration::from_millis(20);

impl KeeperLoop {
    async fn run(&mut self) {
        let Some(mut lease) = self.begin().await else { return };
        match self.keep(&mut lease).await {
            Some(Order::Release(ending)) => {
                let released = self.release(&lease, &ending).await;
                self.teller.tell(KeeperEvent::Released(released));
            }
            // Given up before anything was started under it; or the main thread is gone, and with it the process.
            Some(Order::GiveUp) | None => drop(self.withdraw().await),
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

    async fn acquire(&mut self) -> Option<Lease> {
        match self.try_until_granted().await {
            Ok(ended) => ended,
            Err(Ordered(_)) => self.withdraw().await,
        }
    }

    /// The one waiting loop: try; if busy, sleep until something changes, our place needs a sign of life,
    /// or we are told to give up.
    async fn try_until_granted(&mut self) -> Result<Option<Lease>, Ordered> {
        let mut answered = false;
        let mut troubled = false;
        let mut pause = Pause::new();
        loop {
            let patience = if answered { self.config.patience.attempt } else { self.config.patience.connect };
            let attempt = within(patience, self.backend.try_acquire(&self.config.ask));
            let attempt = unless_ordered(&mut self.ordered, attempt).await?;
            if attempt.is_ok() && std::mem::take(&mut troubled) {
                self.teller.tell(KeeperEvent::Recovered);
            }
            match attempt {
                Ok(Attempt::Granted(lease)) => return Ok(self.granted(lease).await),
                Ok(Attempt::Busy(busy)) => {
                    answered = true;
                    pause = Pause::new();
                    let ask_again = busy.ask_again;
                    self.teller.tell(KeeperEvent::Busy(Box::new(busy)));
                    unless_ordered(&mut self.ordered, hint_or_due(self.backend.as_mut(), ask_again)).await?;
                }
                Ok(Attempt::OtherSlots(why)) => {
                    return Ok(self.end(KeeperEvent::Failed(Fault::OtherSlots.because(why))));
                }
                Ok(Attempt::AlreadyRan) => return Ok(self.end(KeeperEvent::AlreadyRan)),
                Err(error) if !answered || !may_pass(&error) => {
                    // It may have been applied all the same. Whoever waited in vain need not wait for this as well.
                    let _ = within(LAST_WORD, self.backend.withdraw(&self.config.ask)).await;
                    return Ok(self.end(KeeperEvent::Failed(error)));
                }
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        self.teller.tell(KeeperEvent::Trouble(format!("{error:#}")));
                    }
                    unless_ordered(&mut self.ordered, pause.next()).await?;
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

    /// Keeps the lease until there is an order, and hands over that order.
    async fn keep(&mut self, lease: &mut Lease) -> Option<Order> {
        match self.renew_until_lost(lease).await {
            Ok(lost) => {
                self.teller.tell(lost);
                self.ordered.recv().await
            }
            Err(Ordered(order)) => order,
        }
    }

    /// The one renewing loop. Unknown is neither lost nor held: it only fails to push the deadline.
    async fn renew_until_lost(&mut self, lease: &mut Lease) -> Result<KeeperEvent, Ordered> {
        let mut troubled = false;
        let mut pause = Pause::new();
        // A command that is over by then costs the server nothing but the lock.
        unless_ordered(&mut self.ordered, tokio::time::sleep(QUIET)).await?;
        let mut noted = false;
        let mut renewed = true;
        loop {
            let timing = self.config.timing.shortened_to(lease.grant.ttl);
            if !noted && std::mem::take(&mut renewed) {
                let noting = within(timing.attempt(), self.backend.note_start(lease));
                // If it fails, the next renewal may find the server in a better state.
                noted = unless_ordered(&mut self.ordered, noting).await?.is_ok();
            }
            let due = lease.grant.from + timing.renew_every();
            unless_ordered(&mut self.ordered, hint_or_due(self.backend.as_mut(), due)).await?;
            let renewing = within(timing.attempt(), self.backend.renew(lease));
            let renewal = unless_ordered(&mut self.ordered, renewing).await?;
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
                Ok(Renewal::Lost(why)) => return Ok(KeeperEvent::Lost(why)),
                Ok(Renewal::ForceReleased(reason)) => return Ok(KeeperEvent::ForceReleased(reason)),
                Ok(Renewal::Revoked(reason)) => return Ok(KeeperEvent::Revoked(reason)),
                Err(error) => {
                    if !std::mem::replace(&mut troubled, true) {
                        self.teller.tell(KeeperEvent::Trouble(format!("{error:#}")));
                    }
                    unless_ordered(&mut self.ordered, pause.next()).await?;
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

/// What the main thread ordered; `None` if it is gone.
struct Ordered(Option<Order>);

/// Does something, unless there is an order first.
async fn unless_ordered<T>(
    ordered: &mut UnboundedReceiver<Order>,
    work: impl Future<Output = T>,
) -> Result<T, Ordered> {
    tokio::select! {
        biased;
        order = ordered.recv() => Err(Ordered(order)),
        done = work => Ok(done),
    }
}

/// Whether asking again may help.
fn may_pass(error: &anyhow::Error) -> bool {
    match Fault::of(error) {
        Fault::Unreachable | Fault::Disk | Fault::Internal => true,
        Fault::Usage
        | Fault::OtherSlots
        | Fault::Busy
        | Fault::Refused
        | Fault::Config
        | Fault::NotOurs
        | Fault::StaleToken => false,
    }
}

/// Until the backend has a hint for us, if it can give any, or until this instant.
async fn hint_or_due(backend: &mut dyn Backend, due: Instant) {
    let hint = async {
        if backend.changed().await.is_err() {
            std::future::pending().await
        }
    };
    tokio::select! {
        biased;
        () = hint => {}
        () = clock::sleep_until(due) => {}
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
