//! While the command runs under the lock.

use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::{Signal, raise};

use super::Run;
use super::result::{self, Cause, RunResult};
use crate::clock::{self, Instant};
use crate::config::OnLost;
use crate::events::{Caught, MainEvent};
use crate::exit::Exit;
use crate::guardian::{GuardianEvent, Helped};
use crate::keeper::KeeperEvent;
use crate::lock::{Deadlines, Revocation};
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
                result.not_started = Some(errno);
                self.tell_not_started(errno);
            }
            GuardianEvent::Stopped if self.terminal.is_some() => {
                let since = clock::now();
                let _ = raise(Signal::SIGSTOP);
                // Worth telling only if that was too long for the lease.
                let overslept = result.deadlines.is_some_and(|before| self.guardian.signal_at(before).has_passed());
                result.suspended = overslept.then(|| since.elapsed());
            }
            GuardianEvent::Stopped => {}
            GuardianEvent::Pace(pace) => self.tell(Event::pace(pace)),
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

    fn tell_not_started(&mut self, errno: i32) {
        let program = self.job.argv.first().map_or_else(String::new, |word| word.to_string_lossy().into_owned());
        let why = std::io::Error::from_raw_os_error(errno).to_string();
        let event = match result::exit_of_exec(errno) {
            Exit::NOT_FOUND => Event::not_found(&program),
            _ => Event::cannot_execute(&program, &why),
        };
        self.tell(event);
    }
}
