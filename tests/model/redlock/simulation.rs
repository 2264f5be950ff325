//! Many random schedules of the token scheme: contenders whose messages to the nodes interleave in any
//! order, get lost on the way there or back or arrive long after their senders have gone on, and nodes that are
//! out of reach in turn. Checks that tokens grow with every grant and that no two grants overlap; and that the
//! check can fail: on the scheme that suggests itself, the greatest of the nodes' own counters, and on nodes that
//! do not tell late requests from newer ones.

use std::collections::HashMap;

use dlock::backend::redlock::OURS;
use dlock::backend::redlock::acquire::token;
use dlock::backend::redlock::nodes::{Answer, Reply, count};
use dlock::lock::Token;

const NODES: usize = 3;
const TTL: u64 = 60;

#[derive(Clone, Copy, PartialEq)]
enum Scheme {
    TwoPhases,
    GreatestOfCounters,
    LateGivesBackToo,
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
    /// By which request of whom the lock was last taken, and up to which each owner has given up.
    taken: (usize, u64),
    late: HashMap<usize, u64>,
}

#[derive(Clone, Copy)]
struct Request {
    owner: usize,
    step: Step,
    n: u64,
    given_up: u64,
}

impl Node {
    fn holder(&self, now: u64) -> Option<usize> {
        self.lock.filter(|&(_, ends)| now < ends).map(|(owner, _)| owner)
    }

    fn gets(&mut self, request: Request, now: u64, scheme: Scheme) -> Reply {
        match request.step {
            Step::Take => self.take(request, now, scheme),
            Step::Raise(to) => self.raise(request.owner, to, now),
            Step::GiveBack | Step::Hold => self.give_back(request, scheme),
        }
    }

    fn take(&mut self, Request { owner, n, .. }: Request, now: u64, scheme: Scheme) -> Reply {
        let given_up = self.late.get(&owner).is_some_and(|&last| n <= last);
        let is_old = self.taken.0 == owner && self.taken.1 > n;
        if given_up || is_old || self.holder(now).is_some_and(|holder| holder != owner) {
            return Ok(Answer::Gone(None));
        }
        self.lock = Some((owner, now + TTL));
        self.taken = (owner, n);
        let candidate = self.counter + 1;
        if scheme == Scheme::GreatestOfCounters {
            self.counter = candidate;
        }
        Ok(Answer::Ours(Some(Token(candidate))))
    }

    fn raise(&mut self, owner: usize, to: u64, now: u64) -> Reply {
        if self.holder(now) != Some(owner) || self.counter > to {
            return Ok(Answer::Gone(None));
        }
        self.counter = to;
        Ok(Answer::Ours(None))
    }

    fn give_back(&mut self, Request { owner, n, given_up, .. }: Request, scheme: Scheme) -> Reply {
        let last = self.late.entry(owner).or_default();
        *last = given_up.max(*last);
        let is_old = self.taken.0 == owner && self.taken.1 > n;
        if !is_old || scheme == Scheme::LateGivesBackToo {
            self.lock = self.lock.filter(|&(holder, _)| holder != owner);
        }
        Ok(Answer::Gone(None))
    }
}

#[derive(Clone, Copy)]
enum Step {
    Take,
    Raise(u64),
    Hold,
    GiveBack,
}

/// One attempt after the other, until it leaves or was granted; then another one comes in its place.
struct Contender {
    owner: usize,
    started: u64,
    step: Step,
    /// Nodes still to be asked in this step, and what the others said.
    left: Vec<usize>,
    replies: Vec<Reply>,
    /// How many requests each node was sent, and the last of them that got no answer.
    sent: [u64; NODES],
    unheard: [u64; NODES],
}

impl Contender {
    fn new(owner: usize, now: u64) -> Contender {
        let (sent, unheard) = ([0; NODES], [0; NODES]);
        let (left, replies) = ((0..NODES).collect(), Vec::new());
        Contender { owner, started: now, step: Step::Take, left, replies, sent, unheard }
    }

    fn begin(&mut self, step: Step) {
        let (sent, unheard) = (self.sent, self.unheard);
        *self = Contender { step, sent, unheard, ..Contender::new(self.owner, self.started) };
    }

    /// The next request to a node, which gets no answer as long as none has come.
    fn request(&mut self, n: usize) -> Request {
        self.sent[n] += 1;
        let given_up = std::mem::replace(&mut self.unheard[n], self.sent[n]);
        Request { owner: self.owner, step: self.step, n: self.sent[n], given_up }
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
    /// When a request arrives late, where, and which.
    late: Vec<(u64, usize, Request)>,
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

    /// To a node that is left, in any order; it may get lost on the way there or be late, or the answer may get
    /// lost on the way back.
    fn send(&mut self, contender: &mut Contender) {
        let n = contender.left.swap_remove(self.random.below(contender.left.len()));
        let request = contender.request(n);
        if self.random.one_in(8) {
            return self.late.push((self.now + self.random.below(TTL as usize) as u64, n, request));
        }
        if n == self.down || self.random.one_in(30) {
            return;
        }
        let reply = self.nodes[n].gets(request, self.now, self.scheme);
        if !self.random.one_in(30) {
            contender.replies.push(reply);
            contender.unheard[n] = request.given_up;
        }
    }

    fn deliver_late(&mut self) {
        let now = self.now;
        for (_, n, request) in self.late.extract_if(.., |&mut (due, ..)| due <= now) {
            let _ = self.nodes[n].gets(request, now, self.scheme);
        }
    }

    fn decide(&mut self, contender: &mut Contender) {
        let majority = count(&contender.replies, OURS) > NODES / 2;
        match (contender.step, token(&contender.replies)) {
            (Step::GiveBack, _)
                if !self.grants.iter().any(|grant| grant.owner == contender.owner) && !self.random.one_in(3) =>
            {
                contender.started = self.now;
                contender.begin(Step::Take);
            }
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
        let ours = self.grants.iter_mut().find(|grant| grant.owner == contender.owner).expect("it was granted");
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
    let mut world = World { scheme, random, now: 0, nodes, down: 0, late: Vec::new(), owners, grants: Vec::new() };
    for _ in 0..600 {
        world.now += world.random.below(3) as u64;
        if world.random.one_in(20) {
            world.down = world.random.below(NODES);
        }
        world.deliver_late();
        let chosen = world.random.below(contenders.len());
        world.go_on(&mut contenders[chosen]);
    }
    world.grants
}

fn grows(grants: &[Grant]) -> bool {
    grants.windows(2).all(|pair| pair[0].token < pair[1].token)
}

fn excludes(grants: &[Grant]) -> bool {
    grants.windows(2).all(|pair| pair[0].until <= pair[1].from)
}

#[test]
fn tokens_grow_whichever_majority_answers() {
    let mut granted = 0;
    for seed in 1..4000 {
        let grants = schedule(seed, Scheme::TwoPhases);
        granted += grants.len();
        assert!(grows(&grants), "seed {seed}");
        assert!(excludes(&grants), "seed {seed}: two at once");
    }
    assert!(granted > 10_000, "only {granted} grants: the schedules show nothing");
}

#[test]
fn the_greatest_of_the_counters_would_go_backwards() {
    assert!((1..4000).any(|seed| !grows(&schedule(seed, Scheme::GreatestOfCounters))));
}

#[test]
fn a_late_request_that_frees_what_was_taken_again_would_let_two_in_at_once() {
    assert!((1..4000).any(|seed| !excludes(&schedule(seed, Scheme::LateGivesBackToo))));
}
