//! The recipe: taking a place in the queue, keeping it until it is our turn, and releasing the lock.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, SortOrder, SortTarget, Txn, TxnOp, TxnResponse};

use super::Etcd;
use super::errors::Refusal;
use super::keys::lease_id;
use super::queue::{Details, Entry, Reads};
use super::runs::{Granted, Runs};
use super::watch::WatchedKey;
use crate::backend::{Ask, Attempt, Busy, Ending, Lease, Released, taken_away};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::queue::{free_slot, may_hold, waiters, watched};
use crate::lock::{Contends, Grant, Holder, LastRun, LockName, Mode, Record, SeenHolders, Token, messages};
use crate::report::describe;

/// Our place in a queue.
#[derive(Clone, Copy)]
pub(super) struct Place {
    lease: i64,
    /// The create revision of our key, which is our place in the order; `None` if it was not made.
    created: Option<i64>,
    /// There are contenders that share the lock. Only their records tell.
    among_sharers: bool,
    grant: Grant,
}

impl Place {
    fn next_keep_alive(&self) -> Instant {
        self.grant.from + self.grant.ttl / 3
    }
}

/// One look at a queue, and at what was read along with it.
pub struct Look {
    /// All of it, or only as far as our own place.
    entries: Vec<Entry>,
    /// The latest token that was released.
    released: Option<Token>,
    runs: Runs,
    /// Why an operator wants us to release the lock.
    mark: Option<String>,
    /// The value of the `once` key that was asked for.
    once: Option<String>,
    revision: i64,
    raft_term: u64,
}

impl Look {
    /// Reads the answer to [`Etcd::reads`].
    fn read(answer: &TxnResponse, ask: &Ask, place: Option<Place>) -> Result<Look> {
        let mut reads = Reads::of(answer)?;
        let mut entries = reads.entries()?;
        if needs_keys_only(ask, place) {
            let head = reads.entries()?.pop();
            entries.first_mut().into_iter().zip(head).for_each(|(first, head)| *first = head);
        }
        Ok(Look {
            entries,
            released: reads.value()?.and_then(|token| token.parse().ok()).map(Token),
            runs: Runs::read(&reads.range()?, &reads.range()?),
            mark: reads.value()?,
            once: if ask.once.is_some() { reads.value()? } else { None },
            revision: reads.revision,
            raft_term: reads.raft_term,
        })
    }

    fn position(&self, key: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.key == key.as_bytes())
    }
}

