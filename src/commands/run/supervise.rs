//! While the command runs under the lock; and what came of it, for the exit code and the record.

use std::time::Duration;

use anyhow::Result;
use nix::libc;
use nix::sys::signal::{Signal, raise};

use super::{Run, Tally};
use crate::backend::Lease;
use crate::clock::{self, Instant};
use crate::config::OnLost;
use crate::events::{Caught, MainEvent};
use crate::exit::{Exit, Fault};
use crate::guardian::{GuardianEvent, Helped};
use crate::keeper::KeeperEvent;
use crate::lock::{Deadlines, Holder, Identity, LastRun, Outcome, Revocation};
use crate::report::{Event, whole_seconds};

#[derive(PartialEq, Eq)]
enum Command {
    Runs,
    /// No process of it is left.
    Over,
}

impl Run {
    /// Until no process of the command is left.
    pub fn supervise(&mut self, deadlines: Option<Deadlines>) -> Result<RunResult> {
        let mut result = RunResult { deadlines, ..RunResult::default() };
        let mut timeout = self.job.timeout.map(|limit| clock::now() + limit);
        let mut warning = self.job.warn_after.map(|limit| clock::now() + limit);
        loop {
            let backstop = self.guardian.backstop(result.deadlines);
            let due = [timeout, warning, backstop].into_iter().flatten().min();
            let event = self.next(due).inspect_err(|_| {
                // Without events dlock cannot go on, and it must leave nothing running.
                self.guardian.leave_it_to();
            })?;
            match event {
                MainEvent::Signal(caught) => self.forward(caught, &mut result),
                MainEvent::Keeper(KeeperEvent::Renewed(later)) => result.deadlines = Some(later),
                MainEvent::Keeper(event) => self.heard_from_keeper(event, backstop, &mut result),
                MainEvent::Guardian(event) => {
                    if self.heard_from_guardian(event, &mut result) == Command::Over {
                        return Ok(result);
                    }
                }
                MainEvent::Due if timeout.is_some_and(Instant::has_passed) => {
                    timeout = None;
                    let after = self.job.timeout.unwrap_or_default();
                    self.guardian.end(self.job.timing.kill_after);
                    result.ended_by(Cause::TimedOut);
                    self.tell(Event::timed_out(after));
                }
                MainEvent::Due if backstop.is_none_or(|backstop| !backstop.has_passed()) => {
                    if let Some(after) = self.job.warn_after.filter(|_| warning.is_some_and(Instant::has_passed)) {
                        warning = None;
                        self.tell(Event::held_long(after));
                    }
                }
                // The guardian should have said by now that all is over: it is stopped, starved, or dead.
                MainEvent::Due if self.guardian.help() == Helped::Beside => {}
                MainEvent::Due | MainEvent::GuardianGone => {
                    let Run { guardian, voice, job, .. } = self;
                    guardian.replace(|processes| voice.tell(&job.name, &Event::cannot_signal(processes)));
                    self.tell(Event::guardian_died());
                    result.ended_by(Cause::GuardianDied);
                    return Ok(result);
                }
            }
        }
    }

    fn heard_from_guardian(&mut self, event: GuardianEvent, result: &mut RunResult) -> Command {
        match event {
            GuardianEvent::NotStarted { errno } => {
                let program = self.job.argv.first().map(|word| word.to_string_lossy()).unwrap_or_default();
                let event = Event::not_started(&program, &std::io::Error::from_raw_os_error(errno));
                self.tell(event);
                result.not_started = Some(errno);
            }
            GuardianEvent::Stopped if self.terminal.is_some() => {
                let since = clock::now();
                let _ = raise(Signal::SIGSTOP);
                // Worth telling only if that was too long for the lease.
                let overslept = result.deadlines.is_some_and(|before| self.guardian.signal_at(before).has_passed());
                result.suspended = overslept.then(|| since.elapsed());
            }
            GuardianEvent::Pace(pace) if self.voice.tells_all() => self.tell(Event::pace(pace)),
            GuardianEvent::Stopped | GuardianEvent::Pace(_) => {}
            GuardianEvent::Outgrown(pace) => {
                self.tell(Event::outgrown(pace));
                result.ended_by(Cause::Lost);
            }
            GuardianEvent::Expired => {
                self.tell(Event::expired(result.suspended));
                result.ended_by(Cause::Lost);
            }
            GuardianEvent::Refused { processes } => self.tell(Event::cannot_signal(&processes)),
            GuardianEvent::TooLate => {
                self.tell(Event::too_late());
                result.ended_by(Cause::Lost);
                return Command::Over;
            }
            GuardianEvent::Empty { status, leftovers } => {
                result.status = status;
                if leftovers > 0 {
                    self.tell(Event::leftovers(leftovers));
                }
                return Command::Over;
            }
        }
        Command::Runs
    }

