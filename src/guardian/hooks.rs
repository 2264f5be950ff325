//! What `--on-event` runs, beside the command. A process of its own starts a hook for each event that it is handed, ends
//! what takes too long, and says so if one fails. It outlives dlock for as long as its hooks do.
//!
//! It is forked before the guardian, so that no hook is below the guardian, and those who do the guardian's duty spare
//! it: see [`Tree::sparing_present`](super::tree::Tree::sparing_present). A hook is in a session and process group
//! that no signal for dlock or the command reaches.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, killpg, sigaction, sigprocmask};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdin, dup2_stdout, fork, pipe2, setsid};
use serde::{Deserialize, Serialize};

use super::apart;
use super::tree::{Children, next_news};
use super::wire::Link;
use crate::clock::{self, Instant};
use crate::lock::LockName;
use crate::report::{Event, Voice};

/// How long a hook may take, and what it has started in its process group.
const LONGEST: Duration = Duration::from_secs(10);
/// How many may run at once; the events of more wait their turn.
const MOST: usize = 16;

/// Where events are handed over.
#[derive(Clone, Debug)]
pub struct Hooks(Link);

/// Tells a hook what it is for, and a dlock that it runs inside of one.
pub const EVENT: &str = "DLOCK_EVENT";

#[derive(Serialize, Deserialize)]
struct Call {
    event: String,
    json: String,
}

impl Hooks {
    /// Must come before the guardian, and before any thread exists.
    pub fn fork(command: &str, name: &LockName, voice: Voice) -> Result<Hooks> {
        // Those of earlier rounds of --keep-trying, which were this same process.
        while let Children::Changed(..) = next_news(0) {}
        let (ours, theirs) = Link::pair()?;
        // SAFETY: no thread has been started yet, so the child is a complete process.
        match unsafe { fork() }.context("cannot fork the process that runs --on-event")? {
            ForkResult::Parent { .. } => Ok(Hooks(ours)),
            ForkResult::Child => {
                drop(ours);
                if let Ok(mut runner) = Runner::begin(theirs, command, name, voice) {
                    let _ = runner.run();
                }
                // SAFETY: ends this process without running what dlock had registered.
                unsafe { libc::_exit(0) }
            }
        }
    }

    /// Never waits. If there is no room, because somebody has stopped the other side, the event has no hook.
    pub fn call(&self, event: &str, json: &str) {
        let _ = self.0.send(&Call { event: event.to_owned(), json: json.to_owned() }, &[]);
    }
}

struct Runner {
    /// Gone when dlock and its guardian are.
    link: Option<Link>,
    command: String,
    name: LockName,
    voice: Voice,
    running: Vec<Hook>,
}

struct Hook {
    event: String,
    /// Its process group, which has the id of its first process.
    group: Pid,
    ends_at: Instant,
    /// Of its first process.
    status: Option<i32>,
    killed: bool,
}

