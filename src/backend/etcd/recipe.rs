//! Acquiring: taking a place in the queue, and keeping it until it is our turn.

use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};

use super::Etcd;
use super::client::{Watch, WatchedKey, change_of, end_of};
use super::errors::{NO_SUCH_LEASE, is_refusal};
use super::queue::{Details, Entry, Reads, View};
use crate::backend::{Ask, Attempt, Busy, taken_away};
use crate::clock::{self, Instant};
use crate::lock::queue::{Watched, free_slot, may_hold, waiters, watched};
use crate::lock::{Contends, Grant, LockName, Mode, Record, Runs, SeenHolders, Token};

/// Our place in a queue.
#[derive(Clone, Copy)]
pub(super) struct Place {
    lease: i64,
    /// The create revision of our key, which is our place in the order; 0 if it was not made.
    created: i64,
    grant: Grant,
}

impl Place {
    fn next_keep_alive(&self) -> Instant {
        self.grant.from + self.grant.ttl / 3
    }
}

/// What we know of a lock from when it was granted to us.
pub(super) struct Granted {
    pub token: Token,
    pub runs: Runs<i64>,
    /// What our key says from now on; with slots already, else when the run has lasted a moment.
    pub record: Record<Details>,
}

impl Etcd {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        loop {
            let view = match self.look_again(ask).await? {
                Some(view) => view,
                None => self.enter(ask).await?,
            };
            if view.ran_once {
                return Ok(Attempt::AlreadyRan);
            }
            let place = self.place.context("we have no place in the queue")?;
            let (_, key) = self.keys.own(&ask.name, &ask.who.owner);
            let me = view.position(&key);
            let ahead = &view.queue[..me.unwrap_or(view.queue.len())];
            let differs = |one: &&Entry| one.record.is_some() && one.mode().slots() != ask.mode.slots();
            if let Some(other) = ahead.iter().find(differs) {
                return Ok(ask.differs_from(other.contender()));
            }
            let vanished = self.seen.may_run_until(clock::now(), |key| view.entry(key).is_some(), view.released);
            let Some(me) = me.filter(|_| may_hold(ask.mode, ahead)).map(|at| &view.queue[at]) else {
                return Ok(self.wait(ask, place, ahead, view.revision).await);
            };
            let mark = self.keys.mark(&ask.name, &me.key);
            if let Some(reason) = view.reason(&mark) {
                return Err(taken_away(&reason));
            }
            // From now on our key may be deleted, or an operator may ask us to stop.
            self.watch(view.revision, vec![end_of(key), change_of(mark)]);
            if let Some(until) = vanished {
                // It is our turn, but the holder before us may still run its command.
                let ask_again = until.min(place.next_keep_alive());
                return Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again }));
            }
            self.check_token(ask, &view, me)?;
            let mut record = me.record.clone().context("our key holds something that is not ours")?;
            let mut token = me.token();
            record.details.held_since.get_or_insert_with(clock::wall);
            if matches!(ask.mode, Mode::Slots(_)) && record.details.slot.is_none() {
                record.details.slot = Some(free_slot(view.queue.iter().filter_map(Entry::slot)));
                match self.say_slot(ask, &view, me, &record).await? {
                    Some(revision) => token = revision,
                    None => continue,
                }
            }
            let slot = record.details.slot;
            self.granted = Some(Granted { token, runs: view.runs, record });
            self.seen = SeenHolders::default();
            return Ok(Attempt::Granted(ask.lease(token, slot, place.grant)));
        }
    }

    /// Takes a place at the end of the queue, or finds the one we have. The answer may lack us: if the
    /// `once` key is on record, or if we must not wait and would have to.
    pub async fn enter(&mut self, ask: &Ask) -> Result<View> {
        let (lease, key) = self.keys.own(&ask.name, &ask.who.owner);
        let extended = self.members.grant_lease(lease, ask.ttl).await?;
        let record = Record::waiting(&ask.who, ask.mode, ask.ttl).to_json();
        let put = TxnOp::put(key.as_str(), record, Some(PutOptions::new().with_lease(lease)));
        let once = ask.once.as_deref();
        let missing = |key: &str| Compare::create_revision(key, CompareOp::Equal, 0);
        let mut seen = 0;
        loop {
            let mut unless = vec![missing(&key)];
            unless.extend(once.map(|once| missing(&self.keys.once(&ask.name, once))));
            if !ask.queue {
                unless.push(self.nobody_came(&ask.name, seen));
            }
            let reads = View::requests(&self.keys, &ask.name, 0, once);
            let then = [vec![put.clone()], reads.clone()].concat();
            let answer = self.members.transact(Txn::new().when(unless).and_then(then).or_else(reads)).await?;
            let view = View::read(&mut Reads::of(&answer)?, 0, once)?;
            let me = view.entry(&key);
            if me.is_some() || view.ran_once || !may_hold(ask.mode, &view.queue) {
                let created = me.map_or(0, |me| me.created);
                self.place = Some(Place { lease, created, grant: extended.confirmed_in(view.raft_term)? });
                return Ok(view);
            }
            seen = view.revision;
        }
    }

    /// Keeps the place we have and looks at the queue as far as it matters; `None` if we have no place, or have it no
    /// more.
    async fn look_again(&mut self, ask: &Ask) -> Result<Option<View>> {
        let (lease, key) = self.keys.own(&ask.name, &ask.who.owner);
        let Some(mut place) = self.place.take().filter(|place| place.lease == lease) else { return Ok(None) };
        let mut extended = None;
        if place.next_keep_alive().has_passed() {
            extended = self.members.keep_alive(lease).await?;
            if extended.is_none() {
                return Ok(None);
            }
        }
        // Slots may have been taken behind us.
        let until = if matches!(ask.mode, Mode::Slots(_)) { 0 } else { place.created };
        let once = ask.once.as_deref();
        let mut reads = self.members.read(View::requests(&self.keys, &ask.name, until, once)).await?;
        let view = View::read(&mut reads, until, once)?;
        if view.entry(&key).is_none() {
            return Ok(None);
        }
        if let Some(extended) = extended {
            place.grant = extended.confirmed_in(view.raft_term)?;
        }
        self.place = Some(place);
        Ok(Some(view))
    }

    /// Who holds the lock, and until when to wait for a change.
    async fn wait(&mut self, ask: &Ask, place: Place, ahead: &[Entry], revision: i64) -> Attempt {
        let mut ask_again = place.next_keep_alive();
        if ask.queue {
            let watched = watched(ask.mode, ahead).map(|watched| match watched {
                Watched::EndOf(one) => end_of(one.key.as_slice()),
                Watched::EndOfAny(_) => {
                    let (prefix, end) = end_of(self.keys.queue(&ask.name));
                    (prefix, end.with_prefix())
                }
                Watched::ChangeOf(one) => change_of(one.key.as_slice()),
            });
            self.watch(revision, watched.into_iter().collect());
            if let Some(look_again) = self.see_holder(ask.mode, ahead).await {
                ask_again = ask_again.min(look_again);
            }
        }
        let holder = ahead.first().map(Entry::contender);
        Attempt::Busy(Busy { holder, ahead: Some(waiters(ahead)), ask_again })
    }

    fn watch(&mut self, seen: i64, keys: Vec<WatchedKey>) {
        self.members.end_watch();
        self.watch = Watch { keys, from: seen + 1 };
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
            let rest = self.members.rest_of_lease(holder.lease).await;
            lasts_until = Some(from + rest.map_or(ttl, |(rest, _)| rest.unwrap_or_default()));
        }
        self.seen.see(&String::from_utf8_lossy(&holder.key), holder.token(), ttl, lasts_until);
        is_next.then(|| from + ttl.max(Duration::from_secs(1)) / 3)
    }

    /// Refuses our token if etcd's revisions went back.
    fn check_token(&self, ask: &Ask, view: &View, me: &Entry) -> Result<()> {
        let last_run = view.runs.history.last.as_ref().map(|run| run.fencing_token);
        let cause = "etcd's revisions went back, as by a restored snapshot or on another cluster";
        let advice = format!(
            "Restore with etcdutl snapshot restore --bump-revision, or, if nothing compares with the old tokens any \
             more, type: etcdctl del {} && etcdctl del {}",
            self.keys.last_run(&ask.name),
            self.keys.released(&ask.name),
        );
        let next = Token(view.revision.unsigned_abs() + 1);
        ask.check_token([me.token(), next], view.released.into_iter().chain(last_run), [cause, &advice])
    }

    /// Writes to our key which slot we take; its revision is the token. `None` if our place was lost on the way, or
    /// somebody else may have taken the slot.
    async fn say_slot(
        &mut self,
        ask: &Ask,
        view: &View,
        me: &Entry,
        record: &Record<Details>,
    ) -> Result<Option<Token>> {
        let put = TxnOp::put(me.key.as_slice(), record.to_json(), Some(PutOptions::new().with_lease(me.lease)));
        let is_there = Compare::create_revision(me.key.as_slice(), CompareOp::Equal, me.created);
        let taking = Txn::new().when([is_there, self.nobody_came(&ask.name, view.revision)]);
        match self.members.transact(taking.and_then([put])).await {
            Ok(answer) if answer.succeeded() => Ok(Some(Token(Reads::of(&answer)?.revision.unsigned_abs()))),
            Ok(_) => Ok(None),
            Err(error) if is_refusal(&error, NO_SUCH_LEASE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn give_up_place(&mut self, ask: &Ask) -> Result<()> {
        (self.place, self.seen) = (None, SeenHolders::default());
        self.members.revoke_lease(self.keys.own(&ask.name, &ask.who.owner).0).await
    }

    /// Nobody came, to hold the lock or to wait for it, since this revision.
    pub(super) fn nobody_came(&self, name: &LockName, since: i64) -> Compare {
        Compare::mod_revision(self.keys.queue(name), CompareOp::Less, since + 1).with_prefix()
    }
}
