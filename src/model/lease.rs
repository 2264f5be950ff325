//! Keeper, guardian, command, server, and somebody else who takes the lock as soon as it is free. Requests and
//! answers are late or lost in every way; dlock or its guardian dies at any step; a dlock that is stopped is one
//! whose steps do not happen. Deadlines are the real ones, of [`Terms`], on a clock of 100 ms a tick.
//!
//! Time may not pass over what the kernel does for certain: a guardian that is awake acts on a timer that has
//! fired, or on a link that has closed, before the next tick.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Model, explore};
use crate::clock::Instant;
use crate::lock::{Term, Terms};
use crate::mutant::Mutant;

const TICK: Duration = Duration::from_millis(100);
const TTL: Duration = Duration::from_secs(1);
const HORIZON: u8 = 16;
/// To acquire, and then to renew.
const REQUESTS: u8 = 3;

/// A request of dlock's, or the server's answer to it; the same number for both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Message {
    Acquire(u8),
    Renew(u8),
    Release,
    Granted(u8),
    Held(u8),
    Lost(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Lock {
    Free,
    /// Until this tick, on the server's clock.
    Ours {
        until: u8,
    },
    /// Somebody else's, who was not seen by us.
    Theirs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Keeper {
    Idle,
    /// Since this tick for an answer to the request of this number.
    Asks {
        number: u8,
        since: u8,
    },
    Holds,
    Renews {
        number: u8,
        since: u8,
    },
    /// The server has said that the lock is not ours.
    HasLost,
    Released,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: u8,
    lock: Lock,
    /// On the way, in either direction.
    messages: BTreeSet<Message>,
    sent: u8,
    keeper: Keeper,
    dlock_lives: bool,
    guardian_lives: bool,
    /// The guardian's timer, in ticks; `None` before the start.
    kill_at: Option<u8>,
    command_lives: bool,
    /// What the guardian says: no process is left.
    reported_dead: bool,
    /// The command has been told to go, and takes its time.
    told_to_go: bool,
}

pub struct Lease {
    mutant: Option<Mutant>,
}

impl Lease {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// The first tick at which the timer of a lease that counts from `since` has fired.
    fn kill_tick(&self, since: u8) -> u8 {
        let origin = Instant::from_nanos(0);
        let terms = Terms { ttl: TTL, kill_after: TTL / 6 };
        let kill = terms.deadlines(Term { from: origin, ttl: TTL, slack: Duration::ZERO }).kill;
        since + ticks(kill.since(origin))
    }

    fn command_steps(&self, state: &State, add: &mut impl FnMut(&str, State)) {
        if !state.command_lives {
            return;
        }
        // A patient one never goes by itself once it is told; that is what SIGKILL is for.
        if !state.told_to_go {
            add("the command ends", State { command_lives: false, reported_dead: true, ..state.clone() });
            add("the command is told to go", State { told_to_go: true, ..state.clone() });
        }
        if must_kill(state) || state.told_to_go {
            let survives = self.is(Mutant::NoSigkill);
            let idle = self.is(Mutant::NoGuardian) && state.guardian_lives;
            if !(idle || survives && state.reported_dead) {
                add("every process is killed", State { command_lives: survives, reported_dead: true, ..state.clone() });
            }
        }
    }

    fn keeper_steps(&self, state: &State, add: &mut impl FnMut(&str, State)) {
        if !state.dlock_lives {
            return;
        }
        let number = state.sent;
        let send = |message: Message, keeper: Keeper| {
            let mut next = State { keeper, sent: number + 1, ..state.clone() };
            next.messages.insert(message);
            next
        };
        let may_send = number < REQUESTS;
        match state.keeper {
            Keeper::Idle if may_send => {
                add("asks for the lock", send(Message::Acquire(number), Keeper::Asks { number, since: state.now }));
            }
            Keeper::Holds if may_send => {
                add("asks to renew", send(Message::Renew(number), Keeper::Renews { number, since: state.now }));
            }
            Keeper::Renews { .. } => {
                let mut next = State { keeper: Keeper::Holds, ..state.clone() };
                if self.is(Mutant::RenewalIgnored) {
                    next.kill_at = Some(self.kill_tick(state.now));
                }
                add("gives up on an answer", next);
            }
            _ => {}
        }
        let done = state.reported_dead || (self.is(Mutant::ReleaseBeforeDead) && state.told_to_go);
        if done && state.kill_at.is_some() && state.keeper != Keeper::Released {
            let mut next = State { keeper: Keeper::Released, ..state.clone() };
            next.messages.insert(Message::Release);
            add("releases", next);
        }
    }

    /// A message arrives.
    fn deliver(&self, message: Message, state: &State) -> State {
        let mut next = state.clone();
        next.messages.remove(&message);
        match message {
            Message::Acquire(number) => {
                if state.lock == Lock::Free {
                    next.lock = Lock::Ours { until: state.now + ticks(TTL.mul_f64(0.99)) };
                    next.messages.insert(Message::Granted(number));
                }
            }
            Message::Renew(number) => {
                let ours = matches!(state.lock, Lock::Ours { .. });
                if ours {
                    next.lock = Lock::Ours { until: state.now + ticks(TTL.mul_f64(0.99)) };
                }
                next.messages.insert(if ours { Message::Held(number) } else { Message::Lost(number) });
            }
            Message::Release if matches!(state.lock, Lock::Ours { .. }) => next.lock = Lock::Free,
            Message::Release => {}
            Message::Granted(_) | Message::Held(_) | Message::Lost(_) => self.answer(message, state, &mut next),
        }
        next
    }

    fn answer(&self, message: Message, state: &State, next: &mut State) {
        if !state.dlock_lives {
            return;
        }
        let counted_from = |since: u8| if self.is(Mutant::DeadlineFromReply) { state.now } else { since };
        match (state.keeper, message) {
            (Keeper::Asks { number, since }, Message::Granted(answered)) if number == answered => {
                next.keeper = Keeper::Holds;
                let kill_at = self.kill_tick(counted_from(since));
                next.kill_at = Some(kill_at);
                // The guardian starts nothing that would be over already.
                next.command_lives = state.guardian_lives && state.now < kill_at;
                next.reported_dead = !next.command_lives;
            }
            (Keeper::Renews { number, since }, Message::Held(answered)) if number == answered => {
                next.keeper = Keeper::Holds;
                next.kill_at = state.kill_at.max(Some(self.kill_tick(counted_from(since))));
            }
            (Keeper::Renews { number, .. }, Message::Lost(answered)) if number == answered => {
                next.keeper = Keeper::HasLost;
                next.told_to_go = true;
            }
            // Nobody waits for it any more.
            _ => {}
        }
    }
}

/// Whether somebody has to end the command before time goes on: the guardian at its timer or when the link
/// closes, and dlock in its place when it is gone.
fn must_kill(state: &State) -> bool {
    let fired = state.kill_at.is_some_and(|at| state.now >= at);
    fired || !state.dlock_lives || !state.guardian_lives || state.keeper == Keeper::HasLost
}

fn ticks(span: Duration) -> u8 {
    u8::try_from(span.as_nanos().div_ceil(TICK.as_nanos())).unwrap()
}

impl Model for Lease {
    type State = State;

    fn begin(&self) -> State {
        State {
            now: 0,
            lock: Lock::Free,
            messages: BTreeSet::new(),
            sent: 0,
            keeper: Keeper::Idle,
            dlock_lives: true,
            guardian_lives: true,
            kill_at: None,
            command_lives: false,
            reported_dead: false,
            told_to_go: false,
        }
    }

    fn steps(&self, state: &State) -> Vec<(String, State)> {
        let mut steps = Vec::new();
        if state.kill_at.is_some() && !state.command_lives {
            // There was a command, and there will be no other: nothing can go wrong any more.
            return steps;
        }
        let mut add = |name: &str, next: State| steps.push((format!("{}: {name}", state.now), next));
        let enforced = !must_kill(state) || self.is(Mutant::NoGuardian) || state.reported_dead;
        if state.now < HORIZON && (!state.command_lives || enforced) {
            let mut next = State { now: state.now + 1, ..state.clone() };
            if matches!(next.lock, Lock::Ours { until } if next.now >= until) {
                next.lock = Lock::Free;
            }
            add("time passes", next);
        }
        if state.lock == Lock::Free && state.keeper != Keeper::Idle {
            add("somebody else takes the lock", State { lock: Lock::Theirs, ..state.clone() });
        }
        // Both at once is what no process can cover.
        if state.dlock_lives && state.guardian_lives {
            add("dlock dies", State { dlock_lives: false, ..state.clone() });
            add("the guardian dies", State { guardian_lives: false, ..state.clone() });
        }
        for &message in &state.messages {
            // One that is lost is one that does not arrive.
            add(&format!("{message:?} arrives"), self.deliver(message, state));
        }
        self.command_steps(state, &mut add);
        self.keeper_steps(state, &mut add);
        steps
    }

    /// The promise.
    fn is_forbidden(&self, state: &State) -> bool {
        state.command_lives && state.lock == Lock::Theirs
    }
}

#[test]
fn no_order_of_events_lets_two_commands_live_at_once() {
    let states = explore(&Lease { mutant: None }).unwrap_or_else(|way| panic!("{way:#?}"));
    assert!(states > 10_000, "only {states} states: the model shows nothing");
}

#[test]
fn every_mutant_is_found() {
    use Mutant::{DeadlineFromReply, NoGuardian, NoSigkill, ReleaseBeforeDead, RenewalIgnored};
    for mutant in [RenewalIgnored, DeadlineFromReply, NoSigkill, ReleaseBeforeDead, NoGuardian] {
        assert!(explore(&Lease { mutant: Some(mutant) }).is_err(), "{mutant:?} was not found");
    }
}
