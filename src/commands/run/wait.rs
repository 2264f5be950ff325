//! Until the lock is ours, or is not going to be.

use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::{Signal, raise};

use super::{Run, ancestry};
use crate::backend::{Busy, Lease};
use crate::clock::{self, Instant};
use crate::config::Wait;
use crate::events::MainEvent;
use crate::exit::{Exit, Fault};
use crate::keeper::KeeperEvent;
use crate::lock::{Deadlines, Holder};
use crate::report::{Event, describe};

pub enum Waited {
    Granted(Lease, Deadlines),
    /// An ancestor holds the lock, and we are to run under its lease.
    Nested(Box<Holder>),
    Not(Exit),
}

impl Run {
    pub fn wait_for_lock(&mut self) -> Result<Waited> {
        let began = clock::now();
        let mut busy: Option<Busy> = None;
        let mut log_at = began;
        loop {
            let give_up = self.gives_up_after(busy.is_some()).map(|limit| began + limit);
            match self.next(self.next_look(give_up, busy.is_some().then_some(log_at)))? {
                MainEvent::Keeper(KeeperEvent::Granted(mut lease, deadlines)) => {
                    self.voice.clear();
                    (self.tally.acquired, self.tally.waited) = (true, began.elapsed());
                    self.tell(Event::acquired(lease.token, began.elapsed()));
                    // The only slot there is needs no number but here.
                    lease.slot = lease.slot.or(self.job.numbered.then_some(0));
                    return Ok(Waited::Granted(lease, deadlines));
                }
                MainEvent::Keeper(KeeperEvent::Busy(now)) if self.job.wait == Wait::Never => {
                    return Ok(self.busy(&now));
                }
                MainEvent::Keeper(KeeperEvent::Busy(now)) => {
                    busy = Some(now);
                    // However many events the keeper sends.
                    if give_up.is_some_and(Instant::has_passed) {
                        return self.give_up_waiting(began, busy.as_ref());
                    }
                }
                MainEvent::Keeper(news) => {
                    if let Some(ended) = self.heard_while_waiting(news)? {
                        return Ok(ended);
                    }
                }
                MainEvent::Signal(caught) => match caught.signal {
                    Signal::SIGTERM | Signal::SIGINT | Signal::SIGHUP | Signal::SIGQUIT => {
                        self.told_to_stop();
                        self.give_up()?;
                        return Ok(Waited::Not(Exit::by(caught.signal as i32, caught.from_terminal)));
                    }
                    Signal::SIGTSTP => drop(raise(Signal::SIGSTOP)),
                    _ => {}
                },
                MainEvent::Due if give_up.is_some_and(Instant::has_passed) => {
                    return self.give_up_waiting(began, busy.as_ref());
                }
                MainEvent::Due => {}
                MainEvent::GuardianGone => {
                    self.give_up()?;
                    return Err(Fault::Internal.because("the guardian process was killed"));
                }
                MainEvent::Guardian(_) => {}
            }
            if let Some(busy) = &busy {
                self.tell_waiting(busy, began, &mut log_at);
            }
        }
    }

    /// Shows whom we wait for: at once on a terminal and to a service manager, and once a minute in a log.
    fn tell_waiting(&mut self, busy: &Busy, began: Instant, log_at: &mut Instant) {
        const EVERY: Duration = Duration::from_secs(60);
        let (name, holder, ahead) = (&self.job.name, busy.holder.as_ref(), busy.ahead);
        self.voice.waiting(name, holder, ahead, began.elapsed());
        if let Some(notify) = &mut self.notify {
            // Without its age, which is another one all the time.
            let ageless = holder.map(|holder| Holder { acquired_at: None, ..holder.clone() });
            let held_by = ageless.map(|holder| format!(", held by {}", describe(&holder))).unwrap_or_default();
            notify.status(&format!("waits for {name}{held_by}"));
        }
        if self.voice.logs_waiting() && log_at.has_passed() {
            *log_at = clock::now() + EVERY;
            self.voice.tell(name, &Event::waiting(holder, ahead, began.elapsed()));
        }
    }

    fn give_up_waiting(&mut self, began: Instant, busy: Option<&Busy>) -> Result<Waited> {
        self.give_up()?;
        self.tally.waited = began.elapsed();
        match busy {
            Some(busy) => Ok(self.busy(busy)),
            None => Err(self.about(Fault::Unreachable.because("the backend did not answer within --wait"))),
        }
    }

    /// However short --wait is, the backend gets half a second to answer the first time.
    fn gives_up_after(&self, answered: bool) -> Option<Duration> {
        const LEAST: Duration = Duration::from_millis(500);
        match self.job.wait {
            Wait::AtMost(limit) if answered => Some(limit),
            Wait::AtMost(limit) => Some(limit.max(LEAST)),
            Wait::Forever | Wait::Never => None,
        }
    }

    fn heard_while_waiting(&mut self, news: KeeperEvent) -> Result<Option<Waited>> {
        match news {
            KeeperEvent::Nested(_) if self.job.reentrant && self.job.once.is_some() => {
                let advice = "--once and --reentrant do not go together inside another run of the same lock: the key is \
                              checked when a lock is acquired, and the outer run has acquired it";
                return Err(self.about(Fault::Usage.because(advice)));
            }
            KeeperEvent::Nested(holder) if self.job.reentrant => {
                if !holder.owner.as_deref().is_some_and(ancestry::is_ancestor) {
                    let advice = "--reentrant works only in a process that the outer dlock run started and will end. The \
                                  variables of that run are set here, but it is not an ancestor of this process, or \
                                  it has --leftovers leave: it would not end this command in time";
                    return Err(self.about(Fault::Usage.because(advice)));
                }
                return Ok(Some(Waited::Nested(holder)));
            }
            KeeperEvent::Nested(_) => {
                let advice = "this runs inside another run of the same lock and would wait for itself for ever; \
                              --reentrant runs it under the lease of that run";
                return Err(self.about(Fault::Usage.because(advice)));
            }
            KeeperEvent::AlreadyRan => {
                let key = self.job.once.clone().unwrap_or_default();
                self.tell(Event::already_ran(&key));
                return Ok(Some(Waited::Not(Exit::OK)));
            }
            KeeperEvent::Failed(error) => return Err(self.about(error)),
            KeeperEvent::Trouble(why) => self.tell(Event::waiting_for_backend(&why)),
            KeeperEvent::Recovered => self.tell(Event::recovered()),
            _ => {}
        }
        Ok(None)
    }

    pub fn give_up(&mut self) -> Result<()> {
        const LONGEST: Duration = Duration::from_millis(500);
        self.voice.clear();
        self.keeper.give_up();
        let until = clock::now() + LONGEST;
        loop {
            match self.next(Some(until))? {
                MainEvent::Keeper(KeeperEvent::Withdrawn | KeeperEvent::Failed(_)) | MainEvent::Due => return Ok(()),
                _ => {}
            }
        }
    }

    fn busy(&mut self, busy: &Busy) -> Waited {
        self.tally.busy = true;
        self.tell(Event::busy(busy.holder.as_ref()));
        Waited::Not(self.job.conflict)
    }

    /// When to wake while waiting: to give up, to redraw the live line, or to log whom we wait for, if for anybody.
    fn next_look(&self, give_up: Option<Instant>, log_at: Option<Instant>) -> Option<Instant> {
        let redraw = log_at.filter(|_| self.voice.is_live()).map(|_| clock::now() + Duration::from_secs(1));
        let log = log_at.filter(|_| self.voice.logs_waiting());
        [give_up, redraw, log].into_iter().flatten().min()
    }
}
