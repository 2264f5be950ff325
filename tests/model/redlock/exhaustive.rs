//! The token scheme in every order of its messages, for two contenders at a time and few grants: what
//! `simulation` does at random for many. Time is only what follows from it: an attempt or a grant may be over at
//! any moment, and from then on each node may forget it, each at a moment of its own. A request that has not arrived
//! when its sender goes on may do so at any time after; tests/it/verbs/redlock/orders.rs does that to the scripts.

use dlock::backend::redlock::OURS;
use dlock::backend::redlock::acquire::token;
use dlock::backend::redlock::nodes::{Answer, Reply, count};
use dlock::lock::Token;

use crate::{Model, explore};

const NODES: usize = 3;
const GRANTS: u8 = 2;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Phase {
    Takes,
    Raises(u8),
    Holds,
    Over,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Contender {
    owner: u8,
    phase: Phase,
    /// Nodes not yet asked in this phase.
    left: [bool; NODES],
    /// What the nodes that said "ours" would give as a token.
    ours: [Option<u8>; NODES],
}

impl Contender {
    fn new(owner: u8) -> Contender {
        Contender { owner, phase: Phase::Takes, left: [true; NODES], ours: [None; NODES] }
    }

    fn enters(&self, phase: Phase) -> Contender {
        Contender { phase, ..Contender::new(self.owner) }
    }
}

#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Node {
    holder: Option<u8>,
    counter: u8,
    /// A request on its way here whose sender has gone on: the owner and what it was about.
    late: Option<(u8, Phase)>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    nodes: [Node; NODES],
    contenders: [Contender; 2],
    attempts: u8,
    grants: u8,
    newest: u8,
    went_back: bool,
}

impl State {
    /// Nodes have no names: states that differ only in which node is which are one.
    fn sorted(mut self) -> State {
        let [a, b] = &self.contenders;
        let mut all = std::array::from_fn::<_, NODES, _>(|n| {
            (std::mem::take(&mut self.nodes[n]), a.left[n], a.ours[n], b.left[n], b.ours[n])
        });
        all.sort_unstable();
        for (n, (node, a_left, a_ours, b_left, b_ours)) in all.into_iter().enumerate() {
            self.nodes[n] = node;
            (self.contenders[0].left[n], self.contenders[0].ours[n]) = (a_left, a_ours);
            (self.contenders[1].left[n], self.contenders[1].ours[n]) = (b_left, b_ours);
        }
        self
    }
}

impl Node {
    /// What the scripts do with a request: says what the token would be, if the node is or becomes the owner's.
    fn gets(&mut self, owner: u8, request: Phase, phases: Phases) -> Option<u8> {
        match request {
            Phase::Takes if self.holder.is_none_or(|holder| holder == owner) => {
                self.holder = Some(owner);
                let token = self.counter + 1;
                if phases == Phases::One {
                    self.counter = token;
                }
                Some(token)
            }
            Phase::Raises(to) if self.holder == Some(owner) && self.counter <= to => {
                self.counter = to;
                Some(to)
            }
            _ => None,
        }
    }
}

/// What it takes to be granted a token: one is a mistake, which the search must find.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phases {
    One,
    Two,
}

struct Tokens {
    phases: Phases,
    attempts: u8,
    /// Whether requests arrive late, or are lost instead. With three attempts that would be too much to explore.
    late: bool,
}

impl Tokens {
    /// A request reaches a node that was not asked yet, and the answer reaches its contender or is lost.
    fn ask(&self, state: &State, who: usize, n: usize) -> Vec<State> {
        let mut next = state.clone();
        let contender = &mut next.contenders[who];
        contender.left[n] = false;
        contender.ours[n] = next.nodes[n].gets(contender.owner, contender.phase, self.phases);
        let answers = contender.ours[n].is_some();
        let mut unanswered = next.clone();
        unanswered.contenders[who].ours[n] = None;
        if answers { vec![next, unanswered] } else { vec![next] }
    }

