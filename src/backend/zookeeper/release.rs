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
use super::queue::{Details, Entry, Hold, Queue, held_name};
use super::status::{View, reason_for};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use crate::backend::{Ending, Lease, Reheld, Released, Renewal, overwritten};
use crate::clock::{self, Instant};
use crate::lock::{LastRun, LockName, OwnerId, Record, Runs};

/// Reads our place, and why an operator asks for it; `None` if it is gone.
pub(super) fn read_place(answer: &Answer) -> Result<Option<(Option<String>, Stat)>> {
    let ours = found(answer, wire::read_data, "cannot read our place")?;
    Ok(ours.map(|(data, stat)| (Record::read(&data).and_then(|record| record.details.revoked), stat)))
}

impl ZooKeeper {
    pub(super) async fn extend(&mut self, lease: &Lease) -> Result<Renewal> {
        let ttl = self.ensemble.session()?.ttl;
        self.ensemble.attach(ttl).await?;
        let place = self.place()?;
        let (path, czxid) = (place.path.clone(), place.stat.czxid);
        let slot = place.record.details.slot.map(|slot| self.paths.slot(&lease.name, slot.number));
        let held: Vec<_> = std::iter::once(&path).chain(&slot).map(|path| Request::check(path)).collect();
        let taken = Request::get_data(&self.paths.taken(&lease.name));
        let requests = [Request::multi(&held), Request::get_data(&path).watched(), taken];
        let [committed, ours, taken] = &self.ensemble.call(&requests).await?[..] else {
            bail!("an answer to each request")
        };
        let committed = committed.as_ref().map_err(|why| refusal(*why, "cannot renew"))?;
        let ours = match wire::multi_refusal(committed)? {
            None => read_place(ours)?,
            Some((_, Refusal::NO_NODE)) => None,
            Some((_, why)) => return Err(refusal(why, "cannot renew")),
        };
        match ours {
            None => {
                let lost = || Renewal::Lost(format!("{path} was deleted"));
                Ok(reason_for(&lease.owner, taken).map_or_else(lost, Renewal::ForceReleased))
            }
            Some((_, stat)) if stat.czxid != czxid => Ok(Renewal::Lost(format!("{path} is another one now"))),
            Some((revoked, _)) => {
                self.ensemble.prove();
                Ok(revoked.map_or(Renewal::Held(self.lease_grant()?), Renewal::Revoked))
            }
        }
    }

    pub(super) async fn release_place(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        self.visit().await?;
        let mut known = self.runs.clone();
        // Once more whenever another holder or an operator has written the history since.
        let released = loop {
            let runs = match known.take() {
                Some(runs) => runs,
                None => {
                    let view = self.view_of(&lease.name).await?;
                    if self.place.as_ref().is_none_or(|place| view.queue.position(&place.node).is_none()) {
                        break self.was_released(lease, ending, &view).await?;
                    }
                    view.runs
                }
            };
            let mut parts = self.letting_go(&lease.name, ending)?;
            if let Some(run) = &ending.last_run {
                parts.extend(self.record_run(&lease.name, &runs, run, ending.keep));
            }
            if self.commit(parts, &lease.name, "cannot release").await? {
                break Released::Done;
            }
        };
        self.ensemble.end_unused().await;
        self.forget_place();
        Ok(released)
    }

    /// Our place is gone: an earlier release was done and its answer got lost, or the lock was lost.
    async fn was_released(&mut self, lease: &Lease, ending: &Ending, view: &View) -> Result<Released> {
        let held = self.hold_of(&lease.owner, view)?.and_then(Entry::held_on);
        let done = ending.last_run.as_ref().is_some_and(|run| view.runs.history.has_ending(run))
            || held.is_some_and(|hold| hold.token == lease.token);
        if done {
            return Ok(Released::Done);
        }
        let taken = self.why_taken(&lease.name, &lease.owner).await?;
        Ok(taken.map_or(Released::NotOurs, Released::ForceReleased))
    }

    /// What a release does beside adding to the history.
    fn letting_go(&self, name: &LockName, ending: &Ending) -> Result<Vec<Request>> {
        let place = self.place()?;
        let create = |path: &str| self.create(path, b"", Kind::Persistent);
        let mut parts = self.removal(name, &place.node, Some(&place.record));
        if place.noted {
            parts.push(Request::delete_if_there(&self.paths.note(name, &place.node)));
        }
        let run = ending.last_run.as_ref();
        if let Some(lasts) = ending.hold_until.map(Instant::remaining).filter(|left| !left.is_zero()) {
            let mut record = place.record.clone();
            let (lasts_ms, in_use) = (lasts.as_millis() as u64, run.is_none());
            record.details.hold = Some(Hold { lasts_ms, token: place.token(), in_use });
            parts.push(self.create_hold(name, &place.node, &record));
            let slot = place.record.details.slot.map(|slot| self.paths.slot(name, slot.number));
            parts.extend(slot.map(|slot| create(&slot)));
        }
        let once = run.filter(|run| run.succeeded()).and_then(|run| run.once.as_deref());
        parts.extend(once.map(|key| create(&self.paths.once(name, key)).unless(Refusal::NODE_EXISTS)));
        Ok(parts)
    }

    /// Adds a run to the history, after those that vanished before it.
    pub(super) fn record_run(&self, name: &LockName, runs: &Runs<i32>, run: &LastRun, keep: usize) -> Vec<Request> {
        let (history, notes) = runs.with(run, keep);
        let history = Request::set_data(&self.paths.history(name), history.as_bytes(), runs.version);
        notes.iter().map(|note| Request::delete_if_there(note)).chain([history]).collect()
    }

