//! What operators do: look at a lock, list all, move the end of one that was left behind, take one away, forget runs.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse};

use super::Etcd;
use super::errors::{NO_SUCH_LEASE, is_refusal};
use super::keys::lease_id;
use super::queue::{Entry, View};
use crate::backend::{DEFAULT_HISTORY, Forget, Forgotten, Page, Reheld, Revoke, Revoked};
use crate::lock::queue::holders;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, OwnerId, Runs, messages};

/// How many locks are on a page: as many as one transaction can read, which has 128 requests at the most.
const PAGE: usize = 128 / View::REQUESTS;

impl Etcd {
    pub(super) async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    /// Several at once, at most [`PAGE`].
    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let mut states = Vec::with_capacity(names.len());
        for (name, view) in names.iter().zip(self.views_of(names).await?) {
            let mut contenders: Vec<Contender> = view.queue.iter().map(Entry::contender).collect();
            for at in holders(&view.queue) {
                contenders[at].revoked = view.reason(&self.keys.mark(name, &view.queue[at].key)).is_some();
                self.ask_rest_of_lease(view.queue[at].lease, &mut contenders[at]).await?;
            }
            states.push(LockState::of_queue(name.clone(), "etcd", contenders, view.runs.into_history()));
        }
        Ok(states)
    }

    async fn views_of(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let requests: Vec<_> = names.iter().flat_map(|name| View::requests(&self.keys, name, 0)).collect();
        let mut reads = self.members.read(requests).await?;
        names.iter().map(|_| View::read(&mut reads, 0)).collect()
    }

    async fn view_of(&mut self, name: &LockName) -> Result<View> {
        self.views_of(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    async fn ask_rest_of_lease(&mut self, lease: i64, of: &mut Contender) -> Result<()> {
        let rest = self.members.call(async |mut client| client.lease_time_to_live(lease, None).await).await?;
        let seconds = |n: i64| u64::try_from(n).ok().map(Duration::from_secs);
        of.expires_in = seconds(rest.ttl());
        of.ttl = of.ttl.or(seconds(rest.granted_ttl()));
        Ok(())
    }

    /// Locks that somebody uses or once used. All names are read at the beginning; what is behind them is not.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            let prefixes = self.keys.of_all_locks();
            let keys = |prefix| TxnOp::get(prefix, Some(GetOptions::new().with_prefix().with_keys_only()));
            let mut reads = self.members.read(prefixes.clone().map(keys)).await?;
            let mut names = std::collections::BTreeSet::new();
            for prefix in prefixes {
                names.extend(reads.range()?.kvs().iter().filter_map(|kv| name_in(kv.key(), &prefix)));
            }
            self.listing = names.into_iter();
        }
        let names: Vec<LockName> = self.listing.by_ref().take(PAGE).collect();
        let locks = self.states_of(&names).await?;
        Ok(Page { locks, next: (self.listing.len() > 0).then(|| "more".to_owned()) })
    }

    /// Moves the end of what a release has left behind.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let key = self.keys.contender(name, lease_id(name, owner.as_str()));
        let view = self.view_of(name).await?;
        let mark = view.reason(&self.keys.mark(name, key.as_bytes()));
        let Some(own) = holders(&view.queue).map(|at| &view.queue[at]).find(|one| one.key == key.as_bytes()) else {
            return Ok(mark.map_or(Reheld::NotOurs, Reheld::ForceReleased));
        };
        let Some(record) = own.record.clone() else { bail!(messages::overwritten(&key)) };
        if !own.is_left_behind() {
            return Ok(Reheld::Running);
        }
        let change = match mark {
            _ if ttl.is_zero() => TxnOp::delete(key.as_str(), None),
            Some(reason) => return Ok(Reheld::Revoked(reason)),
            None => self.put_on_new_lease(&key, &record.with_ttl(ttl), ttl).await?,
        };
        let unless = Compare::create_revision(key.as_str(), CompareOp::Equal, own.created);
        if !self.members.transact(Txn::new().when([unless]).and_then([change])).await?.succeeded() {
            return Ok(Reheld::NotOurs);
        }
        self.members.tidy(own.lease).await;
        Ok(Reheld::Done)
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder moved its key to another lease just now: the mark has to end with the key's own lease.
        // Also if somebody else has written the history.
        for _ in 0..10 {
            let View { queue, runs, .. } = self.view_of(name).await?;
            let is_meant = |one: &&Entry| one.contender().into_holder().is_still(from);
            let Some(holder) = holders(&queue).map(|at| &queue[at]).find(is_meant) else { return Ok(Revoked::NotHeld) };
            let (then, done) = match how {
                Revoke::Safely { .. } if holder.record.is_none() => {
                    return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned()));
                }
                Revoke::Safely { reason } => (vec![self.put_mark(name, holder, reason)], Revoked::Marked),
                Revoke::Now { reason } => (self.free(name, holder, &runs, from, reason), Revoked::Freed),
            };
            let key = holder.key.as_slice();
            let unless = [
                Compare::create_revision(key, CompareOp::Equal, holder.created),
                Compare::lease(key, CompareOp::Equal, holder.lease),
                self.unchanged(name, &runs),
            ];
            match self.members.transact(Txn::new().when(unless).and_then(then)).await {
                Ok(answer) if answer.succeeded() => return Ok(done),
                Ok(_) => {}
                Err(error) if is_refusal(&error, NO_SUCH_LEASE) => return Ok(Revoked::NotHeld),
                Err(error) => return Err(error),
            }
        }
        bail!("{name} changes all the time")
    }

    /// Why a contender is asked to release the lock, or has lost its key; for as long as its lease lives.
    fn put_mark(&self, name: &LockName, of: &Entry, reason: &str) -> TxnOp {
        let lease = PutOptions::new().with_lease(of.lease);
        TxnOp::put(self.keys.mark(name, &of.key), reason, Some(lease))
    }

    /// Frees the lock at once, and tells its holder why.
    fn free(&self, name: &LockName, holder: &Entry, runs: &Runs<i64>, seen: &Holder, reason: &str) -> Vec<TxnOp> {
        let mut then = self.put_released(name, holder.token());
        then.push(TxnOp::delete(holder.key.as_slice(), None));
        if holder.record.is_some() && holder.lease != 0 {
            then.push(self.put_mark(name, holder, reason));
        }
        // What is only held on to after a run takes nothing away from how that ended.
        let run = LastRun::cut_short(seen, reason);
        if !holder.is_left_behind() || !runs.history.has(&run) {
            then.extend(self.put_run(name, runs, &run, DEFAULT_HISTORY));
        }
        then
    }

    /// The latest token that was released stays.
    pub(super) async fn forget_runs(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let below = |prefix| TxnOp::delete(prefix, Some(DeleteOptions::new().with_prefix()));
        let forget = match what {
            Forget::Once(key) => Txn::new().and_then([TxnOp::delete(self.keys.once(name, key), None)]),
            Forget::Everything => Txn::new().when([self.nobody_came(name, 0)]).and_then([
                TxnOp::delete(self.keys.last_run(name), None),
                below(self.keys.all_noted(name)),
                below(self.keys.once(name, "")),
            ]),
        };
        let answer = self.members.transact(forget).await?;
        let removed = |one| matches!(one, TxnOpResponse::Delete(deleted) if deleted.deleted() > 0);
        Ok(match () {
            () if !answer.succeeded() => Forgotten::InUse,
            () if answer.op_responses().into_iter().any(removed) => Forgotten::Done,
            () => Forgotten::Nothing,
        })
    }
}

/// The lock that a key belongs to. A key that has no name of ours in it belongs to no lock of ours.
fn name_in(key: &[u8], prefix: &str) -> Option<LockName> {
    LockName::decode(std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.split('/').next()?)
}
