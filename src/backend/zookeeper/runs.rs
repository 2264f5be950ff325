//! What is kept of a lock's runs, and how it is forgotten.
//!
//! A holder's node vanishes with its session. So a run that lasts is noted on a node that stays until its release deletes
//! it, and that is named as its place is. A note without a place is of a run that vanished: looking at the lock shows it,
//! and the next release moves it into the history. Notes have to be listed before the places: a place is always older.

use anyhow::{Result, bail};
use serde::Deserialize;

use super::ZooKeeper;
use super::queue::Queue;
use super::release::Part;
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use crate::backend::{Forget, Forgotten};
use crate::lock::{History, LastRun, LockName, Token};

/// How many nodes are deleted in one round trip.
const TOGETHER: usize = 500;
/// How many runs that vanished one release moves, so that its transaction stays small.
const MOST_MOVED: usize = 100;

/// The node that has a lock's history.
#[derive(Clone, Debug)]
pub(super) struct Meta {
    pub history: History,
    /// That of the last run, even if the run is forgotten.
    pub last_token: Option<Token>,
    pub stat: Stat,
}

impl Meta {
    pub fn read(answer: &[u8]) -> Result<Meta> {
        #[derive(Deserialize)]
        struct Last {
            fencing_token: Token,
        }
        let (data, stat) = wire::read_data(answer)?;
        let last_token = serde_json::from_slice(&data).ok().map(|last: Last| last.fencing_token);
        Ok(Meta { history: History::from_json(&String::from_utf8_lossy(&data)), last_token, stat })
    }
}

/// What we know of a lock from when it was granted to us.
pub(super) struct Granted {
    pub runs: Runs,
    /// What to have on record if we vanish.
    pub note: LastRun,
    pub is_noted: bool,
}

/// What is on record of a lock's runs.
#[derive(Clone, Debug)]
pub(super) struct Runs {
    pub history: History,
    /// Of the node that has the history. One that has yet to be made will have version 0.
    pub version: i32,
    /// The notes that have no place.
    vanished: Vec<String>,
}

impl Runs {
    pub fn new(meta: Option<Meta>, notes: &[String], queue: &Queue) -> Runs {
        let (history, version) = meta.map(|meta| (meta.history, meta.stat.version)).unwrap_or_default();
        Runs { history, version, vanished: without_place(notes, queue) }
    }
}

pub(super) fn without_place(notes: &[String], queue: &Queue) -> Vec<String> {
    notes.iter().filter(|note| queue.position(note).is_none()).cloned().collect()
}

impl ZooKeeper {
    /// Where the notes of a lock's runs are. No lock is named so.
    pub(super) fn notes_path(&self, name: &LockName) -> String {
        format!("{}/~noted/{}", self.meta, name.encoded())
    }

    pub(super) fn note_path(&self, name: &LockName, node: &str) -> String {
        format!("{}/{node}", self.notes_path(name))
    }

    /// Nothing happens if the lock was released before this arrives.
    pub(super) async fn note(&mut self, name: &LockName) -> Result<()> {
        let (Some(place), Some(granted)) = (&self.place, &mut self.granted) else { return Ok(()) };
        // It may be applied without an answer.
        granted.is_noted = true;
        let (held, note) = (Request::check(&place.path), granted.note.to_json());
        let path = self.note_path(name, &self.place()?.node);
        let create = Request::create(&path, note.as_bytes(), self.acl(), Kind::Persistent);
        for _ in 0..2 {
            match self.ensemble.transact([&held, &create], "cannot note the run").await? {
                None | Some((0, Refusal::NoNode) | (1, Refusal::NodeExists)) => return Ok(()),
                Some((1, Refusal::NoNode)) => self.make(&self.notes_path(name), Kind::Container).await?,
                Some((_, why)) => return Err(refusal(why, format_args!("cannot create {path}"))),
            }
        }
        bail!("{path} cannot be created")
    }

    /// Of a run that never began.
    pub(super) async fn take_note_back(&mut self, name: &LockName) {
        let Some(place) = self.place.as_ref().filter(|_| self.granted.as_ref().is_some_and(|one| one.is_noted)) else {
            return;
        };
        let delete = Request::delete(&self.note_path(name, &place.node), ANY_VERSION);
        let _ = self.ensemble.call_one(delete).await;
    }