    /// A loss is acted on before it is told: whoever reads standard error may be slow.
    fn heard_from_keeper(&mut self, event: KeeperEvent, backstop: Option<Instant>, result: &mut RunResult) {
        match event {
            KeeperEvent::Trouble(why) => {
                let ends_in = backstop.map_or(Duration::ZERO, Instant::remaining);
                self.tell(Event::trouble(&why, ends_in));
            }
            KeeperEvent::Recovered => self.tell(Event::recovered()),
            KeeperEvent::Lost(why) => {
                self.end_lost(self.grace_once_lost(), result);
                let why = match result.suspended {
                    Some(span) => format!("{why}; the job was suspended for {}", whole_seconds(span)),
                    None => why,
                };
                self.tell(Event::lost(&why));
            }
            KeeperEvent::ForceReleased(reason) => {
                self.end_lost(self.grace_once_lost(), result);
                let by = result.revocation.insert(Revocation::parse(&reason));
                self.tell(Event::force_released(by));
            }
            KeeperEvent::Revoked(reason) => {
                self.end_lost(self.job.timing.kill_after, result);
                let by = result.revocation.insert(Revocation::parse(&reason));
                self.tell(Event::revoked(by));
            }
            _ => {}
        }
    }

    fn end_lost(&mut self, grace: Duration, result: &mut RunResult) {
        self.guardian.end(grace);
        result.ended_by(Cause::Lost);
    }

    /// How long the command may take to go when somebody else may have the lock already.
    fn grace_once_lost(&self) -> Duration {
        match self.job.on_lost {
            OnLost::Kill => Duration::ZERO,
            OnLost::Signal => self.job.timing.kill_after,
        }
    }

    fn forward(&mut self, caught: Caught, result: &mut RunResult) {
        let asks_to_stop = matches!(caught.signal, Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT);
        if asks_to_stop {
            self.told_to_stop();
        }
        let shared_with_command = caught.from_terminal && self.terminal.is_some();
        if shared_with_command {
            result.interrupted_at_terminal = Some(caught.signal);
            return;
        }
        if caught.signal == Signal::SIGTERM {
            result.terminations += 1;
        }
        match result.terminations {
            2.. if caught.signal == Signal::SIGTERM => self.guardian.end(self.job.timing.kill_after),
            _ => self.guardian.signal(caught.signal as i32),
        }
    }
}

/// Why a command was ended, if it did not end by itself; of several, the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    TimedOut,
    GuardianDied,
    Lost,
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
            (None, Some(errno), _) => Exit::of_exec(&std::io::Error::from_raw_os_error(errno)),
            (None, None, Some(status)) if libc::WIFSIGNALED(status) => {
                let signal = libc::WTERMSIG(status);
                Exit::by(signal, self.interrupted_at_terminal.is_some_and(|typed| typed as i32 == signal))
            }
            (None, None, Some(status)) => Exit::Code(libc::WEXITSTATUS(status) as u8),
        }
    }

    /// The record of the run.
    pub fn last_run(&self, lease: &Lease, who: &Identity, tally: &Tally, once: Option<String>) -> LastRun {
        let outcome = match (self.cause, self.status) {
            (Some(Cause::Lost | Cause::GuardianDied), _) => Outcome::Lost,
            (Some(Cause::TimedOut), _) => Outcome::TimedOut,
            (None, Some(status)) if libc::WIFSIGNALED(status) => Outcome::Signaled,
            (None, _) => Outcome::Exited,
        };
        let holder = Holder { fencing_token: Some(lease.token), acquired_at: tally.since, ..who.clone().into() };
        let mut run = LastRun {
            waited_ms: Some(clock::millis(tally.waited)),
            duration_ms: Some(clock::millis(tally.ran)),
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
