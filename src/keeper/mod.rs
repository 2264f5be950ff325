//! The keeper thread: acquire, keep, release. It alone speaks to the backend, on a runtime of its own.
//!
//! It tells the main thread what happens, takes two orders from it, and pushes the deadlines to the
//! guardian. It knows no process and no signal: if it hangs, the deadlines are simply not pushed.

mod duty;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use anyhow::{Context, Result};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::backend::{Ask, Backend, Busy, Ending, Lease, Patience, Released};
use crate::lock::{Deadlines, Holder, OwnerId, Terms};
use duty::Duty;

/// What the main thread hears.
#[derive(Debug)]
pub enum News {
    /// An ancestor of ours holds this very lock.
    Nested(Box<Holder>),
    Busy(Busy),
    Granted(Lease, Deadlines),
    OtherTerms(String),
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
    Taken(String),
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
    news: Receiver<News>,
    bell: Arc<EventFd>,
}

/// Everything the thread needs to begin.
pub struct Charge {
    pub ask: Ask,
    /// Locks that our ancestors hold, by owner: asking for one of them would wait for ever.
    pub ancestors: Vec<OwnerId>,
    pub terms: Terms,
    pub patience: Patience,
}

impl Keeper {
    pub fn spawn(
        charge: Charge,
        open: impl FnOnce() -> Result<Box<dyn Backend>> + Send + 'static,
        push: impl Fn(Deadlines) + Send + 'static,
    ) -> Result<Keeper> {
        let (orders, ordered) = unbounded_channel();
        let (tell, news) = channel();
        let bell = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let ring = Arc::clone(&bell);
        let tell = Teller { news: tell, bell: ring };
        let thread = move || {
            let begun = open().and_then(|backend| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                Ok((backend, runtime.context("cannot start the keeper's runtime")?))
            });
            match begun {
                Ok((backend, runtime)) => {
                    let mut duty = Duty { backend, charge, ordered, tell, push: Box::new(push) };
                    runtime.block_on(duty.run());
                    runtime.shutdown_background();
                }
                Err(error) => tell.tell(News::Failed(error)),
            }
        };
        std::thread::Builder::new().name("keeper".into()).spawn(thread).context("cannot start the keeper's thread")?;
        Ok(Keeper { orders, news, bell })
    }

    /// Leave the queue, and the lock should it have come at the last moment. Answered by `Withdrawn`.
    pub fn give_up(&self) {
        let _ = self.orders.send(Order::GiveUp);
    }

    /// Only after every process of the command is dead. Answered by `Released`.
    pub fn release(&self, ending: Ending) {
        let _ = self.orders.send(Order::Release(Box::new(ending)));
    }

    /// What has happened since, if anything. The descriptor is readable when there is news.
    pub fn news(&self) -> Option<News> {
        let _ = self.bell.read();
        let news = self.news.try_recv().ok();
        if news.is_some() {
            // There may be more behind it.
            let _ = self.bell.write(1);
        }
        news
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

struct Teller {
    news: Sender<News>,
    bell: Arc<EventFd>,
}

impl Teller {
    fn tell(&self, news: News) {
        // Nobody listens when the main thread has already decided how this ends.
        let _ = self.news.send(news);
        let _ = self.bell.write(1);
    }
}
