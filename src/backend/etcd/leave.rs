//! Letting go of a lock, or leaving it held behind us.
//!
//! Whoever leaves it held hangs its key on a lease that nobody renews: our own cannot be made longer than
//! it is. The key keeps its place in the queue, so that foreign mutexes wait for its end as well.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnResponse};

use super::Etcd;
use super::keys::lease_id;
use super::queue::{Contender, Queue, ranges};
use crate::backend::{Ending, Lease, Reheld, Released};
use crate::clock::Instant;
use crate::lock::{LastRun, LockName, OwnerId, Token};

/// How long the end of a run may be held up to clear away a lease that nothing hangs on any more.
const TIDYING: Duration = Duration::from_millis(200);

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
        let traces = [TxnOp::get(key.as_str(), None), TxnOp::get(self.keys.last_run(&lease.name), None)];
        let release = Txn::new().when([still_ours(&key, lease)]).and_then(then).or_else(traces);
        let answer = self.transact(release).await?;
        if !answer.succeeded() && !was_applied(&answer, lease, ending)? {
            return Ok(Released::NotOurs);
        }
        self.tidy(id).await;
        Ok(Released::Done)
    }

    pub(super) async fn hold_for(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let key = self.keys.contender(name, lease_id(name, owner.as_str()));
        let mark = TxnOp::get(self.keys.mark(name, key.as_bytes()), None);
        let queue = Queue::read(&self.transact(Txn::new().and_then([self.read_queue(name), mark])).await?)?;
        let Some(own) = queue.holders().find(|holder| holder.key == key.as_bytes()) else {
            return Ok(Reheld::NotOurs);
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

    /// Frees a lease that nothing hangs on any more: whether this works makes no difference to any lock.
    async fn tidy(&mut self, lease: i64) {
        let _ = tokio::time::timeout(TIDYING, self.drop_lease(lease)).await;
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
