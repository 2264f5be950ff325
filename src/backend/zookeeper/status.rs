//! What operators do: look at a lock, list all, take one away, forget its runs. Looking changes nothing.
//!
//! A holder's node vanishes with its session. So a run that lasts is noted on a node that stays until its release deletes
//! it, and that is named as its place is. A note without a place is of a run that vanished. Notes have to be listed before
//! the places: a place is always older.
//!
//! To free a lock at once makes the run that is cut short the last run, in the same transaction, and puts the reason
//! where its holder looks for it when its place is gone. That is one node beside the last run, for all whose locks were
//! taken away recently: the holder's own nodes are gone with its place, and a node for each of them would stay for ever
//! where a holder never comes back.

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::ZooKeeper;
use super::queue::{Entry, Queue};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, found};
use crate::backend::{Ask, DEFAULT_HISTORY, FOREIGN_HOLDER, Forget, Forgotten, Page, Revoke, Revoked, next_names};
use crate::lock::queue::holders;
use crate::lock::{Holder, LastRun, LockName, LockState, OwnerId, Runs, StoredHistory, Token};

/// How many locks are looked at together.
const PAGE: usize = 250;
/// How many nodes are deleted in one transaction.
const TOGETHER: usize = 500;
/// How many entries are kept for holders that ask late. Even with the longest reasons, this is far below what a node may
/// hold.
const MOST_TAKEN: usize = 200;

/// A lock that was taken away.
#[derive(Serialize, Deserialize)]
struct Taken {
    owner: String,
    reason: String,
}

/// What cannot be read counts as empty.
fn read_taken(answer: &Answer) -> Vec<Taken> {
    let data = answer.as_ref().ok().and_then(|answer| wire::read_data(answer).ok());
    data.and_then(|(data, _)| serde_json::from_slice(&data).ok()).unwrap_or_default()
}

/// Why an owner's lock was freed at once, if it was.
pub(super) fn reason_for(owner: &OwnerId, answer: &Answer) -> Option<String> {
    read_taken(answer).into_iter().rev().find(|taken| taken.owner == owner.as_str()).map(|taken| taken.reason)
}

/// A lock. What its names tell is read in one round trip, what is in the nodes of contenders and in notes in a second.
pub(super) struct View {
    /// Only operators read the nodes of all.
    pub queue: Queue,
    /// Of those that are alive, as they were just before the queue was read: a newcomer is not taken for one that lost its
    /// place. Only contenders ask for it.
    pub signs: Vec<String>,
    /// The `once` key that a contender asked for is on record.
    pub ran_once: bool,
    /// A history that has yet to be made will have version 0.
    pub runs: Runs<i32>,
    /// The token of the last run, even if the run is forgotten.
    pub last_token: Option<Token>,
    /// The notes of runs that vanished.
    vanished: Vec<String>,
}

impl View {
    /// Reads the answers to [`ZooKeeper::view_requests`]. What may not be read beside the queue is as good as empty.
    pub fn read(answers: &[Answer], what: &str, contender: Option<&Ask>) -> Result<View> {
        let (signs, answers) = answers.split_at(usize::from(contender.is_some()).min(answers.len()));
        let [notes, queue, meta, once @ ..] = answers else { bail!("an answer to each request") };
        let queue = found(queue, wire::read_children, format_args!("cannot list {what}"))?;
        let queue = Queue::new(&queue.unwrap_or_default());
        let mut vanished = notes.as_ref().map_or_else(|_| Ok(Vec::new()), |notes| wire::read_children(notes))?;
        vanished.retain(|note| queue.position(note).is_none());
        let signs = signs.first().map(|signs| found(signs, wire::read_children, "cannot list who is alive"));
        let signs = signs.transpose()?.flatten().unwrap_or_default();
        let ran_once = once.first().is_some_and(Result::is_ok);
        let meta = meta.as_ref().ok().map(|meta| wire::read_data(meta)).transpose()?;
        let (json, version) = meta.map(|(data, stat)| (data, stat.version)).unwrap_or_default();
        let last_token = serde_json::from_slice(&json).ok().map(|last: Last| last.fencing_token);
        let runs = Runs::new(StoredHistory::from_json(&String::from_utf8_lossy(&json)), version);
        Ok(View { queue, signs, ran_once, runs, last_token, vanished })
    }
}

/// What stays of a history that was forgotten, so that lower tokens are refused.
#[derive(Serialize, Deserialize)]
struct Last {
    fencing_token: Token,
}

