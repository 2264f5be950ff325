//! While the command runs under the lock.

use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::{Signal, raise};

use super::Run;
use super::course::{self, Cause, Course};
use crate::clock::{self, Instant};
use crate::config::OnLost;
use crate::events::{Caught, MainEvent};
use crate::exit::Exit;
use crate::guardian::{GuardianEvent, Helped};
use crate::keeper::KeeperEvent;
use crate::lock::Deadlines;
use crate::report::Event;

impl Run {
    /// Until no process of the command is left.
    pub fn supervise(&mut self, deadlines: &mut Option<Deadlines>) -> Result<Course> {
        let mut course = Course::default();
        let mut timeout = self.job.timeout.map(|limit| clock::now() + limit);
        loop {
            let backstop = self.guardian.backstop(*deadlines);
            let due = [timeout, backstop].into_iter().flatten().min();
            let event = self.next(due).inspect_err(|_| {
                // Whoever hears nothing any more cannot go on, and must leave nothing running.
                self.guardian.leave_it_to();
            })?;
            match event {
                MainEvent::Signal(caught) => self.forward(caught, &mut course),
                MainEvent::Keeper(KeeperEvent::Renewed(later)) => *deadlines = Some(later),
                MainEvent::Keeper(news) => self.heard_while_holding(news, backstop, &mut course),
                MainEvent::Guardian(GuardianEvent::NotStarted { errno }) => {
                    course.not_started = Some(errno);
                    self.tell_not_started(errno);
                }
                MainEvent::Guardian(GuardianEvent::Stopped) if self.terminal.is_some() => drop(raise(Signal::SIGSTOP)),
                MainEvent::Guardian(GuardianEvent::Stopped) => {}
                MainEvent::Guardian(GuardianEvent::Pace(pace)) => {
                    self.voice.tell(&self.job.name, &Event::Pace { pace });
                }
                MainEvent::Guardian(GuardianEvent::Outgrown(pace)) => {
                    self.voice.tell(&self.job.name, &Event::Outgrown { pace });
                    course.ended_by(Cause::Lost);
                }
                MainEvent::Guardian(GuardianEvent::Expired) => {
                    self.voice.tell(&self.job.name, &Event::Expired);
                    course.ended_by(Cause::Lost);
                }
                MainEvent::Guardian(GuardianEvent::Refused { processes }) => {
                    self.voice.tell(&self.job.name, &Event::CannotSignal { processes: &processes });
                }
                MainEvent::Guardian(GuardianEvent::TooLate) => {
                    self.voice.tell(&self.job.name, &Event::TooLate);
                    course.ended_by(Cause::Lost);
                    return Ok(course);
                }
                MainEvent::Guardian(GuardianEvent::Empty { status, leftovers }) => {
                    course.status = status;
                    if leftovers > 0 {
                        self.voice.tell(&self.job.name, &Event::Leftovers { processes: leftovers });
                    }
                    return Ok(course);
                }
                MainEvent::Due if timeout.is_some_and(Instant::has_passed) => {
                    timeout = None;
                    let after = self.job.timeout.unwrap_or_default();
                    self.guardian.end(self.job.terms.kill_after);
                    course.ended_by(Cause::TimedOut);
                    self.voice.tell(&self.job.name, &Event::TimedOut { after });
                }
                MainEvent::Due if backstop.is_none_or(|backstop| !backstop.has_passed()) => {}
                // The guardian should have said by now that all is over: it is stopped, starved, or gone.
                MainEvent::Due if self.guardian.help() == Helped::Beside => {}
                MainEvent::Due | MainEvent::GuardianGone => {
                    let Run { guardian, voice, job, .. } = self;
                    guardian.replace(|processes| voice.tell(&job.name, &Event::CannotSignal { processes }));
                    self.voice.tell(&self.job.name, &Event::GuardianDied);
                    course.ended_by(Cause::GuardianDied);
                    return Ok(course);
                }
            }
        }
    }

    fn heard_while_holding(&mut self, news: KeeperEvent, backstop: Option<Instant>, course: &mut Course) {
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
                course.ended_by(Cause::Lost);
                self.voice.tell(name, &Event::Lost { why: &why });
            }
            KeeperEvent::Taken(reason) => {
                self.guardian.end(self.grace_once_lost());
                course.ended_by(Cause::Lost);
                self.voice.tell(name, &Event::Taken { reason: &reason });
                course.reason = Some(reason);
            }
            KeeperEvent::Revoked(reason) => {
                self.guardian.end(self.job.terms.kill_after);
                course.ended_by(Cause::Lost);
                self.voice.tell(name, &Event::Revoked { reason: &reason });
                course.reason = Some(reason);
            }
            _ => {}
        }
    }

    /// How long the command may take to go when somebody else may have the lock already.
    fn grace_once_lost(&self) -> Duration {
        match self.job.on_lost {
            OnLost::Kill => Duration::ZERO,
            OnLost::Signal => self.job.terms.kill_after,
        }
    }

    fn forward(&mut self, caught: Caught, course: &mut Course) {
        let asks_to_stop = matches!(caught.signal, Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT);
        self.told_to_stop |= asks_to_stop;
        let shared_with_command = caught.from_terminal && self.terminal.is_some();
        if shared_with_command {
            course.interrupted_at_terminal = Some(caught.signal);
            return;
        }
        if caught.signal == Signal::SIGTERM {
            course.terminations += 1;
        }
        match course.terminations {
            2.. if caught.signal == Signal::SIGTERM => self.guardian.end(self.job.terms.kill_after),
            _ => self.guardian.signal(caught.signal as i32),
        }
    }

    fn tell_not_started(&mut self, errno: i32) {
        let program = self.job.argv.first().map_or_else(String::new, |word| word.to_string_lossy().into_owned());
        let why = std::io::Error::from_raw_os_error(errno).to_string();
        let event = match course::exit_of_exec(errno) {
            Exit::NOT_FOUND => Event::NotFound { program: &program },
            _ => Event::CannotExecute { program: &program, why: &why },
        };
        self.voice.tell(&self.job.name, &event);
    }
}
