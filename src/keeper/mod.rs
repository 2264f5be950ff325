//! The keeper: acquire, keep, release. It alone speaks to the backend, on a runtime of its own.
//!
//! It tells the main thread what happens, takes orders from it, and pushes the deadlines to the guardian. It knows no
//! process and no signal: if it hangs, the deadlines are simply not pushed.
//!
//! It begins on the main thread, while that has nothing to do but wait for it: waking another thread takes longer than
//! asking a server. Then it rests, until the command is over, which may be soon. If not, it gets a thread of its own, so
//! that nothing that holds up the main thread can keep the lease from being renewed.

mod duty;
mod here;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

use crate::backend::{Ask, Backend, Busy, Ending, Lease, Patience, Released};
use crate::clock::Instant;
use crate::lock::{Deadlines, Holder, OwnerId, Terms};
use duty::Duty;
use here::{Held, Here};

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
    /// Heard, and not yet passed on.
    heard: VecDeque<News>,
    bell: Arc<EventFd>,
    /// While it has no thread of its own.
    here: Option<Here>,
}

/// Everything it needs to begin.
pub struct Charge {
    pub ask: Ask,
    /// Locks that our ancestors hold, by owner: asking for one of them would wait for ever.
    pub ancestors: Vec<OwnerId>,
    pub terms: Terms,
    pub patience: Patience,
}

impl Keeper {
    pub fn begin(
        charge: Charge,
        open: impl FnOnce() -> Result<Box<dyn Backend>> + 'static,
        push: impl Fn(Deadlines) + Send + 'static,
    ) -> Result<Keeper> {
        let (orders, ordered) = unbounded_channel();
        let (tell, news) = channel();
        let bell = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let tell = Teller { news: tell, bell: Arc::clone(&bell) };
        let here = Here::new(async move {
            match open() {
                Ok(backend) => {
                    let mut duty = Duty { backend, charge, ordered, tell, push: Box::new(push) };
                    duty.begin().await.map(|lease| Held { duty, lease })
                }
                Err(error) => {
                    tell.tell(News::Failed(error));
                    None
                }
            }
        })?;
        Ok(Keeper { orders, news, heard: VecDeque::new(), bell, here: Some(here) })
    }

    /// Until when a lock that is ours needs no keeper.
    pub fn rests_until(&self) -> Option<Instant> {
        self.here.as_ref()?.at_rest().map(Held::due)
    }

    /// From here on the lock is kept, by a thread of its own. Where there is none to be had, it is done here.
    pub fn go_on_alone(&mut self) {
        let Some(here) = self.here.as_mut().filter(|here| here.at_rest().is_some()) else { return };
        let (give, taken) = channel::<(Runtime, Held)>();
        let thread = move || {
            if let Ok((runtime, held)) = taken.recv() {
                runtime.block_on(held.go_on());
                runtime.shutdown_background();
            }
        };
        if std::thread::Builder::new().name("keeper".into()).spawn(thread).is_err() {
            return here.resume();
        }
        if let Some(held) = here.part() {
            self.here = None;
            let _ = give.send(held);
        }
    }

    /// Leave the queue, and the lock should it have come at the last moment. Answered by `Withdrawn`.
    pub fn give_up(&mut self) {
        self.order(Order::GiveUp);
    }

    /// Only after every process of the command is dead. Answered by `Released`.
    pub fn release(&mut self, ending: Ending) {
        self.order(Order::Release(Box::new(ending)));
        // Somebody may be waiting for it, and whoever has ordered this has other things to do.
        if let Some(here) = &mut self.here {
            here.step();
        }
    }

    fn order(&mut self, order: Order) {
        let _ = self.orders.send(order);
        if let Some(here) = &mut self.here {
            here.resume();
        }
    }

    /// What has happened since, if anything.
    pub fn news(&mut self) -> Option<News> {
        self.heard.pop_front().or_else(|| self.news.try_recv().ok())
    }

    /// Whether there was any at the end of the last wait.
    pub fn has_news(&self) -> bool {
        !self.heard.is_empty()
    }

    /// Waits until one of these can be read, there may be news, or the instant has come. Says which can be read.
    pub fn wait(&mut self, sources: &[BorrowedFd<'_>], due: Option<Instant>) -> Result<Vec<bool>> {
        if let Some(here) = &mut self.here {
            let ready = readable(sources, PollTimeout::ZERO)?;
            if ready.contains(&true) {
                return Ok(ready);
            }
            here.work(sources, due, || {
                self.heard.extend(self.news.try_iter());
                !self.heard.is_empty()
            })?;
            return readable(sources, PollTimeout::ZERO);
        }
        let mut all = sources.to_vec();
        all.push(self.bell.as_fd());
        let mut ready = readable(&all, timeout(due))?;
        if ready.pop() == Some(true) {
            let _ = self.bell.read();
            self.heard.extend(self.news.try_iter());
        }
        Ok(ready)
    }
}

/// poll(2) counts in milliseconds; one more makes sure that the instant has really come.
fn timeout(due: Option<Instant>) -> PollTimeout {
    const LONGEST: Duration = Duration::from_secs(3600);
    let Some(due) = due else { return PollTimeout::NONE };
    let millis = due.remaining().min(LONGEST).as_millis() + 1;
    PollTimeout::try_from(u32::try_from(millis).unwrap_or(u32::MAX)).unwrap_or(PollTimeout::MAX)
}

/// Which of these can be read.
fn readable(sources: &[BorrowedFd<'_>], longest: PollTimeout) -> Result<Vec<bool>> {
    let mut fds: Vec<_> = sources.iter().map(|fd| PollFd::new(*fd, PollFlags::POLLIN)).collect();
    match poll(&mut fds, longest) {
        Ok(_) => Ok(fds.iter().map(|fd| fd.any().unwrap_or(false)).collect()),
        Err(Errno::EINTR) => Ok(vec![false; fds.len()]),
        Err(error) => Err(error).context("poll"),
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
