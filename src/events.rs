//! What the main thread waits for: signals, the guardian, the keeper, and a moment in time; and the terminal that signals
//! may come from.

use std::cell::Cell;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{
    SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, killpg, raise, sigaction, sigprocmask,
};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

use crate::clock::Instant;
use crate::guardian::{Guardian, GuardianEvent};
use crate::keeper::{Keeper, KeeperEvent};

/// A signal that reached dlock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caught {
    pub signal: Signal,
    /// Typed at the terminal, so that everybody in its foreground group, the command included, has got it.
    pub from_terminal: bool,
}

#[derive(Debug)]
pub enum MainEvent {
    Signal(Caught),
    Keeper(KeeperEvent),
    Guardian(GuardianEvent),
    GuardianGone,
    /// The instant that was asked for has come.
    Due,
}

/// Signals, caught from the moment this exists.
pub struct Signals {
    fd: SignalFd,
    /// How many have come since anything else happened.
    in_a_row: Cell<usize>,
    /// What was blocked before, which the command gets back.
    pub inherited_mask: SigSet,
    /// The same for SIGCHLD, if it was ignored: nobody would be told how a child ended.
    pub ignored_children: bool,
}

/// What reaches the command through us.
const FORWARDED: [Signal; 9] = {
    use Signal::*;
    [SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGCONT, SIGTSTP]
};

/// To be ignored, or not.
#[allow(unsafe_code)]
fn set(signal: Signal, disposition: SigHandler) {
    let action = SigAction::new(disposition, SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: no handler is installed.
    let _ = unsafe { sigaction(signal, &action) };
}

impl Signals {
    /// Must come before any thread, so that all threads leave the signals to this.
    pub fn catch() -> Result<Signals> {
        let caught: SigSet = FORWARDED.into_iter().filter(|&signal| !is_ignored(signal)).collect();
        let mut blocked = caught;
        blocked.add(Signal::SIGTTOU);
        let mut inherited_mask = SigSet::empty();
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&blocked), Some(&mut inherited_mask))?;
        let fd = SignalFd::with_flags(&caught, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let ignored_children = is_ignored(Signal::SIGCHLD);
        if ignored_children {
            set(Signal::SIGCHLD, SigHandler::SigDfl);
        }
        Ok(Signals { fd, in_a_row: Cell::new(0), inherited_mask, ignored_children })
    }

    /// As they were before: from here on a signal simply ends us.
    pub fn let_go(&self) -> Result<()> {
        if self.ignored_children {
            set(Signal::SIGCHLD, SigHandler::SigIgn);
        }
        Ok(sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.inherited_mask), None)?)
    }

    fn next(&self) -> Option<Caught> {
        let info = self.fd.read_signal().ok().flatten()?;
        let signal = Signal::try_from(info.ssi_signo as i32).ok()?;
        self.in_a_row.set(self.in_a_row.get() + 1);
        Some(Caught { signal, from_terminal: info.ssi_code == libc::SI_KERNEL })
    }
}

/// What nohup(1) or a shell's `&` wants ignored is passed on as that, not overridden.
#[allow(unsafe_code)]
fn is_ignored(signal: Signal) -> bool {
    let mut present = std::mem::MaybeUninit::uninit();
    // SAFETY: only asks, and reads the answer if there is one.
    unsafe {
        libc::sigaction(signal as i32, std::ptr::null(), present.as_mut_ptr()) == 0
            && present.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// Waits for whatever comes first. Signals come before everything else: a run must not start in the
/// moment it is told to stop. But a storm of signals must not keep dlock from anything else.
pub fn next(signals: &Signals, guardian: &mut Guardian, keeper: &Keeper, due: Option<Instant>) -> Result<MainEvent> {
    const STORM: usize = 2 * FORWARDED.len();
    let signals_first = signals.in_a_row.get() < STORM;
    loop {
        if signals_first && let Some(caught) = signals.next() {
            return Ok(MainEvent::Signal(caught));
        }
        signals.in_a_row.set(0);
        if let Some(event) = keeper.next() {
            return Ok(MainEvent::Keeper(event));
        }
        let sources = [Some(signals.fd.as_fd()), Some(keeper.events()), guardian.reports()];
        let mut fds: Vec<_> = sources.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        match poll(&mut fds, timeout(due)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        match ready[..] {
            [true, ..] if signals_first => {}
            [_, true, ..] => keeper.heard(),
            [_, _, true] => {
                return Ok(match guardian.receive()? {
                    Some(event) => MainEvent::Guardian(event),
                    None => MainEvent::GuardianGone,
                });
            }
            // Last, so that a dlock that was stopped for a while first hears what has happened meanwhile.
            _ if due.is_some_and(Instant::has_passed) => return Ok(MainEvent::Due),
            _ => {
                if let Some(caught) = signals.next() {
                    return Ok(MainEvent::Signal(caught));
                }
            }
        }
    }
}

/// poll(2) counts in milliseconds; one more makes sure that the instant has really come.
fn timeout(due: Option<Instant>) -> PollTimeout {
    const LONGEST: Duration = Duration::from_secs(3600);
    let Some(due) = due else { return PollTimeout::NONE };
    PollTimeout::try_from(due.remaining().min(LONGEST) + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
}

/// Dies of a signal, as whoever started us expects of a program that was interrupted.
pub fn die_of(signal: i32) {
    let Ok(signal) = Signal::try_from(signal) else { return };
    // No core dump of ours: the command had its chance.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, 0);
    let _ = sigprocmask(SigmaskHow::SIG_UNBLOCK, Some(&SigSet::from(signal)), None);
    let _ = raise(signal);
}

/// A terminal whose foreground process group we are in.
#[derive(Debug)]
pub struct Terminal {
    tty: File,
    group: Pid,
}

impl Terminal {
    pub fn in_foreground() -> Option<Terminal> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        let group = getpgrp();
        (tcgetpgrp(tty.as_fd()) == Ok(group)).then_some(Terminal { tty, group })
    }

    pub fn group(&self) -> Pid {
        self.group
    }

    /// A command that made itself the foreground, as an interactive shell does, and was then killed leaves
    /// the terminal to nobody. SIGTTOU must be blocked.
    pub fn take_back(&self) {
        let nobody = |group| killpg(group, None) == Err(Errno::ESRCH);
        if tcgetpgrp(self.tty.as_fd()).is_ok_and(nobody) {
            let _ = tcsetpgrp(self.tty.as_fd(), self.group);
        }
    }
}
