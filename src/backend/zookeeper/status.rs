//! What operators do: look at a lock, list all, take one away. Nobody's place is disturbed by looking.
//!
//! Whoever frees a lock at once makes the run that is cut short the last run, in the same transaction, and puts the
//! reason where its holder looks for it when its place is gone. That is one node beside the last run, for all whose
//! locks were taken away of late: nothing that belongs to the holder's session is left to write it on, and a node for
//! each would stay where a holder never comes back.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::queue::{Entry, Queue};
use super::record::{Details, server_date};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, refusal};
use super::{VISIT, ZooKeeper, token};
use crate::backend::{Page, Revoke, Revoked};
use crate::clock;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, Mode, OwnerId, Record, messages};

/// How many locks are looked at together.
const PAGE: usize = 250;
/// How many holders can be told that their lock was taken away, however late they ask; with a reason of the longest
/// kind each, that is far below what a node may hold.
const MOST_TAKEN: usize = 200;

/// A lock that was taken away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Taken {
    owner: String,
    reason: String,
}

/// Whatever cannot be read says nothing.
fn read_taken(answer: &Answer) -> Vec<Taken> {
    let data = answer.as_ref().ok().and_then(|answer| wire::read_data(answer).ok());
    data.and_then(|(data, _)| serde_json::from_slice(&data).ok()).unwrap_or_default()
}

/// Why an owner's lock was freed at once, if it was.
pub(super) fn reason_for(owner: &OwnerId, answer: &Answer) -> Option<String> {
    read_taken(answer).into_iter().rev().find(|taken| taken.owner == owner.as_str()).map(|taken| taken.reason)
}

/// A contender as it was found; nothing but its name, where its node may not be read.
struct Found {
    entry: Entry,
    node: Option<(Stat, Option<Record<Details>>)>,
}

impl Found {
    /// `None` if it is gone, or its time is over.
    fn read(entry: &Entry, answer: Answer) -> Result<Option<Found>> {
        let node = match answer {
            Ok(answer) => {
                let (data, stat) = wire::read_data(&answer)?;
                let record = Record::read(&data);
                let left = record.as_ref().and_then(|record| left(stat, &record.details));
                if entry.hold.is_some() && left.is_some_and(|left| left.is_zero()) {
                    return Ok(None);
                }
                Some((stat, record))
            }
            Err(Refusal::NoNode) => return Ok(None),
            Err(_) => None,
        };
        Ok(Some(Found { entry: entry.clone(), node }))
    }

    fn contender(&self, released: Option<Stat>) -> Contender {
        let released = released.filter(|_| self.entry.mode == Mode::Exclusive);
        match self.node.clone() {
            Some((stat, record)) => contender(self.entry.mode, stat, record, released),
            None => Contender::unknown(self.entry.mode),
        }
    }
}

impl crate::lock::Contends for Found {
    fn mode(&self) -> Mode {
        self.entry.mode
    }
}

/// A lock as it was found.
struct View {
    queue: Vec<Found>,
    /// How the last run ended, and the node that says so.
    last_run: Option<LastRun>,
    released: Option<Stat>,
}

impl View {
    fn into_state(self, name: &LockName) -> LockState {
        let contenders = self.queue.iter().map(|found| found.contender(self.released)).collect();
        LockState::of_queue(name.clone(), "zookeeper", contenders, self.last_run)
    }
}

impl ZooKeeper {
    pub async fn visit(&mut self) -> Result<()> {
        if !self.ensemble.is_linked() {
            self.ensemble.attach(VISIT).await?;
        }
        Ok(())
    }

    /// Closes the session, unless it has a place in a queue to keep.
    pub async fn end_visit(&mut self) {
        if self.place.is_none() {
            self.ensemble.part().await;
        }
    }

