//! Asking for the lock: a majority in the first phase, a token on a majority in the second, or giving
//! everything back and waiting.
//!
//! Every node keeps a queue of its own, and only its first may take the node. It alone watches the lock there, and a
//! release wakes it alone; the others just keep their places. All nodes have the same order, by the waiters' own clocks,
//! as long as they know the same waiters, which they need not. The queues are for speed and fairness, and nothing else
//! depends on them: a majority decides who holds the lock as if there were no queue, a first who does not come is passed
//! over, and where nodes have different firsts each of them asks again and ignores the queue.

use std::time::{Duration, SystemTime};

use anyhow::Result;

use super::nodes::{Answer, Node, Reply, count, no_majority};
use super::{OURS, Redlock, beside, flag, grant_from, millis, script};
use crate::backend::redis::Script;
use crate::backend::redis::status::contender;
use crate::backend::{Ask, Attempt, Busy};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Mode, Token};

pub static TAKE: Script = script!("take.lua");
pub static RAISE: Script = script!("raise.lua");

/// How often the first waiter asks although nothing seems to change; `common.lua` lets others take longer.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// Nodes that cannot notify are asked so many times as often.
const WITHOUT_PUSHES: u32 = 8;
/// Contenders that split the nodes between them part ways within this time.
const JITTER: Duration = Duration::from_millis(60);
/// A little more than the time after which `common.lua` passes over a first who does not come.
const PASSED_OVER: Duration = Duration::from_millis(510);

/// What is done about the queue when nodes are given back.
#[derive(Clone, Copy, PartialEq)]
pub enum Then {
    Wait,
    Leave,
}