    /// Commits all parts or none. Makes what they write below, if it is missing. False if nothing was done because somebody
    /// else was faster: what the first part is about is gone, or something has another version.
    pub(super) async fn commit(&mut self, mut parts: Vec<Request>, name: &LockName, what: &str) -> Result<bool> {
        let mut made = false;
        loop {
            let answer = self.ensemble.call_one(Request::multi(&parts)).await?;
            let refused = wire::multi_refusal(&answer.map_err(|why| refusal(why, what))?)?;
            let Some((at, why)) = refused else { return Ok(true) };
            match parts[at].otherwise.take() {
                Some((foreseen, Some(instead))) if foreseen == why => parts[at] = *instead,
                Some((foreseen, None)) if foreseen == why => drop(parts.remove(at)),
                _ if why == Refusal::BAD_VERSION => return Ok(false),
                _ if at == 0 && why == Refusal::NO_NODE => return Ok(false),
                otherwise if why == Refusal::NO_NODE && !made => {
                    self.make(&self.paths.history(name), Kind::Persistent).await?;
                    self.make(&self.paths.notes(name), Kind::Container).await?;
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
        let slot = details.and_then(|one| one.slot).map(|slot| self.paths.slot(name, slot.number));
        let sign = (!is_hold).then(|| self.paths.sign(name, node));
        let others = [slot, sign].into_iter().flatten().map(|path| Request::delete_if_there(&path));
        std::iter::once(Request::delete(&self.paths.place(name, node), ANY_VERSION)).chain(others).collect()
    }

    /// Removes a contender. False if it was gone already.
    async fn remove(&mut self, name: &LockName, one: &Entry) -> Result<bool> {
        let removal = self.removal(name, &one.name, one.record.as_ref());
        self.commit(removal, name, &format!("cannot remove {}", one.name)).await
    }

    /// A hold that the server removes by itself, where such nodes are enabled.
    fn create_hold(&self, name: &LockName, node: &str, record: &Record<Details>) -> Request {
        let path = self.paths.place(name, &held_name(node));
        let create = |kind| self.create(&path, record.to_json().as_bytes(), kind);
        let kind = record.details.hold.map_or(Kind::Persistent, |hold| Kind::Expiring(hold.lasts()));
        create(kind).or(Refusal::UNIMPLEMENTED, create(Kind::Persistent))
    }

    /// Removes holds whose time is over from the queue. Returns when the first of the others ends. Nobody knows when a hold
    /// ends that cannot be read: it stays until an operator takes it away.
    pub(super) async fn pass_holds(&mut self, name: &LockName, queue: &mut Queue) -> Result<Option<Instant>> {
        let now = self.server_time().context("we have a place, so we know the server's clock")?;
        let mut first_end: Option<Instant> = None;
        for one in std::mem::take(&mut queue.entries) {
            match one.left(now) {
                Some(Duration::ZERO) if self.remove(name, &one).await? => continue,
                // Somebody else was faster: another waiter, or the owner with a new hold. Ask again.
                Some(Duration::ZERO) => self.ensemble.set_notified(true),
                Some(left) => first_end = first_end.into_iter().chain([clock::now() + left]).min(),
                None => {}
            }
            queue.entries.push(one);
        }
        Ok(first_end)
    }

    /// An owner's hold.
    fn hold_of<'a>(&self, owner: &OwnerId, view: &'a View) -> Result<Option<&'a Entry>> {
        let stem = self.spelling.stem(owner);
        let is_its = |one: &&Entry| one.hold.is_some() && one.name.starts_with(&stem);
        let found = view.queue.entries.iter().find(is_its);
        ensure!(found.is_none_or(|one| one.held_on().is_some()), overwritten(format_args!("{stem}…")));
        Ok(found)
    }

    /// Moves the end of a hold by putting a new node in its place. As long as the hold is there, nobody has been granted
    /// the lock since, so it is not too late.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        loop {
            let view = self.view_of(name).await?;
            let hold = self.hold_of(owner, &view)?;
            let Some((hold, Entry { stat: Some(stat), record: Some(record), .. })) = hold.zip(hold) else {
                let place = view.queue.place_of(&self.spelling.stem(owner));
                if place.is_some_and(|position| view.queue.holds(position)) {
                    return Ok(Reheld::Running);
                }
                let taken = self.why_taken(name, owner).await?;
                return Ok(taken.map_or(Reheld::NotOurs, Reheld::ForceReleased));
            };
            if ttl.is_zero() {
                let removed = self.remove(name, hold).await?;
                return Ok(if removed { Reheld::Done } else { Reheld::NotOurs });
            }
            if let Some(reason) = &record.details.revoked {
                return Ok(Reheld::Revoked(reason.clone()));
            }
            let mut record = record.clone();
            let lasts_ms = ttl.as_millis() as u64;
            record.details.hold = record.details.hold.map(|hold| Hold { lasts_ms, ..hold });
            let delete = Request::delete(&self.paths.place(name, &hold.name), stat.version);
            let parts = vec![delete, self.create_hold(name, &hold.name, &record)];
            // If refused: an operator marked it just now, or another process of the owner was faster. Look again.
            if self.commit(parts, name, "cannot renew").await? {
                return Ok(Reheld::Done);
            }
        }
    }
}