impl ZooKeeper {
    /// For operators, or for a contender.
    pub(super) fn view_requests(&self, name: &LockName, contender: Option<&Ask>) -> Vec<Request> {
        let signs = contender.map(|_| self.paths.signs(name));
        let lists = signs.into_iter().chain([self.paths.notes(name), self.paths.queue(name)]);
        let once = contender.and_then(|ask| ask.once.as_ref()).map(|key| self.paths.once(name, key));
        let history = Request::get_data(&self.paths.history(name));
        let lists = lists.map(|path| Request::get_children(&path));
        lists.chain([history]).chain(once.map(|path| Request::exists(&path))).collect()
    }

    /// Reads several locks in two round trips, and in one more for each that has runs that vanished.
    async fn views_of(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let requests: Vec<_> = names.iter().flat_map(|name| self.view_requests(name, None)).collect();
        let answers = self.ensemble.call(&requests).await?;
        let views = names.iter().zip(answers.chunks_exact(requests.len() / names.len().max(1)));
        let views = views.map(|(name, answers)| View::read(answers, name.as_str(), None));
        let mut views = views.collect::<Result<Vec<View>>>()?;
        self.read_nodes(names.iter().zip(views.iter_mut().map(|view| &mut view.queue)), |_| true).await?;
        for (name, view) in names.iter().zip(&mut views) {
            self.read_notes(name, view).await?;
        }
        Ok(views)
    }

    pub(super) async fn view_of(&mut self, name: &LockName) -> Result<View> {
        self.views_of(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    /// Reads the nodes of some contenders in one round trip. Those that are gone are removed from their queues.
    pub(super) async fn read_nodes<'a>(
        &mut self,
        queues: impl Iterator<Item = (&'a LockName, &'a mut Queue)>,
        of: impl Fn(&Entry) -> bool,
    ) -> Result<()> {
        let queues: Vec<_> = queues.collect();
        let read = |(name, queue): &(&LockName, &mut Queue)| -> Vec<Request> {
            let read = |one: &Entry| Request::get_data(&self.paths.place(name, &one.name));
            queue.entries.iter().filter(|one| of(one)).map(read).collect()
        };
        let requests: Vec<_> = queues.iter().flat_map(read).collect();
        let mut answers = self.ensemble.call(&requests).await?.into_iter();
        for (_, queue) in queues {
            let mut there = Vec::with_capacity(queue.entries.len());
            for mut one in std::mem::take(&mut queue.entries) {
                if !of(&one) || one.read(&answers.next().context("an answer to each request")?)? {
                    there.push(one);
                }
            }
            queue.entries = there;
        }
        Ok(())
    }

    /// Reads the notes of the runs that vanished. One that was released meanwhile has none any more.
    pub(super) async fn read_notes(&mut self, name: &LockName, view: &mut View) -> Result<()> {
        let paths: Vec<String> = view.vanished.iter().map(|note| self.paths.note(name, note)).collect();
        let requests: Vec<Request> = paths.iter().map(|path| Request::get_data(path)).collect();
        for (path, answer) in paths.into_iter().zip(self.ensemble.call(&requests).await?) {
            let data = found(&answer, wire::read_data, format_args!("cannot read {path}"))?;
            let run = data.and_then(|(data, _)| LastRun::from_json(&String::from_utf8_lossy(&data)));
            view.runs.add_vanished(run.map(|run| (path, run)));
        }
        Ok(())
    }

    pub async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        let chroot = if self.paths.chroot.is_empty() { "/" } else { &self.paths.chroot };
        if self.ensemble.call_one(Request::exists(chroot)).await?.is_err() {
            return Err(self.no_chroot());
        }
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let state = |(name, view): (&LockName, View)| {
            let contenders = view.queue.entries.iter().filter(|one| one.is_present()).map(Entry::contender).collect();
            LockState::of_queue(name.clone(), "zookeeper", contenders, view.runs.into_history())
        };
        Ok(names.iter().zip(self.views_of(names).await?).map(state).collect())
    }

