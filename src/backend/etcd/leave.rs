//! Letting go of a lock, or leaving it held behind us; and taking it away from others.
//!
//! Whoever leaves it held hangs its key on a lease that nobody renews: our own cannot be made longer than
//! it is. The key keeps its place in the queue, so that foreign mutexes wait for its end as well.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnResponse};

use super::Etcd;
use super::failure::no_such_lease;
use super::keys::lease_id;
use super::queue::{Contender, Queue, ranges};
use crate::backend::{Ending, Lease, Reheld, Released, Revoke, Revoked};
use crate::clock::Instant;
use crate::lock::{Holder, LastRun, LockName, OwnerId, Token};

/// How often whatever else there is in this thread gets its turn before we go on: more than enough for a request to be
/// on its way, and mostly for a server nearby to have it.
const TURNS: usize = 100;
/// Where the mark for us stands in the answer to a release that was refused.
const MARK_OF_LOST: usize = 1;

impl Etcd {
    pub(super) async fn let_go(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let id = lease_id(&lease.name, lease.owner.as_str());
        let key = self.keys.contender(&lease.name, id);
        let mut then = self.record(&lease.name, ending.last_run.as_ref());
        then.push(self.say_released(&lease.name, lease.token));
        then.push(match ending.hold_until.map(Instant::remaining).filter(|rest| !rest.is_zero()) {
            None => TxnOp::delete(key.as_str(), None),
            Some(rest) => {
                let read = Queue::read(&self.transact(Txn::new().and_then([TxnOp::get(key.as_str(), None)])).await?)?;
                let Some(own) = read.contenders.first() else { return Ok(Released::NotOurs) };
                let value = own.left_behind(lease.token).with_context(|| overwritten(&key))?;
                let lasting = self.grant_any(rest).await?;
                TxnOp::put(key.as_str(), value, Some(PutOptions::new().with_lease(lasting)))
            }
        });
        let mark = self.keys.mark(&lease.name, key.as_bytes());
        let beside = [self.keys.last_run(&lease.name).into_bytes(), mark].map(|key| TxnOp::get(key, None));
        let traces: Vec<TxnOp> = std::iter::once(TxnOp::get(key.as_str(), None)).chain(beside).collect();
        let release = Txn::new().when([still_ours(&key, lease)]).and_then(then).or_else(traces);
        let answer = self.transact(release).await?;
        if !answer.succeeded() && !was_applied(&answer, lease, ending)? {
            let read = Queue::read(&answer)?;
            let taken = read.beside(MARK_OF_LOST).filter(|_| read.contenders.is_empty());
            return Ok(taken.map_or(Released::NotOurs, Released::Taken));
        }
        self.tidy(id).await;
        Ok(Released::Done)
    }

    pub(super) async fn hold_for(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let key = self.keys.contender(name, lease_id(name, owner.as_str()));
        let mark = TxnOp::get(self.keys.mark(name, key.as_bytes()), None);
        let queue = Queue::read(&self.transact(Txn::new().and_then([self.read_queue(name), mark])).await?)?;
        let Some(own) = queue.holders().find(|holder| holder.key == key.as_bytes()) else {
            return Ok(queue.beside(0).map_or(Reheld::NotOurs, Reheld::Taken));
        };
        ensure!(!own.is_foreign(), overwritten(&key));
        if !own.is_left_behind() {
            return Ok(Reheld::Running);
        }
        let change = if ttl.is_zero() {
            TxnOp::delete(key.as_str(), None)
        } else if let Some(reason) = queue.beside(0) {
            return Ok(Reheld::Revoked(reason));
        } else {
            let lasting = self.grant_any(ttl).await?;
            let value = own.left_behind_for(ttl).with_context(|| overwritten(&key))?;
            TxnOp::put(key.as_str(), value, Some(PutOptions::new().with_lease(lasting)))
        };
        let unless = Compare::create_revision(key.as_str(), CompareOp::Equal, own.created);
        if !self.transact(Txn::new().when([unless]).and_then([change])).await?.succeeded() {
            return Ok(Reheld::NotOurs);
        }
        self.tidy(own.lease).await;
        Ok(Reheld::Done)
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder hung its key on another lease just now: the mark has to die with its own.
        for _ in 0..3 {
            let queue = Queue::read(&self.transact(Txn::new().and_then([self.read_queue(name)])).await?)?;
            let is_meant = |one: &&Contender| {
                let seen = one.holder();
                seen.owner == from.owner && from.fencing_token.is_none_or(|token| Some(token) == seen.fencing_token)
            };
            let Some(holder) = queue.holders().find(is_meant) else { return Ok(Revoked::NotHeld) };
            let then = match how {
                Revoke::Safely { .. } if holder.is_foreign() => {
                    return Ok(Revoked::Impossible(
                        "its holder is not dlock and would not notice; --now takes it away at once".to_owned(),
                    ));
                }
                Revoke::Safely { reason } => vec![self.put_mark(name, holder, reason)],
                Revoke::Now { reason } => self.free(name, holder, from, reason),
            };
            let key = holder.key.as_slice();
            let unless = [
                Compare::create_revision(key, CompareOp::Equal, holder.created),
                Compare::lease(key, CompareOp::Equal, holder.lease),
            ];
            match self.transact(Txn::new().when(unless).and_then(then)).await {
                Ok(answer) if !answer.succeeded() => {}
                Ok(_) if matches!(how, Revoke::Now { .. }) => return Ok(Revoked::Freed),
                Ok(_) => return Ok(Revoked::Marked),
                Err(error) if no_such_lease(&error) => return Ok(Revoked::NotHeld),
                Err(error) => return Err(error),
            }
        }
        bail!("{name} changes all the time")
    }

