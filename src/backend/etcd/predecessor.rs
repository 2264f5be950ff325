//! The one before us, if its key vanishes although it neither let go nor ran out of time: an operator
//! deleted it, or an etcd older than 3.4.31 revoked its lease for no reason. It may not have noticed yet.
//!
//! The server would give us the lock at once. We wait until the one before us must have ended its command,
//! which we can tell because we have seen how long its lease lasts. That is so for the next in the queue
//! of an exclusive holder; a newcomer has seen nothing. `force-release --now` counts as letting go.

use std::time::Duration;

use super::Etcd;
use super::place::RELEASED;
use super::queue::{Contender, Queue, holds};
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

impl Etcd {
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
