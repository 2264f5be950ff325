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

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::queue::{Details, Entry, Hold, Queue, server_date};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use super::{ZooKeeper, token};
use crate::backend::{DEFAULT_HISTORY, Forget, Forgotten, Listing, Page, Revoke, Revoked};
use crate::clock;
use crate::lock::queue::holders;
use crate::lock::{
    Contender, Contends, History, Holder, LastRun, LockName, LockState, Mode, OwnerId, Record, Runs, Token, messages,
};

/// How many locks are looked at together.
const PAGE: usize = 250;
/// How many nodes are deleted in one round trip.
const TOGETHER: usize = 500;
/// How many entries are kept for holders that ask late. Even with the longest reasons, this is far below what a node may
/// hold.
const MOST_TAKEN: usize = 200;

/// A lock that was taken away.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// A contender's node as it was found.
pub(super) struct Found {
    pub entry: Entry,
    /// `None` if we may not read the node.
    pub stat: Option<Stat>,
    /// `None` for a program other than dlock.
    pub record: Option<Record<Details>>,
}

impl Found {
    /// `None` if the node is gone.
    pub fn read(entry: &Entry, answer: &Answer) -> Result<Option<Found>> {
        let (stat, record) = match answer {
            Ok(answer) => {
                let (data, stat) = wire::read_data(answer)?;
                (Some(stat), Record::read(&data))
            }
            Err(Refusal::NO_NODE) => return Ok(None),
            Err(_) => (None, None),
        };
        Ok(Some(Found { entry: entry.clone(), stat, record }))
    }

    pub fn hold(&self) -> Option<Hold> {
        self.record.as_ref().and_then(|record| record.details.hold)
    }

    /// How much longer a hold lasts, by our own clock: good enough to be shown.
    fn left(&self) -> Option<Duration> {
        let lasted = clock::wall().duration_since(server_date(self.stat?.ctime)).unwrap_or_default();
        Some(self.hold()?.lasts().saturating_sub(lasted))
    }

    /// Whether it is not a hold whose time is over.
    fn is_present(&self) -> bool {
        self.left().is_none_or(|left| !left.is_zero())
    }

    pub fn contender(&self) -> Contender {
        let unknown = Contender::unknown(self.entry.mode);
        let Some(stat) = self.stat else { return unknown };
        let since = Some(server_date(stat.ctime));
        let shown = Contender { token: Some(token(stat.czxid)), waiting_since: since, ..unknown };
        let Some(Record { who, details }) = self.record.clone() else { return shown };
        Contender {
            who: Some(who),
            token: details.hold.map(|hold| hold.token).or(details.slot.map(|slot| slot.token)).or(shown.token),
            slot: details.slot.map(|slot| slot.number),
            acquired_at: details.acquired_at().or(since),
            ttl: Some(details.ttl()),
            expires_in: self.left(),
            revoked: details.revoked.is_some(),
            ..shown
        }
    }
}

impl Contends for Found {
    fn mode(&self) -> Mode {
        self.entry.mode
    }
}

/// A lock. What its names tell is read in one round trip, what is in the nodes of contenders and in notes in a second.
pub(super) struct View {
    pub queue: Queue,
    /// The nodes of the contenders. Only operators read them all.
    pub nodes: Vec<Found>,
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
    pub fn read(answers: &[Answer], what: &str) -> Result<View> {
        let [notes, queue, meta] = answers else { bail!("an answer to each request") };
        let queue = found(queue, wire::read_children, format_args!("cannot list {what}"))?;
        let queue = Queue::new(&queue.unwrap_or_default());
        let mut vanished = notes.as_ref().map_or_else(|_| Ok(Vec::new()), |notes| wire::read_children(notes))?;
        vanished.retain(|note| queue.position(note).is_none());
        let meta = meta.as_ref().ok().map(|meta| wire::read_data(meta)).transpose()?;
        let (json, version) = meta.map(|(data, stat)| (data, stat.version)).unwrap_or_default();
        let last_token = serde_json::from_slice(&json).ok().map(|last: Last| last.fencing_token);
        let runs = Runs::new(History::from_json(&String::from_utf8_lossy(&json)), version);
        Ok(View { queue, nodes: Vec::new(), signs: Vec::new(), ran_once: false, runs, last_token, vanished })
    }
}

/// What stays of a history that was forgotten, so that lower tokens are refused.
#[derive(Serialize, Deserialize)]
struct Last {
    fencing_token: Token,
}

impl ZooKeeper {
    pub(super) fn view_requests(&self, name: &LockName) -> [Request; 3] {
        let [notes, queue] = [self.notes_path(name), self.lock_path(name)].map(|path| Request::get_children(&path));
        [notes, queue, Request::get_data(&self.meta_path(name))]
    }

