//! Waiting without polling: for the lock in the kernel's own queue; for a slot, for what can happen to a lock that we
//! hold, or for the end of what is held on to, by events of files (inotify(7), and the table of mounts, which can be
//! polled).

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::fstat;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;

use super::folder::{Folder, LockFiles, Lockable, WAITING, revoke, slot};
use super::record::{self, Details, RECORD, WAITER, WAITS};
use crate::backend::Ask;
use crate::clock::{self, Instant};
use crate::lock::{Mode, Record};

/// Our place among those who wait. Its end need not delay the command: it is dropped when the lock is in use.
pub struct Waiting {
    folder: Folder,
    /// Tells `status` that we wait, for as long as its file is locked.
    record: Record<Details>,
    _record_file: Arc<File>,
    blocked: Option<Blocked>,
    /// The lock file, if a blocked call has locked it.
    locked: Option<Lockable>,
    /// Our turn to watch the slots: one waiter does, the others wait for its place.
    turn: Option<Lockable>,
    /// Slot files stay open while we wait: closing them would wake all who watch, ourselves included.
    pub slots: BTreeMap<u32, Lockable>,
    watch: Option<Watch>,
}

/// A thread in flock(2). It cannot be stopped; a lock that it gets too late is released again.
struct Blocked {
    result: oneshot::Receiver<Lockable>,
    file: Awaited,
}

#[derive(Clone, Copy, PartialEq)]
enum Awaited {
    Lock,
    Turn,
}

impl Waiting {
    /// Registers us and begins to wait, unless we wait already.
    pub fn begin(before: Option<Waiting>, files: &LockFiles, ask: &Ask) -> Result<Waiting> {
        let lock = files.folder.open(&files.lock)?;
        let side = files.side()?;
        let mut waiting = match before.filter(|before| before.record.details.inode == lock.inode) {
            Some(waiting) => waiting,
            None => Waiting::register(side.make(WAITING)?, Record::new(ask, lock.inode, WAITS, None))?,
        };
        let slots_are_full = matches!(ask.mode, Mode::Slots(_)) && lock.file.try_lock_shared().is_ok();
        if slots_are_full {
            drop(lock);
            waiting.watch_slots(&side)?;
        } else if waiting.blocked.as_ref().is_none_or(|blocked| blocked.file != Awaited::Lock) {
            waiting.blocked = Some(Blocked::spawn(lock, ask.mode, Awaited::Lock)?);
        }
        Ok(waiting)
    }

    fn register(folder: Folder, record: Record<Details>) -> Result<Waiting> {
        record::boot_id();
        let _record_file = record.write(&folder, WAITER)?;
        let (blocked, locked, turn, slots, watch) = (None, None, None, BTreeMap::new(), None);
        Ok(Waiting { folder, record, _record_file, blocked, locked, turn, slots, watch })
    }

    fn watch_slots(&mut self, side: &Folder) -> Result<()> {
        if self.turn.is_some() {
            if self.watch.is_none() {
                // A holder's end closes its slot's file, whichever way it ends.
                let closed = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CLOSE_NOWRITE;
                self.watch = Some(Watch::new(&[(side.path(""), closed)]));
            }
        } else if self.blocked.is_none() {
            self.blocked = Some(Blocked::spawn(side.open("turn")?, Mode::Exclusive, Awaited::Turn)?);
        }
        Ok(())
    }

    /// A lock file that was locked for us while we waited.
    pub fn take_locked(&mut self) -> Option<Lockable> {
        if let Some(blocked) = &mut self.blocked
            && let Ok(file) = blocked.result.try_recv()
        {
            self.has_locked(file);
        }
        self.locked.take()
    }

    fn has_locked(&mut self, file: Lockable) {
        match self.blocked.take() {
            Some(Blocked { file: Awaited::Lock, .. }) => self.locked = Some(file),
            _ => self.turn = Some(file),
        }
    }

    pub async fn for_release(&mut self) -> Result<()> {
        if let Some(blocked) = &mut self.blocked {
            let file = (&mut blocked.result).await.context("the waiting thread ended")?;
            self.has_locked(file);
            return Ok(());
        }
        match &mut self.watch {
            // Every reader of the records, ourselves included, closes those.
            Some(watch) => watch.next(|name| name.is_none_or(|name| name.starts_with("slot."))).await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.record.remove(&self.folder, WAITER);
    }
}

impl Blocked {
    fn spawn(lock: Lockable, mode: Mode, file: Awaited) -> Result<Blocked> {
        let (give, result) = oneshot::channel();
        let wait = move || {
            let locked = if mode == Mode::Exclusive { lock.file.lock() } else { lock.file.lock_shared() };
            if locked.is_ok() {
                let _ = give.send(lock);
            }
        };
        std::thread::Builder::new().name("flock".into()).spawn(wait).context("cannot start a thread to wait")?;
        Ok(Blocked { result, file })
    }
}

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

/// `None` if any of them cannot be watched.
fn events_of(watched: &[(PathBuf, AddWatchFlags)]) -> Option<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?;
    for (path, events) in watched {
        inotify.add_watch(path.as_path(), *events).ok()?;
    }
    Some(inotify)
}

impl Watch {
    pub fn new(watched: &[(PathBuf, AddWatchFlags)]) -> Watch {
        Watch(events_of(watched).and_then(|inotify| register(inotify, Interest::READABLE)))
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

    /// Returns when our files may not be what they were: they were touched, a mount changed, or it is time to look.
    pub async fn next(&mut self) -> Result<()> {
        let names = &self.names;
        let touched = self.watch.next(|name| name.is_none_or(|name| names.iter().any(|ours| ours == name)));
        match &self.mounts {
            Some(mounts) => tokio::select! {
                touched = touched => touched,
                changed = mounts.ready(Interest::PRIORITY) => {
                    changed?.clear_ready();
                    Ok(())
                }
            },
            None => tokio::time::timeout(LOOK_AGAIN, touched).await.unwrap_or(Ok(())),
        }
    }
}

/// Keeps a lock that is held on to: returns when the record, which is among the descriptors, has been deleted, or its time
/// is over.
pub fn linger(descriptors: &[OwnedFd], mut until: Instant) {
    let Some(file) = descriptors.get(RECORD) else { return };
    let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_DELETE_SELF;
    let changes = events_of(&[(format!("/proc/self/fd/{}", file.as_raw_fd()).into(), events)]);
    let is_deleted = || fstat(file).is_ok_and(|stat| stat.st_nlink == 0);
    let mut owner = None;
    while !is_deleted() && !until.has_passed() {
        // If somebody has overwritten the record, the end stays what it was.
        if let Some(record) = Record::<Details>::read_from(file)
            && *owner.get_or_insert_with(|| record.who.owner.clone()) == record.who.owner
        {
            let Some(left) = record.held_on_for() else { return };
            until = clock::now() + left;
        }
        // Where nothing tells us of a change, look now and then.
        let longest = if changes.is_some() { Duration::from_secs(3600) } else { LOOK_EVERY };
        let millis = u16::try_from(until.remaining().min(longest).as_millis() + 1).unwrap_or(u16::MAX);
        let mut fds: Vec<_> = changes.iter().map(|changes| PollFd::new(changes.as_fd(), PollFlags::POLLIN)).collect();
        let _ = poll(&mut fds, PollTimeout::from(millis));
        if let Some(changes) = &changes {
            let _ = changes.read_events();
        }
    }
}
