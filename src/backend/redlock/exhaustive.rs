//! The token scheme in every order of its messages, for two contenders at a time and few grants: what
//! `simulation` does at random for many. Time is only what follows from it: an attempt or a grant may be over at
//! any moment, and from then on each node may forget it, each at a moment of its own.

use super::Value;
use super::acquire::token;
use super::nodes::{Reply, count};
use crate::model::{Model, explore};
use crate::mutant::Mutant;

const NODES: usize = 3;
const GRANTS: u8 = 2;
const ATTEMPTS: u8 = 3;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
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

#[derive(Clone, Default, PartialEq, Eq, Hash)]
struct Node {
    holder: Option<u8>,
    counter: u8,
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
            let node = &self.nodes[n];
            (node.holder, node.counter, a.left[n], a.ours[n], b.left[n], b.ours[n])
        });
        all.sort_unstable();
        for (n, (holder, counter, a_left, a_ours, b_left, b_ours)) in all.into_iter().enumerate() {
            self.nodes[n] = Node { holder, counter };
            (self.contenders[0].left[n], self.contenders[0].ours[n]) = (a_left, a_ours);
            (self.contenders[1].left[n], self.contenders[1].ours[n]) = (b_left, b_ours);
        }
        self
    }
}

struct Tokens {
    mutant: Option<Mutant>,
}

impl Tokens {
    /// A request reaches a node that was not asked yet, and the answer reaches its contender or is lost.
    fn ask(&self, state: &State, who: usize, n: usize) -> Vec<State> {
        let mut next = state.clone();
        let (node, contender) = (&mut next.nodes[n], &mut next.contenders[who]);
        contender.left[n] = false;
        let mut answers = false;
        match contender.phase {
            Phase::Takes if node.holder.is_none_or(|holder| holder == contender.owner) => {
                node.holder = Some(contender.owner);
                contender.ours[n] = Some(node.counter + 1);
                if self.mutant == Some(Mutant::NaiveRedlockToken) {
                    node.counter += 1;
                }
                answers = true;
            }
            Phase::Raises(to) if node.holder == Some(contender.owner) => {
                node.counter = node.counter.max(to);
                contender.ours[n] = Some(to);
                answers = true;
            }
            _ => {}
        }
        let mut unanswered = next.clone();
        unanswered.contenders[who].ours[n] = None;
        if answers { vec![next, unanswered] } else { vec![next] }
    }

    /// Whoever has heard enough goes on, by the functions that the backend itself decides with.
    fn decide(&self, state: &State, who: usize) -> Option<State> {
        let contender = &state.contenders[who];
        let reply = |candidate: u8| -> Reply { Ok(("ours".into(), vec![Value::Text(candidate.to_string().into())])) };
        let replies: Vec<Reply> = contender.ours.iter().flatten().map(|&candidate| reply(candidate)).collect();
        let token = u8::try_from(token(&replies).filter(|_| count(&replies, "ours") > NODES / 2)?.0).ok()?;
        let mut next = state.clone();
        match contender.phase {
            Phase::Takes if self.mutant != Some(Mutant::NaiveRedlockToken) => {
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

    /// Its time is over: it gave up, crashed, ended, or its lease did. Another one comes in its place.
    fn ends(&self, state: &State, who: usize) -> State {
        let mut next = state.clone();
        next.contenders[who].phase = Phase::Over;
        if state.attempts < ATTEMPTS {
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
        }
        steps.into_iter().map(|(name, next)| (name, next.sorted())).collect()
    }

    fn is_forbidden(&self, state: &State) -> bool {
        state.went_back || state.contenders.iter().all(|contender| contender.phase == Phase::Holds)
    }
}

#[test]
fn two_phases_never_go_backwards_nor_grant_twice() {
    let states = explore(&Tokens { mutant: None }).unwrap_or_else(|way| panic!("{way:#?}"));
    assert!(states > 10_000, "only {states} states: the model shows nothing");
}

#[test]
fn a_token_without_the_second_phase_is_found() {
    let way = explore(&Tokens { mutant: Some(Mutant::NaiveRedlockToken) });
    assert!(way.is_err());
}
