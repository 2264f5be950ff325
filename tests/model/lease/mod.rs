//! Keeper, guardian, command, server, and somebody else who takes the lock as soon as it is free. Requests and
//! answers are late or lost in every way; dlock or its guardian dies at any step, and the server may crash once
//! and come back with its data; a dlock that is stopped is one whose steps do not happen. Deadlines are the real
//! ones, of [`LeaseTiming`], to the millisecond; what is free to happen at any time happens at steps of 200 ms, and at
//! every instant at which a lease or its allowance ends.
//!
//! The server's clock may run 1 % fast or slow against ours. Killing may take as long as the margin: what the
//! kernel is trusted with is that a guardian that is awake is done with it before the lease's end.
//!
//! Not covered, for the promise does not cover it either: both processes of dlock dead at once, a server that loses
//! what it has confirmed (the search finds what happens then), clocks that are set. Not covered, and left to tests:
//! how long a command takes to die, several locks, shared holders and slots, `--hold-at-least`.

mod tests;
mod wire;

use std::time::Duration;

use dlock::clock::Instant;
use dlock::lock::{Grant, LeaseTiming};
use wire::{Message, Wire};

use super::Model;

/// On the true clock, from the beginning.
type Millis = u16;

const STEP: Millis = 200;
const TTL: Millis = 1000;
const HORIZON: Millis = 1600;
/// To acquire, and then to renew.
const REQUESTS: u8 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Lock {
    Free,
    /// Until this instant, by the server's clock.
    Ours {
        until: Millis,
    },
    /// Somebody else's, who was not seen by us.
    Theirs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Server {
    NeverFailed,
    Down,
    Back,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Keeper {
    Idle,
    /// Since then for an answer.
    Asks {
        since: Millis,
    },
    Holds,
    /// For an answer to the request of this number.
    Renews {
        number: u8,
        since: Millis,
    },
    /// The server has said that the lock is not ours.
    HasLost,
    Released,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    now: Millis,
    server: Server,
    lock: Lock,
    wire: Wire,
    sent: u8,
    keeper: Keeper,
    dlock_lives: bool,
    guardian_lives: bool,
    /// The last instant at which the lock may be claimed; `None` before the start.
    end: Option<Millis>,
    command_lives: bool,
    /// What the guardian says: no process is left.
    reported_dead: bool,
    /// The command has been told to go, and takes its time.
    told_to_go: bool,
}

/// A mistake that the search must find. tests/mutants has each as a patch of the code itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    /// Whatever a renewal's answer is, it counts as granted.
    RenewalIgnored,
    /// The lease is counted from the answer, not from before the request.
    DeadlineFromReply,
    /// The tree is said to be dead without having been killed.
    NoSigkill,
    /// The lock is released when the command is told to go, not when it has gone.
    ReleaseBeforeDead,
    /// The guardian does not act on its deadlines.
    NoGuardian,
}

/// What is explored: by default dlock as it is, and a server that keeps its word.
#[derive(Clone, Copy, Default)]
pub struct Lease {
    mutant: Option<Mutant>,
    /// By how many per cent the server's clock is faster than ours.
    drift: i32,
    /// A mutant of the deadlines alone.
    no_allowance_for_drift: bool,
    /// Whether the server comes back without its data.
    forgets: bool,
}

impl Lease {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// The end of a lease that counts from `since`, and how long before it everything is killed.
    fn end(&self, since: Millis) -> (Millis, Millis) {
        let (origin, ttl) = (Instant::from_nanos(0), Duration::from_millis(TTL.into()));
        let timing = LeaseTiming { ttl, kill_after: ttl / 6 };
        let deadlines = timing.deadlines(Grant { from: origin, ttl, slack: Duration::ZERO });
        let millis = |span: Duration| Millis::try_from(span.as_millis()).expect("less than a minute");
        let drift = if self.no_allowance_for_drift { TTL / 100 } else { 0 };
        (since + millis(deadlines.end.since(origin)) + drift, millis(deadlines.end.since(deadlines.kill_at)))
    }

    /// When a lease that the server grants now is over.
    fn lease_from(&self, now: Millis) -> Lock {
        let lasts = i32::from(TTL) * 100 / (100 + self.drift);
        Lock::Ours { until: now + Millis::try_from(lasts).expect("about a ttl") }
    }

    /// Whether the timer has fired.
    fn is_due(&self, state: &State) -> bool {
        state.end.is_some_and(|end| state.now >= end - self.end(0).1)
    }

    /// Whether somebody ends the command: the guardian at its timer or when the link closes, and dlock in its place
    /// when it is gone.
    fn must_kill(&self, state: &State) -> bool {
        self.is_due(state) || !state.dlock_lives || !state.guardian_lives || state.keeper == Keeper::HasLost
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
        if self.must_kill(state) || state.told_to_go {
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
        let (number, since) = (state.sent, state.now);
        let send = |message: Message, keeper: Keeper| State {
            keeper,
            sent: number + 1,
            wire: state.wire.with(message),
            ..state.clone()
        };
        match state.keeper {
            Keeper::Idle => add("asks for the lock", send(Message::Acquire, Keeper::Asks { since })),
            Keeper::Holds if number < REQUESTS => {
                add("asks to renew", send(Message::Renew(number), Keeper::Renews { number, since }));
            }
            Keeper::Renews { .. } => {
                let mut next = State { keeper: Keeper::Holds, ..state.clone() };
                if self.is(Mutant::RenewalIgnored) {
                    next.end = Some(self.end(state.now).0);
                }
                add("gives up on an answer", next);
            }
            _ => {}
        }
        let done = state.reported_dead || (self.is(Mutant::ReleaseBeforeDead) && state.told_to_go);
        if done && state.end.is_some() && state.keeper != Keeper::Released {
            let wire = state.wire.with(Message::Release);
            add("releases", State { keeper: Keeper::Released, wire, ..state.clone() });
        }
    }

    fn server_steps(&self, state: &State, add: &mut impl FnMut(&str, State)) {
        match state.server {
            Server::NeverFailed => add("the server crashes", State { server: Server::Down, ..state.clone() }),
            Server::Down => {
                let back = State { server: Server::Back, ..state.clone() };
                let ours = matches!(state.lock, Lock::Ours { .. });
                if ours && self.forgets {
                    add("the server is back, empty", State { lock: Lock::Free, ..back.clone() });
                } else if ours {
                    // As etcd and ZooKeeper do; the others keep what was written.
                    add(
                        "the server is back, and counts anew",
                        State { lock: self.lease_from(state.now), ..back.clone() },
                    );
                }
                add("the server is back", back);
            }
            Server::Back => {}
        }
        if state.server != Server::Down && state.lock == Lock::Free && state.keeper != Keeper::Idle {
            add("somebody else takes the lock", State { lock: Lock::Theirs, ..state.clone() });
        }
    }

    /// A message arrives.
    fn deliver(&self, message: Message, state: &State) -> State {
        let mut next = State { wire: state.wire.without(message), ..state.clone() };
        let ours = matches!(state.lock, Lock::Ours { .. });
        let mut answers = |answer: Message| next.wire = next.wire.with(answer);
        match message {
            Message::Acquire if state.lock == Lock::Free => {
                answers(Message::Granted);
                next.lock = self.lease_from(state.now);
            }
            Message::Renew(number) if ours => {
                answers(Message::Held(number));
                next.lock = self.lease_from(state.now);
            }
            Message::Renew(number) => answers(Message::Lost(number)),
            Message::Release if ours => next.lock = Lock::Free,
            Message::Acquire | Message::Release => {}
            Message::Granted | Message::Held(_) | Message::Lost(_) => self.answer(message, state, &mut next),
        }
        next
    }

    fn answer(&self, message: Message, state: &State, next: &mut State) {
        if !state.dlock_lives {
            return;
        }
        let counted_from = |since: Millis| if self.is(Mutant::DeadlineFromReply) { state.now } else { since };
        match (state.keeper, message) {
            (Keeper::Asks { since }, Message::Granted) => {
                next.keeper = Keeper::Holds;
                next.end = Some(self.end(counted_from(since)).0);
                // The guardian starts nothing that would be over already.
                next.command_lives = state.guardian_lives && !self.is_due(next);
                next.reported_dead = !next.command_lives;
            }
            (Keeper::Renews { number, since }, Message::Held(answered)) if number == answered => {
                next.keeper = Keeper::Holds;
                next.end = state.end.max(Some(self.end(counted_from(since)).0));
            }
            (Keeper::Renews { number, .. }, Message::Lost(answered)) if number == answered => {
                next.keeper = Keeper::HasLost;
                next.told_to_go = true;
            }
            // Nobody waits for it any more.
            _ => {}
        }
    }

    /// The next instant at which something may be different, unless the command has to be dead before it.
    fn time_passes(&self, state: &State) -> Option<State> {
        let until = match state.lock {
            Lock::Ours { until } => Some(until),
            Lock::Free | Lock::Theirs => None,
        };
        let step = state.now - state.now % STEP + STEP;
        let ends = [until, state.end].into_iter().flatten().filter(|&end| end > state.now);
        let now = ends.min().map_or(step, |end| end.min(step));
        let enforced = state.command_lives && !self.is(Mutant::NoGuardian) && !state.reported_dead;
        if now > HORIZON || (enforced && state.end.is_some_and(|end| now >= end)) {
            return None;
        }
        let lock = if until.is_some_and(|until| now >= until) { Lock::Free } else { state.lock };
        Some(State { now, lock, ..state.clone() })
    }
}

impl Model for Lease {
    type State = State;

    fn begin(&self) -> State {
        State {
            now: 0,
            server: Server::NeverFailed,
            lock: Lock::Free,
            wire: Wire::EMPTY,
            sent: 0,
            keeper: Keeper::Idle,
            dlock_lives: true,
            guardian_lives: true,
            end: None,
            command_lives: false,
            reported_dead: false,
            told_to_go: false,
        }
    }

    fn steps(&self, state: &State) -> Vec<(String, State)> {
        let mut steps = Vec::new();
        if state.end.is_some() && !state.command_lives {
            // There was a command, and there will be no other: nothing can go wrong any more.
            return steps;
        }
        let mut add = |name: &str, next: State| steps.push((name.to_owned(), next));
        if let Some(next) = self.time_passes(state) {
            add("time passes", next);
        }
        // Both at once is what no process can cover.
        if state.dlock_lives && state.guardian_lives {
            add("dlock dies", State { dlock_lives: false, ..state.clone() });
            add("the guardian dies", State { guardian_lives: false, ..state.clone() });
        }
        for message in state.wire.all().filter(|message| state.server != Server::Down || !message.is_request()) {
            // One that is lost is one that does not arrive.
            add("a message arrives", self.deliver(message, state));
        }
        self.server_steps(state, &mut add);
        self.command_steps(state, &mut add);
        self.keeper_steps(state, &mut add);
        steps
    }

    /// The promise.
    fn is_forbidden(&self, state: &State) -> bool {
        state.command_lives && state.lock == Lock::Theirs
    }
}
