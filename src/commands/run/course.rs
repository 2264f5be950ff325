//! How a command's time under the lock went, and what that means for the exit code and the record.

use std::time::SystemTime;

use nix::libc;
use nix::sys::signal::Signal;

use crate::backend::Lease;
use crate::clock;
use crate::exit::{Exit, Fault};
use crate::lock::{Identity, LastRun, Outcome};
use crate::metrics::Tally;

/// Why a command was ended, if it did not end by itself; of several, the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    TimedOut,
    GuardianDied,
    Lost,
}

#[derive(Debug, Default)]
pub struct Course {
    /// Its wait status, once it has one.
    pub status: Option<i32>,
    /// execve's errno, if there was never a command.
    pub not_started: Option<i32>,
    pub cause: Option<Cause>,
    /// What an operator said when taking the lock away.
    pub reason: Option<String>,
    /// How often somebody asked us to terminate.
    pub terminations: u32,
    pub interrupted_at_terminal: Option<Signal>,
}

impl Course {
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

    pub fn last_run(&self, lease: &Lease, who: &Identity, started_at: SystemTime, once: Option<String>) -> LastRun {
        let outcome = match (self.cause, self.status) {
            (Some(Cause::Lost | Cause::GuardianDied), _) => Outcome::Lost,
            (Some(Cause::TimedOut), _) => Outcome::TimedOut,
            (None, Some(status)) if libc::WIFSIGNALED(status) => Outcome::Signaled,
            (None, _) => Outcome::Exited,
        };
        LastRun {
            fencing_token: lease.token,
            host: who.host.clone(),
            user: who.user.clone(),
            command: who.command.clone(),
            started_at,
            ended_at: Some(clock::wall()),
            outcome,
            exit_code: Some(self.exit().code().into()),
            once,
            reason: self.reason.clone(),
        }
    }
}

impl Tally {
    /// Notes how a command that had the lock ended.
    pub fn judge(&mut self, course: &Course) {
        self.lost = course.is_lost();
        self.succeeded = course.exit() == Exit::OK;
        self.failed = !self.succeeded;
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
        let mut course = Course { status: Some(3 << 8), ..Course::default() };
        assert_eq!(course.exit(), Exit::Code(3));
        course.ended_by(Cause::TimedOut);
        assert_eq!(course.exit(), Exit::TIMED_OUT);
        course.ended_by(Cause::Lost);
        course.ended_by(Cause::TimedOut);
        assert_eq!(course.exit(), Exit::LOST);
    }

    #[test]
    fn only_what_was_typed_at_the_terminal_is_died_of_again() {
        let mut course = Course { status: Some(libc::SIGINT), ..Course::default() };
        assert_eq!(course.exit(), Exit::Signal(2));
        course.interrupted_at_terminal = Some(Signal::SIGINT);
        assert_eq!(course.exit(), Exit::Reraise(2));
    }
}
