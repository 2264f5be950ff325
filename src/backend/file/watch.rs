//! Events of files from the kernel: by inotify(7), and by the table of mounts, which can be polled.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::files::{LockFiles, revoke, slot};
use super::record::Details;
use crate::lock::Record;

/// How often we look where the kernel gives us no watch.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How often we look where some changes cause no event: a directory above cannot be watched, or there is a link.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Events of files, where the kernel gives us a watch.
pub struct Watch(Option<AsyncFd<Owned<Inotify>>>);

/// A descriptor that nobody else has.
pub struct Owned<T>(T);

impl<T: AsFd> AsRawFd for Owned<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

#[allow(unsafe_code)]
fn register<T: AsFd>(descriptor: T, interest: Interest) -> Option<AsyncFd<Owned<T>>> {
    // SAFETY: it stays open and the same for as long as `Owned` has it.
    unsafe { AsyncFd::register_with_interest(Owned(descriptor), interest) }.ok()
}

impl Watch {
    pub fn new(watched: &[(PathBuf, AddWatchFlags)]) -> Watch {
        let events = || {
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?;
            for (path, events) in watched {
                inotify.add_watch(path.as_path(), *events).ok()?;
            }
            register(inotify, Interest::READABLE)
        };
        Watch(events())
    }

    /// Watches one more, if that is possible.
    fn add(&self, path: &Path, events: AddWatchFlags) -> bool {
        self.0.as_ref().is_some_and(|fd| fd.get_ref().0.add_watch(path, events).is_ok())
    }

    /// Until an event comes whose file name matters.
    pub async fn next(&mut self, matters: impl Fn(Option<&str>) -> bool) -> Result<()> {
        let Some(fd) = &self.0 else {
            tokio::time::sleep(LOOK_EVERY).await;
            return Ok(());
        };
        loop {
            let mut ready = fd.readable().await?;
            let events = ready.get_inner().0.read_events().unwrap_or_default();
            ready.clear_ready();
            if events.iter().any(|event| matters(event.name.as_ref().and_then(|name| name.to_str()))) {
                return Ok(());
            }
        }
    }
}

/// What a holder learns.
#[derive(PartialEq)]
pub enum FileEvent {
    /// The lock file, or what belongs to it, was touched.
    Touched,
    /// Something has changed, elsewhere perhaps; or nothing, where we are not told of everything.
    Look,
}

/// All that can come between a holder and its lock file: the file and every directory above it are deleted or renamed,
/// something is mounted over one of them, or an operator leaves a mark.
pub struct Interference {
    watch: Watch,
    /// What matters in `NAME.d`: the operator's mark, and our slot.
    names: Vec<String>,
    /// `None` if some changes would cause no event: then we look now and then.
    mounts: Option<AsyncFd<Owned<File>>>,
}

impl Interference {
    pub fn watch(files: &LockFiles, record: &Record<Details>) -> Interference {
        let (lock, side) = (files.lock_path(), files.side_path());
        let moved = AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_DELETE_SELF;
        let here = moved | AddWatchFlags::IN_DONT_FOLLOW;
        let replaced = AddWatchFlags::IN_MOVE | AddWatchFlags::IN_DELETE;
        let watched = [(lock.clone(), here | AddWatchFlags::IN_ATTRIB), (side, here | replaced)];
        let watch = Watch::new(&watched);
        let mut directories = lock.ancestors().skip(1);
        // What a link points to can change without a trace.
        let is_no_link = std::fs::canonicalize(&lock).is_ok_and(|canonical| canonical == lock);
        let seen = is_no_link && directories.all(|above| watch.add(above, moved));
        // It has priority to tell when something was mounted or unmounted.
        let table = File::open("/proc/self/mountinfo").ok().filter(|_| seen);
        let mounts = table.and_then(|table| register(table, Interest::PRIORITY));
        let names = record.details.slot.map(slot).into_iter().chain([revoke(&record.who.owner)]).collect();
        Interference { watch, names, mounts }
    }

    pub async fn next(&mut self) -> Result<FileEvent> {
        let names = &self.names;
        let touched = self.watch.next(|name| name.is_none_or(|name| names.iter().any(|ours| ours == name)));
        match &self.mounts {
            Some(mounts) => tokio::select! {
                touched = touched => touched.map(|()| FileEvent::Touched),
                changed = mounts.ready(Interest::PRIORITY) => {
                    changed?.clear_ready();
                    Ok(FileEvent::Look)
                }
            },
            None => match tokio::time::timeout(LOOK_AGAIN, touched).await {
                Ok(touched) => touched.map(|()| FileEvent::Touched),
                Err(_) => Ok(FileEvent::Look),
            },
        }
    }
}