    pub async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        Ok(self.look(name).await?.into_state(name))
    }

    async fn look(&mut self, name: &LockName) -> Result<View> {
        let chroot = if self.chroot.is_empty() { "/" } else { &self.chroot };
        if self.ensemble.call_one(Request::exists(chroot)).await?.is_err() {
            return Err(self.no_chroot());
        }
        self.look_at(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    /// Looks at several locks in two round trips.
    async fn look_at(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let dirs: Vec<String> = names.iter().map(|name| self.lock_path(name)).collect();
        let metas = names.iter().map(|name| self.meta_path(name));
        let of_each = dirs.iter().zip(metas);
        let requests: Vec<Request> =
            of_each.flat_map(|(dir, meta)| [Request::get_children(dir), Request::get_data(&meta)]).collect();
        let answers = self.ensemble.call(&requests).await?;
        let mut queues = Vec::with_capacity(names.len());
        let mut requests = Vec::new();
        for (dir, answers) in dirs.iter().zip(answers.chunks_exact(2)) {
            let queue = match &answers[0] {
                Ok(answer) => Queue::new(&wire::read_children(answer)?),
                Err(Refusal::NoNode) => Queue::default(),
                Err(why) => return Err(refusal(*why, format_args!("cannot list {dir}"))),
            };
            requests.extend(queue.entries().iter().map(|one| Request::get_data(&format!("{dir}/{}", one.name))));
            queues.push((queue, answers[1].as_ref().ok()));
        }
        let nodes = if requests.is_empty() { Vec::new() } else { self.ensemble.call(&requests).await? };
        let mut nodes = nodes.into_iter();
        let mut views = Vec::with_capacity(names.len());
        for (entries, meta) in queues {
            let mut queue = Vec::new();
            for (entry, answer) in entries.entries().iter().zip(nodes.by_ref()) {
                queue.extend(Found::read(entry, answer)?);
            }
            let meta = meta.map(|meta| wire::read_data(meta)).transpose()?;
            let released = meta.as_ref().map(|(_, stat)| *stat);
            let last_run = meta.and_then(|(data, _)| LastRun::from_json(&String::from_utf8_lossy(&data)));
            views.push(View { queue, last_run, released });
        }
        Ok(views)
    }

    /// The names are all read at the beginning, since ZooKeeper has no other way; what is behind them is not.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            let mut names = Vec::new();
            for dir in [self.root.clone(), self.meta.clone()] {
                names.extend(self.ensemble.children(&dir).await?.iter().filter_map(|child| LockName::decode(child)));
            }
            names.sort_unstable();
            names.dedup();
            self.listing = names.into_iter();
        }
        let names: Vec<LockName> = self.listing.by_ref().take(PAGE).collect();
        let views = if names.is_empty() { Vec::new() } else { self.look_at(&names).await? };
        let locks = names.iter().zip(views).map(|(name, view)| view.into_state(name)).collect();
        Ok(Page { locks, next: (self.listing.len() > 0).then(|| "more".to_owned()) })
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder changed its own node just now.
        for _ in 0..3 {
            let view = self.look(name).await?;
            let is_meant = |found: &&Found| {
                let found = found.contender(None).into_holder();
                found.fencing_token == from.fencing_token && found.owner == from.owner
            };
            let mut holders = crate::lock::queue::holders(&view.queue).map(|at| &view.queue[at]);
            let Some(Found { entry, node: Some((stat, record)) }) = holders.find(is_meant) else {
                return Ok(Revoked::NotHeld);
            };
            let reason = match how {
                Revoke::Now { reason } => return self.free(name, &entry.name, record.as_ref(), from, reason).await,
                Revoke::Safely { reason } => reason,
            };
            let Some(record) = record else { return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned())) };
            // After a run, nobody is left who could be told, or could overlap.
            if record.details.hold.is_some_and(|hold| !hold.in_use) {
                return self.free_unrecorded(name, &entry.name, Some(record)).await;
            }
            let path = format!("{}/{}", self.lock_path(name), entry.name);
            let mut marked = record.clone();
            marked.details.revoked = Some(reason.clone());
            let mark = Request::set_data(&path, marked.to_json().as_bytes(), stat.version);
            match self.ensemble.call_one(mark).await? {
                Ok(_) => return Ok(Revoked::Marked),
                Err(Refusal::NoNode) => return Ok(Revoked::NotHeld),
                Err(Refusal::BadVersion) => {}
                Err(why) => return Err(refusal(why, format_args!("cannot mark {path}"))),
            }
        }
        bail!("{name} changes all the time")
    }

    pub(super) fn taken_path(&self, name: &LockName) -> String {
        format!("{}/taken", self.meta_path(name))
    }

    /// Why an owner's lock was freed at once, if it was.
    pub(super) async fn why_taken(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<String>> {
        let answer = self.ensemble.call_one(Request::get_data(&self.taken_path(name))).await?;
        Ok(reason_for(owner, &answer))
    }

    /// Frees a holder's place, which is `node`, with all that goes with it.
    pub(super) async fn free(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record<Details>>,
        seen: &Holder,
        reason: &str,
    ) -> Result<Revoked> {
        let (meta, path) = (self.meta_path(name), self.taken_path(name));
        let last_run = LastRun::cut_short(seen, reason).to_json();
        // What a release has left behind: how the run ended is known, or there was none.
        let runs = record.is_none_or(|record| record.details.hold.is_none());
        let mut places = self.belongings(name, node, record);
        for _ in 0..10 {
            let looks = [Request::get_data(&meta), Request::get_data(&path)];
            let found = self.ensemble.call(&looks).await?;
            let mut parts: Vec<Request> = places.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            match &found[0] {
                Ok(_) if runs => parts.push(Request::set_data(&meta, last_run.as_bytes(), ANY_VERSION)),
                Ok(_) => {}
                Err(Refusal::NoNode) => {
                    let first = if runs { last_run.as_bytes() } else { b"" };
                    parts.push(Request::create(&meta, first, self.acl(), Kind::Persistent));
                }
                Err(Refusal::NoAuth) => return self.free_unrecorded(name, node, record).await,
                Err(why) => return Err(refusal(*why, format_args!("cannot read {meta}"))),
            }
            if let Some(owner) = record.map(|record| record.who.owner.to_string()) {
                let mut all = read_taken(&found[1]);
                all.push(Taken { owner, reason: reason.to_owned() });
                let late = serde_json::to_vec(&all[all.len().saturating_sub(MOST_TAKEN)..])?;
                parts.push(match &found[1] {
                    Ok(answer) => Request::set_data(&path, &late, wire::read_data(answer)?.1.version),
                    Err(_) => Request::create(&path, &late, self.acl(), Kind::Persistent),
                });
            }
            match self.ensemble.transact(&parts, format_args!("cannot free {name}")).await? {
                None => return Ok(Revoked::Freed),
                Some((0, Refusal::NoNode)) => return Ok(Revoked::NotHeld),
                Some((at, Refusal::NoNode)) if at < places.len() => drop(places.remove(at)),
                // Nobody has ever released a lock here.
                Some((_, Refusal::NoNode)) => self.make(&meta, Kind::Persistent).await?,
                // Somebody else was faster: another operator, or the first release of all.
                Some((_, Refusal::BadVersion | Refusal::NodeExists)) => {}
                Some((at, Refusal::NoAuth)) if at >= places.len() => {
                    return self.free_unrecorded(name, node, record).await;
                }
                Some((_, why)) => return Err(refusal(why, format_args!("cannot free {name}"))),
            }
        }
        bail!("{name} changes all the time")
    }

    /// Who may take a lock away need not be allowed to write anything down.
    async fn free_unrecorded(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record<Details>>,
    ) -> Result<Revoked> {
        let removed = self.remove(name, node, record).await?;
        Ok(if removed { Revoked::Freed } else { Revoked::NotHeld })
    }
}

