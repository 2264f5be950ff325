//! Acquiring: taking a place in the queue, and keeping it until it is our turn.

use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp, TxnResponse};

use super::Etcd;
use super::client::Watch;
use super::errors::{NO_SUCH_LEASE, is_refusal};
use super::keys::lease_id;
use super::queue::{Entry, Reads, View};
use crate::backend::{Ask, Attempt, Busy, Lease, stale_token, taken_away};
use crate::clock::{self, Instant};
use crate::lock::queue::{Watched, free_slot, may_hold, waiters, watched};
use crate::lock::{Contends, Grant, LockName, Mode, Record, Runs, SeenHolders, Token, runs};

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
    /// What to write when the run has lasted a moment: what to have on record of it if we vanish and, for `status`, since
    /// when we hold the lock.
    pub start: Vec<TxnOp>,
}

impl Etcd {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        loop {
            let view = match self.look_again(ask).await? {
                Some(view) => view,
                None => self.enter(ask).await?,
            };
            if view.ran_once {
                self.give_up_place(ask).await?;
                return Ok(Attempt::AlreadyRan);
            }
            let place = self.place.context("we have no place in the queue")?;
            let key = self.own_key(ask);
            let me = view.position(key.as_bytes());
            let ahead = &view.queue[..me.unwrap_or(view.queue.len())];
            let differs = |one: &&Entry| one.record.is_some() && one.mode().slots() != ask.mode.slots();
            if let Some(other) = ahead.iter().find(differs) {
                self.give_up_place(ask).await?;
                return Ok(ask.differs_from(other.contender()));
            }
            let is_present = |key: &str| view.position(key.as_bytes()).is_some();
            let vanished = self.seen.may_run_until(clock::now(), is_present, view.released);
            let Some(me) = me.filter(|_| may_hold(ask.mode, ahead)).map(|at| &view.queue[at]) else {
                return self.wait(ask, place, ahead, view.revision).await.map(Attempt::Busy);
            };
            let mark = self.keys.mark(&ask.name, &me.key);
            if let Some(reason) = view.reason(&mark) {
                self.give_up_place(ask).await?;
                return Err(taken_away(&reason));
            }
            // From now on our key may be deleted, or an operator may ask us to stop.
            self.watch(Watch::after(view.revision).end_of(key).change_of(mark));
            if let Some(until) = vanished {
                // It is our turn, but the holder before us may still run its command.
                let ask_again = until.min(place.next_keep_alive());
                return Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again }));
            }
            if let Some(stale) = self.stale_token(ask, &view, me) {
                self.give_up_place(ask).await?;
                return Err(stale);
            }
            let (token, slot) = match ask.mode {
                Mode::Slots(_) => match self.take_slot(ask, &view, me).await? {
                    Some((token, slot)) => (token, Some(slot)),
                    None => continue,
                },
                Mode::Exclusive | Mode::Shared => (me.token(), None),
            };
            let note = runs::note(&ask.who, token, Some(clock::wall())).to_json();
            let mut start = vec![TxnOp::put(self.keys.noted(&ask.name, token), note, None)];
            // With slots the key says so already, and its revision is the token.
            if slot.is_none() {
                start.push(say_held(me, None)?);
            }
            self.granted = Some(Granted { token, runs: view.runs, start });
            self.seen = SeenHolders::default();
            return Ok(Attempt::Granted(ask.lease(token, slot, place.grant)));
        }
    }

    /// Takes a place at the end of the queue, or finds the one we have. The answer may lack us: if the
    /// `once` key is on record, or if we must not wait and would have to.
    pub async fn enter(&mut self, ask: &Ask) -> Result<View> {
        let lease = lease_id(&ask.name, ask.who.owner.as_str());
        let extended = self.members.grant_lease(lease, ask.ttl).await?;
        let key = self.own_key(ask);
        let record = Record::waiting(&ask.who, ask.mode, ask.ttl).to_json();
        let put = TxnOp::put(key.as_str(), record, Some(PutOptions::new().with_lease(lease)));
        let mut seen = 0;
        loop {
            let mut unless = vec![Compare::create_revision(key.as_str(), CompareOp::Equal, 0)];
            unless.extend(self.once_key(ask).map(|once| Compare::create_revision(once, CompareOp::Equal, 0)));
            if !ask.queue {
                unless.push(self.nobody_came(&ask.name, seen));
            }
            let reads = self.look_requests(ask, 0);
            let then: Vec<_> = std::iter::once(put.clone()).chain(reads.clone()).collect();
            let answer = self.members.transact(Txn::new().when(unless).and_then(then).or_else(reads)).await?;
            let view = read_look(&answer, ask, 0)?;
            let me = view.position(key.as_bytes());
            if me.is_some() || view.ran_once || !may_hold(ask.mode, &view.queue) {
                let created = me.map_or(0, |me| view.queue[me].created);
                self.place = Some(Place { lease, created, grant: extended.confirmed_in(view.raft_term)? });
                return Ok(view);
            }
            seen = view.revision;
        }
    }

    /// Keeps the place we have and looks at the queue as far as it matters; `None` if we have no place, or have it no
    /// more.
    async fn look_again(&mut self, ask: &Ask) -> Result<Option<View>> {
        let lease = lease_id(&ask.name, ask.who.owner.as_str());
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
        let answer = self.members.transact(Txn::new().and_then(self.look_requests(ask, until))).await?;
        let view = read_look(&answer, ask, until)?;
        if view.position(self.own_key(ask).as_bytes()).is_none() {
            return Ok(None);
        }
        if let Some(extended) = extended {
            place.grant = extended.confirmed_in(view.raft_term)?;
        }
        self.place = Some(place);
        Ok(Some(view))
    }

    fn look_requests(&self, ask: &Ask, until: i64) -> Vec<TxnOp> {
        let once = self.once_key(ask).map(|once| TxnOp::get(once, None));
        View::requests(&self.keys, &ask.name, until).into_iter().chain(once).collect()
    }

    /// Who holds the lock, and until when to wait for a change.
    async fn wait(&mut self, ask: &Ask, place: Place, ahead: &[Entry], revision: i64) -> Result<Busy> {
        let mut ask_again = place.next_keep_alive();
        if ask.queue {
            let watch = Watch::after(revision);
            self.watch(match watched(ask.mode, ahead) {
                Some(Watched::EndOf(one)) => watch.end_of(one.key.as_slice()),
                Some(Watched::EndOfAny(_)) => watch.end_of_any(self.keys.queue(&ask.name)),
                Some(Watched::ChangeOf(one)) => watch.change_of(one.key.as_slice()),
                None => watch,
            });
            if let Some(look_again) = self.see_holder(ask.mode, ahead).await {
                ask_again = ask_again.min(look_again);
            }
        } else {
            self.give_up_place(ask).await?;
        }
        let holder = ahead.first().map(|holder| holder.contender().into_holder());
        Ok(Busy { holder, ahead: Some(waiters(ahead)), ask_again })
    }

    fn watch(&mut self, watch: Watch) {
        self.members.end_watch();
        self.watch = watch;
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

    /// Why our token must not be handed out, if etcd's revisions went back.
    fn stale_token(&self, ask: &Ask, view: &View, me: &Entry) -> Option<anyhow::Error> {
        let last_run = view.runs.history.runs.first().map(|run| run.fencing_token);
        let cause = "etcd's revisions went back, as by a restored snapshot or on another cluster";
        let advice = format!(
            "Restore with etcdutl snapshot restore --bump-revision, or, if nothing compares with the old tokens any \
             more, type: etcdctl del {} && etcdctl del {}",
            self.keys.last_run(&ask.name),
            self.keys.released(&ask.name),
        );
        let next = Token(view.revision.unsigned_abs() + 1);
        stale_token(ask.mode, me.token(), next, view.released.into_iter().chain(last_run), cause, &advice)
    }

    /// Takes a slot that nobody has, if we have none yet. `None` if our place was lost on the way, or
    /// somebody else may have taken the slot.
    async fn take_slot(&mut self, ask: &Ask, view: &View, me: &Entry) -> Result<Option<(Token, u32)>> {
        if let Some(slot) = me.slot() {
            return Ok(Some((me.token(), slot)));
        }
        let slot = free_slot(view.queue.iter().filter_map(Entry::slot));
        let is_there = Compare::create_revision(me.key.as_slice(), CompareOp::Equal, me.created);
        let taking = Txn::new().when([is_there, self.nobody_came(&ask.name, view.revision)]);
        match self.members.transact(taking.and_then([say_held(me, Some(slot))?])).await {
            Ok(answer) if answer.succeeded() => {
                let token = Token(Reads::of(&answer)?.revision.unsigned_abs());
                Ok(Some((token, slot)))
            }
            Ok(_) => Ok(None),
            Err(error) if is_refusal(&error, NO_SUCH_LEASE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn give_up_place(&mut self, ask: &Ask) -> Result<()> {
        (self.place, self.seen) = (None, SeenHolders::default());
        self.members.revoke_lease(lease_id(&ask.name, ask.who.owner.as_str())).await
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
}

/// Reads the answer to [`Etcd::look_requests`].
fn read_look(answer: &TxnResponse, ask: &Ask, until: i64) -> Result<View> {
    let mut reads = Reads::of(answer)?;
    let mut view = View::read(&mut reads, until)?;
    view.ran_once = ask.once.is_some() && reads.value()?.is_some();
    Ok(view)
}

/// Writes to our key that we hold the lock from now on.
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
