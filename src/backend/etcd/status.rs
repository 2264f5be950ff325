//! What operators do: look at a lock, list all, move the end of one that was left behind, take one away.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp};

use super::Etcd;
use super::errors::Refusal;
use super::keys::lease_id;
use super::queue::{Entry, Reads};
use super::recipe::in_order;
use crate::backend::{Page, Reheld, Revoke, Revoked};
use crate::lock::queue::holders;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, OwnerId, messages};

/// How many locks are on a page.
const PAGE: usize = 120;
/// How many keys are looked at for their names, of contenders and of last runs each. Many: the server counts
/// all keys that follow, every time. Fewer in tests, so that a list of theirs goes on.
const NAMES: i64 = if cfg!(test) { 60 } else { 5000 };
/// How many locks are read in one transaction, with three requests each: 128 are the most that etcd takes.
const TOGETHER: usize = 40;

/// How far a list of all locks has got.
#[derive(Default)]
pub struct Listing {
    names: VecDeque<LockName>,
    /// As it is encoded in a key: what comes behind it has not been read yet.
    after: Option<String>,
    complete: bool,
}

impl Etcd {
    pub(super) async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    /// Several at once, at most [`TOGETHER`].
    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let reads = names.iter().flat_map(|name| {
            let queue = TxnOp::get(self.keys.queue(name), Some(in_order()));
            let marks = TxnOp::get(self.keys.marks(name), Some(GetOptions::new().with_prefix().with_keys_only()));
            [queue, TxnOp::get(self.keys.last_run(name), None), marks]
        });
        let look = Txn::new().and_then(reads.collect::<Vec<_>>());
        let mut reads = Reads::of(&self.members.transact(look).await?)?;
        let mut states = Vec::with_capacity(names.len());
        for name in names {
            let (queue, last_run, marks) = (reads.entries()?, reads.value()?, reads.range()?);
            let mut contenders: Vec<Contender> = queue.iter().map(Entry::contender).collect();
            for at in holders(&queue) {
                let mark = self.keys.mark(name, &queue[at].key);
                contenders[at].revoked = marks.kvs().iter().any(|kv| kv.key() == mark);
                self.ask_rest_of_lease(queue[at].lease, &mut contenders[at]).await?;
            }
            let last_run = last_run.and_then(|record| LastRun::from_json(&record));
            states.push(LockState::of_queue(name.clone(), "etcd", contenders, last_run));
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

    /// Locks that somebody uses or once used, in the order of their keys.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            self.listing = Listing::default();
        }
        if self.listing.names.is_empty() && !self.listing.complete {
            self.read_names().await?;
        }
        let on_page = PAGE.min(self.listing.names.len());
        let names: Vec<LockName> = self.listing.names.drain(..on_page).collect();
        let mut locks = Vec::with_capacity(names.len());
        for names in names.chunks(TOGETHER) {
            locks.extend(self.states_of(names).await?);
        }
        let more = !self.listing.names.is_empty() || !self.listing.complete;
        Ok(Page { locks, next: more.then(|| "more".to_owned()) })
    }

    async fn read_names(&mut self) -> Result<()> {
        let (contenders, last_runs) = (self.keys.all_contenders().to_owned(), self.keys.all_last_runs());
        let after = self.listing.after.as_deref();
        let look = [self.keys_from(&contenders, after), self.keys_from(&last_runs, after)];
        let mut reads = Reads::of(&self.members.transact(Txn::new().and_then(look)).await?)?;
        let mut names = BTreeSet::new();
        let mut complete_until: Option<String> = None;
        for prefix in [contenders, last_runs] {
            let range = reads.range()?;
            let found: Vec<_> = range.kvs().iter().filter_map(|kv| segment(kv.key(), &prefix)).collect();
            if range.more() {
                let last = found.last().cloned();
                complete_until = complete_until.into_iter().chain(last).min();
            }
            names.extend(found);
        }
        let reached = names.iter().filter(|name| complete_until.as_ref().is_none_or(|last| *name <= last));
        // A key that is no name of ours is no lock of ours.
        let names = reached.filter_map(|name| LockName::decode(name.trim_end_matches('/'))).collect();
        let after = complete_until.map(|last| last.trim_end_matches('/').to_owned());
        self.listing = Listing { names, complete: after.is_none(), after };
        Ok(())
    }

    fn keys_from(&self, prefix: &str, after: Option<&str>) -> TxnOp {
        // '0' follows '/', which is what ends a name in a key.
        let start = after.map_or_else(|| prefix.to_owned(), |name| format!("{prefix}{name}0"));
        let mut end = prefix.trim_end_matches('/').to_owned();
        end.push('0');
        TxnOp::get(start, Some(GetOptions::new().with_range(end).with_limit(NAMES).with_keys_only()))
    }

    /// Moves the end of what a release has left behind.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let key = self.keys.contender(name, lease_id(name, owner.as_str()));
        let mark = TxnOp::get(self.keys.mark(name, key.as_bytes()), None);
        let look = Txn::new().and_then([TxnOp::get(self.keys.queue(name), Some(in_order())), mark]);
        let mut reads = Reads::of(&self.members.transact(look).await?)?;
        let (mut queue, mark) = (reads.entries()?, reads.value()?);
        let Some(at) = holders(&queue).find(|at| queue[*at].key == key.as_bytes()) else {
            return Ok(mark.map_or(Reheld::NotOurs, Reheld::Taken));
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
        // Once more if the holder hung its key on another lease just now: the mark has to die with its own.
        for _ in 0..3 {
            let look = Txn::new().and_then([TxnOp::get(self.keys.queue(name), Some(in_order()))]);
            let queue = Reads::of(&self.members.transact(look).await?)?.entries()?;
            let is_meant = |one: &&Entry| {
                let seen = one.contender().into_holder();
                seen.owner == from.owner && from.fencing_token.is_none_or(|token| Some(token) == seen.fencing_token)
            };
            let Some(holder) = holders(&queue).map(|at| &queue[at]).find(is_meant) else { return Ok(Revoked::NotHeld) };
            let then = match how {
                Revoke::Safely { .. } if holder.is_foreign() => {
                    return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned()));
                }
                Revoke::Safely { reason } => vec![self.put_mark(name, holder, reason)],
                Revoke::Now { reason } => self.free(name, holder, from, reason),
            };
            let key = holder.key.as_slice();
            let unless = [
                Compare::create_revision(key, CompareOp::Equal, holder.created),
                Compare::lease(key, CompareOp::Equal, holder.lease),
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

    /// Frees the lock at once, and leaves its holder word of why.
    fn free(&self, name: &LockName, holder: &Entry, seen: &Holder, reason: &str) -> Vec<TxnOp> {
        let mut then = vec![TxnOp::delete(holder.key.as_slice(), None), self.put_released(name, holder.token())];
        if !holder.is_foreign() && holder.lease != 0 {
            then.push(self.put_mark(name, holder, reason));
        }
        if !holder.is_left_behind() {
            then.extend(self.put_record(name, Some(&LastRun::cut_short(seen, reason))));
        }
        then
    }
}

/// The name in a key, with the slash that keys are ordered with.
fn segment(key: &[u8], prefix: &str) -> Option<String> {
    let rest = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    Some(format!("{}/", rest.split('/').next()?))
}
