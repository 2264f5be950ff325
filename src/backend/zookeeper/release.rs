//! Keeping the lease, releasing the lock, and keeping others out without a session.
//!
//! Nothing ephemeral outlives its session, so a release with a hold (`--hold-at-least`, and `dlock acquire` until its
//! ttl is over) puts a persistent node in our place, with the same sequence number: other programs wait for it as they
//! did for us. It lasts for a time that is counted from its creation by the servers' clocks alone, since those of hosts
//! differ. When that time is over, any dlock that contends removes the hold. So does the server, if nodes with a ttl
//! are enabled (`zookeeper.extendedTypesEnabled`); if they are not, and no dlock ever comes, other programs wait on.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::ZooKeeper;
use super::queue::{Details, Entry, Hold, Queue, held_name, server_date};
use super::status::{Found, View, reason_for};
use super::wire::{self, ANY_VERSION, Kind, Refusal, Request, found, refusal};
use crate::backend::{Ending, Lease, Reheld, Released, Renewal};
use crate::clock::{self, Instant};
use crate::lock::{LastRun, LockName, OwnerId, Record, Runs, messages, runs};

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
        let place = self.place()?;
        let committed = committed.as_ref().map_err(|why| refusal(*why, "cannot renew"))?;
        let ours = match wire::multi_refusal(committed)? {
            None => found(ours, wire::read_data, "cannot renew")?,
            Some((_, Refusal::NO_NODE)) => None,
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

    /// Notes that a run began, and since when we hold the lock; watches our place from now on. Nothing happens if the lock
    /// was released before this arrives.
    pub(super) async fn note(&mut self, lease: &Lease) -> Result<()> {
        let Some(place) = &mut self.place else { return Ok(()) };
        // It may be applied without an answer.
        place.noted = true;
        let (path, Record { who, details }) = (place.path.clone(), &place.record);
        // Another version is an operator's, or our own: with slots from when we took one, or from an earlier try.
        let held = Request::set_data(&path, place.record.to_json().as_bytes(), place.version);
        let note = runs::note(who, lease.token, details.acquired_at()).to_json();
        let note_path = format!("{}/{}", self.notes_path(&lease.name), self.place()?.node);
        let note = Request::create(&note_path, note.as_bytes(), self.acl(), Kind::Persistent);
        let parts = vec![Request::check(&path), held.unless(Refusal::BAD_VERSION), note.unless(Refusal::NODE_EXISTS)];
        self.commit(parts, &lease.name, "cannot note the run").await?;
        let ours = self.ensemble.call_one(Request::get_data(&path).watched()).await?;
        let ours = found(&ours, wire::read_data, "cannot watch our place")?;
        let ours = ours.and_then(|(data, _)| Record::read(&data)).filter(|record| record.details.revoked.is_none());
        // Whatever we were notified of until now is our own doing, or has been read just now.
        self.ensemble.set_notified(ours.is_none());
        Ok(())
    }

    pub(super) async fn release_place(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        self.visit().await?;
        let mut known = self.runs.clone();
        // Once more whenever another holder or an operator has written the history since.
        loop {
            let Some(mut parts) = self.letting_go(&lease.name, ending) else {
                return self.was_released(lease, ending).await;
            };
            if let Some(run) = &ending.last_run {
                let runs = match known.take() {
                    Some(runs) => runs,
                    None => self.view_of(&lease.name).await?.runs,
                };
                parts.extend(self.record_run(&lease.name, &runs, run, ending.keep));
            }
            match self.commit(parts, &lease.name, "cannot release").await {
                Ok(None) => break,
                Ok(Some(_)) => return self.was_released(lease, ending).await,
                Err(error) if error.downcast_ref() == Some(&Refusal::BAD_VERSION) => {}
                Err(error) => return Err(error),
            }
        }
        self.ensemble.end_unused().await;
        self.forget_place();
        Ok(Released::Done)
    }

    /// What a release does beside adding to the history; `None` if we have no place.
    fn letting_go(&self, name: &LockName, ending: &Ending) -> Option<Vec<Request>> {
        let place = self.place.as_ref()?;
        let create = |path: &str| Request::create(path, b"", self.acl(), Kind::Persistent);
        let mut parts = self.removal(name, &place.node, Some(&place.record));
        if place.noted {
            parts.push(Request::delete(&self.note_path(name, &place.node), ANY_VERSION).unless(Refusal::NO_NODE));
        }
        let run = ending.last_run.as_ref();
        if let Some(lasts) = ending.hold_until.map(Instant::remaining).filter(|left| !left.is_zero()) {
            let mut record = place.record.clone();
            let (lasts_ms, in_use) = (lasts.as_millis() as u64, run.is_none());
            record.details.hold = Some(Hold { lasts_ms, token: place.token(), in_use });
            parts.push(self.create_hold(name, &place.node, &record));
            let slot = place.record.details.slot.map(|slot| self.slot_path(name, slot.number));
            parts.extend(slot.map(|slot| create(&slot)));
        }
        let once = run.filter(|run| run.succeeded()).and_then(|run| run.once.as_deref());
        parts.extend(once.map(|key| create(&self.once_path(name, key)).unless(Refusal::NODE_EXISTS)));
        Some(parts)
    }

    /// Adds a run to the history, after those that vanished before it.
    pub(super) fn record_run(&self, name: &LockName, runs: &Runs<i32>, run: &LastRun, keep: usize) -> Vec<Request> {
        let (history, notes) = runs.with(run, keep);
        let forget = |note: String| Request::delete(&note, ANY_VERSION).unless(Refusal::NO_NODE);
        let history = Request::set_data(&self.meta_path(name), history.as_bytes(), runs.version);
        notes.into_iter().map(forget).chain([history]).collect()
    }

    /// Our place is gone: an earlier release was done and its answer got lost, or the lock was lost.
    pub(super) async fn was_released(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        self.forget_place();
        self.visit().await?;
        let view = self.view_of(&lease.name).await?;
        let taken = self.why_taken(&lease.name, &lease.owner).await?;
        let held = self.hold_of(&lease.owner, &view)?.and_then(Found::hold);
        let done = ending.last_run.as_ref().is_some_and(|run| view.runs.history.has_ending(run))
            || held.is_some_and(|hold| hold.token == lease.token);
        self.ensemble.end_unused().await;
        Ok(match taken {
            _ if done => Released::Done,
            Some(reason) => Released::ForceReleased(reason),
            None => Released::NotOurs,
        })
    }

    /// Commits all parts or none. Makes what they write below, if it is missing. Only the first part decides: if that is
    /// refused because its node is gone or was changed, nothing is done, and that is the answer.
    pub(super) async fn commit(
        &mut self,
        mut parts: Vec<Request>,
        name: &LockName,
        what: &str,
    ) -> Result<Option<Refusal>> {
        let mut made = false;
        loop {
            let answer = self.ensemble.call_one(Request::multi(&parts)).await?;
            let refused = wire::multi_refusal(&answer.map_err(|why| refusal(why, what))?)?;
            let Some((at, why)) = refused else { return Ok(None) };
            match parts[at].otherwise.take() {
                Some((foreseen, Some(instead))) if foreseen == why => parts[at] = *instead,
                Some((foreseen, None)) if foreseen == why => drop(parts.remove(at)),
                _ if at == 0 && matches!(why, Refusal::NO_NODE | Refusal::BAD_VERSION) => return Ok(Some(why)),
                otherwise if why == Refusal::NO_NODE && !made => {
                    self.make(&self.meta_path(name), Kind::Persistent).await?;
                    self.make(&self.notes_path(name), Kind::Container).await?;
                    made = true;
                    parts[at].otherwise = otherwise;
                }
                _ => return Err(refusal(why, what)),
            }
        }
    }

    /// All that removes a contender: its place, and the slot and the sign of life that go with it.
    pub(super) fn removal(&self, name: &LockName, node: &str, record: Option<&Record<Details>>) -> Vec<Request> {
        let details = record.map(|record| &record.details);
        let is_hold = details.is_some_and(|one| one.hold.is_some());
        let slot = details.and_then(|one| one.slot).map(|slot| self.slot_path(name, slot.number));
        let sign = (!is_hold).then(|| self.sign_path(name, node));
        let others = [slot, sign].into_iter().flatten();
        let others = others.map(|path| Request::delete(&path, ANY_VERSION).unless(Refusal::NO_NODE));
        std::iter::once(Request::delete(&self.place_path(name, node), ANY_VERSION)).chain(others).collect()
    }

    /// Removes a contender. False if it was gone already.
    pub(super) async fn remove(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record<Details>>,
    ) -> Result<bool> {
        let removal = self.removal(name, node, record);
        Ok(self.commit(removal, name, &format!("cannot remove {node}")).await?.is_none())
    }

    /// A hold that the server removes by itself, where such nodes are enabled.
    fn create_hold(&self, name: &LockName, node: &str, record: &Record<Details>) -> Request {
        let path = self.place_path(name, &held_name(node));
        let create = |kind| Request::create(&path, record.to_json().as_bytes(), self.acl(), kind);
        let kind = record.details.hold.map_or(Kind::Persistent, |hold| Kind::Expiring(hold.lasts()));
        create(kind).or(Refusal::UNIMPLEMENTED, create(Kind::Persistent))
    }

    /// Removes holds whose time is over from the queue. Returns when the first of the others ends.
    pub(super) async fn pass_holds(&mut self, name: &LockName, queue: &mut Queue) -> Result<Option<Instant>> {
        let now = self.clock.context("we have a place, so we know the server's clock")?.now();
        let mut first_end: Option<Instant> = None;
        let holds: Vec<Entry> = queue.entries.iter().filter(|one| one.hold.is_some()).cloned().collect();
        let nodes = self.read_nodes(holds.iter().map(|hold| (name, hold))).await?;
        for (Entry { name: node, .. }, found) in holds.iter().zip(nodes) {
            let Some(found) = found else {
                queue.remove(node);
                continue;
            };
            // Nobody knows when a hold ends that cannot be read. It stays until an operator takes it away.
            let (Some(stat), Some(hold)) = (found.stat, found.hold()) else { continue };
            let left = hold.lasts().saturating_sub(now.duration_since(server_date(stat.ctime)).unwrap_or_default());
            if !left.is_zero() {
                let end = clock::now() + left;
                first_end = Some(first_end.map_or(end, |other| other.min(end)));
            } else if self.remove(name, node, found.record.as_ref()).await? {
                queue.remove(node);
            } else {
                // Somebody else was faster: another waiter, or the owner with a new hold. Ask again.
                self.ensemble.set_notified(true);
            }
        }
        Ok(first_end)
    }

    /// An owner's hold.
    fn hold_of<'a>(&self, owner: &OwnerId, view: &'a View) -> Result<Option<&'a Found>> {
        let stem = self.spelling.stem(owner);
        let is_its = |one: &&Found| one.entry.hold.is_some() && one.entry.name.starts_with(&stem);
        let found = view.nodes.iter().find(is_its);
        ensure!(found.is_none_or(|one| one.hold().is_some()), messages::overwritten(format_args!("{stem}…")));
        Ok(found)
    }

    /// Moves the end of a hold by putting a new node in its place. As long as the hold is there, nobody has been granted
    /// the lock since, so it is not too late.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        loop {
            let view = self.view_of(name).await?;
            let Some(Found { entry, stat: Some(stat), record: Some(record) }) = self.hold_of(owner, &view)? else {
                let place = view.queue.place_of(&self.spelling.stem(owner));
                if place.is_some_and(|position| view.queue.holds(position)) {
                    return Ok(Reheld::Running);
                }
                return Ok(self.why_taken(name, owner).await?.map_or(Reheld::NotOurs, Reheld::ForceReleased));
            };
            if ttl.is_zero() {
                let removed = self.remove(name, &entry.name, Some(record)).await?;
                return Ok(if removed { Reheld::Done } else { Reheld::NotOurs });
            }
            if let Some(reason) = &record.details.revoked {
                return Ok(Reheld::Revoked(reason.clone()));
            }
            let mut record = record.clone();
            let lasts_ms = ttl.as_millis() as u64;
            record.details.hold = record.details.hold.map(|hold| Hold { lasts_ms, ..hold });
            let delete = Request::delete(&self.place_path(name, &entry.name), stat.version);
            let parts = vec![delete, self.create_hold(name, &entry.name, &record)];
            // If refused: an operator marked it just now, or another process of the owner was faster. Look again.
            if self.commit(parts, name, "cannot renew").await?.is_none() {
                return Ok(Reheld::Done);
            }
        }
    }
}