    /// Whoever has heard enough goes on, by the functions that the backend itself decides with.
    fn decide(&self, state: &State, who: usize) -> Option<State> {
        let contender = &state.contenders[who];
        let reply = |candidate: u8| -> Reply { Ok(Answer::Ours(Some(Token(candidate.into())))) };
        let replies: Vec<Reply> = contender.ours.iter().flatten().map(|&candidate| reply(candidate)).collect();
        let token = u8::try_from(token(&replies).filter(|_| count(&replies, OURS) > NODES / 2)?.0).ok()?;
        let mut next = self.goes_on(state, who);
        match contender.phase {
            Phase::Takes if self.phases == Phases::Two => {
                next.contenders[who] = contender.enters(Phase::Raises(token));
            }
            Phase::Takes | Phase::Raises(_) => {
                next.contenders[who] = contender.enters(Phase::Holds);
                next.grants += 1;
                next.went_back = token <= state.newest;
                next.newest = token;
            }
            _ => return None,
        }
        Some(next)
    }

    /// What has not arrived when its sender goes on is late or lost.
    fn goes_on(&self, state: &State, who: usize) -> State {
        let (mut next, contender) = (state.clone(), &state.contenders[who]);
        for n in (0..NODES).filter(|&n| self.late && contender.left[n]) {
            if matches!(contender.phase, Phase::Takes | Phase::Raises(_)) {
                next.nodes[n].late.get_or_insert((contender.owner, contender.phase));
            }
        }
        next
    }

    /// Its time is over: it gave up, crashed, ended, or its lease did. Another one comes in its place.
    fn ends(&self, state: &State, who: usize) -> State {
        let mut next = self.goes_on(state, who);
        next.contenders[who].phase = Phase::Over;
        if state.attempts < self.attempts {
            next.contenders[who] = Contender::new(state.attempts);
            next.attempts += 1;
        }
        next
    }
}

impl Model for Tokens {
    type State = State;

    fn begin(&self) -> State {
        let contenders = [Contender::new(0), Contender::new(1)];
        State { nodes: Default::default(), contenders, attempts: 2, grants: 0, newest: 0, went_back: false }
    }

    fn steps(&self, state: &State) -> Vec<(String, State)> {
        let mut steps = Vec::new();
        if state.grants == GRANTS {
            // Only a grant can break anything.
            return steps;
        }
        for (who, contender) in state.contenders.iter().enumerate() {
            let owner = contender.owner;
            if matches!(contender.phase, Phase::Takes | Phase::Raises(_)) {
                for n in (0..NODES).filter(|&n| contender.left[n]) {
                    let asked = self.ask(state, who, n).into_iter();
                    steps.extend(asked.map(|next| (format!("{owner} asks node {n}"), next)));
                }
                steps.extend(self.decide(state, who).map(|next| (format!("{owner} goes on"), next)));
            }
            if contender.phase != Phase::Over {
                steps.push((format!("{owner} is over"), self.ends(state, who)));
            }
        }
        for n in 0..NODES {
            let live = |owner: u8| state.contenders.iter().any(|one| one.owner == owner && one.phase != Phase::Over);
            if state.nodes[n].holder.is_some_and(|owner| !live(owner)) {
                let mut next = state.clone();
                next.nodes[n].holder = None;
                steps.push((format!("node {n} is free again"), next));
            }
            if let Some((owner, request)) = state.nodes[n].late {
                let mut next = state.clone();
                next.nodes[n].late = None;
                next.nodes[n].gets(owner, request, self.phases);
                steps.push((format!("{owner} arrives late at node {n}"), next));
            }
        }
        steps.into_iter().map(|(name, next)| (name, next.sorted())).collect()
    }

    fn is_forbidden(&self, state: &State) -> bool {
        state.went_back || state.contenders.iter().all(|contender| contender.phase == Phase::Holds)
    }
}

fn holds_good(model: &Tokens) {
    let states = explore(model).unwrap_or_else(|way| panic!("{way:#?}"));
    assert!(states > 10_000, "only {states} states: the model shows nothing");
}

#[test]
fn two_phases_never_go_backwards_nor_grant_twice() {
    holds_good(&Tokens { phases: Phases::Two, attempts: 3, late: false });
}

#[test]
fn nor_do_they_when_requests_arrive_late() {
    holds_good(&Tokens { phases: Phases::Two, attempts: 2, late: true });
}

#[test]
fn a_token_without_the_second_phase_is_found() {
    let way = explore(&Tokens { phases: Phases::One, attempts: 3, late: false });
    assert!(way.is_err());
}
