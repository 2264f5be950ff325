//! What dlock and its guardian say to each other: one packet a message, over a socket pair whose closing
//! is itself a message. Both ends are the same program, so the encoding (postcard) may change at any time.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, recv,
    recvmsg, sendmsg, shutdown, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::stage::Pace;
use crate::clock::Instant;
use crate::lock::Deadlines;

/// From dlock to the guardian.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Run the command with these variables (`KEY=VALUE`), under these deadlines. Descriptors that keep the lock held come
    /// along.
    Start { variables: Vec<String>, deadlines: Deadlines },
    /// The lease was renewed: deadlines only ever move later.
    Extend { deadlines: Deadlines, sent: Instant },
    /// Pass a signal on to the command.
    Signal(i32),
    /// End the command: first signal now, SIGKILL after this time.
    End { grace: Duration },
    /// The run is over; keep the descriptors for as long as they are wanted, without dlock. It should be until then.
    Linger { until: Instant },
}

/// From the guardian to dlock.
#[derive(Debug, Serialize, Deserialize)]
pub enum GuardianEvent {
    /// The command was not started: execve(2) failed with this errno.
    NotStarted { errno: i32 },
    /// The lease was over before the command could be started.
    TooLate,
    /// The command has stopped, as by Ctrl-Z.
    Stopped,
    /// SIGKILL has to come earlier than planned, or can come later again.
    Pace(Pace),
    /// No deadline was pushed in time: the command is being ended.
    Expired,
    /// The deadlines would do, but not for killing so many processes on a machine so busy: the command is being ended.
    Outgrown(Pace),
    /// Processes that we may not signal are still there: their names and process ids.
    Refused { processes: Vec<(String, i32)> },
    /// No process of the command lives (or those left are left on purpose): its own wait status, and how many were ended
    /// behind it.
    Empty { status: Option<i32>, leftovers: usize },
}

/// One end of the connection. Clones speak through the same socket; a message is never torn.
#[derive(Clone, Debug)]
pub struct Link(Arc<OwnedFd>);

const MOST_DESCRIPTORS: usize = 8;
const BROKEN: &str = "cannot read from the guardian's link";

