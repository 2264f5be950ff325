//! `dlock run`: wait for the lock, run the command under it, release it, exit as the command did.

mod metrics;
mod next_round;
mod notify;
mod supervise;
mod wait;

use std::time::{Duration, SystemTime};

use anyhow::Result;

use crate::backend::{self, Ask, Ending, Lease, Released, Unrecorded};
use crate::clock::{self, Instant};
use crate::config::{RunJob, Wait};
use crate::events::{self, MainEvent, Signals, Terminal};
use crate::exit::{Exit, Fault};
use crate::guardian::{EVENT, Guardian, GuardianOptions, Hooks, Plan};
use crate::keeper::{Keeper, KeeperConfig, KeeperEvent};
use crate::lock::{Deadlines, Holder, Identity, Revocation};
use crate::report::{Event, Voice};
pub use metrics::METRICS;
use notify::Notify;
use supervise::RunResult;
use wait::Waited;
pub use wait::is_inside;

/// After this it is left to the lease to run out.
const LONGEST_RELEASE: Duration = Duration::from_secs(10);

pub fn run(job: RunJob, voice: &mut Voice) -> Result<Exit> {
    let mut run = Run::prepare(job, voice)?;
    let exit = match run.wait_for_lock() {
        Ok(Waited::Granted(lease, deadlines)) => run.under_lock(&lease, deadlines),
        Ok(Waited::Nested(outer)) => run.under_outer_lock(&outer),
        Ok(Waited::Not(exit)) => Ok(exit),
        Err(error) => Err(error),
    };
    run.finish();
    if run.wants_another_round(&exit) {
        if let Err(error) = &exit {
            run.voice.error(error);
        }
        return next_round::begin(run);
    }
    run.notify.iter().for_each(Notify::stopping);
    exit
}

/// For `dlock acquire`: wait for the lock, and leave it held for its ttl.
pub fn take(job: RunJob, voice: &mut Voice) -> Result<Result<Lease, Exit>> {
    let mut run = Run::prepare(job, voice)?;
    let taken = match run.wait_for_lock()? {
        Waited::Granted(lease, _) => {
            let until = lease.grant.from + run.job.timing.ttl;
            run.keeper.release(Ending { last_run: None, keep: run.job.history, hold_until: Some(until) });
            match run.released()? {
                Released::Done => {
                    run.guardian.linger(&lease, until);
                    Ok(Ok(lease))
                }
                Released::NotOurs | Released::ForceReleased(_) => Ok(Err(Exit::LOST)),
            }
        }
        Waited::Nested(_) => Err(Fault::Internal.because("acquire is never reentrant")),
        Waited::Not(exit) => Ok(Err(exit)),
    };
    run.finish();
    taken
}

struct Run {
    job: RunJob,
    who: Identity,
    /// What the command gets over its own environment, but for what only the grant tells.
    variables: Vec<String>,
    voice: Voice,
    signals: Signals,
    /// Where we were started, if in its foreground.
    terminal: Option<Terminal>,
    guardian: Guardian,
    keeper: Keeper,
    tally: Tally,
    /// The service manager, if one wants to be told.
    notify: Option<Notify>,
    /// Somebody wants this to end, the command and us.
    told_to_stop: bool,
}

/// What is counted of a run, for the history and the metrics.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    acquired: bool,
    busy: bool,
    lost: bool,
    waited: Duration,
    held: Duration,
    /// When a command was started under the lock, how long it ran, and how it ended.
    since: Option<SystemTime>,
    ran: Duration,
    exit_code: Option<u8>,
    /// What is known at the start of a run has been counted.
    start_counted: bool,
}

