//! A lock that is held on to without a run: a process with nothing else to do keeps the flock, for the
//! sake of those who know only flock(2). The record says until when, and that it is still wanted.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::fstat;

use super::record::Record;

/// Returns when the record that is among the descriptors has been deleted, or its time is over.
pub fn linger(descriptors: &[OwnedFd]) {
    let found = descriptors.iter().find_map(|descriptor| Some((descriptor, Record::read_from(descriptor)?)));
    let Some((file, mut record)) = found else { return };
    let changes = watch(file);
    while !is_deleted(file) {
        // One that somebody has overwritten ends when it was going to.
        let same = Record::read_from(file).filter(|now| now.who.owner == record.who.owner);
        record = same.unwrap_or(record);
        let Some(left) = record.held_on_for() else { return };
        // Where nothing tells us of a change, look now and then.
        let longest = if changes.is_some() { Duration::from_secs(3600) } else { Duration::from_millis(500) };
        let millis = u16::try_from(left.min(longest).as_millis() + 1).unwrap_or(u16::MAX);
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
