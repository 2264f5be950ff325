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

/// A keeper between two threads.
pub struct Parted {
    pub runtime: Runtime,
    pub duty: Duty,
    pub lease: Lease,
}

/// Ends with what is to go on elsewhere, if it does.
type Work = Pin<Box<dyn Future<Output = Option<(Duty, Lease)>>>>;

pub struct Here {
    /// Taken out only to go elsewhere.
    runtime: Option<Runtime>,
    /// Until all is done, or until it is told to part.
    work: Option<Work>,
    /// What wakes us besides; always the same, but the last may be missing at the end.
    sources: Vec<AsyncFd<OwnedFd>>,
}

impl Here {
    pub fn new(work: impl Future<Output = Option<(Duty, Lease)>> + 'static) -> Result<Here> {
        let runtime =
            Builder::new_current_thread().enable_all().build().context("cannot start the keeper's runtime")?;
        Ok(Here { runtime: Some(runtime), work: Some(Box::pin(work)), sources: Vec::new() })
    }

    pub fn is_done(&self) -> bool {
        self.work.is_none()
    }

    /// Works until it is told that there is something to hear, until one of these sources has something to say (or had,
    /// a moment ago), or until the instant has come.
    pub fn work(
        &mut self,
        sources: &[BorrowedFd<'_>],
        due: Option<Instant>,
        mut has_news: impl FnMut() -> bool,
    ) -> Result<()> {
        let Here { runtime: Some(runtime), work, sources: known } = self else { return Ok(()) };
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
            if let Some(working) = work
                && working.as_mut().poll(waking).is_ready()
            {
                *work = None;
            }
            // What is not asked for any more may have been closed, and would be ready for ever.
            let spoken_to = known.iter().take(sources.len()).any(|source| is_ready(source, waking));
            if has_news() || spoken_to { Poll::Ready(()) } else { is_due.as_mut().poll(waking) }
        }));
        Ok(())
    }

    /// Goes as far as it can without waiting for anything.
    pub fn step(&mut self) {
        if let (Some(runtime), Some(working)) = (&self.runtime, &mut self.work)
            && runtime.block_on(poll_fn(|waking| Poll::Ready(working.as_mut().poll(waking)))).is_ready()
        {
            self.work = None;
        }
    }

    /// Ends here, to be taken up elsewhere. It must have been told to.
    pub fn part(mut self) -> Option<Parted> {
        self.sources.clear();
        let (runtime, work) = (self.runtime.take()?, self.work.take()?);
        let (duty, lease) = runtime.block_on(work)?;
        Some(Parted { runtime, duty, lease })
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
        std::mem::forget((self.runtime.take(), self.work.take(), std::mem::take(&mut self.sources)));
    }
}
