//! The queue. Every node keeps one of its own, and only its first may take it; it alone watches the lock there,
//! and a release wakes it alone. The others just keep their places. All nodes have the same order, by the waiters'
//! own clocks, as long as they know the same waiters, which they need not.
//!
//! That is for speed and fairness. Nothing hangs on it: who holds the lock is decided by a majority as if there
//! were no queue, a first who does not come is passed over, and where nodes have different firsts each of them
//! asks again without heeding the queue.

use std::time::{Duration, SystemTime};

use anyhow::Result;

use super::answer::Answer;
use super::nodes::{Reply, count};
use super::{OURS, Redlock, TURNS, millis};
use crate::backend::Busy;
use crate::backend::redis::status::contender;
use crate::backend::redis::watch::Watch;
use crate::clock::{self, Instant};
use crate::lock::OwnerId;

/// So often a first waiter asks although nothing seems to change; `common.lua` lets others take longer.
const BEAT: Duration = Duration::from_secs(2);
/// Nodes that cannot notify are asked so many times as often.
const BLIND: u32 = 8;
/// Contenders that split the nodes between them part ways within this time.
const SCATTER: Duration = Duration::from_millis(60);
/// A little more than the time after which `common.lua` passes over a first who does not come.
const PASSED_OVER: Duration = Duration::from_millis(510);
/// A release reaches the nodes at different times: so long after a majority the others are waited for.
const SETTLE: Duration = Duration::from_millis(3);

/// When we began to wait.
#[derive(Clone, Copy)]
pub struct Began {
    at: Instant,
    wall: SystemTime,
}

/// What is done about the queue when nodes are given back.
#[derive(Clone, Copy, PartialEq)]
pub enum Then {
    Wait,
    Leave,
}

impl Began {
    pub fn now() -> Began {
        Began { at: clock::now(), wall: clock::wall() }
    }

    /// The date, which is the same for all nodes, and for how long, should they have another date.
    pub fn told(&self) -> [String; 2] {
        let date = self.wall.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        [date.as_micros().to_string(), millis(self.at.elapsed())]
    }
}

impl Redlock {
    /// Who is in the way, how many are before us, what to watch, and when to ask again.
    pub(super) fn busy(&mut self, keys: &[String], owner: &OwnerId, replies: &[Reply]) -> Result<Busy> {
        let ours = count(replies, OURS);
        let (quorum, turn) = (self.nodes.quorum(), format!("{}{owner}", keys[TURNS]));
        let (mut holders, mut ends, mut ranks) = (Vec::new(), Vec::new(), vec![0; ours]);
        let mut beat = Duration::MAX;
        for (node, reply) in self.nodes.iter_mut().zip(replies) {
            node.watch = Watch::default();
            let Ok(answer) = reply else { continue };
            node.seen = None;
            let (Answer::Theirs(theirs) | Answer::Behind(theirs)) = answer else { continue };
            node.seen = theirs.owner.clone().map(|owner| (owner, theirs.details.clone()));
            node.watch = Watch { keys: vec![turn.clone()], seen: vec![None] };
            if theirs.ahead == 0 {
                node.watch.keys.push(keys[0].clone());
                node.watch.seen.push(theirs.owner.clone());
            }
            if let Answer::Theirs(theirs) = answer {
                ends.push(theirs.left.unwrap_or(BEAT));
            }
            ranks.push(theirs.ahead);
            beat = beat.min(theirs.beat.unwrap_or(BEAT));
            let holder = theirs.owner.clone().map(|owner| contender(owner, &theirs.details, None).into_holder());
            holders.extend(holder);
        }
        if self.nodes.deaf() {
            beat /= BLIND;
        }
        ends.sort_unstable();
        let others = ranks.len() - ours;
        ranks.sort_unstable();
        // On a majority there are no more than so many before us.
        let ahead = ranks.get(quorum - 1).copied().unwrap_or(0);
        // So many nodes have to be let go before a majority is free.
        let held = (ends.len() + 1).saturating_sub(quorum);
        // We were first on some nodes, others were on the rest.
        self.insists = held == 0 && ours > 0;
        let again = match held.checked_sub(1) {
            Some(n) if ahead == 0 => beat.min(ends[n] + Duration::from_millis(1)),
            Some(_) => beat,
            None if self.insists => some_of(SCATTER)?,
            None => beat.min(PASSED_OVER * u32::try_from(ahead.max(1)).unwrap_or(u32::MAX)) + some_of(SCATTER)?,
        };
        if self.insists {
            // They give back what they took, which is no reason to get in each other's way again.
            self.nodes.iter_mut().for_each(|node| node.watch = Watch::default());
        }
        (self.needed, self.settle) = ((others + 1).saturating_sub(quorum).max(1), SETTLE);
        Ok(Busy {
            holder: holders.into_iter().max_by_key(|holder| holder.host.is_some()),
            ahead: Some(ahead),
            ask_again: clock::now() + again,
        })
    }
}

fn some_of(most: Duration) -> Result<Duration> {
    let mut random = [0u8; 1];
    getrandom::fill(&mut random)?;
    Ok(most * u32::from(random[0]) / 256)
}
