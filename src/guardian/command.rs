//! The command's process, from clone to exec. Everything that can be made ready before the grant is, so that next to no
//! time passes between the grant and the command.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, clone};
use nix::sys::prctl;
use nix::sys::signal::{
    SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, kill, killpg, sigaction, sigprocmask,
};
use nix::unistd::{Pid, execvpe, getpgid, getpid, getppid, setpgid};

use super::tree;

/// What exec and its search along the PATH need, and what of it is needed in any case.
const STACK: usize = 128 * 1024;
const FIRST_USED: usize = 8 * 1024;

/// What is needed to run the command as if dlock were not there.
#[derive(Clone, Debug)]
pub struct Plan {
    pub argv: Vec<OsString>,
    /// The signal mask dlock was started with.
    pub mask: SigSet,
    /// The process group to run in; `None`: one of its own. On a terminal whose foreground group we are
    /// in, the command joins that group: Ctrl-C, Ctrl-Z and `fg` then reach it exactly as if it had been
    /// typed without dlock, and a pipeline it is part of keeps the terminal too.
    pub group: Option<Pid>,
    /// Whether dlock was started with SIGCHLD ignored, which it cannot afford itself.
    pub ignores_children: bool,
}

/// What is to be run, and what runs.
#[derive(Debug)]
pub struct Command {
    argv: Vec<CString>,
    environment: Vec<CString>,
    mask: SigSet,
    /// The process group it shares with others, unless it has one of its own.
    joined: Option<Pid>,
    ignores_children: bool,
    /// What the process works on until it is another program. The part that is used first is there already.
    stack: Vec<u8>,
    pid: Option<Pid>,
}

impl Command {
    pub fn new(plan: &Plan) -> Result<Command> {
        let argv = plan.argv.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<_, _>>();
        let environment = std::env::vars_os().filter_map(|(key, value)| entry(&key, &value)).collect();
        let argv = argv.context("an argument with a NUL in it")?;
        let Plan { mask, group: joined, ignores_children, .. } = *plan;
        let mut stack = vec![0; STACK];
        stack[STACK - FIRST_USED..].fill(1);
        Ok(Command { argv, environment, mask, joined, ignores_children, stack, pid: None })
    }

    /// Starts the command. An error is why it could not be executed: its process has ended then, if there was one.
    pub fn start(&mut self, variables: &BTreeMap<String, String>) -> Result<(), Errno> {
        put(&mut self.environment, variables);
        let guardian = getpid();
        let mut failed = None;
        let mut stack = std::mem::take(&mut self.stack);
        let become_command = Box::new(|| {
            failed = Some(self.exec(guardian));
            127
        });
        let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
        // SAFETY: like vfork(2). The child works in our memory, on a stack of its own, while we are suspended until
        // it has executed the command or ended; we have no other thread, and every signal is blocked.
        let pid = unsafe { clone(become_command, &mut stack, flags, Some(libc::SIGCHLD)) };
        self.pid = Some(pid?);
        failed.map_or(Ok(()), Err)
    }

    /// Runs in the child. Returns only if exec failed.
    fn exec(&self, guardian: Pid) -> Errno {
        let _ = setpgid(getpid(), self.joined.unwrap_or(getpid()));
        // Belt and braces: the guardian's walk through the tree is what counts.
        let _ = prctl::set_pdeathsig(Signal::SIGKILL);
        if getppid() != guardian {
            return Errno::ESRCH;
        }
        // Rust ignores SIGPIPE for itself; a command that is piped into head(1) must not.
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: setting a default disposition installs no handler.
        let _ = unsafe { sigaction(Signal::SIGPIPE, &default) };
        if self.ignores_children {
            let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
            // SAFETY: the same.
            let _ = unsafe { sigaction(Signal::SIGCHLD, &ignore) };
        }
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.mask), None);
        match execvpe(&self.argv[0], &self.argv, &self.environment) {
            Err(errno) => errno,
            Ok(never) => match never {},
        }
    }

    pub fn is(&self, pid: Pid) -> bool {
        self.pid == Some(pid)
    }

    pub fn has_process(&self) -> bool {
        self.pid.is_some()
    }

    /// Passes a signal on to the command's process group, or to our part of a group that others are in too.
    pub fn signal(&self, signal: i32) {
        let (Ok(signal), Some(pid)) = (Signal::try_from(signal), self.pid) else { return };
        match self.joined {
            None => drop(killpg(pid, signal)),
            Some(group) => tree::signal_all(signal, |pid| getpgid(Some(pid)) == Ok(group)),
        }
    }

    /// To every process below us, once: its own group in one step, so that none that is being born is missed, and whoever
    /// has left the group.
    pub fn signal_everything(&self, signal: Signal) {
        let own_group = self.pid.filter(|_| self.joined.is_none());
        let elsewhere = |pid: &Pid| own_group.is_none_or(|group| getpgid(Some(*pid)) != Ok(group));
        // Before the first is told: see `tree::signal_all`.
        let others: Vec<Pid> = tree::descendants().into_iter().filter(elsewhere).collect();
        if let Some(group) = own_group {
            let _ = killpg(group, signal);
        }
        for pid in others {
            let _ = kill(pid, signal);
        }
    }
}

fn entry(key: &OsStr, value: &OsStr) -> Option<CString> {
    CString::new([key.as_bytes(), b"=", value.as_bytes()].concat()).ok()
}

/// Puts the lock's variables over what was inherited. An empty value takes a variable away.
fn put(environment: &mut Vec<CString>, variables: &BTreeMap<String, String>) {
    for (key, value) in variables {
        let start = format!("{key}=");
        environment.retain(|inherited| !inherited.as_bytes().starts_with(start.as_bytes()));
        if !value.is_empty() {
            environment.extend(entry(OsStr::new(key), OsStr::new(value)));
        }
    }
}
