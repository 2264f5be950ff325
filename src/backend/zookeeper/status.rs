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

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::queue::{Details, Entry, Queue, server_date};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use super::{ZooKeeper, token};
use crate::backend::{DEFAULT_HISTORY, Forget, Forgotten, Page, Revoke, Revoked};
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

/// What a contender's node says. Other programs store no record of ours.
type Node = (Stat, Option<Record<Details>>);

/// A contender's node as it was found.
pub(super) struct Found {
    pub entry: Entry,
    node: Result<Node, Refusal>,
}

impl Found {
    /// What its node says; `None` if it is gone.
    pub fn node(&self) -> Result<Option<&Node>> {
        match &self.node {
            Ok(node) => Ok(Some(node)),
            Err(Refusal::NO_NODE) => Ok(None),
            Err(why) => Err(refusal(*why, format_args!("cannot read {}", self.entry.name))),
        }
    }

    /// Neither gone nor a hold whose time is over.
    fn is_present(&self) -> bool {
        match &self.node {
            Ok((stat, Some(record))) => left(*stat, &record.details).is_none_or(|left| !left.is_zero()),
            node => !matches!(node, Err(Refusal::NO_NODE)),
        }
    }

    /// Nothing but its name is known where its node may not be read.
    pub fn contender(&self) -> Contender {
        match self.node.clone() {
            Ok((stat, record)) => contender(self.entry.mode, stat, record),
            Err(_) => Contender::unknown(self.entry.mode),
        }
    }
}

impl Contends for Found {
    fn mode(&self) -> Mode {
        self.entry.mode
    }
}

/// A lock, read in one round trip. The nodes of its contenders and the notes have to be read apart.
pub(super) struct View {
    pub queue: Queue,
    /// Of those that are alive, as they were just before the queue was read: a newcomer is not taken for one that lost its
    /// place. Only contenders ask for it.
    pub signs: Vec<String>,
    /// The `once` key that a contender asked for is on record.
    pub ran_once: bool,
    pub history: History,
    /// The token of the last run, even if the run is forgotten.
    pub last_token: Option<Token>,
    /// Of the node that has the history. One that has yet to be made will have version 0.
    pub version: i32,
    /// The notes of runs that vanished.
    pub vanished: Vec<String>,
}

impl View {
    /// Reads the answers to [`ZooKeeper::view_requests`]. What may not be read beside the queue is as good as empty.
    pub fn read(answers: &[Answer], what: &str) -> Result<View> {
        let [notes, queue, meta] = answers else { bail!("an answer to each request") };
        let queue =
            Queue::new(&found(queue, wire::read_children, format_args!("cannot list {what}"))?.unwrap_or_default());
        let mut vanished = notes.as_ref().map_or_else(|_| Ok(Vec::new()), |notes| wire::read_children(notes))?;
        vanished.retain(|note| queue.position(note).is_none());
        let meta = meta.as_ref().ok().map(|meta| wire::read_data(meta)).transpose()?;
        let (json, version) = meta.map(|(data, stat)| (data, stat.version)).unwrap_or_default();
        let last: Option<Last> = serde_json::from_slice(&json).ok();
        let history = History::from_json(&String::from_utf8_lossy(&json));
        let last_token = last.map(|last| last.fencing_token);
        Ok(View { queue, signs: Vec::new(), ran_once: false, history, last_token, version, vanished })
    }
}

/// What stays of a history that was forgotten, so that lower tokens are refused.
#[derive(Serialize, Deserialize)]
struct Last {
    fencing_token: Token,
}

impl ZooKeeper {
    pub async fn state_of(&mut self, name: &LockName) -> Result<LockState> {
        let chroot = if self.chroot.is_empty() { "/" } else { &self.chroot };
        if self.ensemble.call_one(Request::exists(chroot)).await?.is_err() {
            return Err(self.no_chroot());
        }
        self.states_of(std::slice::from_ref(name)).await?.pop().context("one state of each lock")
    }