    pub(super) async fn read_runs(&mut self, name: &LockName) -> Result<Runs> {
        let requests = [
            Request::get_children(&self.notes_path(name)),
            Request::get_children(&self.lock_path(name)),
            Request::get_data(&self.meta_path(name)),
        ];
        let [notes, queue, meta] = &self.ensemble.call(&requests).await?[..] else {
            bail!("an answer to each request")
        };
        let listed = |answer: &Answer| found(answer, wire::read_children, format_args!("cannot list {name}"));
        let meta = found(meta, Meta::read, format_args!("cannot read the history of {name}"))?;
        let queue = Queue::new(&listed(queue)?.unwrap_or_default());
        Ok(Runs::new(meta, &listed(notes)?.unwrap_or_default(), &queue))
    }

    /// The runs that vanished, the oldest first, and their notes. One that was released meanwhile has none any more.
    pub(super) async fn read_notes(&mut self, name: &LockName, notes: &[String]) -> Result<Vec<(String, LastRun)>> {
        let paths: Vec<String> = notes.iter().map(|note| self.note_path(name, note)).collect();
        let requests: Vec<Request> = paths.iter().map(|path| Request::get_data(path)).collect();
        let mut runs = Vec::new();
        for (path, answer) in paths.into_iter().zip(self.ensemble.call(&requests).await?) {
            let data = found(&answer, wire::read_data, format_args!("cannot read {path}"))?;
            let run = data.and_then(|(data, _)| LastRun::from_json(&String::from_utf8_lossy(&data)));
            runs.extend(run.map(|run| (path, run)));
        }
        runs.sort_by_key(|(_, run)| run.fencing_token);
        Ok(runs)
    }

    /// Adds a run to the history, after those that vanished before it.
    pub(super) async fn record_run(
        &mut self,
        name: &LockName,
        runs: &Runs,
        run: &LastRun,
        keep: usize,
    ) -> Result<Vec<Part>> {
        let mut history = runs.history.clone();
        let mut parts = Vec::new();
        for (path, vanished) in self.read_notes(name, &runs.vanished).await?.into_iter().take(MOST_MOVED) {
            parts.push(Part::unless(Request::delete(&path, ANY_VERSION), Refusal::NoNode));
            if !history.has(&vanished) {
                history.add(vanished, keep);
            }
        }
        history.add(run.clone(), keep);
        let json = history.to_json().unwrap_or_default();
        parts.push(Part::new(Request::set_data(&self.meta_path(name), json.as_bytes(), runs.version)));
        Ok(parts)
    }

    /// Tokens come from the servers' transaction numbers. The last one stays on record, so that lower ones are refused.
    pub(super) async fn forget_runs(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        if let Forget::Once(key) = what {
            let deleted = self.delete_all(vec![self.once_path(name, key)]).await?;
            return Ok(if deleted { Forgotten::Done } else { Forgotten::Nothing });
        }
        let path = self.meta_path(name);
        loop {
            let state = self.state_of(name).await?;
            if !state.holders.is_empty() || !state.waiters.is_empty() {
                return Ok(Forgotten::InUse);
            }
            let answer = self.ensemble.call_one(Request::get_data(&path)).await?;
            let meta = found(&answer, Meta::read, format_args!("cannot read {path}"))?;
            let mut forgotten = false;
            if let Some(Meta { last_token, stat, .. }) = meta.filter(|meta| !meta.history.runs.is_empty()) {
                let token = last_token.map(|token| serde_json::json!({ "fencing_token": token }).to_string());
                let rest = Request::set_data(&path, token.unwrap_or_default().as_bytes(), stat.version);
                match self.ensemble.call_one(rest).await? {
                    Ok(_) => forgotten = true,
                    // Somebody has used it meanwhile.
                    Err(Refusal::BadVersion | Refusal::NoNode) => continue,
                    Err(why) => return Err(refusal(why, format_args!("cannot write {path}"))),
                }
            }
            let once = self.ensemble.children(&path).await?.into_iter().filter(|child| child.starts_with("once-"));
            let once = once.map(|child| format!("{path}/{child}"));
            let notes = self.ensemble.children(&self.notes_path(name)).await?;
            let notes = notes.iter().map(|note| self.note_path(name, note));
            forgotten |= self.delete_all(once.chain(notes).collect()).await?;
            return Ok(if forgotten { Forgotten::Done } else { Forgotten::Nothing });
        }
    }

    /// Whether there was any of them.
    async fn delete_all(&mut self, paths: Vec<String>) -> Result<bool> {
        let mut any = false;
        for paths in paths.chunks(TOGETHER) {
            let deletes: Vec<_> = paths.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            for (path, answer) in paths.iter().zip(self.ensemble.call(&deletes).await?) {
                any |= found(&answer, |_| Ok(()), format_args!("cannot delete {path}"))?.is_some();
            }
        }
        Ok(any)
    }
}
