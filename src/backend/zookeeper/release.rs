//! Keeping the lease, releasing the lock, and keeping others out without a session.
//!
//! Nothing ephemeral outlives its session, so a release with a hold (`--hold-at-least`, and `dlock acquire` until its
//! ttl is over) puts a persistent node in our place, with the same sequence number: other programs wait for it as they
//! did for us. It lasts for so long after its creation, by the servers' clocks alone: that those of hosts differ is
//! what holds are for. Once that is over, any dlock that contends takes it out of the way. So does the server, if it
//! was told to have nodes with a ttl (`zookeeper.extendedTypesEnabled`); if not, and if no dlock ever comes, other
//! programs wait on.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::queue::{Entry, Queue, held_name};
use super::recipe::Place;
use super::record::{Details, Hold, server_date};
use super::status::reason_for;
use super::wire::{self, ANY_VERSION, Kind, Refusal, Request, refusal};
use super::{VISIT, ZooKeeper};
use crate::backend::{Ending, Lease, Reheld, Released, Renewal};
use crate::clock::{self, Instant};
use crate::lock::{LastRun, LockName, OwnerId, Record, messages};

/// The parts of the transaction, to tell which of them was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Place,
    Slot,
    Sign,
    Hold,
    LastRun,
    Once,
}

/// A hold as it stands in the queue.
struct Held {
    name: String,
    path: String,
    version: i32,
    record: Record<Details>,
    hold: Hold,
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
        let deleted = || {
            let lost = || Renewal::Lost(messages::deleted(&place.path));
            reason_for(&lease.owner, taken).map_or_else(lost, Renewal::Taken)
        };
        match wire::multi_refusal(committed.as_ref().map_err(|why| refusal(*why, "cannot renew"))?)? {
            None => {}
            Some((_, Refusal::NoNode)) => return Ok(deleted()),
            Some((_, why)) => return Err(refusal(why, "cannot renew")),
        }
        let (data, stat) = match ours {
            Ok(answer) => wire::read_data(answer)?,
            Err(Refusal::NoNode) => return Ok(deleted()),
            Err(why) => return Err(refusal(*why, "cannot renew")),
        };
        if stat.czxid != place.czxid {
            return Ok(Renewal::Lost(format!("{} is another one now", place.path)));
        }
        self.ensemble.prove();
        match Record::read(&data).and_then(|record| record.details.revoked) {
            Some(reason) => Ok(Renewal::Revoked(reason)),
            None => Ok(Renewal::Held(self.term()?)),
        }
    }

    pub(super) async fn release_place(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(VISIT).await?;
        }
        let Some(place) = &self.place else { return self.was_released(lease).await };
        // What turned out to be needless while trying.
        let mut without = Vec::new();
        if place.record.details.slot.is_none() {
            without.push(Part::Slot);
        }
        loop {
            let parts = self.release_parts(lease, self.place()?, ending);
            let parts = parts.into_iter().filter(|(part, _)| !without.contains(part));
            let (parts, requests): (Vec<Part>, Vec<Request>) = parts.unzip();
            let refused = self.ensemble.transact(&requests, "cannot release").await?;
            match refused.map(|(at, why)| (parts[at], why)) {
                None => break,
                Some((Part::Place, Refusal::NoNode)) => return self.was_released(lease).await,
                Some((part @ (Part::Slot | Part::Sign), Refusal::NoNode)) => without.push(part),
                Some((part @ Part::Once, Refusal::NodeExists)) => without.push(part),
                Some((Part::LastRun, Refusal::NoNode)) if self.ran_before => self.ran_before = false,
                Some((Part::LastRun, Refusal::NodeExists)) => self.ran_before = true,
                Some((Part::LastRun, Refusal::NoNode)) => {
                    self.ran_before = true;
                    let meta = self.meta_path(&lease.name);
                    self.make(&meta, Kind::Persistent).await?;
                }
                Some((Part::Hold, Refusal::Unimplemented)) if self.nodes_expire => self.nodes_expire = false,
                Some((part, why)) => return Err(refusal(why, format_args!("cannot release ({part:?})"))),
            }
        }
        self.ensemble.part().await;
        self.forget_place();
        Ok(Released::Done)
    }

    /// All that a release may take; the record of the run is made, or changed if there is one.
    fn release_parts(&self, lease: &Lease, place: &Place, ending: &Ending) -> Vec<(Part, Request)> {
        let name = &lease.name;
        let create = |path: &str, data: &str| Request::create(path, data.as_bytes(), self.acl(), Kind::Persistent);
        let slot = self.slot_path(name, place.record.details.slot.map_or(0, |slot| slot.number));
        let mut parts = vec![
            (Part::Place, Request::delete(&place.path, ANY_VERSION)),
            (Part::Sign, Request::delete(&self.sign_path(name, &place.node), ANY_VERSION)),
            (Part::Slot, Request::delete(&slot, ANY_VERSION)),
        ];
        let last_run = ending.last_run.as_ref();
        if let Some(lasts) = ending.hold_until.map(Instant::remaining).filter(|left| !left.is_zero()) {
            let mut record = place.record.clone();
            record.details.hold = Some(Hold { in_use: last_run.is_none(), ..Hold::new(lasts, place.token()) });
            if record.details.acquired_ms.is_none() {
                record.details.acquire_now();
            }
            parts.push((Part::Hold, self.create_hold(name, &place.node, &record)));
            parts.push((Part::Slot, create(&slot, "")));
        }
        if let Some(last_run) = last_run {
            let (meta, json) = (self.meta_path(name), last_run.to_json());
            let note = match self.ran_before {
                true => Request::set_data(&meta, json.as_bytes(), ANY_VERSION),
                false => create(&meta, &json),
            };
            parts.push((Part::LastRun, note));
            let once = last_run.once.as_deref().filter(|_| last_run.succeeded());
            parts.extend(once.map(|key| (Part::Once, create(&self.once_path(name, key), ""))));
        }
        parts
    }

    /// Our place is gone: whether because an earlier release was done and its answer lost, or because the
    /// lock was.
    pub(super) async fn was_released(&mut self, lease: &Lease) -> Result<Released> {
        self.forget_place();
        self.visit().await?;
        let meta = self.meta_path(&lease.name);
        let last_run = self.ensemble.data(&meta).await?;
        let last_run = last_run.and_then(|(data, _)| LastRun::from_json(&String::from_utf8_lossy(&data)));
        // What an operator who freed it at once has put there is about our run as well, but does not know its end.
        let (own, cut_short) = match last_run.filter(|run| run.fencing_token == lease.token) {
            Some(run) if run.exit_code.is_none() => (None, run.reason),
            own => (own, None),
        };
        let taken = self.why_taken(&lease.name, &lease.owner).await?.or(cut_short);
        let held = self.hold_of(&lease.name, &lease.owner).await?;
        let done = own.is_some() || held.is_some_and(|held| held.hold.token == lease.token);
        self.ensemble.part().await;
        Ok(match taken {
            _ if done => Released::Done,
            Some(reason) => Released::Taken(reason),
            None => Released::NotOurs,
        })
    }

    /// Where nodes do not expire, and most servers are not told to have such nodes, it stays until a dlock passes it.
    fn create_hold(&self, name: &LockName, node: &str, record: &Record<Details>) -> Request {
        let path = format!("{}/{}", self.lock_path(name), held_name(node));
        let kind = record.details.lasts().filter(|_| self.nodes_expire).map_or(Kind::Persistent, Kind::Expiring);
        Request::create(&path, record.to_json().as_bytes(), self.acl(), kind)
    }

    /// Takes holds whose time is over out of the queue. Returns when the first of the others ends.
    pub(super) async fn pass_holds(&mut self, name: &LockName, queue: &mut Queue) -> Result<Option<Instant>> {
        let dir = self.lock_path(name);
        let now = self.clock.context("whoever has a place knows the server's clock")?.now();
        let mut first_end: Option<Instant> = None;
        let holds: Vec<Entry> = queue.entries().iter().filter(|one| one.hold.is_some()).cloned().collect();
        for entry in holds {
            let Some((data, stat)) = self.ensemble.data(&format!("{dir}/{}", entry.name)).await? else {
                queue.remove(&entry.name);
                continue;
            };
            let record = Record::read(&data);
            // Of one that cannot be read nobody knows when it ends: it stays, until an operator takes it away.
            let Some(lasts) = record.as_ref().and_then(|record| record.details.lasts()) else { continue };
            let left = lasts.saturating_sub(now.duration_since(server_date(stat.ctime)).unwrap_or_default());
            if !left.is_zero() {
                let end = clock::now() + left;
                first_end = Some(first_end.map_or(end, |other| other.min(end)));
            } else if self.remove(name, &entry.name, record.as_ref()).await? {
                queue.remove(&entry.name);
            } else {
                // Somebody else was faster: another waiter, or the owner with a new hold. Ask again.
                self.ensemble.poke();
            }
        }
        Ok(first_end)
    }

    /// Removes a contender, its slot and its sign of life. False if it was gone already.
    pub(super) async fn remove(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record<Details>>,
    ) -> Result<bool> {
        let mut paths = self.belongings(name, node, record);
        let what = format!("cannot remove {}", paths[0]);
        loop {
            let parts: Vec<Request> = paths.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            match self.ensemble.transact(&parts, &what).await? {
                None => return Ok(true),
                Some((0, Refusal::NoNode)) => return Ok(false),
                Some((at, Refusal::NoNode)) => drop(paths.remove(at)),
                Some((_, why)) => return Err(refusal(why, what)),
            }
        }
    }

    /// A contender's place, and the slot and the sign of life that go with it.
    pub(super) fn belongings(&self, name: &LockName, node: &str, record: Option<&Record<Details>>) -> Vec<String> {
        let details = record.map(|record| &record.details);
        let path = format!("{}/{node}", self.lock_path(name));
        let slot = details.and_then(|one| one.slot).map(|slot| self.slot_path(name, slot.number));
        let is_hold = details.is_some_and(|one| one.hold.is_some());
        let sign = (!is_hold).then(|| self.sign_path(name, node));
        [Some(path), slot, sign].into_iter().flatten().collect()
    }

    async fn hold_of(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<Held>> {
        let dir = self.lock_path(name);
        let queue = Queue::new(&self.ensemble.children(&dir).await?);
        let Some(entry) = queue.hold_of(&self.spelling.stem(owner)) else { return Ok(None) };
        let path = format!("{dir}/{}", entry.name);
        let Some((data, stat)) = self.ensemble.data(&path).await? else { return Ok(None) };
        let readable = Record::read(&data).and_then(|record| Some((record.details.hold?, record)));
        let Some((hold, record)) = readable else { bail!(messages::overwritten(path)) };
        Ok(Some(Held { name: entry.name.clone(), path, version: stat.version, record, hold }))
    }

    /// Moves the end of a hold by putting a new node in its place. As long as nobody has taken it out of
    /// the way, nobody has been granted the lock since, so it is not too late.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        loop {
            let Some(held) = self.hold_of(name, owner).await? else { return self.without_hold(name, owner).await };
            if ttl.is_zero() {
                let removed = self.remove(name, &held.name, Some(&held.record)).await?;
                return Ok(if removed { Reheld::Done } else { Reheld::NotOurs });
            }
            let mut record = held.record;
            if let Some(reason) = record.details.revoked {
                return Ok(Reheld::Revoked(reason));
            }
            record.details.hold = Some(Hold { in_use: held.hold.in_use, ..Hold::new(ttl, held.hold.token) });
            let create = self.create_hold(name, &held.name, &record);
            match self.ensemble.transact(&[Request::delete(&held.path, held.version), create], "cannot renew").await? {
                None => return Ok(Reheld::Done),
                // An operator marked it just now, or another process of the owner was faster: look again.
                Some((0, Refusal::NoNode | Refusal::BadVersion)) => {}
                Some((1, Refusal::Unimplemented)) if self.nodes_expire => self.nodes_expire = false,
                Some((_, why)) => return Err(refusal(why, "cannot renew")),
            }
        }
    }

    async fn without_hold(&mut self, name: &LockName, owner: &OwnerId) -> Result<Reheld> {
        let queue = Queue::new(&self.ensemble.children(&self.lock_path(name)).await?);
        if queue.place_of(&self.spelling.stem(owner)).is_some_and(|position| queue.holds(position)) {
            return Ok(Reheld::Running);
        }
        Ok(self.why_taken(name, owner).await?.map_or(Reheld::NotOurs, Reheld::Taken))
    }
}