    /// Reads several locks in two round trips, and in one more for each that has runs that vanished.
    async fn views_of(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let requests: Vec<_> = names.iter().flat_map(|name| self.view_requests(name)).collect();
        let answers = self.ensemble.call(&requests).await?;
        let views = names.iter().zip(answers.chunks_exact(requests.len() / names.len().max(1)));
        let views: Result<Vec<View>> = views.map(|(name, answers)| View::read(answers, name.as_str())).collect();
        let mut views = views?;
        let entries =
            names.iter().zip(&views).flat_map(|(name, view)| view.queue.entries.iter().map(move |one| (name, one)));
        let mut nodes = self.read_nodes(entries).await?.into_iter();
        for (name, view) in names.iter().zip(&mut views) {
            view.nodes = nodes.by_ref().take(view.queue.entries.len()).flatten().collect();
            self.read_notes(name, view).await?;
        }
        Ok(views)
    }

    pub(super) async fn view_of(&mut self, name: &LockName) -> Result<View> {
        self.views_of(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    /// Reads contenders' nodes in one round trip. `None` stands for those that are gone.
    pub(super) async fn read_nodes<'a>(
        &mut self,
        of: impl Iterator<Item = (&'a LockName, &'a Entry)>,
    ) -> Result<Vec<Option<Found>>> {
        let (entries, requests): (Vec<_>, Vec<_>) =
            of.map(|(name, entry)| (entry, Request::get_data(&self.place_path(name, &entry.name)))).unzip();
        let answers = self.ensemble.call(&requests).await?;
        entries.into_iter().zip(&answers).map(|(entry, answer)| Found::read(entry, answer)).collect()
    }

    /// Reads the notes of the runs that vanished. One that was released meanwhile has none any more.
    pub(super) async fn read_notes(&mut self, name: &LockName, view: &mut View) -> Result<()> {
        let paths: Vec<String> = view.vanished.iter().map(|note| self.note_path(name, note)).collect();
        let requests: Vec<Request> = paths.iter().map(|path| Request::get_data(path)).collect();
        for (path, answer) in paths.into_iter().zip(self.ensemble.call(&requests).await?) {
            let data = found(&answer, wire::read_data, format_args!("cannot read {path}"))?;
            let run = data.and_then(|(data, _)| LastRun::from_json(&String::from_utf8_lossy(&data)));
            view.runs.add_vanished(run.map(|run| (path, run)));
        }
        Ok(())
    }

    pub async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        let chroot = if self.chroot.is_empty() { "/" } else { &self.chroot };
        if self.ensemble.call_one(Request::exists(chroot)).await?.is_err() {
            return Err(self.no_chroot());
        }
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let state = |(name, view): (&LockName, View)| {
            let contenders = view.nodes.iter().filter(|one| one.is_present()).map(Found::contender).collect();
            LockState::of_queue(name.clone(), "zookeeper", contenders, view.runs.into_history())
        };
        Ok(names.iter().zip(self.views_of(names).await?).map(state).collect())
    }

