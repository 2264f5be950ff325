//! Many random schedules of the token scheme: contenders whose messages to the nodes interleave in any
//! order, get lost on the way there or back, and nodes that are out of reach in turn. Checks that tokens
//! grow with every grant and that no two grants overlap; and that the check can fail, on the scheme that
//! suggests itself, the greatest of the nodes' own counters.

use super::Value;
use super::acquire::token;
use super::nodes::{Reply, count};

const NODES: usize = 3;
const TTL: u64 = 60;

#[derive(Clone, Copy, PartialEq)]
enum Scheme {
    TwoPhases,
    GreatestOfCounters,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// A node as take.lua, raise.lua and give_back.lua see it, without a clock in its counter.
#[derive(Default)]
struct Node {
    lock: Option<(usize, u64)>,
    counter: u64,
}

impl Node {
    fn holder(&self, now: u64) -> Option<usize> {
        self.lock.filter(|&(_, ends)| now < ends).map(|(owner, _)| owner)
    }

    fn take(&mut self, owner: usize, now: u64, scheme: Scheme) -> Reply {
        if self.holder(now).is_some_and(|holder| holder != owner) {
            return Ok(("theirs".into(), Vec::new()));
        }
        self.lock = Some((owner, now + TTL));
        let candidate = self.counter + 1;
        if scheme == Scheme::GreatestOfCounters {
            self.counter = candidate;
        }
        Ok(("ours".into(), vec![Value::Text(candidate.to_string().into())]))
    }

    fn raise(&mut self, owner: usize, to: u64, now: u64) -> Reply {
        if self.holder(now) != Some(owner) {
            return Ok(("gone".into(), Vec::new()));
        }
        self.counter = self.counter.max(to);
        Ok(("ours".into(), Vec::new()))
    }

    fn give_back(&mut self, owner: usize) -> Reply {
        self.lock = self.lock.filter(|&(holder, _)| holder != owner);
        Ok(("done".into(), Vec::new()))
    }
}

#[derive(Clone, Copy)]
enum Step {
    Take,
    Raise(u64),
    Hold,
    GiveBack,
}

/// One attempt after the other, each under an owner of its own.
struct Contender {
    owner: usize,
    started: u64,
    step: Step,
    /// Nodes still to be asked in this step, and what the others said.
    left: Vec<usize>,
    replies: Vec<Reply>,
}

impl Contender {
    fn new(owner: usize, now: u64) -> Contender {
        Contender { owner, started: now, step: Step::Take, left: (0..NODES).collect(), replies: Vec::new() }
    }

    fn begin(&mut self, step: Step) {
        *self = Contender { step, ..Contender::new(self.owner, self.started) };
    }
}

struct Grant {
    owner: usize,
    token: u64,
    from: u64,
    until: u64,
}

struct World {
    scheme: Scheme,
    random: Random,
    now: u64,
    nodes: [Node; NODES],
    /// The node that is out of reach.
    down: usize,
    owners: usize,
    /// In the order in which they were granted.
    grants: Vec<Grant>,
}

impl World {
    /// One message or one decision of one contender.
    fn go_on(&mut self, contender: &mut Contender) {
        match contender.step {
            Step::Hold => self.hold(contender),
            _ if !contender.left.is_empty() => self.send(contender),
            _ => self.decide(contender),
        }
    }

    /// To a node that is left, in any order; it may get lost on the way there, or the answer on the way back.
    fn send(&mut self, contender: &mut Contender) {
        let n = contender.left.swap_remove(self.random.below(contender.left.len()));
        if n == self.down || self.random.one_in(30) {
            return;
        }
        let node = &mut self.nodes[n];
        let reply = match contender.step {
            Step::Take => node.take(contender.owner, self.now, self.scheme),
            Step::Raise(to) => node.raise(contender.owner, to, self.now),
            Step::GiveBack | Step::Hold => node.give_back(contender.owner),
        };
        if !self.random.one_in(30) {
            contender.replies.push(reply);
        }
    }

    fn decide(&mut self, contender: &mut Contender) {
        let majority = count(&contender.replies, "ours") > NODES / 2;
        match (contender.step, token(&contender.replies)) {
            (Step::GiveBack, _) => {
                *contender = Contender::new(self.owners, self.now);
                self.owners += 1;
            }
            (Step::Take, Some(token)) if majority && self.scheme == Scheme::TwoPhases => {
                contender.begin(Step::Raise(token.0));
            }
            (Step::Take, Some(token)) if majority => self.grant(contender, token.0),
            (Step::Raise(token), _) if majority => self.grant(contender, token),
            _ => contender.begin(Step::GiveBack),
        }
    }

    fn grant(&mut self, contender: &mut Contender, token: u64) {
        let until = contender.started + TTL;
        if self.now >= until {
            return contender.begin(Step::GiveBack);
        }
        self.grants.push(Grant { owner: contender.owner, token, from: self.now, until });
        contender.step = Step::Hold;
    }

    /// Ends at some time; or crashes, and then its lease has to run out.
    fn hold(&mut self, contender: &mut Contender) {
        let ours = self.grants.iter_mut().find(|grant| grant.owner == contender.owner).unwrap();
        if self.now < ours.until && !self.random.one_in(8) {
            return;
        }
        ours.until = ours.until.min(self.now);
        contender.begin(Step::GiveBack);
        if self.random.one_in(4) {
            contender.left.clear();
        }
    }
}

fn schedule(seed: u64, scheme: Scheme) -> Vec<Grant> {
    let random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut contenders: Vec<Contender> = (0..3).map(|owner| Contender::new(owner, 0)).collect();
    let (owners, nodes) = (contenders.len(), Default::default());
    let mut world = World { scheme, random, now: 0, nodes, down: 0, owners, grants: Vec::new() };
    for _ in 0..600 {
        world.now += world.random.below(3) as u64;
        if world.random.one_in(20) {
            world.down = world.random.below(NODES);
        }
        let chosen = world.random.below(contenders.len());
        world.go_on(&mut contenders[chosen]);
    }
    world.grants
}

fn grows(grants: &[Grant]) -> bool {
    grants.windows(2).all(|pair| pair[0].token < pair[1].token)
}

#[test]
fn tokens_grow_whichever_majority_answers() {
    let mut granted = 0;
    for seed in 1..4000 {
        let grants = schedule(seed, Scheme::TwoPhases);
        granted += grants.len();
        assert!(grows(&grants), "seed {seed}");
        assert!(grants.windows(2).all(|pair| pair[0].until <= pair[1].from), "seed {seed}: two at once");
    }
    assert!(granted > 10_000, "only {granted} grants: the schedules show nothing");
}

#[test]
fn the_greatest_of_the_counters_would_go_backwards() {
    assert!((1..4000).any(|seed| !grows(&schedule(seed, Scheme::GreatestOfCounters))));
}