/// How much longer a hold lasts, by our own clock: good enough to be shown.
fn left(stat: Stat, details: &Details) -> Option<Duration> {
    let lasted = clock::wall().duration_since(server_date(stat.ctime)).unwrap_or_default();
    details.lasts().map(|lasts| lasts.saturating_sub(lasted))
}

/// What is known of a contender: of another program's, only its node. One that is alone and has not noted down when it
/// was its turn had it when the one before it `released` the lock, or when it came.
pub(super) fn contender(mode: Mode, stat: Stat, record: Option<Record<Details>>, released: Option<Stat>) -> Contender {
    let shown = Contender {
        token: Some(token(stat.czxid)),
        waiting_since: Some(server_date(stat.ctime)),
        ..Contender::unknown(mode)
    };
    let Some(Record { who, details }) = record else { return shown };
    let noted = details.acquired_ms.and_then(|ms| i64::try_from(ms).ok());
    let acquired = noted.unwrap_or_else(|| released.map_or(stat.ctime, |released| released.mtime.max(stat.ctime)));
    Contender {
        who: Some(who),
        token: details.hold.map(|hold| hold.token).or(details.slot.map(|slot| slot.token)).or(shown.token),
        slot: details.slot.map(|slot| slot.number),
        acquired_at: Some(server_date(acquired)),
        ttl: Some(details.ttl()),
        expires_in: left(stat, &details),
        revoked: details.revoked.is_some(),
        ..shown
    }
}