    /// The names are all read at the beginning, since ZooKeeper has no other way; what is behind them is not.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            self.listing.clear();
            for dir in [&self.paths.root, &self.paths.meta] {
                let children = self.ensemble.children(dir).await?;
                self.listing.extend(children.iter().filter_map(|child| LockName::decode(child)));
            }
        }
        let (names, next) = next_names(&mut self.listing, PAGE);
        Ok(Page { locks: self.states_of(&names).await?, next })
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder changed its own node just now, if somebody else has written what we write, or if we may
        // not write to the history.
        let mut may_record = true;
        for _ in 0..10 {
            let View { queue, runs, .. } = self.view_of(name).await?;
            let queue: Vec<Entry> = queue.entries.into_iter().filter(Entry::is_present).collect();
            let is_meant = |one: &&Entry| one.contender().is_still(from);
            let holder = holders(&queue).map(|at| &queue[at]).find(is_meant);
            let Some(holder) = holder else { return Ok(Revoked::NotHeld) };
            let (node, record) = (holder.name.as_str(), holder.record.as_ref());
            // After a run, there is no process left to ask, and how it ended is on record.
            let is_over = holder.held_on().is_some_and(|hold| !hold.in_use);
            let cut_short = |reason: &str| {
                let run = runs.cut_short(from, reason).filter(|_| may_record && !is_over);
                run.map(|run| self.record_run(name, &runs, &run, DEFAULT_HISTORY)).unwrap_or_default()
            };
            let (parts, done) = match (how, record.zip(holder.stat)) {
                (Revoke::Safely { .. }, None) => {
                    return Ok(Revoked::Impossible(FOREIGN_HOLDER.to_owned()));
                }
                (Revoke::Safely { reason }, Some((record, stat))) if !is_over => {
                    let mut marked = record.clone();
                    marked.details.revoked = Some(reason.clone());
                    let (path, json) = (self.paths.place(name, node), marked.to_json());
                    let mut parts = vec![Request::set_data(&path, json.as_bytes(), stat.version)];
                    // After `dlock acquire` there is no dlock that could say later how it ended.
                    if record.details.hold.is_some() {
                        parts.extend(cut_short(reason));
                    }
                    (parts, Revoked::Marked)
                }
                (Revoke::Safely { .. }, _) => (self.removal(name, node, record), Revoked::Freed),
                (Revoke::Now { reason }, _) => {
                    let mut parts = self.removal(name, node, record);
                    let run = cut_short(reason);
                    if !run.is_empty() {
                        parts.push(Request::delete_if_there(&self.paths.note(name, node)));
                        parts.extend(run);
                    }
                    if let Some(record) = record.filter(|_| may_record) {
                        parts.push(self.tell_taken(name, &record.who.owner, reason).await?);
                    }
                    (parts, Revoked::Freed)
                }
            };
            match self.commit(parts, name, &format!("cannot take {name} away")).await {
                Ok(true) => return Ok(done),
                Ok(false) => {}
                Err(error) => match error.downcast_ref() {
                    // Another operator was the first to leave word for a holder.
                    Some(&Refusal::NODE_EXISTS) => {}
                    Some(&Refusal::NO_AUTH) if may_record => may_record = false,
                    _ => return Err(error),
                },
            }
        }
        bail!("{name} changes all the time")
    }

    /// Leaves word for a holder why its lock was freed at once.
    async fn tell_taken(&mut self, name: &LockName, owner: &OwnerId, reason: &str) -> Result<Request> {
        let path = self.paths.taken(name);
        let taken = self.ensemble.call_one(Request::get_data(&path)).await?;
        let mut all = read_taken(&taken);
        all.push(Taken { owner: owner.to_string(), reason: reason.to_owned() });
        let latest = serde_json::to_vec(&all[all.len().saturating_sub(MOST_TAKEN)..])?;
        Ok(match &taken {
            Ok(answer) => Request::set_data(&path, &latest, wire::read_data(answer)?.1.version),
            Err(_) => self.create(&path, &latest, Kind::Persistent),
        })
    }

    /// Why an owner's lock was freed at once, if it was.
    pub(super) async fn why_taken(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<String>> {
        let answer = self.ensemble.call_one(Request::get_data(&self.paths.taken(name))).await?;
        Ok(reason_for(owner, &answer))
    }

    /// Tokens come from the servers' transaction numbers. The last one stays on record, so that lower ones are refused.
    pub(super) async fn forget_runs(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let is_done = |done| if done { Forgotten::Done } else { Forgotten::Nothing };
        if let Forget::Once(key) = what {
            let once = Request::delete(&self.paths.once(name, key), ANY_VERSION);
            return self.commit(vec![once], name, "cannot forget a run").await.map(is_done);
        }
        let path = self.paths.history(name);
        'again: loop {
            let view = self.view_of(name).await?;
            if view.queue.entries.iter().any(Entry::is_present) {
                return Ok(Forgotten::InUse);
            }
            let mut parts = Vec::new();
            if view.runs.history.last.is_some() {
                let last =
                    view.last_token.map(|fencing_token| serde_json::to_vec(&Last { fencing_token })).transpose()?;
                parts.push(Request::set_data(&path, &last.unwrap_or_default(), view.runs.version));
            }
            let once = self.ensemble.children(&path).await?.into_iter().filter(|child| child.starts_with("once-"));
            let notes = view.vanished.iter().map(|note| self.paths.note(name, note));
            let others = once.map(|child| format!("{path}/{child}")).chain(notes);
            parts.extend(others.map(|path| Request::delete_if_there(&path)));
            for parts in parts.chunks(TOGETHER) {
                if !self.commit(parts.to_vec(), name, "cannot forget its runs").await? {
                    // Somebody has used it meanwhile.
                    continue 'again;
                }
            }
            return Ok(is_done(!parts.is_empty()));
        }
    }
}