impl Link {
    pub fn pair() -> Result<(Link, Link)> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .context("cannot make a socket pair for the guardian")?;
        Ok((Link(Arc::new(ours)), Link(Arc::new(theirs))))
    }

    /// Never waits: whoever does not listen, because it is stopped, must not keep the other side from its duty. EAGAIN
    /// says that there is no room now, every other error that nobody is there any more.
    pub fn send(&self, message: &impl Serialize, descriptors: &[Arc<File>]) -> nix::Result<()> {
        let bytes = postcard::to_allocvec(message).map_err(|_| Errno::EINVAL)?;
        let raw: Vec<RawFd> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &[IoSlice::new(&bytes)], rights, flags, None).map(drop)
    }

    /// Whether [`receive`](Self::receive) would not block.
    pub fn has_more(&self) -> bool {
        poll(&mut [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// For all clones, whoever has them.
    pub fn close(&self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }

    /// The next message, or `None` when the other side is gone. Blocks; poll first.
    pub fn receive<T: DeserializeOwned>(&self) -> Result<Option<(T, Vec<OwnedFd>)>> {
        let mut buffer = vec![0u8; self.length_of_next()?];
        if buffer.is_empty() {
            return Ok(None);
        }
        let mut space = nix::cmsg_space!([RawFd; MOST_DESCRIPTORS]);
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let message = recvmsg::<UnixAddr>(self.0.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC);
        let descriptors = owned(message.context(BROKEN)?.cmsgs()?);
        Ok(Some((postcard::from_bytes(&buffer)?, descriptors)))
    }

    /// Zero when nothing will come any more: no message is empty.
    fn length_of_next(&self) -> Result<usize> {
        loop {
            match recv(self.0.as_raw_fd(), &mut [], MsgFlags::MSG_PEEK | MsgFlags::MSG_TRUNC) {
                Ok(length) => return Ok(length),
                Err(Errno::EINTR) => {}
                Err(Errno::ECONNRESET) => return Ok(0),
                Err(error) => return Err(error).context(BROKEN),
            }
        }
    }
}

fn owned<'a>(messages: impl Iterator<Item = ControlMessageOwned> + 'a) -> Vec<OwnedFd> {
    let mut descriptors = Vec::new();
    for message in messages {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just made these descriptors for us alone.
            descriptors.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    descriptors
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;
    use std::io::{Read, Seek, Write};

    use nix::libc;

    use super::*;

    fn arrives<T: Serialize + DeserializeOwned + Debug>(message: &T) {
        let (ours, theirs) = Link::pair().unwrap();
        ours.send(message, &[]).unwrap();
        let (received, descriptors) = theirs.receive::<T>().unwrap().unwrap();
        assert_eq!(format!("{received:?}"), format!("{message:?}"));
        assert!(descriptors.is_empty());
    }

    #[test]
    fn every_message_arrives_as_it_was_sent() {
        let sent = Instant::from_nanos(1_234_567_890_123_456_789);
        let deadlines = Deadlines { signal_at: sent, kill_at: sent + Duration::from_nanos(1), end: Instant::NEVER };
        let variables = vec!["DLOCK_NAME=\u{e4}\n\"\0".into()];
        arrives(&Order::Start { variables, deadlines });
        arrives(&Order::Extend { deadlines: Deadlines::NEVER, sent });
        arrives(&Order::Signal(libc::SIGRTMAX()));
        arrives(&Order::End { grace: Duration::from_nanos(1) });
        arrives(&Order::Linger { until: sent });
        let pace = Pace { lateness: Duration::from_nanos(1), walk: Duration::from_secs(1), processes: usize::MAX };
        arrives(&GuardianEvent::NotStarted { errno: libc::ENOENT });
        arrives(&GuardianEvent::TooLate);
        arrives(&GuardianEvent::Stopped);
        arrives(&GuardianEvent::Pace(pace));
        arrives(&GuardianEvent::Expired);
        arrives(&GuardianEvent::Outgrown(pace));
        arrives(&GuardianEvent::Refused { processes: vec![("su (x)".into(), i32::MAX)] });
        arrives(&GuardianEvent::Empty { status: Some(9), leftovers: 3 });
        arrives(&GuardianEvent::Empty { status: None, leftovers: 0 });
    }

    #[test]
    fn descriptors_come_along_with_their_message() {
        let (ours, theirs) = Link::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        let sent: Vec<_> = (0..MOST_DESCRIPTORS).map(|_| Arc::new(file.try_clone().unwrap())).collect();
        ours.send(&Order::Linger { until: Instant::NEVER }, &sent).unwrap();
        let (_, received) = theirs.receive::<Order>().unwrap().unwrap();
        assert_eq!(received.len(), MOST_DESCRIPTORS);
        for descriptor in received {
            std::fs::File::from(descriptor).write_all(b"x").unwrap();
        }
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "xxxxxxxx", "they are the same file");
    }

    #[test]
    fn a_closed_link_ends_with_what_was_sent_before() {
        let (ours, theirs) = Link::pair().unwrap();
        let another = ours.clone();
        ours.send(&Order::Signal(1), &[]).unwrap();
        ours.close();
        assert!(matches!(theirs.receive().unwrap(), Some((Order::Signal(1), _))));
        assert!(theirs.receive::<Order>().unwrap().is_none());
        assert_eq!(another.send(&Order::Signal(2), &[]), Err(Errno::EPIPE));
    }

    #[test]
    fn whoever_does_not_listen_keeps_nobody_waiting() {
        let (ours, theirs) = Link::pair().unwrap();
        let mut sent = 0;
        let full = loop {
            match ours.send(&Order::Signal(sent), &[]) {
                Ok(()) => sent += 1,
                Err(errno) => break errno,
            }
        };
        assert_eq!(full, Errno::EAGAIN);
        for n in 0..sent {
            assert!(matches!(theirs.receive().unwrap(), Some((Order::Signal(got), _)) if got == n));
        }
        ours.send(&Order::Signal(sent), &[]).unwrap();
    }
}
