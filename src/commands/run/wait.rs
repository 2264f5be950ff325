//! Until the lock is ours, or is not going to be. A lock is never waited for by its own holder: which locks the runs around
//! this one hold is seen here.
//!
//! Variables say so, and variables travel: over ssh, into containers, to jobs that are started later. So they are only
//! hints. Whether an owner still holds the lock, the backend knows; whether its run is really around us, the table of
//! processes.

use std::fs::read_to_string;
use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::{Signal, raise};
use nix::unistd::{Pid, getpid};

use super::Run;
use crate::backend::{Busy, Lease};
use crate::clock::{self, Instant};
use crate::config::{Leftovers, Wait};
use crate::events::MainEvent;
use crate::exit::{Exit, Fault};
use crate::keeper::KeeperEvent;
use crate::lock::{Deadlines, Holder, LockName, OwnerId};
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
                    if self.voice.tells_all() {
                        self.tell(Event::acquired(lease.token, began.elapsed()));
                    }
                    // The only slot there is needs no number but here.
                    lease.slot = lease.slot.or(self.job.numbered.then_some(0));
                    return Ok(Waited::Granted(lease, deadlines));
                }
                MainEvent::Keeper(KeeperEvent::Busy(now)) if self.job.wait == Wait::Never => {
                    return Ok(self.busy(&now));
                }
                MainEvent::Keeper(KeeperEvent::Busy(now)) => {
                    busy = Some(*now);
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
            KeeperEvent::Nested(holder) => {
                let advice = match () {
                    () if !self.job.reentrant => {
                        "this runs inside another run of the same lock and would wait for itself for ever; --reentrant \
                         runs it under the lease of that run"
                    }
                    () if self.job.once.is_some() => {
                        "--once and --reentrant do not go together inside another run of the same lock: the key is \
                         checked when a lock is acquired, and the outer run has acquired it"
                    }
                    () if !holder.owner.as_deref().is_some_and(is_ancestor) => {
                        "--reentrant works only in a process that the outer dlock run started and will end. The \
                         variables of that run are set here, but it is not an ancestor of this process, or it has \
                         --leftovers leave: it would not end this command in time"
                    }
                    () => return Ok(Some(Waited::Nested(holder))),
                };
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

/// `name=owner` of every run we are inside of, outermost first.
const HELD: &str = "DLOCK_HELD";
/// `owner=process` for each of these owners.
const HELD_BY: &str = "DLOCK_HELD_BY";

/// The owners under which runs around us took a lock of this name. The variables may be stale, or speak
/// of another backend: only if one of these owners is found holding the lock are we nested.
pub fn owners_of(name: &LockName) -> Vec<OwnerId> {
    let pair = std::env::var("DLOCK_NAME").ok().zip(std::env::var("DLOCK_OWNER").ok());
    let pair = pair.map(|(name, owner)| format!("{name}={owner}")).unwrap_or_default();
    let held = std::env::var(HELD).unwrap_or_default();
    let entries = held.split(' ').chain([pair.as_str()]).filter_map(|entry| entry.split_once('='));
    entries.filter(|(held, _)| *held == name.as_str()).filter_map(|(_, owner)| owner.parse().ok()).collect()
}

/// Whether the run that took a lock of this name as this owner is around us, as far as variables tell.
pub fn is_inside(name: &LockName, owner: &OwnerId) -> bool {
    std::env::var(HELD).is_ok_and(|held| held.split(' ').any(|entry| entry == format!("{name}={owner}")))
}

/// Whether the dlock that runs as this owner is an ancestor of this process: then its guardian ends us with the rest of
/// its command.
fn is_ancestor(owner: &str) -> bool {
    let processes = std::env::var(HELD_BY).unwrap_or_default();
    let process = processes.split(' ').filter_map(|entry| entry.split_once('=')).find(|(known, _)| *known == owner);
    let Some((_, process)) = process else { return false };
    let parents =
        std::iter::successors(Some(getpid()), |pid| Some(Stat::of(*pid)?.parent).filter(|pid| pid.as_raw() > 0));
    parents.skip(1).any(|parent| identity(parent).as_deref() == Some(process))
}

/// The variables for a command that runs under one lock more. A run that leaves processes behind names no process:
/// it would not end an inner run before it releases the lock.
pub fn held_with(name: &LockName, owner: &OwnerId, leftovers: Leftovers) -> [String; 2] {
    let add = |variable: &str, entry: String| {
        let inherited = std::env::var(variable).unwrap_or_default();
        format!("{variable}={}", format!("{inherited} {entry}").trim_start())
    };
    let process = identity(getpid()).filter(|_| leftovers != Leftovers::Leave);
    let process = process.map_or_else(String::new, |process| format!("{owner}={process}"));
    [add(HELD, format!("{name}={owner}")), add(HELD_BY, process)]
}

/// A process of this boot: its id may be used again, but not with the same start, in ticks since the boot.
fn identity(pid: Pid) -> Option<String> {
    Some(format!("{pid}.{}", Stat::of(pid)?.born))
}

struct Stat {
    parent: Pid,
    born: u64,
}

impl Stat {
    fn of(pid: Pid) -> Option<Stat> {
        let stat = read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // `pid (name) state ppid …`: the name may hold anything; the start is the 22nd field.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        Some(Stat { parent: Pid::from_raw(fields.nth(1)?.parse().ok()?), born: fields.nth(17)?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start_too() {
        let ours = Stat::of(getpid()).unwrap();
        assert_eq!(identity(getpid()), Some(format!("{}.{}", getpid(), ours.born)));
        let parent = Stat::of(ours.parent).unwrap();
        assert!(parent.born > 0 && parent.born <= ours.born, "a parent is older: {} {}", parent.born, ours.born);
    }
}