impl Etcd {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        loop {
            let look = match self.look_again(ask).await? {
                Some(look) => look,
                None => self.enter(ask).await?,
            };
            if look.once.is_some() {
                self.give_up_place(ask).await?;
                return Ok(Attempt::AlreadyRan);
            }
            let place = self.place.context("we have no place in the queue")?;
            let me = look.position(&self.own_key(ask));
            let ahead = &look.entries[..me.unwrap_or(look.entries.len())];
            let differs = |one: &&Entry| !one.is_foreign() && one.mode().slots() != ask.mode.slots();
            if let Some(other) = ahead.iter().find(differs) {
                self.give_up_place(ask).await?;
                let who = describe(&other.contender().into_holder());
                return Ok(Attempt::OtherSlots(messages::other_slots(who, other.mode(), ask.mode)));
            }
            let is_present = |key: &str| look.position(key).is_some();
            let vanished = self.seen.may_run_until(clock::now(), is_present, look.released);
            let Some(me) = me.filter(|_| may_hold(ask.mode, ahead)).map(|at| &look.entries[at]) else {
                return self.wait(ask, place, &look, ahead).await.map(Attempt::Busy);
            };
            if let Some(reason) = look.mark {
                self.give_up_place(ask).await?;
                return Err(taken_away(&reason));
            }
            self.watch(self.about_us(ask, me), look.revision);
            if let Some(until) = vanished {
                // It is our turn, but the holder before us may still run its command.
                let ask_again = until.min(place.next_keep_alive());
                return Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again }));
            }
            self.expect_newest_token(ask, &look, me).await?;
            let (token, slot) = match ask.mode {
                Mode::Slots(_) => match self.take_slot(ask, &look, me).await? {
                    Some((token, slot)) => (token, Some(slot)),
                    None => continue,
                },
                Mode::Exclusive | Mode::Shared => (me.token(), None),
            };
            // Unless our key was made in the transaction that we look at.
            if slot.is_none() && me.created != look.revision {
                self.announcement = Some(announcement(me)?);
            }
            self.seen = SeenHolders::default();
            let acquired_at = Some(clock::wall());
            let holder = Holder { fencing_token: Some(token), acquired_at, ..ask.who.clone().into() };
            let (runs, note) = (look.runs.vanished(&look.entries, token), LastRun::vanished(&holder));
            self.granted = Some(Granted { token, runs, note, is_noted: false });
            let (name, owner, descriptors) = (ask.name.clone(), ask.who.owner.clone(), Vec::new());
            return Ok(Attempt::Granted(Lease { name, owner, token, slot, grant: place.grant, descriptors }));
        }
    }

    /// Takes a place at the end of the queue, or finds the one we have. The answer may lack us: if the
    /// `once` key is on record, or if we must not wait and would have to.
    pub async fn enter(&mut self, ask: &Ask) -> Result<Look> {
        let lease = lease_id(&ask.name, ask.who.owner.as_str());
        let extended = self.members.grant_lease(lease, ask.ttl).await?;
        let key = self.own_key(ask);
        let record = Record::waiting(&ask.who, ask.mode, ask.ttl).to_json();
        let mut seen = 0;
        let look = loop {
            let mut unless = vec![Compare::create_revision(key.as_str(), CompareOp::Equal, 0)];
            unless.extend(self.once_key(ask).map(|once| Compare::create_revision(once, CompareOp::Equal, 0)));
            if !ask.queue {
                unless.push(self.nobody_came(&ask.name, seen));
            }
            let put = TxnOp::put(key.as_str(), record.as_str(), Some(PutOptions::new().with_lease(lease)));
            let reads = self.reads(ask, None);
            let then: Vec<_> = std::iter::once(put).chain(reads.clone()).collect();
            let answer = self.members.transact(Txn::new().when(unless).and_then(then).or_else(reads)).await?;
            let look = Look::read(&answer, ask, None)?;
            let is_settled = look.position(&key).is_some() || look.once.is_some();
            if answer.succeeded() || is_settled || !may_hold(ask.mode, &look.entries) {
                break look;
            }
            seen = look.revision;
        };
        let created = look.position(&key).map(|me| look.entries[me].created);
        let among_sharers = look.entries.iter().any(|one| one.mode() == Mode::Shared);
        self.place = Some(Place { lease, created, among_sharers, grant: extended.confirmed_in(look.raft_term)? });
        Ok(look)
    }

    /// Keeps the place we have and looks at the queue as far as it matters; `None` if we have no place, or have it no
    /// more.
    async fn look_again(&mut self, ask: &Ask) -> Result<Option<Look>> {
        let lease = lease_id(&ask.name, ask.who.owner.as_str());
        let Some(mut place) = self.place.take().filter(|place| place.lease == lease) else { return Ok(None) };
        let mut extended = None;
        if place.next_keep_alive().has_passed() {
            extended = self.members.keep_alive(lease).await?;
            if extended.is_none() {
                return Ok(None);
            }
        }
        let answer = self.members.transact(Txn::new().and_then(self.reads(ask, Some(place)))).await?;
        let look = Look::read(&answer, ask, Some(place))?;
        if look.position(&self.own_key(ask)).is_none() {
            return Ok(None);
        }
        if let Some(extended) = extended {
            place.grant = extended.confirmed_in(look.raft_term)?;
        }
        self.place = Some(place);
        Ok(Some(look))
    }

    /// Who holds the lock, and until when to wait for a change.
    async fn wait(&mut self, ask: &Ask, place: Place, look: &Look, ahead: &[Entry]) -> Result<Busy> {
        let mut ask_again = place.next_keep_alive();
        if ask.queue {
            let watched = watched(ask.mode, ahead);
            let keys = watched.iter().map(|watched| WatchedKey::of(watched, self.keys.queue(&ask.name)));
            self.watch(keys.collect(), look.revision);
            if let Some(look_again) = self.see_holder(ask.mode, ahead).await {
                ask_again = ask_again.min(look_again);
            }
        } else {
            self.give_up_place(ask).await?;
        }
        let holder = ahead.first().map(|holder| holder.contender().into_holder());
        Ok(Busy { holder, ahead: Some(waiters(ahead)), ask_again })
    }

    fn watch(&mut self, keys: Vec<WatchedKey>, seen: i64) {
        if !self.watch.watches(&keys) {
            self.members.end_watch();
        }
        self.watch.set(keys, seen);
    }

    /// Remembers an exclusive holder, in case it vanishes. The next in the queue also asks how long its lease lasts, so
    /// that it need not wait for one that ended by itself, and looks again in time to see the last renewal.
    async fn see_holder(&mut self, mode: Mode, ahead: &[Entry]) -> Option<Instant> {
        let (holder, others) = ahead.split_first()?;
        if holder.mode() != Mode::Exclusive || holder.is_left_behind() {
            return None;
        }
        let ttl = holder.ttl()?;
        let from = clock::now();
        let is_next = may_hold(mode, others);
        let mut lasts_until = None;
        if is_next {
            let rest = self.members.call(async |mut client| client.lease_time_to_live(holder.lease, None).await).await;
            let rest = rest.ok().map(|rest| Duration::from_secs(u64::try_from(rest.ttl()).unwrap_or(0)));
            lasts_until = Some(from + rest.unwrap_or(ttl));
        }
        self.seen.see(&String::from_utf8_lossy(&holder.key), holder.token(), ttl, lasts_until);
        is_next.then(|| from + ttl.max(Duration::from_secs(1)) / 3)
    }

    /// Refuses to go on where etcd's revisions went back. With shares and slots a holder may end before another one
    /// asks for its token, so that only etcd's own revision tells.
    async fn expect_newest_token(&mut self, ask: &Ask, look: &Look, me: &Entry) -> Result<()> {
        let newest = match ask.mode {
            Mode::Exclusive => me.token(),
            Mode::Shared | Mode::Slots(_) => Token(look.revision.unsigned_abs() + 1),
        };
        let last_run = look.runs.history.runs.first().map(|run| run.fencing_token);
        let Some(recorded) = messages::newer_on_record(newest, look.released.into_iter().chain(last_run)) else {
            return Ok(());
        };
        self.give_up_place(ask).await?;
        let (runs, released) = (self.keys.last_run(&ask.name), self.keys.released(&ask.name));
        let cause = "etcd's revisions went back, as by a restored snapshot or on another cluster";
        let advice = format!(
            "Restore with etcdutl snapshot restore --bump-revision, or, if nothing compares with the old tokens any \
             more, type: etcdctl del {runs} && etcdctl del {released}"
        );
        Err(Fault::StaleToken.because(messages::counter_went_back(newest, recorded, cause, advice)))
    }

    /// Takes a slot that nobody has, if we have none yet. `None` if our place was lost on the way, or
    /// somebody else may have taken the slot.
    async fn take_slot(&mut self, ask: &Ask, look: &Look, me: &Entry) -> Result<Option<(Token, u32)>> {
        if let Some(slot) = me.slot() {
            return Ok(Some((me.token(), slot)));
        }
        let slot = free_slot(look.entries.iter().filter_map(Entry::slot));
        let is_there = Compare::create_revision(me.key.as_slice(), CompareOp::Equal, me.created);
        let taking = Txn::new().when([is_there, self.nobody_came(&ask.name, look.revision)]);
        match self.members.transact(taking.and_then([say_held(me, Some(slot))?])).await {
            Ok(answer) if answer.succeeded() => {
                let revision = answer.header().context("etcd answered without a header")?.revision();
                Ok(Some((Token(revision.unsigned_abs()), slot)))
            }
            Ok(_) => Ok(None),
            Err(error) if Refusal::of(&error) == Some(Refusal::NoSuchLease) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn give_up_place(&mut self, ask: &Ask) -> Result<()> {
        (self.place, self.seen) = (None, SeenHolders::default());
        self.members.revoke_lease(lease_id(&ask.name, ask.who.owner.as_str())).await
    }

    pub(super) async fn release_place(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let id = lease_id(&lease.name, lease.owner.as_str());
        let key = self.keys.contender(&lease.name, id);
        let let_go = match ending.hold_until.map(Instant::remaining).filter(|rest| !rest.is_zero()) {
            None => TxnOp::delete(key.as_str(), None),
            Some(rest) => {
                let answer = self.members.transact(Txn::new().and_then([TxnOp::get(key.as_str(), None)])).await?;
                let Some(own) = Reads::of(&answer)?.entries()?.pop() else { return Ok(Released::NotOurs) };
                let Some(record) = own.record else { bail!(messages::overwritten(&key)) };
                self.put_on_new_lease(&key, &record.left_behind(lease.token), rest).await?
            }
        };
        let granted = self.granted.as_ref().filter(|granted| granted.token == lease.token);
        let mut runs = granted.map(|granted| granted.runs.clone()).unwrap_or_default();
        // Once more whenever another holder or an operator has written the history since.
        loop {
            let note = self.delete_note(&lease.name, lease.token);
            let (mut when, mut then) = (
                vec![still_ours(&key, lease)],
                vec![let_go.clone(), self.put_released(&lease.name, lease.token), note],
            );
            if let Some(run) = &ending.last_run {
                when.push(self.unchanged(&lease.name, &runs));
                then.extend(self.put_run(&lease.name, &runs, run, ending.keep));
            }
            let mut traces = vec![
                TxnOp::get(key.as_str(), None),
                TxnOp::get(self.keys.mark(&lease.name, key.as_bytes()), None),
                TxnOp::get(self.keys.queue(&lease.name), Some(in_order().with_keys_only())),
            ];
            traces.extend(self.read_runs(&lease.name));
            let answer = self.members.transact(Txn::new().when(when).and_then(then).or_else(traces)).await?;
            if answer.succeeded() {
                break;
            }
            let mut reads = Reads::of(&answer)?;
            let (own, mark, queue) = (reads.entries()?.pop(), reads.value()?, reads.entries()?);
            runs = Runs::read(&reads.range()?, &reads.range()?).vanished(&queue, lease.token);
            // An earlier try may have been applied without an answer: it left our key behind, or our record.
            let is_ours = own.as_ref().is_some_and(|own| own.token() == lease.token);
            let left_behind = own.as_ref().is_some_and(|own| is_ours && own.is_left_behind());
            if left_behind || ending.last_run.as_ref().is_some_and(|run| runs.history.has_ending(run)) {
                break;
            }
            if !is_ours {
                return Ok(mark.filter(|_| own.is_none()).map_or(Released::NotOurs, Released::ForceReleased));
            }
        }
        self.members.tidy(id).await;
        Ok(Released::Done)
    }

    /// Attaches a key to a new lease that nobody renews: the ttl of our own cannot be changed. The key keeps its place in
    /// the queue, so that other programs wait for its end as well.
    pub(super) async fn put_on_new_lease(
        &mut self,
        key: &str,
        record: &Record<Details>,
        ttl: Duration,
    ) -> Result<TxnOp> {
        let lease = PutOptions::new().with_lease(self.members.grant_any_lease(ttl).await?);
        Ok(TxnOp::put(key, record.to_json(), Some(lease)))
    }

    /// Tells the next holder that it need not wait out the one before.
    pub(super) fn put_released(&self, name: &LockName, token: Token) -> TxnOp {
        TxnOp::put(self.keys.released(name), token.to_string(), None)
    }

    /// What a [`Look`] is read from. A contender that has a `place` reads the queue no further than that, unless it wants
    /// a slot: slots may have been taken behind it.
    fn reads(&self, ask: &Ask, place: Option<Place>) -> Vec<TxnOp> {
        let (name, mut queue) = (&ask.name, in_order());
        if let Some(created) = place.and_then(|place| place.created).filter(|_| !matches!(ask.mode, Mode::Slots(_))) {
            queue = queue.with_max_create_revision(created);
        }
        let mut reads = Vec::new();
        if needs_keys_only(ask, place) {
            reads.push(TxnOp::get(self.keys.queue(name), Some(queue.clone().with_keys_only())));
            queue = queue.with_limit(1);
        }
        reads.push(TxnOp::get(self.keys.queue(name), Some(queue)));
        let mark = self.keys.mark(name, self.own_key(ask).as_bytes());
        reads.push(TxnOp::get(self.keys.released(name), None));
        reads.extend(self.read_runs(name));
        reads.push(TxnOp::get(mark, None));
        reads.extend(self.once_key(ask).map(|once| TxnOp::get(once, None)));
        reads
    }

    fn once_key(&self, ask: &Ask) -> Option<String> {
        ask.once.as_deref().map(|key| self.keys.once(&ask.name, key))
    }

    fn own_key(&self, ask: &Ask) -> String {
        self.keys.contender(&ask.name, lease_id(&ask.name, ask.who.owner.as_str()))
    }

    /// Nobody came, to hold the lock or to wait for it, since this revision.
    pub(super) fn nobody_came(&self, name: &LockName, since: i64) -> Compare {
        Compare::mod_revision(self.keys.queue(name), CompareOp::Less, since + 1).with_prefix()
    }

    /// What may happen to the first in the queue: its key is deleted, or an operator asks it to stop.
    fn about_us(&self, ask: &Ask, me: &Entry) -> Vec<WatchedKey> {
        let mark = self.keys.mark(&ask.name, &me.key);
        vec![WatchedKey::EndOf(me.key.clone()), WatchedKey::AnyChangeOf(mark)]
    }
}

/// An exclusive waiter has compared its number of slots when it came. From then on it needs no record but that of the
/// first in the queue, unless some share the lock. Records are most of what waiters read: with many waiters, reading all
/// of them takes the processor.
fn needs_keys_only(ask: &Ask, place: Option<Place>) -> bool {
    ask.mode == Mode::Exclusive && place.is_some_and(|place| place.created.is_some() && !place.among_sharers)
}

pub(super) fn in_order() -> GetOptions {
    GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend)
}

/// Writes to our key since when we hold the lock, for `status`. If it arrives late, when the key was left behind on
/// another lease, it changes nothing.
fn announcement(me: &Entry) -> Result<Txn> {
    let untouched = Compare::mod_revision(me.key.as_slice(), CompareOp::Equal, me.modified);
    Ok(Txn::new().when([untouched]).and_then([say_held(me, None)?]))
}

fn say_held(me: &Entry, slot: Option<u32>) -> Result<TxnOp> {
    let record = me.record.clone().context("our key holds something that is not ours")?.holding(slot);
    Ok(TxnOp::put(me.key.as_slice(), record.to_json(), Some(PutOptions::new().with_lease(me.lease))))
}

/// What is true of a lease's key as long as the lock is ours.
pub(super) fn still_ours(key: &str, lease: &Lease) -> Compare {
    let token = i64::try_from(lease.token.0).unwrap_or(i64::MAX);
    match lease.slot {
        Some(_) => Compare::mod_revision(key, CompareOp::Equal, token),
        None => Compare::create_revision(key, CompareOp::Equal, token),
    }
}
