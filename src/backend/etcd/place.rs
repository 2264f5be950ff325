//! Our place in a queue: taking it, keeping it, and saying so once we hold the lock.

use anyhow::{Context, Result};
use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};

use super::Etcd;
use super::failure::no_such_lease;
use super::keys::lease_id;
use super::queue::{Card, Contender, Queue, holds};
use crate::backend::Ask;
use crate::clock::Instant;
use crate::lock::{Identity, Mode, Term, Token};

/// Our place in a queue.
#[derive(Clone, Copy)]
pub struct Place {
    pub lease: i64,
    /// The create revision of our key, which is our place in the order; `None` if it was not made.
    created: Option<i64>,
    pub term: Term,
}

impl Place {
    pub fn next_keep_alive(&self) -> Instant {
        self.term.from + self.term.ttl / 3
    }
}

/// What a look at the queue reads along with it.
pub const RELEASED: usize = 0;
pub const MARK: usize = 1;
pub const ONCE: usize = 2;

#[derive(PartialEq, Eq)]
pub enum Entered {
    Now,
    Before,
}

impl Etcd {
    /// Takes a place at the end of the queue, or finds the one we have. The answer may lack us: if the
    /// `once` key is on record, or if we must not wait and would have to.
    pub(super) async fn enter(&mut self, ask: &Ask) -> Result<(Queue, Entered)> {
        let lease = lease_id(&ask.name, ask.who.owner.as_str());
        self.neighbour = None;
        let kept = self.grant(lease, ask.ttl).await?;
        let key = self.keys.contender(&ask.name, lease);
        let card = Card::new(ask.mode, ask.ttl).to_json(&ask.who);
        let mut seen = 0;
        let (queue, entered) = loop {
            let mut unless = vec![Compare::create_revision(key.as_str(), CompareOp::Equal, 0)];
            unless.extend(self.once_key(ask).map(|once| Compare::create_revision(once, CompareOp::Equal, 0)));
            if !ask.queue {
                // Nobody came, to hold it or to wait for it, since we looked.
                let nobody = Compare::mod_revision(self.keys.queue(&ask.name), CompareOp::Less, seen + 1);
                unless.push(nobody.with_prefix());
            }
            let put = TxnOp::put(key.as_str(), card.as_str(), Some(PutOptions::new().with_lease(lease)));
            let look = self.look(ask, None);
            let then = std::iter::once(put).chain(look.clone()).collect::<Vec<_>>();
            let answer = self.transact(Txn::new().when(unless).and_then(then).or_else(look)).await?;
            let queue = Queue::read(&answer)?;
            if answer.succeeded() {
                break (queue, Entered::Now);
            }
            if queue.find(&key).is_some() || queue.beside(ONCE).is_some() || !holds(ask.mode, &queue.contenders) {
                break (queue, Entered::Before);
            }
            seen = queue.revision;
        };
        let created = queue.find(&key).map(|me| queue.contenders[me].created);
        self.place = Some(Place { lease, created, term: kept.confirmed_by(&queue)? });
        Ok((queue, entered))
    }

    /// Keeps the place we have and looks at the queue as far as it matters; `None` if we have no place, or have it no more.
    pub(super) async fn look_again(&mut self, ask: &Ask) -> Result<Option<Queue>> {
        let lease = lease_id(&ask.name, ask.who.owner.as_str());
        let Some(mut place) = self.place.take().filter(|place| place.lease == lease) else { return Ok(None) };
        let own = self.keys.contender(&ask.name, lease);
        let mut kept = None;
        if place.next_keep_alive().has_passed() {
            kept = self.keep_alive(lease).await?;
            if kept.is_none() {
                return Ok(None);
            }
        } else if let Some(queue) = self.left_to_us(ask, &own).await? {
            self.place = Some(place);
            return Ok(Some(queue));
        }
        // Slots may have been taken behind us.
        let as_far_as_us = place.created.filter(|_| !matches!(ask.mode, Mode::Slots(_)));
        let queue = Queue::read(&self.transact(Txn::new().and_then(self.look(ask, as_far_as_us))).await?)?;
        if queue.find(&own).is_none() {
            return Ok(None);
        }
        if let Some(kept) = kept {
            place.term = kept.confirmed_by(&queue)?;
        }
        self.place = Some(place);
        Ok(Some(queue))
    }

    /// Takes a slot that nobody has, if we have none yet. `None` if our place was lost on the way, or
    /// somebody else may have taken the slot.
    pub(super) async fn take_slot(&mut self, ask: &Ask, queue: &Queue, me: &Contender) -> Result<Option<(Token, u32)>> {
        if let Some(slot) = me.slot() {
            return Ok(Some((me.token(), slot)));
        }
        let slot = queue.free_slot();
        let nobody = Compare::mod_revision(self.keys.queue(&ask.name), CompareOp::Less, queue.revision + 1);
        let taking = Txn::new().when([is_there(me), nobody.with_prefix()]);
        match self.transact(taking.and_then([say_held(me, &ask.who, Some(slot))?])).await {
            Ok(answer) if answer.succeeded() => {
                let revision = answer.header().context("etcd answered without a header")?.revision();
                Ok(Some((Token(revision.unsigned_abs()), slot)))
            }
            Ok(_) => Ok(None),
            Err(error) if no_such_lease(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Says in our key since when we hold the lock, for `status` to tell. It may arrive late, when the key has been left
/// behind on another lease: it stays there.
pub fn announcement(me: &Contender, who: &Identity) -> Result<Txn> {
    let untouched = Compare::mod_revision(me.key.as_slice(), CompareOp::Equal, me.modified);
    Ok(Txn::new().when([untouched]).and_then([say_held(me, who, None)?]))
}

fn is_there(me: &Contender) -> Compare {
    Compare::create_revision(me.key.as_slice(), CompareOp::Equal, me.created)
}

fn say_held(me: &Contender, who: &Identity, slot: Option<u32>) -> Result<TxnOp> {
    let card = me.card.clone().context("our key holds something that is not ours")?.holding(slot);
    Ok(TxnOp::put(me.key.as_slice(), card.to_json(who), Some(PutOptions::new().with_lease(me.lease))))
}
