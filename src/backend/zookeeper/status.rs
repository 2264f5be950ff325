//! What operators do: look at a lock, list all, take one away. Looking changes nothing.
//!
//! To free a lock at once makes the run that is cut short the last run, in the same transaction, and puts the reason
//! where its holder looks for it when its place is gone. That is one node beside the last run, for all whose locks were
//! taken away recently: the holder's own nodes are gone with its place, and a node for each of them would stay for ever
//! where a holder never comes back.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use super::queue::{Entry, Queue};
use super::record::{Details, server_date};
use super::release::Part;
use super::runs::{Meta, without_place};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use super::{ZooKeeper, token};
use crate::backend::{DEFAULT_HISTORY, Page, Revoke, Revoked};
use crate::clock;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, Mode, OwnerId, Record, messages};

/// How many locks are looked at together.
const PAGE: usize = 250;
/// How many entries are kept for holders that ask late. Even with the longest reasons, this is far below what a node may
/// hold.
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
            Err(Refusal::NoNode) => Ok(None),
            Err(why) => Err(refusal(*why, format_args!("cannot read {}", self.entry.name))),
        }
    }

    /// Neither gone nor a hold whose time is over.
    fn is_present(&self) -> bool {
        match &self.node {
            Ok((stat, Some(record))) => left(*stat, &record.details).is_none_or(|left| !left.is_zero()),
            node => !matches!(node, Err(Refusal::NoNode)),
        }
    }

    /// Nothing but its name is known where its node may not be read.
    pub fn contender(&self, released: Option<Stat>) -> Contender {
        match self.node.clone() {
            Ok((stat, record)) => contender(self.entry.mode, stat, record, released),
            Err(_) => Contender::unknown(self.entry.mode),
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
    meta: Option<Meta>,
    /// The oldest first.
    vanished: Vec<LastRun>,
}

impl View {
    fn into_state(self, name: &LockName) -> LockState {
        let released = self.meta.as_ref().map(|meta| meta.stat);
        let contenders = self.queue.iter().map(|found| found.contender(released)).collect();
        let mut history = self.meta.map(|meta| meta.history).unwrap_or_default();
        self.vanished.into_iter().for_each(|run| history.add(run, usize::MAX));
        LockState::of_queue(name.clone(), "zookeeper", contenders, history)
    }
}

impl ZooKeeper {
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
        let requests = names.iter().flat_map(|name| {
            let children = [self.notes_path(name), self.lock_path(name)].map(|path| Request::get_children(&path));
            children.into_iter().chain([Request::get_data(&self.meta_path(name))])
        });
        let answers = self.ensemble.call(&requests.collect::<Vec<_>>()).await?;
        let mut queues = Vec::with_capacity(names.len());
        for (name, answers) in names.iter().zip(answers.chunks_exact(3)) {
            let children = found(&answers[1], wire::read_children, format_args!("cannot list {name}"))?;
            let notes = answers[0].as_ref().map_or_else(|_| Ok(Vec::new()), |notes| wire::read_children(notes))?;
            let queue = Queue::new(&children.unwrap_or_default());
            let vanished = without_place(&notes, &queue);
            queues.push((name, queue, vanished, answers[2].as_ref().ok()));
        }
        let entries = queues.iter().flat_map(|(name, queue, ..)| queue.entries().iter().map(|entry| (*name, entry)));
        let mut nodes = self.read_nodes(entries).await?.into_iter();
        let mut views = Vec::with_capacity(names.len());
        for (name, queue, vanished, meta) in queues {
            let queue = nodes.by_ref().take(queue.entries().len()).filter(Found::is_present).collect();
            let meta = meta.map(|meta| Meta::read(meta)).transpose()?;
            let is_new = |run: &LastRun| meta.as_ref().is_none_or(|meta| !meta.history.has(run));
            let vanished = self.read_notes(name, &vanished).await?.into_iter().map(|(_, run)| run);
            let vanished = vanished.filter(is_new).collect();
            views.push(View { queue, meta, vanished });
        }
        Ok(views)
    }

    /// Reads contenders' nodes in one round trip.
    pub(super) async fn read_nodes<'a>(
        &mut self,
        of: impl Iterator<Item = (&'a LockName, &'a Entry)>,
    ) -> Result<Vec<Found>> {
        let (entries, requests): (Vec<Entry>, Vec<Request>) = of
            .map(|(name, entry)| {
                (entry.clone(), Request::get_data(&format!("{}/{}", self.lock_path(name), entry.name)))
            })
            .unzip();
        let answers = self.ensemble.call(&requests).await?;
        let read = |(entry, answer): (Entry, Answer)| {
            let node = answer.map(|answer| wire::read_data(&answer).map(|(data, stat)| (stat, Record::read(&data))));
            Ok(Found { entry, node: node.map_or_else(|why| Ok(Err(why)), |node| node.map(Ok))? })
        };
        entries.into_iter().zip(answers).map(read).collect()
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
        let views = self.look_at(&names).await?;
        let locks = names.iter().zip(views).map(|(name, view)| view.into_state(name)).collect();
        Ok(Page { locks, next: (self.listing.len() > 0).then(|| "more".to_owned()) })
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let mut may_record = true;
        // Once more if the holder changed its own node just now, or if we may not write anything down.
        for _ in 0..3 {
            let view = self.look(name).await?;
            let is_meant = |found: &&Found| {
                let found = found.contender(None).into_holder();
                found.fencing_token == from.fencing_token && found.owner == from.owner
            };
            let mut holders = crate::lock::queue::holders(&view.queue).map(|at| &view.queue[at]);
            let Some(Found { entry, node: Ok((stat, record)) }) = holders.find(is_meant) else {
                return Ok(Revoked::NotHeld);
            };
            let reason = match how {
                Revoke::Now { reason } => return self.free(name, &entry.name, record.as_ref(), from, reason).await,
                Revoke::Safely { reason } => reason,
            };
            let Some(record) = record else { return Ok(Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned())) };
            // After a run, there is no process left to ask, and none that could overlap.
            if record.details.hold.is_some_and(|hold| !hold.in_use) {
                return self.free_unrecorded(name, &entry.name, Some(record)).await;
            }
            let path = format!("{}/{}", self.lock_path(name), entry.name);
            let mut marked = record.clone();
            marked.details.revoked = Some(reason.clone());
            let mut parts = vec![Part::new(Request::set_data(&path, marked.to_json().as_bytes(), stat.version))];
            // After `dlock acquire`, too, there is no dlock that could say later how it ended.
            if may_record && record.details.hold.is_some() {
                parts.extend(self.record_cut_short(name, from, reason).await?);
            }
            match self.commit(parts, &self.meta_path(name), &format!("cannot mark {path}")).await {
                Ok(None) => return Ok(Revoked::Marked),
                Ok(Some(Refusal::NoNode)) => return Ok(Revoked::NotHeld),
                Ok(Some(_)) => {}
                Err(error) if error.downcast_ref() == Some(&Refusal::BadVersion) => {}
                Err(error) if may_record && error.downcast_ref() == Some(&Refusal::NoAuth) => may_record = false,
                Err(error) => return Err(error),
            }
        }
        bail!("{name} changes all the time")
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
        // Once more if another operator was faster, or another holder has written the history.
        for _ in 0..10 {
            let taken = self.ensemble.call_one(Request::get_data(&path)).await?;
            let mut parts = self.removal(name, node, record);
            // What is only held on to after a run takes nothing away from how that ended.
            if record.is_none_or(|record| record.details.hold.as_ref().is_none_or(|hold| hold.in_use)) {
                let note = Request::delete(&self.note_path(name, node), ANY_VERSION);
                parts.push(Part::unless(note, Refusal::NoNode));
                parts.extend(self.record_cut_short(name, seen, reason).await?);
            }
            if let Some(owner) = record.map(|record| record.who.owner.to_string()) {
                let mut all = read_taken(&taken);
                all.push(Taken { owner, reason: reason.to_owned() });
                let latest = serde_json::to_vec(&all[all.len().saturating_sub(MOST_TAKEN)..])?;
                parts.push(Part::new(match &taken {
                    Ok(answer) => Request::set_data(&path, &latest, wire::read_data(answer)?.1.version),
                    Err(_) => Request::create(&path, &latest, self.acl(), Kind::Persistent),
                }));
            }
            match self.commit(parts, &meta, &format!("cannot free {name}")).await {
                Ok(None) => return Ok(Revoked::Freed),
                Ok(Some(_)) => return Ok(Revoked::NotHeld),
                Err(error) => match error.downcast_ref::<Refusal>() {
                    Some(Refusal::BadVersion | Refusal::NodeExists) => {}
                    Some(Refusal::NoAuth) => return self.free_unrecorded(name, node, record).await,
                    _ => return Err(error),
                },
            }
        }
        bail!("{name} changes all the time")
    }

    /// Makes a run that an operator cuts short the last one, unless it is on record already.
    async fn record_cut_short(&mut self, name: &LockName, seen: &Holder, reason: &str) -> Result<Vec<Part>> {
        let (runs, run) = (self.read_runs(name).await?, LastRun::cut_short(seen, reason));
        if runs.history.has(&run) {
            return Ok(Vec::new());
        }
        self.record_run(name, &runs, &run, DEFAULT_HISTORY).await
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
    let released = released.filter(|_| mode == Mode::Exclusive).map_or(stat.ctime, |released| released.mtime);
    let acquired = noted.unwrap_or(released.max(stat.ctime));
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
