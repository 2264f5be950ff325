//! The one before us, if its key vanishes although it neither let go nor ran out of time: an operator
//! deleted it, or an etcd older than 3.4.31 revoked its lease for no reason. It may not have noticed yet.
//!
//! The server would give us the lock at once. We wait until the one before us must have ended its command,
//! which we can tell because we have seen how long its lease lasts. That is so for the next in the queue
//! of an exclusive holder; a newcomer has seen nothing. `force-release --now` counts as letting go.

use std::time::Duration;

use anyhow::{Result, ensure};
use etcd_client::{Txn, TxnOp};

use super::Etcd;
use super::place::RELEASED;
use super::queue::{Contender, Queue, holds, ranges};
use crate::backend::Ask;
use crate::clock::{self, Instant};
use crate::lock::{Mode, Token};

pub struct Predecessor {
    created: i64,
    token: Token,
    ttl: Duration,
    /// Its lease does not run out before this.
    lasts_until: Instant,
    /// Once its key is gone too early: when its last claim to the lock ends.
    may_live_until: Option<Instant>,
}

impl Predecessor {
    /// The only one that keeps a contender of this mode from holding the lock.
    pub fn among(ahead: &[Contender], mode: Mode) -> Option<&Contender> {
        let (holder, others) = ahead.split_first()?;
        let alone = holder.mode() == Mode::Exclusive && holds(mode, others);
        (alone && !holder.is_foreign() && !holder.is_left_behind()).then_some(holder)
    }

    /// `rest` is what its lease had left, in seconds, when it was asked for at `from` or later.
    pub fn new(holder: &Contender, from: Instant, rest: Option<i64>) -> Predecessor {
        let ttl = holder.holder().ttl.unwrap_or_default();
        let rest = rest.map_or(ttl, |rest| Duration::from_secs(u64::try_from(rest).unwrap_or(0)));
        let lasts_until = from + rest;
        Predecessor { created: holder.created, token: holder.token(), ttl, lasts_until, may_live_until: None }
    }

    /// Often enough to see the last renewal before the lease runs out.
    pub fn next_look(&self, last: Instant) -> Instant {
        last + self.ttl.max(Duration::from_secs(1)) / 3
    }

    /// Until when it may still be running its command, if it vanished before its time.
    pub fn may_live_until(&mut self, queue: &Queue) -> Option<Instant> {
        let is_there = queue.contenders.iter().any(|one| one.created == self.created);
        // Whoever let go after it has waited for it as we would.
        let released = queue.beside(RELEASED).and_then(|token| token.parse().ok());
        if is_there || released.is_some_and(|token: u64| token >= self.token.0) {
            return None;
        }
        if self.may_live_until.is_none() && !self.lasts_until.has_passed() {
            // It may have been renewed up to this moment, and claims no lock for longer than its ttl.
            self.may_live_until = Some(clock::now() + self.ttl);
        }
        self.may_live_until.filter(|until| !until.has_passed())
    }
}

/// Who is directly before us. Nobody can come between, so once it has held the lock for itself alone and let go,
/// nobody is left before us.
pub struct Neighbour {
    key: Vec<u8>,
    created: i64,
}

impl Neighbour {
    pub fn among(ahead: &[Contender], mode: Mode) -> Option<Neighbour> {
        let last = ahead.last().filter(|last| !last.is_foreign() && last.mode() == Mode::Exclusive)?;
        (mode == Mode::Exclusive).then(|| Neighbour { key: last.key.clone(), created: last.created })
    }
}

impl Etcd {
    /// The queue as far as us, if our neighbour has left it to us. A few keys tell, however long the queue is, of
    /// which the server would read all to find the little that we need. `None` says nothing.
    pub(super) async fn left_to_us(&mut self, ask: &Ask, own: &str) -> Result<Option<Queue>> {
        let Some(neighbour) = self.neighbour.take() else { return Ok(None) };
        let keys = [own.as_bytes(), &neighbour.key].map(|key| TxnOp::get(key, None));
        let look: Vec<_> = keys.into_iter().chain(self.look_beside(ask)).collect();
        let answer = self.transact(Txn::new().and_then(look)).await?;
        let mut ranges: Vec<_> = ranges(&answer).collect();
        ensure!(ranges.len() >= 4, "etcd answered without what was asked for");
        // One that let go may keep its key for a while all the same.
        let is_gone = ranges.remove(1).kvs().is_empty();
        let queue = Queue::from_ranges(&answer, ranges.into_iter())?;
        let released = queue.beside(RELEASED).and_then(|token| token.parse::<i64>().ok());
        // Its very token: one of a slot, which somebody took meanwhile, may be greater and say nothing.
        let has_held = released == Some(neighbour.created);
        Ok((is_gone && has_held && queue.find(own).is_some()).then_some(queue))
    }

    /// While we are next, remembers who holds the lock and how long its lease lasts; says when to look again.
    pub(super) async fn look_after(&mut self, ask: &Ask, ahead: &[Contender]) -> Option<Instant> {
        self.predecessor = None;
        let holder = Predecessor::among(ahead, ask.mode).filter(|_| ask.queue)?;
        let from = clock::now();
        let rest = self.members.call(async |mut client| client.lease_time_to_live(holder.lease, None).await).await;
        let predecessor = Predecessor::new(holder, from, rest.ok().map(|rest| rest.ttl()));
        Some(self.predecessor.insert(predecessor).next_look(from))
    }
}
