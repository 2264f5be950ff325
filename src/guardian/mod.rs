//! The guardian seen from dlock: a process of its own, forked before any thread exists, that owns the
//! command. See `watch` for its side.
//!
//! What it cannot cover: being killed in the same instant as dlock, and processes that dlock may not
//! signal (setuid programs). The fencing token covers those. Without a /proc that shows them, no process could be found:
//! then nothing is started.

mod apart;
mod command;
mod terminal;
mod tree;
mod watch;
pub mod wire;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::timer::Timer;
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork, getsid};

use crate::backend::Lease;
use crate::clock::Instant;
use crate::config::Leftovers;
use crate::exit::Fault;
use crate::lock::{Deadlines, LockName};
use crate::report::Voice;
pub use command::Plan;
pub use terminal::Terminal;
pub use wire::Report;
use wire::{Link, Order};

/// How the guardian treats the command and what it leaves behind.
#[derive(Debug)]
pub struct Manners {
    pub name: LockName,
    pub signal: i32,
    pub leftovers: Leftovers,
    pub voice: Voice,
    /// Returns when the descriptors it is given need not be kept any more: at this instant, unless it hears otherwise.
    pub linger: fn(&[OwnedFd], Instant),
}

#[derive(Debug)]
pub struct Guardian {
    link: Link,
    pid: Pid,
    lingers: bool,
    /// Told to go: nothing is to be heard of it any more.
    retired: bool,
}

/// The way on which the keeper pushes the deadlines, and nothing else.
#[derive(Clone, Debug)]
pub struct DeadlineLink(Link);

impl Guardian {
    /// Forks the guardian, which then waits for [`start`](Self::start).
    pub fn fork(plan: &Plan, manners: Manners) -> Result<Guardian> {
        if !tree::can_be_seen() {
            return Err(Fault::Internal.because(
                "/proc does not show the processes of this pid namespace, so that a command's could not be found and ended; \
                 mount it: mount -t proc proc /proc (as unshare --mount-proc does)",
            ));
        }
        let (ours, theirs) = Link::pair()?;
        // Should the guardian die, its orphans come to us and not to init.
        tree::adopt_orphans().context("prctl(PR_SET_CHILD_SUBREAPER)")?;
        // SAFETY: no thread has been started yet, so the child is a complete process.
        match unsafe { fork() }.context("cannot fork the guardian")? {
            ForkResult::Parent { child } => Ok(Guardian { link: ours, pid: child, lingers: false, retired: false }),
            ForkResult::Child => {
                drop(ours);
                watch::watch(theirs, plan, manners);
                // SAFETY: ends this process without running what dlock had registered.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Runs the command under the deadlines of a lease.
    pub fn start(&mut self, lease: &Lease, deadlines: Deadlines, variables: BTreeMap<String, String>) -> Result<()> {
        let (term, kill) = (deadlines.term.as_nanos(), deadlines.kill.as_nanos());
        self.link.send(&Order::Start { variables, term, kill }, &lease.descriptors)
    }

    /// Runs the command under somebody else's lease, who sees to its end.
    pub fn start_without_lease(&mut self, variables: BTreeMap<String, String>) -> Result<()> {
        let never = Instant::NEVER.as_nanos();
        self.link.send(&Order::Start { variables, term: never, kill: never }, &[])
    }

    /// Where the keeper pushes the deadlines.
    pub fn deadline_link(&self) -> DeadlineLink {
        DeadlineLink(self.link.clone())
    }

    /// An order that does not arrive finds nobody: the closed link is reported by [`receive`](Self::receive).
    pub fn signal(&self, signal: i32) {
        let _ = self.link.send(&Order::Signal(signal), &[]);
    }

    /// Ends the command: the first signal now, SIGKILL after `grace`.
    pub fn end(&self, grace: Duration) {
        let grace = u64::try_from(grace.as_nanos()).unwrap_or(u64::MAX);
        let _ = self.link.send(&Order::End { grace }, &[]);
    }

    /// Leaves the guardian behind to keep the lock's descriptors for as long as they are wanted.
    pub fn linger(&mut self, lease: &Lease, until: Instant) {
        if !lease.descriptors.is_empty() {
            self.lingers = true;
            let _ = self.link.send(&Order::Linger { until: until.as_nanos() }, &lease.descriptors);
        }
    }

    /// Lets the guardian go once there is nothing left to guard: all it could still do is to end what has ended.
    pub fn retire(&mut self) {
        if !self.lingers && !self.retired {
            self.retired = true;
            let _ = kill(self.pid, Signal::SIGKILL);
        }
    }

    /// The same while the lock is still ours. Descriptors that keep it held would be the guardian's to let go of, should
    /// we be stopped before we do; the kernel can see to that as well, by ending us at the lease's end unless what is
    /// returned is dropped before.
    pub fn retire_early(&mut self, lease: &Lease, end: Instant) -> Option<Timer> {
        let ends_us = if lease.descriptors.is_empty() { None } else { watch::die_at(end).ok() };
        if lease.descriptors.is_empty() || ends_us.is_some() {
            self.retire();
        }
        ends_us
    }

    /// Sees the guardian off, so that nothing of ours outlives us.
    pub fn dismiss(&mut self) {
        self.retire();
        if self.lingers {
            return;
        }
        // What the command has left behind on purpose is not ours to wait for.
        let _ = waitpid(self.pid, None);
    }

    /// Readable when there is a report.
    pub fn reports(&self) -> Option<BorrowedFd<'_>> {
        (!self.retired).then(|| self.link.as_fd())
    }

    /// The next report; `None` if the guardian is gone, which is not meant to happen.
    pub fn receive(&self) -> Result<Option<Report>> {
        Ok(self.link.receive()?.map(|(report, _)| report))
    }

    /// Leaves everything to the guardian, as our own end would, and waits until it has done its duty.
    pub fn leave_it_to(&mut self) {
        self.retired = true;
        self.link.close();
        let _ = waitpid(self.pid, None);
    }

    /// Does the guardian's duty when it cannot: makes sure that it is dead, and every process below it.
    pub fn replace(&mut self) {
        self.retire();
        tree::end_all(getsid(None).ok(), |_, _| ());
    }
}

impl DeadlineLink {
    pub fn push(&self, deadlines: Deadlines) {
        let (term, kill) = (deadlines.term.as_nanos(), deadlines.kill.as_nanos());
        let _ = self.0.send(&Order::Extend { term, kill }, &[]);
    }
}
