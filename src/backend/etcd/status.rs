//! What an operator sees: reads only.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{GetOptions, KeyValue, Txn, TxnOp};

use super::Etcd;
use super::queue::{Contender, Queue, ranges};
use crate::backend::Page;
use crate::lock::{Holder, LastRun, LockName, LockState, Mode, State};

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
            let marks = TxnOp::get(self.keys.marks(name), Some(GetOptions::new().with_prefix().with_keys_only()));
            [self.read_queue(name), TxnOp::get(self.keys.last_run(name), None), marks]
        });
        let answer = self.transact(Txn::new().and_then(reads.collect::<Vec<_>>())).await?;
        let mut ranges = ranges(&answer);
        let mut states = Vec::with_capacity(names.len());
        for name in names {
            let queue = Queue::from_ranges(&answer, ranges.by_ref().take(2))?;
            let marks = ranges.next().map(|mut marks| marks.take_kvs()).unwrap_or_default();
            states.push(self.state_from(name, &queue, &marks).await?);
        }
        Ok(states)
    }

    async fn state_from(&mut self, name: &LockName, queue: &Queue, marks: &[KeyValue]) -> Result<LockState> {
        let is_marked =
            |one: &Contender| marks.iter().any(|mark| mark.key() == self.keys.mark(name, &one.key).as_slice());
        let mut state = LockState::free(name.clone(), "etcd");
        if queue.holders().next().is_some() {
            state.state = if queue.holders().any(is_marked) { State::Revoked } else { State::Held };
        }
        state.mode = queue.contenders.first().map_or(Mode::Exclusive, Contender::mode);
        state.slots = state.mode.slots();
        state.waiters = queue.waiters().map(Contender::waiter).collect();
        state.last_run = queue.beside(0).and_then(|record| LastRun::from_json(&record));
        for holder in queue.holders() {
            state.holders.push(self.with_rest_of_lease(holder).await?);
        }
        Ok(state)
    }

    async fn with_rest_of_lease(&mut self, contender: &Contender) -> Result<Holder> {
        let lease = contender.lease;
        let rest = self.members.call(async |mut client| client.lease_time_to_live(lease, None).await).await?;
        let seconds = |n: i64| u64::try_from(n).ok().map(Duration::from_secs);
        let holder = contender.holder();
        Ok(Holder { expires_in: seconds(rest.ttl()), ttl: holder.ttl.or(seconds(rest.granted_ttl())), ..holder })
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
        let answer = self.transact(Txn::new().and_then(look)).await?;
        let mut names = BTreeSet::new();
        let mut complete_until: Option<String> = None;
        for (prefix, range) in [contenders, last_runs].iter().zip(ranges(&answer)) {
            let found: Vec<_> = range.kvs().iter().filter_map(|kv| segment(kv.key(), prefix)).collect();
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
}

/// The name in a key, with the slash that keys are ordered with.
fn segment(key: &[u8], prefix: &str) -> Option<String> {
    let rest = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?;
    Some(format!("{}/", rest.split('/').next()?))
}
