//! The guardian seen from dlock: a process of its own, forked before any thread exists, that owns the
//! command. See `watch` for its side.
//!
//! What it cannot cover: being killed in the same instant as dlock, and processes that dlock may not
//! signal (setuid programs). The fencing token covers those. Without a /proc that shows them, no process could be found:
//! then nothing is started.

mod apart;
mod command;
mod hooks;
mod stage;
mod tree;
mod watch;
pub mod wire;

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::backend::Lease;
use crate::clock::{self, Instant};
use crate::config::Leftovers;
use crate::lock::{Deadlines, LockName};
use crate::report::Voice;
pub use command::Plan;
use command::{Command, Leaf};
pub use hooks::{EVENT, Hooks};
pub use stage::{Pace, Priority, possible_priority};
use tree::{Proc, Tree};
pub use wire::GuardianEvent;
use wire::{Link, Order};

/// How the guardian treats the command and what it leaves behind.
#[derive(Debug)]
pub struct GuardianOptions {
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
    /// The command's processes while the guardian lives, and once they are ours because it does not.
    tree: Tree,
    orphans: Tree,
    /// The place of the command's cgroup, if there is one.
    leaf: Option<PathBuf>,
    /// The last one that it has reported.
    pace: Pace,
    /// When an order to end the command must have been carried out.
    ends_by: Option<Instant>,
    help: Option<Help>,
    lingers: bool,
    /// It was told to go, or is dead: no event comes from it any more.
    retired: bool,
}

/// dlock kills the command's processes beside a guardian that is late.
#[derive(Clone, Copy, Debug)]
struct Help {
    since: Instant,
    again_at: Instant,
}

/// What came of helping the guardian.
#[derive(Debug, PartialEq, Eq)]
pub enum Helped {
    Beside,
    GuardianDead,
}

/// How long the guardian may take to carry out an order before dlock helps.
const PATIENCE: Duration = Duration::from_millis(100);

