//! A lock that is held on to without a run: a process with nothing else to do keeps the flock, for the
//! sake of those who know only flock(2). The record says until when, and that it is still wanted.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::fstat;

use super::record::Record;
use crate::clock::{self, Instant};

/// Returns when the record, which is among the descriptors, has been deleted, or its time is over.
pub fn linger(descriptors: &[OwnedFd], mut until: Instant) {
    let Some(file) = descriptors.get(super::RECORD) else { return };
    let changes = watch(file);
    let mut owner = None;
    while !is_deleted(file) && !until.has_passed() {
        // One that somebody has overwritten ends when it was going to.
        if let Some(record) = Record::read_from(file)
            && *owner.get_or_insert_with(|| record.who.owner.clone()) == record.who.owner
        {
            let Some(left) = record.held_on_for() else { return };
            until = clock::now() + left;
        }
        // Where nothing tells us of a change, look now and then.
        let longest = if changes.is_some() { Duration::from_secs(3600) } else { Duration::from_millis(500) };
        let millis = u16::try_from(until.remaining().min(longest).as_millis() + 1).unwrap_or(u16::MAX);
        let mut fds: Vec<_> = changes.iter().map(|changes| PollFd::new(changes.as_fd(), PollFlags::POLLIN)).collect();
        let _ = poll(&mut fds, PollTimeout::from(millis));
        if let Some(changes) = &changes {
            let _ = changes.read_events();
        }
    }
}

fn is_deleted(file: &OwnedFd) -> bool {
    fstat(file.as_fd()).is_ok_and(|stat| stat.st_nlink == 0)
}

fn watch(record: &OwnedFd) -> Option<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?;
    let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_DELETE_SELF;
    inotify.add_watch(format!("/proc/self/fd/{}", record.as_raw_fd()).as_str(), events).ok()?;
    Some(inotify)
}
