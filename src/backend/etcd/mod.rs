//! etcd: a queue of contenders' keys, each alive as long as its owner's lease.
//!
//! The lowest create revision holds, as in Go's `concurrency.Mutex` and `etcdctl lock`, whose keys stand
//! in the same queue. See [`keys`] for the keys. The token is the create revision of our key,
//! or with slots the revision at which we took the slot.
//!
//! etcd 3.4.23 may confirm the renewal of a lease that is revoked or that another leader looks after,
//! so nothing counts as ours before a linearizable read has shown our key in the same raft term.

mod client;
mod doctor;
mod errors;
mod keys;
pub mod queue;
mod recipe;

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, PutOptions, Txn, TxnOp, TxnOpResponse};

use self::client::{Members, Watch};
use self::errors::{NO_SUCH_LEASE, is_refusal};
use self::keys::Keys;
pub use self::keys::lease_id;
use self::queue::{Details, Entry, Reads, View};
use self::recipe::{Granted, Place};
use crate::backend::{
    Address, Ask, Attempt, Backend, Checkup, DEFAULT_HISTORY, Ending, FOREIGN_HOLDER, Forget, Forgotten, Lease, Page,
    Patience, Reheld, Released, Renewal, Revoke, Revoked, next_names, overwritten,
};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::queue::holders;
use crate::lock::{Contender, Holder, LockName, LockState, OwnerId, Record, SeenHolders, runs};

/// Between two tries to watch.
const PAUSE: Duration = Duration::from_millis(500);
/// A lease that has no key any more may end by itself, if it lasts no longer than this.
const SHORT_LEASE: Duration = Duration::from_secs(60);
/// How many locks are on a page: as many as one transaction can read, which has 128 requests at the most.
const PAGE: usize = 128 / View::REQUESTS;

pub struct Etcd {
    pub members: Members,
    pub keys: Keys,
    place: Option<Place>,
    granted: Option<Granted>,
    watch: Watch,
    /// Whom we saw hold the lock while we waited.
    seen: SeenHolders,
    /// The rest of a list of all locks.
    listing: BTreeSet<LockName>,
}

impl Etcd {
    pub fn open(address: &Address, patience: Patience) -> Result<Etcd> {
        if !matches!(address.path(), "" | "/") {
            return Err(Fault::Config.because("an etcd URL has no path; to put locks elsewhere use ?prefix=…"));
        }
        Ok(Etcd {
            members: Members::at(address, patience)?,
            keys: Keys::under(address.param("prefix").unwrap_or("dlock/"))?,
            place: None,
            granted: None,
            watch: Watch::default(),
            seen: SeenHolders::default(),
            listing: BTreeSet::new(),
        })
    }

    async fn views_of(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let requests: Vec<_> = names.iter().flat_map(|name| View::requests(&self.keys, name, 0, None)).collect();
        let mut reads = self.members.read(requests).await?;
        names.iter().map(|_| View::read(&mut reads, 0, None)).collect()
    }

    async fn view_of(&mut self, name: &LockName) -> Result<View> {
        self.views_of(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    /// Several at once, at most [`PAGE`].
    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let mut states = Vec::with_capacity(names.len());
        for (name, view) in names.iter().zip(self.views_of(names).await?) {
            let mut contenders: Vec<Contender> = view.queue.iter().map(Entry::contender).collect();
            for at in holders(&view.queue) {
                let (of, Entry { key, lease, .. }) = (&mut contenders[at], &view.queue[at]);
                of.revoked = view.reason(&self.keys.mark(name, key)).is_some();
                let (rest, granted) = self.members.rest_of_lease(*lease).await?;
                (of.expires_in, of.ttl) = (rest, of.ttl.or(granted));
            }
            states.push(LockState::of_queue(name.clone(), "etcd", contenders, view.runs.into_history()));
        }
        Ok(states)
    }

    /// Attaches a key to a new lease that nobody renews: the ttl of our own cannot be changed. The key keeps its place in
    /// the queue, so that other programs wait for its end as well.
    async fn put_on_new_lease(&mut self, key: &str, record: &Record<Details>, ttl: Duration) -> Result<TxnOp> {
        let lease = self.members.grant_lease(0, ttl).await?.lease;
        Ok(TxnOp::put(key, record.to_json(), Some(PutOptions::new().with_lease(lease))))
    }

    /// What we know from when this lease was granted to us.
    fn granted(&self, lease: &Lease) -> Option<&Granted> {
        self.granted.as_ref().filter(|granted| granted.token == lease.token)
    }
}

/// What is true of a lease's key as long as the lock is ours.
fn still_ours(key: &str, lease: &Lease) -> Compare {
    let token = i64::try_from(lease.token.0).unwrap_or(i64::MAX);
    match lease.slot {
        Some(_) => Compare::mod_revision(key, CompareOp::Equal, token),
        None => Compare::create_revision(key, CompareOp::Equal, token),
    }
}

#[async_trait(?Send)]
impl Backend for Etcd {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let attempt = self.contend(ask).await;
        self.members.connected |= attempt.is_ok();
        if ask.is_over(&attempt) {
            self.give_up_place(ask).await?;
        }
        attempt
    }

