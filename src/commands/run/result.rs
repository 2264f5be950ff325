//! How a command's time under the lock went, and what that means for the exit code and the record.

use std::time::{Duration, SystemTime};

use nix::libc;
use nix::sys::signal::Signal;

use crate::backend::Lease;
use crate::clock::{self, Instant};
use crate::exit::{Exit, Fault};
use crate::lock::{Deadlines, Holder, Identity, LastRun, Outcome, Revocation};

/// Why a command was ended, if it did not end by itself; of several, the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    TimedOut,
    GuardianDied,
    Lost,
}

/// When a run began.
#[derive(Debug)]
pub struct Begun {
    pub at: SystemTime,
    pub since: Instant,
    pub waited: Duration,
}

#[derive(Debug, Default)]
pub struct RunResult {
    /// The latest of its lease, if it has one of its own.
    pub deadlines: Option<Deadlines>,
    /// Its wait status, once it has one.
    pub status: Option<i32>,
    /// execve's errno, if there was never a command.
    pub not_started: Option<i32>,
    pub cause: Option<Cause>,
    /// What an operator said when taking the lock away.
    pub revocation: Option<Revocation>,
    /// For how long the job was suspended, if that kept it from renewing its lease.
    pub suspended: Option<Duration>,
    /// How often somebody asked us to terminate.
    pub terminations: u32,
    pub interrupted_at_terminal: Option<Signal>,
}

impl RunResult {
    pub fn ended_by(&mut self, cause: Cause) {
        self.cause = self.cause.max(Some(cause));
    }

    pub fn is_lost(&self) -> bool {
        self.cause == Some(Cause::Lost)
    }

    /// Whether there was a run at all, and it had the lock until its end.
    pub fn came_to_its_end(&self) -> bool {
        !self.is_lost() && self.not_started.is_none()
    }

    pub fn exit(&self) -> Exit {
        match (self.cause, self.not_started, self.status) {
            (Some(Cause::Lost), ..) => Exit::LOST,
            (Some(Cause::TimedOut), ..) => Exit::TIMED_OUT,
            (Some(Cause::GuardianDied), ..) | (None, None, None) => Fault::Internal.exit(),
            (None, Some(errno), _) => exit_of_exec(errno),
            (None, None, Some(status)) if libc::WIFSIGNALED(status) => {
                let signal = libc::WTERMSIG(status);
                Exit::by(signal, self.interrupted_at_terminal.is_some_and(|typed| typed as i32 == signal))
            }
            (None, None, Some(status)) => Exit::Code(libc::WEXITSTATUS(status) as u8),
        }
    }

    /// The record of the run that began at this date, having waited this long.
    pub fn last_run(&self, lease: &Lease, who: &Identity, begun: &Begun, once: Option<String>) -> LastRun {
        let outcome = match (self.cause, self.status) {
            (Some(Cause::Lost | Cause::GuardianDied), _) => Outcome::Lost,
            (Some(Cause::TimedOut), _) => Outcome::TimedOut,
            (None, Some(status)) if libc::WIFSIGNALED(status) => Outcome::Signaled,
            (None, _) => Outcome::Exited,
        };
        let holder = Holder { fencing_token: Some(lease.token), acquired_at: Some(begun.at), ..who.clone().into() };
        let mut run = LastRun {
            waited_ms: Some(clock::millis(begun.waited)),
            duration_ms: Some(clock::millis(begun.since.elapsed())),
            exit_code: Some(self.exit().code().into()),
            once,
            ..LastRun::of_holder(&holder, outcome)
        };
        if let Some(revocation) = &self.revocation {
            run.revoked(revocation);
        }
        run
    }
}

/// What one run adds to the metrics.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub acquired: bool,
    pub busy: bool,
    pub lost: bool,
    pub waited: Duration,
    pub held: Duration,
    /// When a command was started under the lock.
    pub since: Option<SystemTime>,
    /// How it ended.
    pub ended: Option<Ended>,
    /// What is known at the start of a run has been counted.
    pub start_counted: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Ended {
    pub exit_code: u8,
    pub duration: Duration,
}

impl Tally {
    /// Notes how a command that had the lock ended.
    pub fn judge(&mut self, result: &RunResult, duration: Duration) {
        self.lost = result.is_lost();
        self.ended = Some(Ended { exit_code: result.exit().code(), duration });
    }
}

/// As every shell and timeout(1) have it.
pub fn exit_of_exec(errno: i32) -> Exit {
    if errno == libc::ENOENT { Exit::NOT_FOUND } else { Exit::CANNOT_EXECUTE }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_beats_the_commands_own_code() {
        let mut result = RunResult { status: Some(3 << 8), ..RunResult::default() };
        assert_eq!(result.exit(), Exit::Code(3));
        result.ended_by(Cause::TimedOut);
        assert_eq!(result.exit(), Exit::TIMED_OUT);
        result.ended_by(Cause::Lost);
        result.ended_by(Cause::TimedOut);
        assert_eq!(result.exit(), Exit::LOST);
    }

    #[test]
    fn only_what_was_typed_at_the_terminal_is_died_of_again() {
        let mut result = RunResult { status: Some(libc::SIGINT), ..RunResult::default() };
        assert_eq!(result.exit(), Exit::Signal(2));
        result.interrupted_at_terminal = Some(Signal::SIGINT);
        assert_eq!(result.exit(), Exit::Reraise(2));
    }
}
