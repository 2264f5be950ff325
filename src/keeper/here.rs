//! The keeper's work while it is done on the main thread, between one thing that happens there and the next.

use std::future::{Future, poll_fn};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::pin::{Pin, pin};
use std::task::{Context as Waking, Poll};

use anyhow::{Context, Result};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::runtime::{Builder, Runtime};

use super::duty::Duty;
use crate::backend::Lease;
use crate::clock::{self, Instant};

/// Ends with the lock that is ours, if it is.
type Work = Pin<Box<dyn Future<Output = Option<Held>>>>;

/// A lock that is ours, and whoever is to keep it.
pub struct Held {
    pub duty: Duty,
    pub lease: Lease,
}

impl Held {
    /// When the lease has to be renewed.
    pub fn due(&self) -> Instant {
        self.lease.term.from + self.duty.charge.terms.shortened_to(self.lease.term.ttl).renew_every()
    }

    pub async fn go_on(self) {
        let Held { mut duty, lease } = self;
        duty.go_on(lease).await;
    }
}

pub struct Here {
    /// Taken out only to go elsewhere.
    runtime: Option<Runtime>,
    state: State,
    /// What wakes us besides; always the same, but the last may be missing at the end.
    sources: Vec<AsyncFd<OwnedFd>>,
}

enum State {
    Working(Work),
    /// The command has begun, and may soon be over.
    Resting(Box<Held>),
    Done,
}

impl Here {
    pub fn new(work: impl Future<Output = Option<Held>> + 'static) -> Result<Here> {
        let runtime =
            Builder::new_current_thread().enable_all().build().context("cannot start the keeper's runtime")?;
        Ok(Here { runtime: Some(runtime), state: State::Working(Box::pin(work)), sources: Vec::new() })
    }

    /// What is at rest here, to be taken up elsewhere.
    pub fn part(&mut self) -> Option<(Runtime, Held)> {
        match std::mem::replace(&mut self.state, State::Done) {
            State::Resting(held) => {
                self.sources.clear();
                Some((self.runtime.take()?, *held))
            }
            other => {
                self.state = other;
                None
            }
        }
    }

    pub fn at_rest(&self) -> Option<&Held> {
        match &self.state {
            State::Resting(held) => Some(held),
            State::Working(_) | State::Done => None,
        }
    }

    /// There is something to do.
    pub fn resume(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Done) {
            State::Resting(held) => State::Working(Box::pin(async {
                held.go_on().await;
                None
            })),
            other => other,
        };
    }

    /// Goes as far as it can without waiting for anything.
    pub fn step(&mut self) {
        if let Some(runtime) = &self.runtime {
            runtime.block_on(poll_fn(|waking| {
                self.state.poll(waking);
                Poll::Ready(())
            }));
        }
    }

    /// Works until it is told that there is something to hear, until one of these sources has something to say (or had,
    /// a moment ago), or until the instant has come.
    pub fn work(
        &mut self,
        sources: &[BorrowedFd<'_>],
        due: Option<Instant>,
        mut has_news: impl FnMut() -> bool,
    ) -> Result<()> {
        let Here { runtime: Some(runtime), state, sources: known } = self else { return Ok(()) };
        let _inside = runtime.enter();
        for source in sources.iter().skip(known.len()) {
            known.push(watched(source).context("cannot wait for signals and the guardian")?);
        }
        let mut is_due = pin!(async {
            match due {
                Some(due) => clock::sleep_until(due).await,
                None => std::future::pending().await,
            }
        });
        runtime.block_on(poll_fn(|waking| {
            state.poll(waking);
            // What is not asked for any more may have been closed, and would be ready for ever.
            let spoken_to = known.iter().take(sources.len()).any(|source| is_ready(source, waking));
            if has_news() || spoken_to { Poll::Ready(()) } else { is_due.as_mut().poll(waking) }
        }));
        Ok(())
    }
}

impl State {
    fn poll(&mut self, waking: &mut Waking<'_>) {
        if let State::Working(work) = self
            && let Poll::Ready(held) = work.as_mut().poll(waking)
        {
            *self = held.map_or(State::Done, |held| State::Resting(Box::new(held)));
        }
    }
}

fn watched(source: &BorrowedFd<'_>) -> std::io::Result<AsyncFd<OwnedFd>> {
    let copy = source.try_clone_to_owned()?;
    // SAFETY: the copy is nobody else's, and is closed when it is not watched any more.
    #[allow(unsafe_code)]
    unsafe { AsyncFd::register_with_interest(copy, Interest::READABLE) }.map_err(Into::into)
}

/// Whether there was something since this was asked last; if not, the source wakes us when there is.
fn is_ready(source: &AsyncFd<OwnedFd>, waking: &mut Waking<'_>) -> bool {
    match source.poll_read_ready(waking) {
        Poll::Ready(Ok(mut ready)) => {
            ready.clear_ready();
            true
        }
        Poll::Ready(Err(_)) => true,
        Poll::Pending => false,
    }
}

impl Drop for Here {
    /// The process is about to end: nothing is taken apart for that, nor is a name waited for that is being looked up.
    fn drop(&mut self) {
        let state = std::mem::replace(&mut self.state, State::Done);
        std::mem::forget((self.runtime.take(), state, std::mem::take(&mut self.sources)));
    }
}