impl Runner {
    fn begin(link: Link, command: &str, name: &LockName, voice: Voice) -> Result<Runner> {
        let _ = setsid();
        // `pkill dlock` is about locks.
        let _ = prctl::set_name(c"dlock-hooks");
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None)?;
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: setting a default disposition installs no handler.
        unsafe { sigaction(Signal::SIGCHLD, &default) }?;
        // What a hook leaves behind comes to us, and not to dlock.
        prctl::set_child_subreaper(true)?;
        let null = File::options().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&null)?;
        // Whoever reads what the command prints wants to see its end.
        dup2_stdout(&null)?;
        drop(null);
        apart::close_others(&[link.as_fd().as_raw_fd()]);
        let (command, name) = (command.to_owned(), name.clone());
        Ok(Runner { link: Some(link), command, name, voice, running: Vec::new() })
    }

    /// Until there is no dlock to call a hook, and no hook.
    fn run(&mut self) -> Result<()> {
        while self.link.is_some() || !self.running.is_empty() {
            if self.sleep()? {
                self.hear()?;
            }
            self.look_after();
        }
        Ok(())
    }

    /// Waits for a call, or until it is time to look after the hooks that run. Whether there is a call.
    fn sleep(&self) -> Result<bool> {
        const LOOK_AGAIN_MS: u8 = 20;
        let timeout = if self.running.is_empty() { PollTimeout::NONE } else { LOOK_AGAIN_MS.into() };
        let link = self.link.as_ref().filter(|_| self.running.len() < MOST);
        let mut fds: Vec<_> = link.iter().map(|link| PollFd::new(link.as_fd(), PollFlags::POLLIN)).collect();
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => Ok(fds.first().is_some_and(|link| link.any().unwrap_or(false))),
            Err(error) => Err(error).context("poll"),
        }
    }

    fn hear(&mut self) -> Result<()> {
        let Some(link) = &self.link else { return Ok(()) };
        match link.receive::<Call>()? {
            Some((call, _)) => match self.start(&call) {
                Ok(group) => {
                    let ends_at = clock::now() + LONGEST;
                    self.running.push(Hook { event: call.event, group, ends_at, status: None, killed: false });
                }
                Err(error) => self.tell_failure(&call.event, &format!("cannot be started: {error:#}")),
            },
            None => {
                self.link = None;
                // Whoever reads what dlock says wants to see its end, too.
                let null = File::options().write(true).open("/dev/null")?;
                dup2_stderr(&null)?;
            }
        }
        Ok(())
    }

    fn start(&self, call: &Call) -> Result<Pid> {
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(&self.command).process_group(0);
        shell.env(EVENT, &call.event).env("DLOCK_NAME", self.name.as_str()).env_remove("NOTIFY_SOCKET");
        shell.stdin(filled_pipe(&call.json)?).stdout(Stdio::null()).stderr(Stdio::null());
        let child = shell.spawn()?;
        Ok(Pid::from_raw(child.id().cast_signed()))
    }

    /// Collects the dead, ends what takes too long, and says what failed.
    fn look_after(&mut self) {
        while let Children::Changed(pid, status) = next_news(0) {
            if let Some(hook) = self.running.iter_mut().find(|hook| hook.group == pid) {
                hook.status = Some(status);
            }
        }
        let (over, running) = std::mem::take(&mut self.running).into_iter().partition(Hook::is_over);
        self.running = running;
        for hook in over {
            if let Some(why) = hook.failure() {
                self.tell_failure(&hook.event, &why);
            }
        }
        for hook in self.running.iter_mut().filter(|hook| !hook.killed && hook.ends_at.has_passed()) {
            // We alone reap its processes, and there is one: the number is not somebody else's.
            let _ = killpg(hook.group, Signal::SIGKILL);
            hook.killed = true;
        }
    }

    fn tell_failure(&mut self, event: &str, why: &str) {
        self.voice.tell(&self.name, &Event::hook_failed(event, why));
    }
}

impl Hook {
    /// Whether its process group has no process any more. What leaves the group is not the hook's.
    fn is_over(&self) -> bool {
        let dead = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        waitid(Id::PGid(self.group), dead) == Err(Errno::ECHILD)
    }

    fn failure(&self) -> Option<String> {
        let status = ExitStatus::from_raw(self.status?);
        match (status.code(), status.signal()) {
            (Some(0), _) => None,
            (Some(code), _) => Some(format!("it ended with exit code {code}")),
            (_, Some(libc::SIGKILL)) if self.killed => Some(format!("it was killed after {} s", LONGEST.as_secs())),
            (_, signal) => Some(format!("it died of signal {}", signal.unwrap_or_default())),
        }
    }
}

/// A pipe that has the text in it already, whether or not anybody reads it. An event is not longer than what every pipe
/// has room for.
fn filled_pipe(text: &str) -> Result<OwnedFd> {
    let (read, write) = pipe2(OFlag::O_CLOEXEC).context("pipe")?;
    nix::fcntl::fcntl(&write, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).context("fcntl")?;
    match File::from(write).write_all(text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error).context("pipe"),
        _ => Ok(read),
    }
}
