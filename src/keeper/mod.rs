//! The keeper: acquire, keep, release. One background thread from the beginning to the end of a run, which alone speaks to
//! the backend, on a runtime of its own.
//!
//! It tells the main thread what happens, takes orders from it, and pushes the deadlines to the guardian. It knows no
//! process and no signal: if it hangs, the deadlines are simply not pushed.

mod lease;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::backend::{Ask, Backend, Busy, Ending, Lease, Patience, Released};
use crate::lock::{Deadlines, Holder, LeaseTiming, OwnerId};
use lease::KeeperLoop;

/// What the main thread hears.
#[derive(Debug)]
pub enum KeeperEvent {
    /// An ancestor of ours holds this very lock.
    Nested(Box<Holder>),
    Busy(Busy),
    Granted(Lease, Deadlines),
    OtherSlots(String),
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