    /// Why a contender is to let go, or has lost its key; for as long as its lease lives.
    fn put_mark(&self, name: &LockName, of: &Contender, reason: &str) -> TxnOp {
        let lease = PutOptions::new().with_lease(of.lease);
        TxnOp::put(self.keys.mark(name, &of.key), reason, Some(lease))
    }

    /// Frees the lock on the spot, and leaves word of why to whom it may concern.
    fn free(&self, name: &LockName, holder: &Contender, seen: &Holder, reason: &str) -> Vec<TxnOp> {
        let mut then = vec![TxnOp::delete(holder.key.as_slice(), None), self.say_released(name, holder.token())];
        if !holder.is_foreign() && holder.lease != 0 {
            then.push(self.put_mark(name, holder, reason));
        }
        if !holder.is_left_behind() {
            then.extend(self.record(name, Some(&LastRun::cut_short(seen, reason))));
        }
        then
    }

    /// Tells the next holder that it need not fear for the life of the one before.
    pub(super) fn say_released(&self, name: &LockName, token: Token) -> TxnOp {
        TxnOp::put(self.keys.released(name), token.to_string(), None)
    }

    fn record(&self, name: &LockName, last_run: Option<&LastRun>) -> Vec<TxnOp> {
        let Some(last_run) = last_run else { return Vec::new() };
        let once = last_run.once.as_deref().filter(|_| last_run.succeeded());
        let once = once.map(|once| TxnOp::put(self.keys.once(name, once), last_run.fencing_token.to_string(), None));
        let run = TxnOp::put(self.keys.last_run(name), last_run.to_json(), None);
        std::iter::once(run).chain(once).collect()
    }

    /// Frees a lease that nothing hangs on any more: whether this works makes no difference to any lock, so nobody waits
    /// for the answer.
    async fn tidy(&mut self, lease: i64) {
        let Some(mut client) = self.members.client() else { return };
        let revoked = tokio::spawn(async move { client.lease_revoke(lease).await });
        for _ in 0..TURNS {
            if revoked.is_finished() {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}

fn overwritten(key: &str) -> String {
    format!("the key {key} has been overwritten: force-release --now takes it away")
}

/// What is true of a lease's key as long as the lock is ours.
fn still_ours(key: &str, lease: &Lease) -> Compare {
    let token = i64::try_from(lease.token.0).unwrap_or(i64::MAX);
    match lease.slot {
        Some(_) => Compare::mod_revision(key, CompareOp::Equal, token),
        None => Compare::create_revision(key, CompareOp::Equal, token),
    }
}

/// Whether an earlier try to release was applied without an answer: it left our key behind, or our record.
fn was_applied(refusal: &TxnResponse, lease: &Lease, ending: &Ending) -> Result<bool> {
    let key = Queue::read(refusal)?.contenders.into_iter().next();
    let record = ranges(refusal).nth(1).and_then(|mut range| range.take_kvs().into_iter().next());
    let ours = |own: &Contender| own.is_left_behind() && own.token() == lease.token;
    let last_run = ending.last_run.as_ref().map(LastRun::to_json);
    Ok(key.as_ref().is_some_and(ours)
        || record.is_some_and(|record| last_run.is_some_and(|last_run| record.value() == last_run.as_bytes())))
}
