//! What dlock and its guardian say to each other: one packet a message, over a socket pair whose closing
//! is itself a message.

use std::collections::BTreeMap;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, recv,
    recvmsg, sendmsg, shutdown, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// From dlock to the guardian. Instants are nanoseconds on CLOCK_BOOTTIME.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Run the command with these variables added, under these deadlines. Descriptors that keep the lock
    /// held come along.
    Start { variables: BTreeMap<String, String>, term: u64, kill: u64 },
    /// The lease was renewed: deadlines only ever move later.
    Extend { term: u64, kill: u64 },
    /// Pass a signal on to the command.
    Signal(i32),
    /// End the command: first signal now, SIGKILL after this many nanoseconds.
    End { grace: u64 },
    /// The run is over; keep the descriptors for as long as they are wanted, without dlock. It should be until then.
    Linger { until: u64 },
}

/// From the guardian to dlock.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// The command was not started: execve(2) failed with this errno.
    NotStarted { errno: i32 },
    /// The lease was over before the command could be started.
    TooLate,
    /// The command has stopped, as by Ctrl-Z.
    Stopped,
    /// No deadline was pushed in time: the command is being ended.
    Expired,
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

    pub fn send(&self, message: &impl Serialize, descriptors: &[Arc<OwnedFd>]) -> Result<()> {
        let bytes = serde_json::to_vec(message)?;
        let raw: Vec<RawFd> = descriptors.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
        // Whoever does not listen, because it is stopped, must not keep the other side from its duty.
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &[IoSlice::new(&bytes)], rights, flags, None)
            .context("the other side of the guardian's link is gone, or does not listen")?;
        Ok(())
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
        Ok(Some((serde_json::from_slice(&buffer)?, descriptors)))
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
