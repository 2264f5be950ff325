//! What operators do: look at a lock, list all, move the end of one that was left behind, take one away.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp};

use super::Etcd;
use super::errors::Refusal;
use super::keys::lease_id;
use super::queue::{Entry, Reads};
use super::recipe::in_order;
use super::runs::Runs;
use crate::backend::{DEFAULT_HISTORY, Page, Reheld, Revoke, Revoked};
use crate::lock::queue::holders;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, OwnerId, Token, messages};

/// How many locks are on a page.
const PAGE: usize = 120;
/// How many keys are read at once for their names.
const KEYS: i64 = 5000;
/// How many locks are read in one transaction, with four requests each: 128 are the most that etcd takes.
const TOGETHER: usize = 30;

impl Etcd {
    pub(super) async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    /// Several at once, at most [`TOGETHER`].
    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let reads = names.iter().flat_map(|name| {
            let queue = TxnOp::get(self.keys.queue(name), Some(in_order()));
            let marks = TxnOp::get(self.keys.marks(name), Some(GetOptions::new().with_prefix().with_keys_only()));
            [queue, marks].into_iter().chain(self.read_runs(name))
        });
        let look = Txn::new().and_then(reads.collect::<Vec<_>>());
        let mut reads = Reads::of(&self.members.transact(look).await?)?;
        let mut states = Vec::with_capacity(names.len());
        for name in names {
            let (queue, marks) = (reads.entries()?, reads.range()?);
            let runs = Runs::read(&reads.range()?, &reads.range()?).vanished(&queue, Token(u64::MAX));
            let mut contenders: Vec<Contender> = queue.iter().map(Entry::contender).collect();
            for at in holders(&queue) {
                let mark = self.keys.mark(name, &queue[at].key);
                contenders[at].revoked = marks.kvs().iter().any(|kv| kv.key() == mark);
                self.ask_rest_of_lease(queue[at].lease, &mut contenders[at]).await?;
            }
            states.push(LockState::of_queue(name.clone(), "etcd", contenders, runs.into_history()));
        }
        Ok(states)
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
            self.listing = self.names().await?.into_iter();
        }
        let names: Vec<LockName> = self.listing.by_ref().take(PAGE).collect();
        let mut locks = Vec::with_capacity(names.len());
        for names in names.chunks(TOGETHER) {
            locks.extend(self.states_of(names).await?);
        }
        Ok(Page { locks, next: (self.listing.len() > 0).then(|| "more".to_owned()) })
    }

    async fn names(&mut self) -> Result<BTreeSet<LockName>> {
        let mut names = BTreeSet::new();
        for prefix in [self.keys.all_contenders().to_owned(), self.keys.all_last_runs()] {
            // '0' follows '/', which ends the prefix.
            let end = format!("{}0", prefix.trim_end_matches('/'));
            let mut start = prefix.clone().into_bytes();
            loop {
                let options = GetOptions::new().with_range(end.as_str()).with_limit(KEYS).with_keys_only();
                let look = Txn::new().and_then([TxnOp::get(start, Some(options))]);
                let keys = Reads::of(&self.members.transact(look).await?)?.range()?;
                names.extend(keys.kvs().iter().filter_map(|kv| name_in(kv.key(), &prefix)));
                match keys.kvs().last() {
                    Some(last) if keys.more() => start = [last.key(), b"\0"].concat(),
                    _ => break,
                }
            }
        }
        Ok(names)
    }

    /// Moves the end of what a release has left behind.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let key = self.keys.contender(name, lease_id(name, owner.as_str()));
        let mark = TxnOp::get(self.keys.mark(name, key.as_bytes()), None);
        let look = Txn::new().and_then([TxnOp::get(self.keys.queue(name), Some(in_order())), mark]);
        let mut reads = Reads::of(&self.members.transact(look).await?)?;
        let (mut queue, mark) = (reads.entries()?, reads.value()?);
        let Some(at) = holders(&queue).find(|at| queue[*at].key == key.as_bytes()) else {
            return Ok(mark.map_or(Reheld::NotOurs, Reheld::ForceReleased));
        };
        let own = queue.swap_remove(at);
        if !own.is_foreign() && !own.is_left_behind() {
            return Ok(Reheld::Running);
        }
        let Some(record) = own.record else { bail!(messages::overwritten(&key)) };
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
            let queue = TxnOp::get(self.keys.queue(name), Some(in_order()));
            let look = Txn::new().and_then([queue].into_iter().chain(self.read_runs(name)).collect::<Vec<_>>());
            let mut reads = Reads::of(&self.members.transact(look).await?)?;
            let queue = reads.entries()?;
            let runs = Runs::read(&reads.range()?, &reads.range()?).vanished(&queue, Token(u64::MAX));
            let is_meant = |one: &&Entry| {
                let seen = one.contender().into_holder();
                seen.owner == from.owner && from.fencing_token.is_none_or(|token| Some(token) == seen.fencing_token)
            };
            let Some(holder) = holders(&queue).map(|at| &queue[at]).find(is_meant) else { return Ok(Revoked::NotHeld) };
            let then = match how {
                Revoke::Safely { .. } if holder.is_foreign() => {
                    return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned()));
                }
                Revoke::Safely { reason } => {
                    let mut then = vec![self.put_mark(name, holder, reason)];
                    if holder.is_left_behind() {
                        then.extend(self.put_cut_short(name, holder, &runs, from, reason));
                    }
                    then
                }
                Revoke::Now { reason } => self.free(name, holder, &runs, from, reason),
            };
            let key = holder.key.as_slice();
            let unless = [
                Compare::create_revision(key, CompareOp::Equal, holder.created),
                Compare::lease(key, CompareOp::Equal, holder.lease),
                self.unchanged(name, &runs),
            ];
            match self.members.transact(Txn::new().when(unless).and_then(then)).await {
                Ok(answer) if !answer.succeeded() => {}
                Ok(_) if matches!(how, Revoke::Now { .. }) => return Ok(Revoked::Freed),
                Ok(_) => return Ok(Revoked::Marked),
                Err(error) if Refusal::of(&error) == Some(Refusal::NoSuchLease) => return Ok(Revoked::NotHeld),
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
    fn free(&self, name: &LockName, holder: &Entry, runs: &Runs, seen: &Holder, reason: &str) -> Vec<TxnOp> {
        let key = TxnOp::delete(holder.key.as_slice(), None);
        let mut then = vec![key, self.put_released(name, holder.token()), self.delete_note(name, holder.token())];
        if !holder.is_foreign() && holder.lease != 0 {
            then.push(self.put_mark(name, holder, reason));
        }
        then.extend(self.put_cut_short(name, holder, runs, seen, reason));
        then
    }

    /// What is only held on to after a run takes nothing away from how that ended.
    fn put_cut_short(&self, name: &LockName, holder: &Entry, runs: &Runs, seen: &Holder, reason: &str) -> Vec<TxnOp> {
        let run = LastRun::cut_short(seen, reason);
        match holder.is_left_behind() && runs.history.has(&run) {
            true => Vec::new(),
            false => self.put_run(name, runs, &run, DEFAULT_HISTORY),
        }
    }
}

/// The lock that a key belongs to. A key that has no name of ours in it belongs to no lock of ours.
fn name_in(key: &[u8], prefix: &str) -> Option<LockName> {
    LockName::decode(std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.split('/').next()?)
}
