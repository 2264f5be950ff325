//! Keeping others out without a session: `--hold-at-least`, and `dlock acquire` until its ttl is over.
//!
//! Nothing ephemeral outlives its session, so a release with a hold puts a persistent node in our place,
//! with the same sequence number: other programs wait for it as they did for us. It lasts for so long after
//! its creation, by the servers' clocks alone: that those of hosts differ is what holds are for. Once that
//! is over, any dlock that contends takes it out of the way. So does the server, if it was told to have
//! nodes with a ttl (`zookeeper.extendedTypesEnabled`); if not, and if no dlock ever comes, other programs
//! wait on.

use std::time::Duration;

use anyhow::{Context, Result};

use super::queue::{Contender, Queue, held_name};
use super::record::{Hold, Record, server_date};
use super::reply::{self, Refusal, Stat};
use super::request::{ANY_VERSION, Kind, Request};
use super::{ZooKeeper, refusal};
use crate::backend::Reheld;
use crate::clock::{self, Instant};
use crate::lock::{LockName, OwnerId};

/// A hold as it stands in the queue.
pub(super) struct Held {
    name: String,
    path: String,
    version: i32,
    record: Record,
    pub(super) hold: Hold,
}

impl ZooKeeper {
    pub(super) fn create_hold(&self, path: &str, record: &Record, expiring: bool) -> Request {
        let kind = record.lasts().filter(|_| expiring).map_or(Kind::Persistent, Kind::Expiring);
        Request::create(path, &record.to_bytes(), self.acl(), kind)
    }

    /// Takes holds whose time is over out of the queue. Returns when the first of the others ends.
    pub(super) async fn pass_holds(&mut self, name: &LockName, queue: &mut Queue) -> Result<Option<Instant>> {
        let dir = self.lock_path(name);
        let now = self.place.as_ref().context("we have a place")?.clock.now();
        let mut first_end: Option<Instant> = None;
        let holds: Vec<Contender> = queue.contenders().iter().filter(|one| one.hold.is_some()).cloned().collect();
        for contender in holds {
            let path = format!("{dir}/{}", contender.name);
            let Some((stat, record)) = self.read_record(&path).await? else {
                queue.remove(&contender.name);
                continue;
            };
            // Of one that cannot be read nobody knows when it ends: it stays, until an operator takes it away.
            let Some(lasts) = record.as_ref().and_then(Record::lasts) else { continue };
            let left = lasts.saturating_sub(now.duration_since(server_date(stat.ctime)).unwrap_or_default());
            if left.is_zero() {
                if self.remove(name, &contender.name, record.as_ref()).await? {
                    queue.remove(&contender.name);
                } else {
                    // Somebody else was faster: another waiter, or the owner with a new hold. Ask again.
                    self.ensemble.poke();
                }
            } else {
                let end = clock::now() + left;
                first_end = Some(first_end.map_or(end, |other| other.min(end)));
            }
        }
        Ok(first_end)
    }

    async fn read_record(&mut self, path: &str) -> Result<Option<(Stat, Option<Record>)>> {
        match self.ensemble.call_one(Request::get_data(path, false)).await? {
            Ok(answer) => {
                let (data, stat) = reply::read_data(&answer)?;
                Ok(Some((stat, Record::from_bytes(&data))))
            }
            Err(Refusal::NoNode) => Ok(None),
            Err(why) => Err(refusal(why, format_args!("cannot read {path}"))),
        }
    }

    /// Removes a contender, its slot and its sign of life. False if it was gone already.
    pub(super) async fn remove(&mut self, name: &LockName, node: &str, record: Option<&Record>) -> Result<bool> {
        let mut paths = self.belongings(name, node, record);
        let path = paths[0].clone();
        loop {
            let parts: Vec<Request> = paths.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            let answer = self.ensemble.call_one(Request::multi(&parts)).await?;
            let answer = answer.map_err(|why| refusal(why, format_args!("cannot remove {path}")))?;
            match reply::multi_refusal(&answer)? {
                None => return Ok(true),
                Some((0, Refusal::NoNode)) => return Ok(false),
                Some((at, Refusal::NoNode)) => drop(paths.remove(at)),
                Some((_, why)) => return Err(refusal(why, format_args!("cannot remove {path}"))),
            }
        }
    }

    /// A contender's place, and the slot and the sign of life that go with it.
    pub(super) fn belongings(&self, name: &LockName, node: &str, record: Option<&Record>) -> Vec<String> {
        let path = format!("{}/{node}", self.lock_path(name));
        let slot = record.and_then(|one| one.slot).map(|slot| self.slot_path(name, slot.number));
        let is_hold = record.is_some_and(|one| one.hold.is_some());
        let sign = (!is_hold).then(|| self.sign_path(name, node));
        [Some(path), slot, sign].into_iter().flatten().collect()
    }

    pub(super) async fn hold_of(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<Held>> {
        let dir = self.lock_path(name);
        let queue = Queue::new(&self.children(&dir).await?);
        let Some(contender) = queue.place_of(&self.spelling.stem(owner), true) else { return Ok(None) };
        let path = format!("{dir}/{}", contender.name);
        let Some((stat, record)) = self.read_record(&path).await? else { return Ok(None) };
        let readable = record.and_then(|record| Some((record.hold?, record)));
        let (hold, record) =
            readable.with_context(|| format!("{path} has been overwritten: force-release --now takes it away"))?;
        Ok(Some(Held { name: contender.name.clone(), path, version: stat.version, record, hold }))
    }

    /// Moves the end of a hold by putting a new node in its place. As long as nobody has taken it out of
    /// the way, nobody has been granted the lock since, so it is not too late.
    pub(super) async fn move_end(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let mut expiring = true;
        loop {
            let Some(held) = self.hold_of(name, owner).await? else { return self.without_hold(name, owner).await };
            if ttl.is_zero() {
                let removed = self.remove(name, &held.name, Some(&held.record)).await?;
                return Ok(if removed { Reheld::Done } else { Reheld::NotOurs });
            }
            if let Some(reason) = held.record.revoked {
                return Ok(Reheld::Revoked(reason));
            }
            let hold = Hold::new(ttl, held.hold.token, held.hold.in_use);
            let record = Record { hold: Some(hold), ..held.record };
            let new = format!("{}/{}", self.lock_path(name), held_name(&held.name));
            let create = self.create_hold(&new, &record, expiring);
            let replace = Request::multi(&[Request::delete(&held.path, held.version), create]);
            let answer = self.ensemble.call_one(replace).await?.map_err(|why| refusal(why, "cannot renew"))?;
            match reply::multi_refusal(&answer)? {
                None => return Ok(Reheld::Done),
                // An operator marked it just now, or another process of the owner was faster: look again.
                Some((0, Refusal::NoNode | Refusal::BadVersion)) => {}
                Some((1, Refusal::Unimplemented)) if expiring => expiring = false,
                Some((_, why)) => return Err(refusal(why, "cannot renew")),
            }
        }
    }

    async fn without_hold(&mut self, name: &LockName, owner: &OwnerId) -> Result<Reheld> {
        let dir = self.lock_path(name);
        let queue = Queue::new(&self.children(&dir).await?);
        let place = queue.place_of(&self.spelling.stem(owner), false).and_then(|one| queue.position(&one.name));
        let holds = place.is_some_and(|position| queue.holds(position));
        if holds {
            return Ok(Reheld::Running);
        }
        Ok(self.why_taken(name, owner).await?.map_or(Reheld::NotOurs, Reheld::Taken))
    }
}
