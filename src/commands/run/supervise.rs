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

impl Run {
    /// Until no process of the command is left.
    pub fn supervise(&mut self, deadlines: &mut Option<Deadlines>) -> Result<RunResult> {
        let mut result = RunResult::default();
        let mut timeout = self.job.timeout.map(|limit| clock::now() + limit);
        let mut warning = self.job.warn_after.map(|limit| clock::now() + limit);
        loop {
            let backstop = self.guardian.backstop(*deadlines);
            let due = [timeout, warning, backstop].into_iter().flatten().min();
            let event = self.next(due).inspect_err(|_| {
                // Whoever hears nothing any more cannot go on, and must leave nothing running.
                self.guardian.leave_it_to();
            })?;
            match event {
                MainEvent::Signal(caught) => self.forward(caught, &mut result),
                MainEvent::Keeper(KeeperEvent::Renewed(later)) => *deadlines = Some(later),
                MainEvent::Keeper(news) => self.heard_while_holding(news, backstop, &mut result),
                MainEvent::Guardian(GuardianEvent::NotStarted { errno }) => {
                    result.not_started = Some(errno);
                    self.tell_not_started(errno);
                }
                MainEvent::Guardian(GuardianEvent::Stopped) if self.terminal.is_some() => {
                    let since = clock::now();
                    let _ = raise(Signal::SIGSTOP);
                    // Only if that was too long for the lease.
                    let overslept = deadlines.is_some_and(|before| self.guardian.signal_at(before).has_passed());
                    result.suspended = overslept.then(|| since.elapsed());
                }
                MainEvent::Guardian(GuardianEvent::Stopped) => {}
                MainEvent::Guardian(GuardianEvent::Pace(pace)) => {
                    self.voice.tell(&self.job.name, &Event::Pace { pace });
                }
                MainEvent::Guardian(GuardianEvent::Outgrown(pace)) => {
                    self.voice.tell(&self.job.name, &Event::Outgrown { pace });
                    result.ended_by(Cause::Lost);
                }
                MainEvent::Guardian(GuardianEvent::Expired) => {
                    self.voice.tell(&self.job.name, &Event::Expired { suspended: result.suspended });
                    result.ended_by(Cause::Lost);
                }
                MainEvent::Guardian(GuardianEvent::Refused { processes }) => {
                    self.voice.tell(&self.job.name, &Event::CannotSignal { processes: &processes });
                }
                MainEvent::Guardian(GuardianEvent::TooLate) => {
                    self.voice.tell(&self.job.name, &Event::TooLate);
                    result.ended_by(Cause::Lost);
                    return Ok(result);
                }
                MainEvent::Guardian(GuardianEvent::Empty { status, leftovers }) => {
                    result.status = status;
                    if leftovers > 0 {
                        self.voice.tell(&self.job.name, &Event::Leftovers { processes: leftovers });
                    }
                    return Ok(result);
                }
                MainEvent::Due if timeout.is_some_and(Instant::has_passed) => {
                    timeout = None;
                    let after = self.job.timeout.unwrap_or_default();
                    self.guardian.end(self.job.timing.kill_after);
                    result.ended_by(Cause::TimedOut);
                    self.voice.tell(&self.job.name, &Event::TimedOut { after });
                }
                MainEvent::Due if backstop.is_none_or(|backstop| !backstop.has_passed()) => {
                    if let Some(after) = self.job.warn_after.filter(|_| warning.is_some_and(Instant::has_passed)) {
                        warning = None;
                        self.voice.tell(&self.job.name, &Event::HeldLong { after });
                    }
                }
                // The guardian should have said by now that all is over: it is stopped, starved, or gone.
                MainEvent::Due if self.guardian.help() == Helped::Beside => {}
                MainEvent::Due | MainEvent::GuardianGone => {
                    let Run { guardian, voice, job, .. } = self;
                    guardian.replace(|processes| voice.tell(&job.name, &Event::CannotSignal { processes }));
                    self.voice.tell(&self.job.name, &Event::GuardianDied);
                    result.ended_by(Cause::GuardianDied);
                    return Ok(result);
                }
            }
        }
    }

    fn heard_while_holding(&mut self, news: KeeperEvent, backstop: Option<Instant>, result: &mut RunResult) {
        let name = &self.job.name;
        match news {
            KeeperEvent::Trouble(why) => {
                let ends_in = backstop.map_or(Duration::ZERO, Instant::remaining);
                self.voice.tell(name, &Event::Trouble { why: &why, ends_in });
            }
            KeeperEvent::Recovered => self.voice.tell(name, &Event::Recovered),
            // What has to be done comes before what is said about it: nobody may be reading.
            KeeperEvent::Lost(why) => {
                self.guardian.end(self.grace_once_lost());
                result.ended_by(Cause::Lost);
                let why = match result.suspended {
                    Some(span) => format!("{why}; the job was suspended for {}", whole_seconds(span)),
                    None => why,
                };
                self.voice.tell(name, &Event::Lost { why: &why });
            }
            KeeperEvent::ForceReleased(reason) => {
                self.guardian.end(self.grace_once_lost());
                result.ended_by(Cause::Lost);
                let revocation = Revocation::parse(&reason);
                self.voice.tell(name, &Event::ForceReleased { by: &revocation });
                result.revocation = Some(revocation);
            }
            KeeperEvent::Revoked(reason) => {
                self.guardian.end(self.job.timing.kill_after);
                result.ended_by(Cause::Lost);
                let revocation = Revocation::parse(&reason);
                self.voice.tell(name, &Event::Revoked { by: &revocation });
                result.revocation = Some(revocation);
            }
            _ => {}
        }
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
            self.told_to_stop = true;
            self.notify.stopping();
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
            Exit::NOT_FOUND => Event::NotFound { program: &program },
            _ => Event::CannotExecute { program: &program, why: &why },
        };
        self.voice.tell(&self.job.name, &event);
    }
}