    /// Reconnects by itself, with pauses, and never fails: the other verbs report what is wrong.
    async fn changed(&mut self) -> Result<()> {
        if self.watch.keys.is_empty() {
            std::future::pending::<()>().await;
        }
        while self.members.changed(&mut self.watch).await.is_err() {
            self.members.end_watch();
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        self.give_up_place(ask).await?;
        // Of a run that never began.
        if let Some(granted) = self.granted.take() {
            let note = TxnOp::delete(self.keys.noted(&ask.name, granted.token), None);
            self.members.transact(Txn::new().and_then([note])).await?;
        }
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let (id, key) = self.keys.own(&lease.name, &lease.owner);
        let Some(extended) = self.members.keep_alive(id).await? else {
            return Ok(Renewal::Lost("its etcd lease is gone".to_owned()));
        };
        let mark = self.keys.mark(&lease.name, key.as_bytes());
        let mut reads = self.members.read([TxnOp::get(key, None), TxnOp::get(mark, None)]).await?;
        let grant = extended.confirmed_in(reads.raft_term)?;
        let token = reads.range()?.kvs().first().map(|kv| Entry::from(kv).token());
        Ok(match (token, reads.value()?) {
            (None, Some(reason)) => Renewal::ForceReleased(reason),
            (None, None) => Renewal::Lost("its etcd key was deleted".to_owned()),
            (Some(token), _) if token != lease.token => {
                Renewal::Lost(format!("its etcd key was deleted and made again: its token is now {token}"))
            }
            (_, Some(reason)) => Renewal::Revoked(reason),
            (Some(_), None) => Renewal::Held(grant),
        })
    }

    /// Nothing happens if the lock was released before this arrives; nor if its key was left behind, which then is on
    /// another lease.
    async fn note_start(&mut self, lease: &Lease) -> Result<()> {
        let (name, (id, key)) = (&lease.name, self.keys.own(&lease.name, &lease.owner));
        let Some(Granted { record, .. }) = self.granted(lease) else { return Ok(()) };
        let note = runs::note(&record.who, lease.token, record.details.held_since).to_json();
        let mut then = vec![TxnOp::put(self.keys.noted(name, lease.token), note, None)];
        // With slots the key says already since when, and its revision is the token.
        if lease.slot.is_none() {
            then.push(TxnOp::put(key.as_str(), record.to_json(), Some(PutOptions::new().with_lease(id))));
        }
        let held = [still_ours(&key, lease), Compare::lease(key, CompareOp::Equal, id)];
        self.members.transact(Txn::new().when(held).and_then(then)).await?;
        Ok(())
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let (name, (id, key)) = (&lease.name, self.keys.own(&lease.name, &lease.owner));
        let let_go = match ending.hold_until.map(Instant::remaining).filter(|rest| !rest.is_zero()) {
            None => TxnOp::delete(key.as_str(), None),
            Some(rest) => {
                let mut record = self.granted(lease).context("what is held on to was granted to us")?.record.clone();
                record.details.token = Some(lease.token);
                self.put_on_new_lease(&key, &record, rest).await?
            }
        };
        let mut known = self.granted(lease).map(|granted| granted.runs.clone());
        // Once more whenever another holder or an operator has written the history since.
        loop {
            let (mut when, mut then) = (vec![still_ours(&key, lease)], self.keys.put_released(name, lease.token));
            then.push(let_go.clone());
            if let Some(run) = &ending.last_run {
                let runs = known.take().unwrap_or_default();
                when.push(self.keys.unchanged(name, &runs));
                then.extend(self.keys.put_run(name, &runs, run, ending.keep));
            }
            let traces = View::requests(&self.keys, name, 0, None);
            let answer = self.members.transact(Txn::new().when(when).and_then(then).or_else(traces)).await?;
            if answer.succeeded() {
                break;
            }
            let view = View::read(&mut Reads::of(&answer)?, 0, None)?;
            // An earlier try may have been applied without an answer: it left our key behind, or our record.
            let own = view.entry(&key);
            let is_ours = own.is_some_and(|own| own.token() == lease.token);
            let left_behind = own.is_some_and(|own| is_ours && own.is_left_behind());
            if left_behind || ending.last_run.as_ref().is_some_and(|run| view.runs.history.has_ending(run)) {
                break;
            }
            if !is_ours {
                let reason = view.reason(&self.keys.mark(name, key.as_bytes())).filter(|_| own.is_none());
                return Ok(reason.map_or(Released::NotOurs, Released::ForceReleased));
            }
            known = Some(view.runs);
        }
        // A request less for nearly every run: without a key it holds nothing.
        if lease.grant.ttl > SHORT_LEASE {
            self.members.tidy(id).await;
        }
        Ok(Released::Done)
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let (_, key) = self.keys.own(name, owner);
        let view = self.view_of(name).await?;
        let mark = view.reason(&self.keys.mark(name, key.as_bytes()));
        let Some(own) = holders(&view.queue).map(|at| &view.queue[at]).find(|one| one.key == key.as_bytes()) else {
            return Ok(mark.map_or(Reheld::NotOurs, Reheld::ForceReleased));
        };
        let Some(mut record) = own.record.clone() else { bail!(overwritten(&key)) };
        if !own.is_left_behind() {
            return Ok(Reheld::Running);
        }
        let change = match mark {
            _ if ttl.is_zero() => TxnOp::delete(key.as_str(), None),
            Some(reason) => return Ok(Reheld::Revoked(reason)),
            None => {
                record.details.ttl_ms = clock::millis(ttl);
                self.put_on_new_lease(&key, &record, ttl).await?
            }
        };
        let unless = Compare::create_revision(key.as_str(), CompareOp::Equal, own.created);
        if !self.members.transact(Txn::new().when([unless]).and_then([change])).await?.succeeded() {
            return Ok(Reheld::NotOurs);
        }
        self.members.tidy(own.lease).await;
        Ok(Reheld::Done)
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    /// The latest token that was released stays.
    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
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

    /// Locks that somebody uses or once used. All names are read at the beginning; what is behind them is not.
    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            let prefixes = self.keys.of_all_locks();
            let keys = |prefix| TxnOp::get(prefix, Some(GetOptions::new().with_prefix().with_keys_only()));
            let mut reads = self.members.read(prefixes.clone().map(keys)).await?;
            self.listing.clear();
            for prefix in prefixes {
                self.listing.extend(reads.range()?.kvs().iter().filter_map(|kv| name_in(kv.key(), &prefix)));
            }
        }
        let (names, next) = next_names(&mut self.listing, PAGE);
        Ok(Page { locks: self.states_of(&names).await?, next })
    }