impl Run {
    /// The hooks are the first process to be forked: what comes later must know that they are not the command's. Then
    /// signals, then the guardian, and only then what may make a thread.
    fn prepare(job: RunJob, voice: &mut Voice) -> Result<Run> {
        // A dlock inside of a hook has none, or there would be no end of them.
        if let Some(command) = job.on_event.as_ref().filter(|_| std::env::var_os(EVENT).is_none()) {
            voice.call(Hooks::fork(command, &job.name, voice.of_another_process())?);
        }
        if let Some(path) = &job.metrics_file {
            metrics::refuse_foreign(path)?;
        }
        let words: Vec<_> = job.argv.iter().map(|word| word.to_string_lossy()).collect();
        let mut who = Identity::of_this_process(&words.join(" "))?;
        who.note.clone_from(&job.note);
        let signals = Signals::catch()?;
        let terminal = Terminal::in_foreground();
        let plan = Plan {
            argv: job.argv.clone(),
            mask: signals.inherited_mask,
            group: terminal.as_ref().map(Terminal::group),
            ignores_children: signals.ignored_children,
        };
        let options = GuardianOptions {
            name: job.name.clone(),
            signal: job.signal,
            leftovers: job.leftovers,
            voice: voice.clone(),
            linger: backend::linger,
        };
        let guardian = Guardian::fork(plan, options)?;

        let ask = Ask {
            name: job.name.clone(),
            who: who.clone(),
            mode: job.mode,
            ttl: job.timing.ttl,
            queue: job.wait != Wait::Never,
            once: job.once.clone(),
        };
        let ancestors = wait::owners_of(&job.name);
        let config = KeeperConfig { ask, ancestors, timing: job.timing, patience: job.service.patience };
        let service = job.service.clone();
        let keeper = Keeper::begin(config, move || service.open(), guardian.deadline_push())?;
        // Now, so that there is less to do once the lock is granted.
        let mut variables = vec![format!("DLOCK_NAME={}", job.name), format!("DLOCK_OWNER={}", who.owner)];
        variables.extend([next_round::VARIABLE, notify::VARIABLE].map(|ours| format!("{ours}=")));
        variables.extend(wait::held_with(&job.name, &who.owner, job.leftovers));
        let notify = std::env::var_os(notify::VARIABLE).and_then(|manager| Notify::to(&manager));
        let tally = Tally::default();
        let voice = voice.clone();
        Ok(Run { job, who, variables, voice, signals, terminal, guardian, keeper, tally, notify, told_to_stop: false })
    }

    fn under_lock(&mut self, lease: &Lease, deadlines: Deadlines) -> Result<Exit> {
        let started = self.start(lease, deadlines)?;
        let result = self.supervise(Some(deadlines))?;
        self.tally.ran = started.elapsed();
        self.release(lease, &result)
    }

    /// Starts the command, and says so to whoever wants to know. From when on it runs.
    fn start(&mut self, lease: &Lease, deadlines: Deadlines) -> Result<Instant> {
        let (date, started) = (clock::wall(), clock::now());
        if lease.grant.ttl < self.job.timing.ttl {
            self.tell(Event::shorter_ttl(lease.grant.ttl, self.job.timing.ttl));
        }
        if let Err(error) = self.guardian.start(self.variables(lease), deadlines, &lease.descriptors) {
            self.give_up()?;
            return Err(error);
        }
        self.tally.since = Some(date);
        if let Some(notify) = &mut self.notify {
            let (name, token, since) = (&lease.name, lease.token, humantime::format_rfc3339_seconds(date));
            notify.ready(&format!("holds {name} since {since} with fencing token {token}"));
        }
        if let Some(path) = &self.job.metrics_file {
            // If this fails, the end of the run counts it as well, and reports a failure.
            self.tally.start_counted = metrics::count_start(path, &lease.name, &self.tally).is_ok();
        }
        if let Some(lock) = backend::held_by_root(&self.job.service.address, &self.job.name) {
            self.tell(Event::another_lock(&lock));
        }
        Ok(started)
    }

    /// When no process of the command is left.
    fn release(&mut self, lease: &Lease, result: &RunResult) -> Result<Exit> {
        let granted = lease.grant.from;
        let last_run = result.last_run(lease, &self.who, &self.tally, self.job.once.clone());
        let held_on = Some(granted + self.job.hold_at_least).filter(|until| !until.has_passed());
        let hold_until = held_on.filter(|_| result.came_to_its_end());
        // Before anything else: somebody may be waiting for it.
        self.keeper.release(Ending { last_run: Some(last_run), keep: self.job.history, hold_until });
        if lease.descriptors.is_empty() {
            // The guardian holds no lock that it would have to let go of if dlock were stopped now.
            self.guardian.retire();
        }
        (self.tally.held, self.tally.lost) = (granted.elapsed(), result.is_lost());
        self.tally.exit_code = Some(result.exit().code());
        let released = self.see_released(lease, result)?;
        if let Some(until) = hold_until {
            self.guardian.linger(lease, until);
        }
        match released {
            Released::Done => Ok(result.exit()),
            Released::NotOurs | Released::ForceReleased(_) => Ok(Exit::LOST),
        }
    }

