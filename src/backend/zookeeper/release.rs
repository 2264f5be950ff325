//! Keeping the lease, releasing the lock, and keeping others out without a session.
//!
//! Nothing ephemeral outlives its session, so a release with a hold (`--hold-at-least`, and `dlock acquire` until its
//! ttl is over) puts a persistent node in our place, with the same sequence number: other programs wait for it as they
//! did for us. It lasts for a time that is counted from its creation by the servers' clocks alone, since those of hosts
//! differ. When that time is over, any dlock that contends removes the hold. So does the server, if nodes with a ttl
//! are enabled (`zookeeper.extendedTypesEnabled`); if they are not, and no dlock ever comes, other programs wait on.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::queue::{Entry, Queue, held_name};
use super::record::{Details, Hold, server_date};
use super::runs::Meta;
use super::status::reason_for;
use super::wire::{self, ANY_VERSION, Kind, Refusal, Request, found, refusal};
use super::{VISIT, ZooKeeper};
use crate::backend::{Ending, Lease, Reheld, Released, Renewal};
use crate::clock::{self, Instant};
use crate::lock::{LockName, OwnerId, Record, messages};

/// One request of a transaction, and what to do if the server refuses just that.
pub(super) struct Part {
    request: Request,
    /// If it is refused for this reason: what to send instead, or nothing.
    otherwise: Option<(Refusal, Option<Request>)>,
}

impl Part {
    pub fn new(request: Request) -> Part {
        Part { request, otherwise: None }
    }

    pub fn unless(request: Request, refused: Refusal) -> Part {
        Part { request, otherwise: Some((refused, None)) }
    }

    fn or(request: Request, refused: Refusal, instead: Request) -> Part {
        Part { request, otherwise: Some((refused, Some(instead))) }
    }
}

impl ZooKeeper {
    pub(super) async fn extend(&mut self, lease: &Lease) -> Result<Renewal> {
        let ttl = self.ensemble.session()?.ttl;
        self.ensemble.attach(ttl).await?;
        let place = self.place()?;
        let mut held = vec![Request::check(&place.path)];
        held.extend(place.record.details.slot.map(|slot| Request::check(&self.slot_path(&lease.name, slot.number))));
        let taken = Request::get_data(&self.taken_path(&lease.name));
        let requests = [Request::multi(&held), Request::get_data(&place.path).watched(), taken];
        let [committed, ours, taken] = &self.ensemble.call(&requests).await?[..] else {
            bail!("three answers to three requests")
        };
        self.watches_place = true;
        let place = self.place()?;
        let committed = committed.as_ref().map_err(|why| refusal(*why, "cannot renew"))?;
        let ours = match wire::multi_refusal(committed)? {
            None => found(ours, wire::read_data, "cannot renew")?,
            Some((_, Refusal::NoNode)) => None,
            Some((_, why)) => return Err(refusal(why, "cannot renew")),
        };
        let Some((data, stat)) = ours else {
            let lost = || Renewal::Lost(messages::deleted(&place.path));
            return Ok(reason_for(&lease.owner, taken).map_or_else(lost, Renewal::ForceReleased));
        };
        if stat.czxid != place.czxid {
            return Ok(Renewal::Lost(format!("{} is another one now", place.path)));
        }
        self.ensemble.prove();
        match Record::read(&data).and_then(|record| record.details.revoked) {
            Some(reason) => Ok(Renewal::Revoked(reason)),
            None => Ok(Renewal::Held(self.lease_grant()?)),
        }
    }