    async fn examine(&mut self) -> Result<Checkup> {
        doctor::examine(&mut self.members).await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder moved its key to another lease just now: the mark has to end with the key's own lease.
        // Also if somebody else has written the history.
        for _ in 0..10 {
            let View { queue, runs, .. } = self.view_of(name).await?;
            let is_meant = |one: &&Entry| one.contender().is_still(from);
            let Some(holder) = holders(&queue).map(|at| &queue[at]).find(is_meant) else { return Ok(Revoked::NotHeld) };
            let cut_short = |reason: &str| {
                let run = runs.cut_short(from, reason);
                run.map(|run| self.keys.put_run(name, &runs, &run, DEFAULT_HISTORY)).unwrap_or_default()
            };
            let (then, done) = match how {
                Revoke::Safely { .. } if holder.record.is_none() => {
                    return Ok(Revoked::Impossible(FOREIGN_HOLDER.to_owned()));
                }
                Revoke::Safely { reason } => {
                    let mut then = vec![self.keys.put_mark(name, holder, reason)];
                    // After `dlock acquire` there is no dlock that could say later how it ended.
                    if holder.is_left_behind() {
                        then.extend(cut_short(reason));
                    }
                    (then, Revoked::Marked)
                }
                Revoke::Now { reason } => {
                    let mut then = self.keys.put_released(name, holder.token());
                    then.push(TxnOp::delete(holder.key.as_slice(), None));
                    if holder.record.is_some() && holder.lease != 0 {
                        then.push(self.keys.put_mark(name, holder, reason));
                    }
                    then.extend(cut_short(reason));
                    (then, Revoked::Freed)
                }
            };
            let key = holder.key.as_slice();
            let unless = [
                Compare::create_revision(key, CompareOp::Equal, holder.created),
                Compare::lease(key, CompareOp::Equal, holder.lease),
                self.keys.unchanged(name, &runs),
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
}

/// The lock that a key belongs to. A key that has no name of ours in it belongs to no lock of ours.
fn name_in(key: &[u8], prefix: &str) -> Option<LockName> {
    LockName::decode(std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.split('/').next()?)
}