impl Guardian {
    /// Forks the guardian, which then waits for [`start`](Self::start).
    pub fn fork(plan: Plan, options: GuardianOptions) -> Result<Guardian> {
        let proc = Proc::open()?;
        let command = Command::new(plan)?;
        let (ours, theirs) = Link::pair()?;
        // Should the guardian die, its orphans come to us and not to init.
        prctl::set_child_subreaper(true).context("prctl(PR_SET_CHILD_SUBREAPER)")?;
        let orphans = Tree::below_us(&proc)?.sparing_present()?;
        // A process that is left behind on purpose would stay in it.
        let leaf = if options.leftovers == Leftovers::Leave { None } else { Leaf::place() };
        // SAFETY: no thread has been started yet, so the child is a complete process.
        match unsafe { fork() }.context("cannot fork the guardian")? {
            ForkResult::Parent { child } => Ok(Guardian {
                link: ours,
                pid: child,
                tree: Tree::below(child, &proc)?,
                orphans,
                leaf,
                pace: Pace::default(),
                ends_by: None,
                help: None,
                lingers: false,
                retired: false,
            }),
            ForkResult::Child => {
                drop((ours, orphans));
                watch::watch(theirs, &proc, leaf, command, options);
                // SAFETY: ends this process without running what dlock had registered.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Runs the command under these deadlines. The descriptors keep the lock held, for a backend that has such.
    pub fn start(&self, variables: Vec<String>, deadlines: Deadlines, descriptors: &[Arc<File>]) -> Result<()> {
        self.link.send(&Order::Start { variables, deadlines }, descriptors).context("the guardian process is gone")
    }

    /// What the keeper pushes the deadlines with, and can do nothing else with.
    pub fn deadline_push(&self) -> impl Fn(Deadlines) + Send + use<> {
        let link = self.link.clone();
        move |deadlines| {
            let _ = link.send(&Order::Extend { deadlines, sent: clock::now() }, &[]);
        }
    }

    /// An order to a guardian that is gone is dropped: [`receive`](Self::receive) reports that.
    pub fn signal(&self, signal: i32) {
        let _ = self.link.send(&Order::Signal(signal), &[]);
    }

    /// Ends the command: the first signal now, SIGKILL after `grace`.
    pub fn end(&mut self, grace: Duration) {
        let ends_by = clock::now() + grace + PATIENCE;
        self.ends_by = Some(self.ends_by.map_or(ends_by, |earlier| earlier.min(ends_by)));
        let _ = self.link.send(&Order::End { grace }, &[]);
    }

    /// When dlock has to [`help`](Self::help), unless all is over before.
    pub fn backstop(&self, deadlines: Option<Deadlines>) -> Option<Instant> {
        let of_lease = deadlines.map(|deadlines| deadlines.with_margin(self.pace.margin()).backstop());
        let first = || [of_lease, self.ends_by].into_iter().flatten().min();
        self.help.map(|help| help.again_at).or_else(first)
    }

    /// When the guardian ends the command unless it hears of a renewal.
    pub fn signal_at(&self, deadlines: Deadlines) -> Instant {
        deadlines.with_margin(self.pace.margin()).signal_at
    }

    /// Kills the command's processes beside a guardian that is late: it may be stopped, starved, or have much to do.
    /// It goes on, since it is the one that reaps them and knows when it is over; we come back soon.
    pub fn help(&mut self) -> Helped {
        const SOON: Duration = Duration::from_millis(20);
        const ROUNDS: usize = 8;
        const LONGEST: Duration = Duration::from_secs(5);
        let dead = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        if !matches!(waitid(Id::Pid(self.pid), dead), Ok(WaitStatus::StillAlive)) {
            return Helped::GuardianDead;
        }
        let _ = kill(self.pid, Signal::SIGCONT);
        let _ = self.leaf.as_deref().map(Leaf::kill_at);
        let mut known = HashSet::new();
        for _ in 0..ROUNDS {
            if self.tree.kill_all(&mut known).fresh == 0 {
                break;
            }
        }
        let since = self.help.map_or_else(clock::now, |help| help.since);
        self.help = Some(Help { since, again_at: clock::now() + SOON });
        if since.elapsed() > LONGEST && self.tree.living() == 0 {
            // The guardian cannot be woken, and no process of the command is left.
            let _ = kill(self.pid, Signal::SIGKILL);
        }
        Helped::Beside
    }

    /// Leaves the guardian behind to keep the lock's descriptors for as long as they are wanted.
    pub fn linger(&mut self, lease: &Lease, until: Instant) {
        if !lease.descriptors.is_empty() {
            self.lingers = true;
            let _ = self.link.send(&Order::Linger { until }, &lease.descriptors);
        }
    }

    /// Ends the guardian when no process of the command is left.
    pub fn retire(&mut self) {
        if !self.lingers && !self.retired {
            self.retired = true;
            let _ = kill(self.pid, Signal::SIGKILL);
        }
    }

    /// Ends the guardian and waits for it, so that nothing of ours outlives us. One that lingers does.
    pub fn dismiss(&mut self) {
        self.retire();
        // Unless the guardian has done it, when the command ended.
        let _ = self.leaf.as_deref().map(Leaf::remove);
        if !self.lingers {
            let _ = waitpid(self.pid, None);
        }
    }

    /// Readable when there is news of it.
    pub fn reports(&self) -> Option<BorrowedFd<'_>> {
        (!self.retired).then(|| self.link.as_fd())
    }

    /// The next event; `None` if the guardian is gone, which is not meant to happen.
    pub fn receive(&mut self) -> Result<Option<GuardianEvent>> {
        let received = self.link.receive()?.map(|(event, _)| event);
        match &received {
            Some(GuardianEvent::Pace(pace) | GuardianEvent::Outgrown(pace)) => self.pace = *pace,
            Some(_) => {}
            None => self.retired = true,
        }
        Ok(received)
    }

    /// Closes the link, so that the guardian ends the command as if dlock were dead, and waits for that.
    pub fn leave_it_to(&mut self) {
        self.retired = true;
        self.link.close();
        let _ = waitpid(self.pid, None);
    }

    /// Ends every process of the command after the death of the guardian: they are our children now.
    /// `refused` hears of those that we may not signal.
    pub fn replace(&mut self, mut refused: impl FnMut(&[(String, i32)])) {
        self.retired = true;
        let _ = self.leaf.as_deref().map(Leaf::kill_at);
        self.orphans.end_all(|_, _| (), |processes| refused(processes));
    }
}

/// Whether the processes of a command could be found; if not, none is started.
pub fn find_processes() -> Result<()> {
    Tree::below_us(&Proc::open()?).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a test in a process of its own, of which it is the only thread: it has children, and waits for all there are.
    /// The test's program is run again for it, so that there is no other thread when that forks.
    pub fn alone(test: &str, body: impl FnOnce()) {
        const ALONE: &str = "DLOCK_TEST_ALONE";
        if std::env::var_os(ALONE).is_some() {
            // SAFETY: the only other thread waits for the end of this test.
            match unsafe { fork() }.expect("it can be forked") {
                ForkResult::Parent { child } => assert_eq!(waitpid(child, None), Ok(WaitStatus::Exited(child, 0))),
                ForkResult::Child => {
                    let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_ok();
                    // SAFETY: ends this process, whose other thread is not there to hear of it.
                    unsafe { libc::_exit(i32::from(!passed)) }
                }
            }
            return;
        }
        let mut itself = std::process::Command::new(std::env::current_exe().expect("a test has a program"));
        itself.args([&format!("guardian::{test}"), "--exact", "--nocapture"]).env(ALONE, "1");
        let ran = itself.output().expect("it can be run again");
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&ran.stderr));
    }
}