    pub(super) async fn release_place(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(VISIT).await?;
        }
        let mut known = self.granted.as_ref().map(|granted| granted.runs.clone());
        // Once more whenever another holder or an operator has written the history since.
        loop {
            let runs = match known.take() {
                Some(runs) => runs,
                None => self.read_runs(&lease.name).await?,
            };
            let mut recorded = Vec::new();
            if let Some(run) = &ending.last_run {
                recorded = self.record_run(&lease.name, &runs, run, ending.keep).await?;
            }
            let Some(mut parts) = self.letting_go(&lease.name, ending) else { return self.was_released(lease).await };
            parts.extend(recorded);
            match self.commit(parts, &self.meta_path(&lease.name), "cannot release").await {
                Ok(None) => break,
                Ok(Some(_)) => return self.was_released(lease).await,
                Err(error) if error.downcast_ref() == Some(&Refusal::BadVersion) => {}
                Err(error) => return Err(error),
            }
        }
        self.ensemble.part().await;
        self.forget_place();
        Ok(Released::Done)
    }

    /// What a release does beside adding to the history; `None` if we have no place.
    fn letting_go(&self, name: &LockName, ending: &Ending) -> Option<Vec<Part>> {
        let place = self.place.as_ref()?;
        let create = |path: &str| Request::create(path, b"", self.acl(), Kind::Persistent);
        let mut parts = self.removal(name, &place.node, Some(&place.record));
        if self.granted.as_ref().is_some_and(|granted| granted.is_noted) {
            let note = Request::delete(&self.note_path(name, &place.node), ANY_VERSION);
            parts.push(Part::unless(note, Refusal::NoNode));
        }
        let run = ending.last_run.as_ref();
        if let Some(lasts) = ending.hold_until.map(Instant::remaining).filter(|left| !left.is_zero()) {
            let mut record = place.record.clone();
            let hold = Hold { lasts_ms: 0, token: place.token(), in_use: run.is_none() };
            record.details.hold = Some(hold.lasting(lasts));
            if record.details.acquired_ms.is_none() {
                record.details.acquire_now();
            }
            parts.push(self.create_hold(name, &place.node, &record));
            let slot = place.record.details.slot.map(|slot| self.slot_path(name, slot.number));
            parts.extend(slot.map(|slot| Part::new(create(&slot))));
        }
        let once = run.filter(|run| run.succeeded()).and_then(|run| run.once.as_deref());
        let once = once.map(|key| create(&self.once_path(name, key)));
        parts.extend(once.map(|once| Part::unless(once, Refusal::NodeExists)));
        Some(parts)
    }

    /// Our place is gone: an earlier release was done and its answer got lost, or the lock was lost.
    pub(super) async fn was_released(&mut self, lease: &Lease) -> Result<Released> {
        self.forget_place();
        self.visit().await?;
        let meta = self.ensemble.call_one(Request::get_data(&self.meta_path(&lease.name))).await?;
        let meta = found(&meta, Meta::read, "cannot read how the last runs ended")?;
        let mut runs = meta.map(|meta| meta.history.runs).unwrap_or_default().into_iter();
        // The record of an operator who freed the lock at once is about our run as well, but does not know its end.
        let (own, cut_short) = match runs.find(|run| run.fencing_token == lease.token) {
            Some(run) if run.exit_code.is_none() => (None, run.reason),
            own => (own, None),
        };
        let taken = self.why_taken(&lease.name, &lease.owner).await?.or(cut_short);
        let held = self.hold_of(&lease.name, &lease.owner).await?;
        let held = held.and_then(|(_, _, record)| record.details.hold);
        let done = own.is_some() || held.is_some_and(|hold| hold.token == lease.token);
        self.ensemble.part().await;
        Ok(match taken {
            _ if done => Released::Done,
            Some(reason) => Released::ForceReleased(reason),
            None => Released::NotOurs,
        })
    }

    /// Commits all parts or none. Makes `meta`, below which they may write, if it is missing. Only the first part
    /// decides: if that is refused because its node is gone or was changed, nothing is done, and that is the answer.
    pub(super) async fn commit(&mut self, mut parts: Vec<Part>, meta: &str, what: &str) -> Result<Option<Refusal>> {
        let mut made = false;
        loop {
            let requests = parts.iter().map(|part| &part.request);
            let Some((at, why)) = self.ensemble.transact(requests, what).await? else { return Ok(None) };
            match &mut parts[at].otherwise {
                Some((foreseen, instead)) if *foreseen == why => match instead.take() {
                    Some(instead) => parts[at].request = instead,
                    None => drop(parts.remove(at)),
                },
                _ if at == 0 && matches!(why, Refusal::NoNode | Refusal::BadVersion) => return Ok(Some(why)),
                _ if why == Refusal::NoNode && !made => {
                    self.make(meta, Kind::Persistent).await?;
                    made = true;
                }
                _ => return Err(refusal(why, what)),
            }
        }
    }

    /// All that removes a contender: its place, and the slot and the sign of life that go with it.
    pub(super) fn removal(&self, name: &LockName, node: &str, record: Option<&Record<Details>>) -> Vec<Part> {
        let details = record.map(|record| &record.details);
        let is_hold = details.is_some_and(|one| one.hold.is_some());
        let slot = details.and_then(|one| one.slot).map(|slot| self.slot_path(name, slot.number));
        let sign = (!is_hold).then(|| self.sign_path(name, node));
        let place = Part::new(Request::delete(&format!("{}/{node}", self.lock_path(name)), ANY_VERSION));
        let others = [slot, sign].into_iter().flatten();
        let others = others.map(|path| Part::unless(Request::delete(&path, ANY_VERSION), Refusal::NoNode));
        std::iter::once(place).chain(others).collect()
    }

    /// Removes a contender. False if it was gone already.
    pub(super) async fn remove(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record<Details>>,
    ) -> Result<bool> {
        let removal = self.removal(name, node, record);
        let refused = self.commit(removal, &self.meta_path(name), &format!("cannot remove {node}")).await?;
        Ok(refused.is_none())
    }

    /// A hold that the server removes by itself, where such nodes are enabled.
    fn create_hold(&self, name: &LockName, node: &str, record: &Record<Details>) -> Part {
        let path = format!("{}/{}", self.lock_path(name), held_name(node));
        let create = |kind| Request::create(&path, record.to_json().as_bytes(), self.acl(), kind);
        let kind = record.details.lasts().map_or(Kind::Persistent, Kind::Expiring);
        Part::or(create(kind), Refusal::Unimplemented, create(Kind::Persistent))
    }

    /// Removes holds whose time is over from the queue. Returns when the first of the others ends.
    pub(super) async fn pass_holds(&mut self, name: &LockName, queue: &mut Queue) -> Result<Option<Instant>> {
        let now = self.clock.context("we have a place, so we know the server's clock")?.now();
        let mut first_end: Option<Instant> = None;
        let holds: Vec<Entry> = queue.entries().iter().filter(|one| one.hold.is_some()).cloned().collect();
        for hold in self.read_nodes(holds.iter().map(|hold| (name, hold))).await? {
            let Some((stat, record)) = hold.node()? else {
                queue.remove(&hold.entry.name);
                continue;
            };
            // Of one that cannot be read nobody knows when it ends: it stays, until an operator takes it away.
            let Some(lasts) = record.as_ref().and_then(|record| record.details.lasts()) else { continue };
            let left = lasts.saturating_sub(now.duration_since(server_date(stat.ctime)).unwrap_or_default());
            if !left.is_zero() {
                let end = clock::now() + left;
                first_end = Some(first_end.map_or(end, |other| other.min(end)));
            } else if self.remove(name, &hold.entry.name, record.as_ref()).await? {
                queue.remove(&hold.entry.name);
            } else {
                // Somebody else was faster: another waiter, or the owner with a new hold. Ask again.
                self.ensemble.poke();
            }
        }
        Ok(first_end)
    }

    /// An owner's hold: its name in the queue, the version of its node, and what that says.
    async fn hold_of(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<(String, i32, Record<Details>)>> {
        let dir = self.lock_path(name);
        let queue = Queue::new(&self.ensemble.children(&dir).await?);
        let Some(entry) = queue.hold_of(&self.spelling.stem(owner)) else { return Ok(None) };
        let path = format!("{dir}/{}", entry.name);
        let Some((data, stat)) = self.ensemble.data(&path).await? else { return Ok(None) };
        let record = Record::read(&data).filter(|record| record.details.hold.is_some());
        let Some(record) = record else { bail!(messages::overwritten(path)) };
        Ok(Some((entry.name.clone(), stat.version, record)))
    }

    /// Moves the end of a hold by putting a new node in its place. As long as the hold is there, nobody has been granted
    /// the lock since, so it is not too late.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        loop {
            let Some((node, version, mut record)) = self.hold_of(name, owner).await? else {
                return self.without_hold(name, owner).await;
            };
            if ttl.is_zero() {
                let removed = self.remove(name, &node, Some(&record)).await?;
                return Ok(if removed { Reheld::Done } else { Reheld::NotOurs });
            }
            if let Some(reason) = record.details.revoked {
                return Ok(Reheld::Revoked(reason));
            }
            record.details.hold = record.details.hold.map(|hold| hold.lasting(ttl));
            let delete = Request::delete(&format!("{}/{node}", self.lock_path(name)), version);
            let parts = vec![Part::new(delete), self.create_hold(name, &node, &record)];
            // If refused: an operator marked it just now, or another process of the owner was faster. Look again.
            if self.commit(parts, &self.meta_path(name), "cannot renew").await?.is_none() {
                return Ok(Reheld::Done);
            }
        }
    }

    async fn without_hold(&mut self, name: &LockName, owner: &OwnerId) -> Result<Reheld> {
        let queue = Queue::new(&self.ensemble.children(&self.lock_path(name)).await?);
        if queue.place_of(&self.spelling.stem(owner)).is_some_and(|position| queue.holds(position)) {
            return Ok(Reheld::Running);
        }
        Ok(self.why_taken(name, owner).await?.map_or(Reheld::NotOurs, Reheld::ForceReleased))
    }
}