    fn under_outer_lock(&mut self, outer: &Holder) -> Result<Exit> {
        let slot = outer.slot.or(self.job.numbered.then_some(0));
        let token = outer.fencing_token.map(|token| format!("DLOCK_FENCING_TOKEN={token}"));
        let mut variables = vec![format!("DLOCK_NAME={}", self.job.name), format!("{}=", notify::VARIABLE)];
        variables.extend(outer.owner.iter().map(|owner| format!("DLOCK_OWNER={owner}")));
        variables.extend(token);
        variables.extend(slot.map(|slot| format!("DLOCK_SLOT={slot}")));
        // The guardian of the outer run sees to its end.
        self.guardian.start(variables, Deadlines::NEVER, &[])?;
        if let Some(notify) = &mut self.notify {
            notify.ready(&format!("runs under the lock {} of the run around it", self.job.name));
        }
        let result = self.supervise(None)?;
        Ok(result.exit())
    }

    /// Whatever the answer, the command has ended: a release that fails only leaves the lease to run out.
    fn see_released(&mut self, lease: &Lease, result: &RunResult) -> Result<Released> {
        let released = self.released();
        let event = match &released {
            Ok(Released::ForceReleased(reason)) if result.revocation.is_none() => {
                Event::force_released(&Revocation::parse(reason))
            }
            Ok(Released::ForceReleased(_)) => return Ok(Released::NotOurs),
            Ok(Released::NotOurs) if result.is_lost() => return Ok(Released::NotOurs),
            Ok(Released::NotOurs) => Event::found_lost(),
            Ok(Released::Done) if !self.voice.tells_all() => return Ok(Released::Done),
            Ok(Released::Done) => Event::released(lease.token, result.exit().code(), self.tally.ran),
            Err(error) if error.root_cause().is::<Unrecorded>() => Event::unrecorded(&error.root_cause().to_string()),
            Err(error) => Event::release_failed(&format!("{error:#}")),
        };
        self.tell(event);
        Ok(released.unwrap_or(Released::Done))
    }

    /// The keeper's answer to an order to release.
    fn released(&mut self) -> Result<Released> {
        let until = clock::now() + LONGEST_RELEASE;
        loop {
            match self.next(Some(until))? {
                MainEvent::Keeper(KeeperEvent::Released(released)) => return released,
                MainEvent::Due => return Err(Fault::Unreachable.because("the backend does not answer")),
                _ => {}
            }
        }
    }

    /// When nothing of the command is left, and the lock is released or was never ours.
    fn finish(&mut self) {
        if let Some(path) = &self.job.metrics_file
            && let Err(error) = metrics::count_end(path, &self.job.name, &self.tally)
        {
            self.tell(Event::metrics_failed(&format!("{error:#}")));
        }
        self.guardian.dismiss();
        if let Some(terminal) = &self.terminal {
            terminal.take_back();
        }
    }

    /// Somebody wants this to end, the command and us.
    fn told_to_stop(&mut self) {
        self.told_to_stop = true;
        self.notify.iter().for_each(Notify::stopping);
    }

    /// Whether `--keep-trying` wants another round: not after success, nor after somebody told us to stop.
    fn wants_another_round(&self, exit: &Result<Exit>) -> bool {
        let may_change = match exit {
            Ok(exit) => *exit != Exit::OK,
            Err(error) => {
                matches!(Fault::of(error), Fault::Unreachable | Fault::Disk | Fault::NotOurs | Fault::Internal)
            }
        };
        self.job.keep_trying && may_change && !self.told_to_stop
    }

    fn tell(&mut self, event: Event) {
        self.voice.tell(&self.job.name, &event);
    }

    fn next(&mut self, due: Option<Instant>) -> Result<MainEvent> {
        events::next(&self.signals, &mut self.guardian, &self.keeper, due)
    }

    fn variables(&self, lease: &Lease) -> Vec<String> {
        let slot = lease.slot.map_or_else(String::new, |slot| slot.to_string());
        let granted = [format!("DLOCK_FENCING_TOKEN={}", lease.token), format!("DLOCK_SLOT={slot}")];
        self.variables.iter().cloned().chain(granted).collect()
    }

    fn about(&self, error: anyhow::Error) -> anyhow::Error {
        let fault = Fault::of(&error);
        error.context(format!("{} on {}", self.job.name, self.job.service.address)).context(fault)
    }
}