impl Redlock {
    /// When we began to wait: the date, which is the same for all nodes, and for how long, should they have another date.
    pub(super) fn began(&mut self) -> [String; 2] {
        let (at, date) = self.began.get_or_insert_with(|| (clock::now(), clock::wall()));
        let since = date.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        [since.as_micros().to_string(), millis(at.elapsed())]
    }

    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        if ask.mode != Mode::Exclusive {
            return Err(Fault::Usage.because(
                "Redlock knows only exclusive locks: nodes that each count holders for themselves would not agree \
                 on who they are. Use redis://, etcd://, zookeeper:// or postgres:// for --shared and --slots",
            ));
        }
        let keys = self.keys(&ask.name);
        self.who = ask.who.to_json();
        let from = clock::now();
        let once = ask.once.clone().unwrap_or_default();
        let [since, waited] = self.began();
        let ignores_queue = flag(std::mem::take(&mut self.ignores_queue)).to_owned();
        let args = [millis(ask.ttl), once, flag(ask.queue).to_owned(), since, waited, ignores_queue, self.who.clone()];
        let for_node = |node: &Node| {
            let (holder, details) = node.seen.clone().unwrap_or_default();
            args.iter().cloned().chain([holder, details]).collect()
        };
        let replies = self.nodes.ask_by_number(&TAKE, &keys, &ask.who.owner, for_node).await;
        let (ours, quorum) = (count(&replies, OURS), self.nodes.quorum());
        if count(&replies, |answer| matches!(answer, Answer::Ran)) > 0 {
            self.give_back(ask, &keys, Then::Leave).await;
            return Ok(Attempt::AlreadyRan);
        }
        if let Some(token) = token(&replies).filter(|_| ours >= quorum) {
            let grant = grant_from(from, ask.ttl);
            let agreed = self.raise(ask, &keys, token).await;
            if agreed && grant.from.elapsed() < ask.ttl.mul_f64(0.99) - grant.slack {
                self.watch_as_holder(&ask.name, &ask.who.owner, &replies);
                self.began = None;
                return Ok(Attempt::Granted(ask.lease(token, None, grant)));
            }
        }
        let answered = replies.iter().filter(|reply| reply.is_ok()).count() >= quorum;
        // A request of ours may still arrive at a node, or may have done so without our hearing of it.
        if ours > 0 || self.nodes.all.iter().any(|node| node.unanswered.is_some()) {
            // Whoever cannot reach a majority must not be in the way of those who can.
            let and = if ask.queue && answered { Then::Wait } else { Then::Leave };
            self.give_back(ask, &keys, and).await;
        }
        if !answered {
            return Err(no_majority(replies));
        }
        Ok(Attempt::Busy(self.busy(ask, &replies)?))
    }

    /// Raises the counters and says whether that made the lock ours.
    async fn raise(&mut self, ask: &Ask, keys: &[String], token: Token) -> bool {
        let args = [ask.who.owner.to_string(), token.to_string(), millis(ask.ttl), ask.who.to_json()];
        let replies = self.nodes.ask(&RAISE, keys, |_| args.to_vec()).await;
        count(&replies, OURS) >= self.nodes.quorum()
    }

    /// Who is in the way, how many are before us, what to watch, and when to ask again.
    fn busy(&mut self, ask: &Ask, replies: &[Reply]) -> Result<Busy> {
        let ours = count(replies, OURS);
        let (quorum, lock) = (self.nodes.quorum(), format!("{}{}", self.prefix, ask.name));
        let turn = beside(&self.prefix, &ask.name, &format!("turn:{}", ask.who.owner));
        let (mut holders, mut ends, mut ranks) = (Vec::new(), Vec::new(), vec![0; ours]);
        let mut every = Duration::MAX;
        for (node, reply) in self.nodes.all.iter_mut().zip(replies) {
            node.watch.clear();
            let Ok(answer) = reply else { continue };
            node.seen = None;
            let Answer::Busy(theirs) = answer else { continue };
            node.seen = theirs.owner.clone().map(|owner| (owner, theirs.details.clone()));
            node.watch.push((turn.clone(), None));
            if theirs.ahead == 0 {
                node.watch.push((lock.clone(), theirs.owner.clone()));
            }
            if theirs.owner.is_some() {
                ends.push(theirs.left.unwrap_or(ASK_EVERY));
            }
            ranks.push(theirs.ahead);
            every = every.min(theirs.ask_again.unwrap_or(ASK_EVERY));
            let holder = theirs.owner.clone().map(|owner| contender(owner, &theirs.details, None));
            holders.extend(holder);
        }
        if self.nodes.all.iter().any(|node| node.server.cannot_push) {
            every /= WITHOUT_PUSHES;
        }
        ends.sort_unstable();
        let others = ranks.len() - ours;
        ranks.sort_unstable();
        // On a majority there are no more than so many before us.
        let ahead = ranks.get(quorum - 1).copied().unwrap_or(0);
        // How many nodes have to be let go before a majority is free.
        let held = (ends.len() + 1).saturating_sub(quorum);
        // We were first on some nodes, others were on the rest.
        self.ignores_queue = held == 0 && ours > 0;
        let again = match held.checked_sub(1) {
            Some(n) if ahead == 0 => every.min(ends[n] + Duration::from_millis(1)),
            Some(_) => every,
            None if self.ignores_queue => some_of(JITTER)?,
            None => every.min(PASSED_OVER * u32::try_from(ahead.max(1)).unwrap_or(u32::MAX)) + some_of(JITTER)?,
        };
        if self.ignores_queue {
            // They give back what they took, which is no reason to get in each other's way again.
            self.nodes.all.iter_mut().for_each(|node| node.watch.clear());
        }
        self.needed = (others + 1).saturating_sub(quorum).max(1);
        Ok(Busy {
            holder: holders.into_iter().max_by_key(|holder| holder.host.is_some()),
            ahead: Some(ahead),
            ask_again: clock::now() + again,
        })
    }
}

/// The token that a majority's answers to the first phase call for.
pub fn token(replies: &[Reply]) -> Option<Token> {
    let candidate = |reply: &Reply| match reply {
        Ok(Answer::Ours(token)) => *token,
        _ => None,
    };
    replies.iter().filter_map(candidate).max()
}

fn some_of(most: Duration) -> Result<Duration> {
    let mut random = [0u8; 1];
    getrandom::fill(&mut random)?;
    Ok(most * u32::from(random[0]) / 256)
}