    /// Looks at several locks in two round trips, and in one more for each that has runs that vanished.
    async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let views = self.views_of(names).await?;
        let entries =
            names.iter().zip(&views).flat_map(|(name, view)| view.queue.entries.iter().map(move |e| (name, e)));
        let mut nodes = self.read_nodes(entries).await?.into_iter();
        let mut states = Vec::with_capacity(names.len());
        for (name, view) in names.iter().zip(views) {
            let nodes = nodes.by_ref().take(view.queue.entries.len()).filter(Found::is_present);
            let contenders = nodes.map(|found| found.contender()).collect();
            let history = self.runs_in(name, view).await?.into_history();
            states.push(LockState::of_queue(name.clone(), "zookeeper", contenders, history));
        }
        Ok(states)
    }

    pub(super) fn view_requests(&self, name: &LockName) -> [Request; 3] {
        let [notes, queue] = [self.notes_path(name), self.lock_path(name)].map(|path| Request::get_children(&path));
        [notes, queue, Request::get_data(&self.meta_path(name))]
    }

    async fn views_of(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let requests: Vec<_> = names.iter().flat_map(|name| self.view_requests(name)).collect();
        let answers = self.ensemble.call(&requests).await?;
        names.iter().zip(answers.chunks_exact(3)).map(|(name, answers)| View::read(answers, name.as_str())).collect()
    }

    pub(super) async fn view_of(&mut self, name: &LockName) -> Result<View> {
        self.views_of(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    /// Reads the notes of the runs that vanished. One that was released meanwhile has none any more.
    pub(super) async fn runs_in(&mut self, name: &LockName, view: View) -> Result<Runs<i32>> {
        let paths: Vec<String> = view.vanished.iter().map(|note| self.note_path(name, note)).collect();
        let requests: Vec<Request> = paths.iter().map(|path| Request::get_data(path)).collect();
        let mut vanished = Vec::new();
        for (path, answer) in paths.into_iter().zip(self.ensemble.call(&requests).await?) {
            let data = found(&answer, wire::read_data, format_args!("cannot read {path}"))?;
            let run = data.and_then(|(data, _)| LastRun::from_json(&String::from_utf8_lossy(&data)));
            vanished.extend(run.map(|run| (path, run)));
        }
        Ok(Runs::new(view.history, view.version, vanished))
    }

    /// Reads contenders' nodes in one round trip.
    pub(super) async fn read_nodes<'a>(
        &mut self,
        of: impl Iterator<Item = (&'a LockName, &'a Entry)>,
    ) -> Result<Vec<Found>> {
        let (entries, requests): (Vec<_>, Vec<_>) =
            of.map(|(name, entry)| (entry.clone(), Request::get_data(&self.place_path(name, &entry.name)))).unzip();
        let mut all = Vec::with_capacity(entries.len());
        for (entry, answer) in entries.into_iter().zip(self.ensemble.call(&requests).await?) {
            let node = match answer {
                Ok(answer) => wire::read_data(&answer).map(|(data, stat)| Ok((stat, Record::read(&data))))?,
                Err(why) => Err(why),
            };
            all.push(Found { entry, node });
        }
        Ok(all)
    }

    /// The names are all read at the beginning, since ZooKeeper has no other way; what is behind them is not.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            let mut names = std::collections::BTreeSet::new();
            for dir in [self.root.clone(), self.meta.clone()] {
                names.extend(self.ensemble.children(&dir).await?.iter().filter_map(|child| LockName::decode(child)));
            }
            self.listing = names.into_iter();
        }
        let names: Vec<LockName> = self.listing.by_ref().take(PAGE).collect();
        let locks = self.states_of(&names).await?;
        Ok(Page { locks, next: (self.listing.len() > 0).then(|| "more".to_owned()) })
    }

    /// The contenders that are there.
    async fn contenders(&mut self, name: &LockName) -> Result<Vec<Found>> {
        let view = self.view_of(name).await?;
        let mut queue = self.read_nodes(view.queue.entries.iter().map(|entry| (name, entry))).await?;
        queue.retain(Found::is_present);
        Ok(queue)
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let mut may_record = true;
        // Once more if the holder changed its own node just now, if somebody else has written what we write, or if we may
        // not write to the history.
        for _ in 0..10 {
            let queue = self.contenders(name).await?;
            let is_meant = |found: &&Found| found.contender().into_holder().is_still(from);
            let holder = holders(&queue).map(|at| &queue[at]).find(is_meant);
            let Some(Found { entry, node: Ok((stat, record)) }) = holder else { return Ok(Revoked::NotHeld) };
            let (node, record) = (entry.name.as_str(), record.as_ref());
            let (parts, done) = match (how, record) {
                (Revoke::Now { reason }, _) => (self.freeing(name, node, record, from, reason).await?, Revoked::Freed),
                (Revoke::Safely { .. }, None) => {
                    return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned()));
                }
                // After a run, there is no process left to ask, and none that could overlap.
                (Revoke::Safely { .. }, Some(Record { details: Details { hold: Some(hold), .. }, .. }))
                    if !hold.in_use =>
                {
                    (self.removal(name, node, record), Revoked::Freed)
                }
                (Revoke::Safely { reason }, Some(record)) => {
                    let mut marked = record.clone();
                    marked.details.revoked = Some(reason.clone());
                    let (path, json) = (self.place_path(name, node), marked.to_json());
                    let mut parts = vec![Request::set_data(&path, json.as_bytes(), stat.version)];
                    // After `dlock acquire` there is no dlock that could say later how it ended.
                    if may_record && record.details.hold.is_some() {
                        parts.extend(self.record_cut_short(name, from, reason).await?);
                    }
                    (parts, Revoked::Marked)
                }
            };
            match self.commit(parts, name, &format!("cannot take {name} away")).await {
                Ok(None) => return Ok(done),
                Ok(Some(Refusal::NO_NODE)) => return Ok(Revoked::NotHeld),
                Ok(Some(_)) => {}
                Err(error) => match error.downcast_ref::<Refusal>() {
                    Some(&Refusal::BAD_VERSION | &Refusal::NODE_EXISTS) => {}
                    // An operator may be allowed to delete nodes, but not to write the history.
                    Some(&Refusal::NO_AUTH) if done == Revoked::Freed => {
                        let removed = self.remove(name, node, record).await?;
                        return Ok(if removed { Revoked::Freed } else { Revoked::NotHeld });
                    }
                    Some(&Refusal::NO_AUTH) if may_record => may_record = false,
                    _ => return Err(error),
                },
            }
        }
        bail!("{name} changes all the time")
    }

    /// What frees a holder's place, which is `node`, and tells it why.
    async fn freeing(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record<Details>>,
        seen: &Holder,
        reason: &str,
    ) -> Result<Vec<Request>> {
        let mut parts = self.removal(name, node, record);
        // After a run, a hold is freed without a record: how the run ended is on record already.
        if record.is_none_or(|record| record.details.hold.is_none_or(|hold| hold.in_use)) {
            parts.push(Request::delete(&self.note_path(name, node), ANY_VERSION).unless(Refusal::NO_NODE));
            parts.extend(self.record_cut_short(name, seen, reason).await?);
        }
        if let Some(owner) = record.map(|record| record.who.owner.to_string()) {
            let path = self.taken_path(name);
            let taken = self.ensemble.call_one(Request::get_data(&path)).await?;
            let mut all = read_taken(&taken);
            all.push(Taken { owner, reason: reason.to_owned() });
            let latest = serde_json::to_vec(&all[all.len().saturating_sub(MOST_TAKEN)..])?;
            parts.push(match &taken {
                Ok(answer) => Request::set_data(&path, &latest, wire::read_data(answer)?.1.version),
                Err(_) => Request::create(&path, &latest, self.acl(), Kind::Persistent),
            });
        }
        Ok(parts)
    }

    /// Makes a run that an operator cuts short the last one, unless it is on record already.
    async fn record_cut_short(&mut self, name: &LockName, seen: &Holder, reason: &str) -> Result<Vec<Request>> {
        let view = self.view_of(name).await?;
        let (runs, run) = (self.runs_in(name, view).await?, LastRun::cut_short(seen, reason));
        match runs.history.has(&run) {
            true => Ok(Vec::new()),
            false => Ok(self.record_run(name, &runs, &run, DEFAULT_HISTORY)),
        }
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
        let doomed = match what {
            Forget::Once(key) => vec![self.once_path(name, key)],
            Forget::Everything => loop {
                let view = self.view_of(name).await?;
                if !self.contenders(name).await?.is_empty() {
                    return Ok(Forgotten::InUse);
                }
                if !view.history.runs.is_empty() {
                    let last = view.last_token.map(|fencing_token| Last { fencing_token });
                    let last = last.map(|last| serde_json::to_vec(&last)).transpose()?.unwrap_or_default();
                    match self.ensemble.call_one(Request::set_data(&path, &last, view.version)).await? {
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
        for paths in doomed.chunks(TOGETHER) {
            let deletes: Vec<_> = paths.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            for (path, answer) in paths.iter().zip(self.ensemble.call(&deletes).await?) {
                forgotten |= found(&answer, |_| Ok(()), format_args!("cannot delete {path}"))?.is_some();
            }
        }
        Ok(if forgotten { Forgotten::Done } else { Forgotten::Nothing })
    }
}

/// How much longer a hold lasts, by our own clock: good enough to be shown.
fn left(stat: Stat, details: &Details) -> Option<Duration> {
    let lasted = clock::wall().duration_since(server_date(stat.ctime)).unwrap_or_default();
    details.lasts().map(|lasts| lasts.saturating_sub(lasted))
}

/// What is known of a contender: of another program's, only its node.
pub(super) fn contender(mode: Mode, stat: Stat, record: Option<Record<Details>>) -> Contender {
    let shown = Contender {
        token: Some(token(stat.czxid)),
        waiting_since: Some(server_date(stat.ctime)),
        ..Contender::unknown(mode)
    };
    let Some(Record { who, details }) = record else { return shown };
    Contender {
        who: Some(who),
        token: details.hold.map(|hold| hold.token).or(details.slot.map(|slot| slot.token)).or(shown.token),
        slot: details.slot.map(|slot| slot.number),
        acquired_at: details.acquired_at().or(shown.waiting_since),
        ttl: Some(details.ttl()),
        expires_in: left(stat, &details),
        revoked: details.revoked.is_some(),
        ..shown
    }
}