    /// The names are all read at the beginning, since ZooKeeper has no other way; what is behind them is not.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            let mut names = BTreeSet::new();
            for dir in [self.root.clone(), self.meta.clone()] {
                names.extend(self.ensemble.children(&dir).await?.iter().filter_map(|child| LockName::decode(child)));
            }
            self.listing = Listing::of(names);
        }
        let names = self.listing.next(PAGE);
        Ok(Page { locks: self.states_of(&names).await?, next: self.listing.more() })
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder changed its own node just now, if somebody else has written what we write, or if we may
        // not write to the history.
        let mut may_record = true;
        for _ in 0..10 {
            let View { nodes, runs, .. } = self.view_of(name).await?;
            let queue: Vec<Found> = nodes.into_iter().filter(Found::is_present).collect();
            let is_meant = |one: &&Found| one.contender().into_holder().is_still(from);
            let holder = holders(&queue).map(|at| &queue[at]).find(is_meant);
            let Some(holder) = holder else { return Ok(Revoked::NotHeld) };
            let (node, record) = (holder.entry.name.as_str(), holder.record.as_ref());
            // After a run, there is no process left to ask, and how it ended is on record.
            let is_over = holder.hold().is_some_and(|hold| !hold.in_use);
            let (parts, done) = match (how, record.zip(holder.stat)) {
                (Revoke::Safely { .. }, None) => {
                    return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned()));
                }
                (Revoke::Safely { reason }, Some((record, stat))) if !is_over => {
                    let mut marked = record.clone();
                    marked.details.revoked = Some(reason.clone());
                    let (path, json) = (self.place_path(name, node), marked.to_json());
                    let mut parts = vec![Request::set_data(&path, json.as_bytes(), stat.version)];
                    // After `dlock acquire` there is no dlock that could say later how it ended.
                    if may_record && record.details.hold.is_some() {
                        parts.extend(self.record_cut_short(name, &runs, from, reason));
                    }
                    (parts, Revoked::Marked)
                }
                (Revoke::Safely { .. }, _) => (self.removal(name, node, record), Revoked::Freed),
                (Revoke::Now { reason }, _) => {
                    let mut parts = self.removal(name, node, record);
                    if may_record && !is_over {
                        parts.push(Request::delete(&self.note_path(name, node), ANY_VERSION).unless(Refusal::NO_NODE));
                        parts.extend(self.record_cut_short(name, &runs, from, reason));
                    }
                    if let Some(record) = record.filter(|_| may_record) {
                        parts.push(self.tell_taken(name, &record.who.owner, reason).await?);
                    }
                    (parts, Revoked::Freed)
                }
            };
            match self.commit(parts, name, &format!("cannot take {name} away")).await {
                Ok(None) => return Ok(done),
                Ok(Some(Refusal::NO_NODE)) => return Ok(Revoked::NotHeld),
                Ok(Some(_)) => {}
                Err(error) => match error.downcast_ref::<Refusal>() {
                    Some(&Refusal::BAD_VERSION | &Refusal::NODE_EXISTS) => {}
                    Some(&Refusal::NO_AUTH) if may_record => may_record = false,
                    _ => return Err(error),
                },
            }
        }
        bail!("{name} changes all the time")
    }

    /// Leaves word for a holder why its lock was freed at once.
    async fn tell_taken(&mut self, name: &LockName, owner: &OwnerId, reason: &str) -> Result<Request> {
        let path = self.taken_path(name);
        let taken = self.ensemble.call_one(Request::get_data(&path)).await?;
        let mut all = read_taken(&taken);
        all.push(Taken { owner: owner.to_string(), reason: reason.to_owned() });
        let latest = serde_json::to_vec(&all[all.len().saturating_sub(MOST_TAKEN)..])?;
        Ok(match &taken {
            Ok(answer) => Request::set_data(&path, &latest, wire::read_data(answer)?.1.version),
            Err(_) => Request::create(&path, &latest, self.acl(), Kind::Persistent),
        })
    }

    /// Makes a run that an operator cuts short the last one, unless it is on record already.
    fn record_cut_short(&self, name: &LockName, runs: &Runs<i32>, seen: &Holder, reason: &str) -> Vec<Request> {
        let run = LastRun::cut_short(seen, reason);
        if runs.history.has(&run) { Vec::new() } else { self.record_run(name, runs, &run, DEFAULT_HISTORY) }
    }

    /// Why an owner's lock was freed at once, if it was.
    pub(super) async fn why_taken(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<String>> {
        let answer = self.ensemble.call_one(Request::get_data(&self.taken_path(name))).await?;
        Ok(reason_for(owner, &answer))
    }

    /// Tokens come from the servers' transaction numbers. The last one stays on record, so that lower ones are refused.
    pub(super) async fn forget_runs(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let path = self.meta_path(name);
        let mut forgotten = false;
        let paths: Vec<String> = match what {
            Forget::Once(key) => vec![self.once_path(name, key)],
            Forget::Everything => loop {
                let view = self.view_of(name).await?;
                if view.nodes.iter().any(Found::is_present) {
                    return Ok(Forgotten::InUse);
                }
                if !view.runs.history.runs.is_empty() {
                    let last = view.last_token.map(|fencing_token| Last { fencing_token });
                    let last = last.map(|last| serde_json::to_vec(&last)).transpose()?.unwrap_or_default();
                    match self.ensemble.call_one(Request::set_data(&path, &last, view.runs.version)).await? {
                        Ok(_) => forgotten = true,
                        // Somebody has used it meanwhile.
                        Err(Refusal::BAD_VERSION | Refusal::NO_NODE) => continue,
                        Err(why) => return Err(refusal(why, format_args!("cannot write {path}"))),
                    }
                }
                let once = self.ensemble.children(&path).await?.into_iter().filter(|child| child.starts_with("once-"));
                let notes = view.vanished.iter().map(|note| self.note_path(name, note));
                break once.map(|child| format!("{path}/{child}")).chain(notes).collect();
            },
        };
        for paths in paths.chunks(TOGETHER) {
            let deletes: Vec<_> = paths.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            for (path, answer) in paths.iter().zip(self.ensemble.call(&deletes).await?) {
                forgotten |= found(&answer, |_| Ok(()), format_args!("cannot delete {path}"))?.is_some();
            }
        }
        Ok(if forgotten { Forgotten::Done } else { Forgotten::Nothing })
    }
}
