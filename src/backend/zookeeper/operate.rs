//! What operators do: look at a lock, list all, take one away. Nobody's place is disturbed by looking.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::queue::{Contender, Queue};
use super::record::{Record, server_date};
use super::reply::{self, Answer, Refusal, Stat};
use super::request::Request;
use super::{VISIT, ZooKeeper, refusal, token};
use crate::backend::{Page, Revoke, Revoked};
use crate::clock;
use crate::lock::{Holder, LastRun, LockName, LockState, Mode, State, Waiter};

/// How many locks are looked at together.
const PAGE: usize = 250;

/// A lock as it was found.
pub(super) struct View {
    queue: Queue,
    nodes: Vec<Option<(Stat, Option<Record>)>>,
    last_run: Option<LastRun>,
    /// Of the node that says how the last run ended.
    released: Option<Stat>,
}

impl View {
    /// What the answers about its children and its last run tell; of the contenders, only their names.
    fn of_queue(dir: &str, children: &Answer, last_run: &Answer) -> Result<View> {
        let children = match children {
            Ok(answer) => reply::read_children(answer)?,
            Err(Refusal::NoNode) => Vec::new(),
            Err(why) => return Err(refusal(*why, format_args!("cannot list {dir}"))),
        };
        let (last_run, released) = match last_run {
            Ok(answer) => {
                let (data, stat) = reply::read_data(answer)?;
                (LastRun::from_json(&String::from_utf8_lossy(&data)), Some(stat))
            }
            Err(_) => (None, None),
        };
        Ok(View { queue: Queue::new(&children), nodes: Vec::new(), last_run, released })
    }

    /// Takes the answer about each of its contenders. Those that are gone, or over, are none any more.
    fn add_nodes(&mut self, answers: &mut impl Iterator<Item = Answer>) -> Result<()> {
        for (contender, answer) in self.queue.contenders().to_vec().iter().zip(answers) {
            match answer {
                Ok(answer) => {
                    let (data, stat) = reply::read_data(&answer)?;
                    let record = Record::from_bytes(&data);
                    let left = record.as_ref().and_then(|record| left(stat, record));
                    if contender.hold.is_some() && left.is_some_and(|left| left.is_zero()) {
                        self.queue.remove(&contender.name);
                    } else {
                        self.nodes.push(Some((stat, record)));
                    }
                }
                Err(Refusal::NoNode) => self.queue.remove(&contender.name),
                Err(_) => self.nodes.push(None),
            }
        }
        Ok(())
    }

    fn holders(&self) -> impl Iterator<Item = (&Contender, Stat, Option<&Record>)> {
        let found = |position: usize| {
            let (stat, record) = self.nodes[position].as_ref()?;
            Some((&self.queue.contenders()[position], *stat, record.as_ref()))
        };
        (0..self.nodes.len()).filter(|position| self.queue.holds(*position)).filter_map(found)
    }

    pub(super) fn state(self, name: &LockName) -> LockState {
        let mut state = LockState::free(name.clone(), "zookeeper");
        let Some(first) = self.queue.contenders().first() else {
            return LockState { last_run: self.last_run, ..state };
        };
        let mode = first.mode;
        state.mode = mode;
        state.slots = mode.slots();
        state.state = match self.holders().any(|(_, _, record)| record.is_some_and(|one| one.revoked.is_some())) {
            true => State::Revoked,
            false => State::Held,
        };
        for (position, node) in self.nodes.into_iter().enumerate() {
            match node {
                Some((stat, record)) if self.queue.holds(position) => {
                    let alone = self.queue.contenders()[position].mode == Mode::Exclusive;
                    state.holders.push(holder(stat, record, self.released.filter(|_| alone)));
                }
                Some((stat, record)) => state.waiters.push(waiter(stat, record)),
                None if self.queue.holds(position) => state.holders.push(Holder::default()),
                None => state.waiters.push(Waiter::default()),
            }
        }
        state.last_run = self.last_run;
        state
    }
}

impl ZooKeeper {
    pub(super) async fn visit(&mut self) -> Result<()> {
        if !self.ensemble.is_linked() {
            self.ensemble.attach(VISIT).await?;
        }
        Ok(())
    }

    /// Closes the session, unless it has a place in a queue to keep.
    pub(super) async fn end_visit(&mut self) {
        if self.place.is_none() {
            self.ensemble.part().await;
        }
    }

    pub(super) async fn look(&mut self, name: &LockName) -> Result<View> {
        self.expect_chroot().await?;
        self.look_at(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    async fn expect_chroot(&mut self) -> Result<()> {
        let chroot = if self.chroot.is_empty() { "/" } else { &self.chroot };
        let found = self.ensemble.call_one(Request::exists(chroot, false)).await?;
        found.map(drop).map_err(|_| self.no_chroot())
    }

    /// Looks at several locks in two round trips.
    async fn look_at(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let dirs: Vec<String> = names.iter().map(|name| self.lock_path(name)).collect();
        let metas = names.iter().map(|name| self.meta_path(name));
        let of_each = dirs.iter().zip(metas);
        let requests: Vec<Request> =
            of_each.flat_map(|(dir, meta)| [Request::get_children(dir), Request::get_data(&meta, false)]).collect();
        let answers = self.ensemble.call(&requests).await?;
        let mut views = Vec::with_capacity(names.len());
        let mut requests = Vec::new();
        for (dir, answers) in dirs.iter().zip(answers.chunks_exact(2)) {
            let view = View::of_queue(dir, &answers[0], &answers[1])?;
            let data_of = |one: &Contender| Request::get_data(&format!("{dir}/{}", one.name), false);
            requests.extend(view.queue.contenders().iter().map(data_of));
            views.push(view);
        }
        let answers = if requests.is_empty() { Vec::new() } else { self.ensemble.call(&requests).await? };
        let mut answers = answers.into_iter();
        for view in &mut views {
            view.add_nodes(&mut answers)?;
        }
        Ok(views)
    }

    /// The names are all read at the beginning, since ZooKeeper has no other way; what is behind them is not.
    pub(super) async fn page(&mut self, after: Option<String>) -> Result<Page> {
        if after.is_none() {
            let mut names = Vec::new();
            for dir in [self.root.clone(), self.meta.clone()] {
                names.extend(self.children(&dir).await?.iter().filter_map(|child| LockName::decode(child)));
            }
            names.sort_unstable();
            names.dedup();
            self.listing = names.into_iter();
        }
        let names: Vec<LockName> = self.listing.by_ref().take(PAGE).collect();
        let views = if names.is_empty() { Vec::new() } else { self.look_at(&names).await? };
        let locks = names.iter().zip(views).map(|(name, view)| view.state(name)).collect();
        Ok(Page { locks, next: (self.listing.len() > 0).then(|| "more".to_owned()) })
    }

    pub(super) async fn take_away(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        // Once more if the holder changed its own node just now.
        for _ in 0..3 {
            let view = self.look(name).await?;
            let same = |stat: Stat, record: Option<&Record>| {
                let found = holder(stat, record.cloned(), None);
                found.fencing_token == from.fencing_token && found.owner == from.owner
            };
            let Some((contender, stat, record)) = view.holders().find(|(_, stat, record)| same(*stat, *record)) else {
                return Ok(Revoked::NotHeld);
            };
            let path = format!("{}/{}", self.lock_path(name), contender.name);
            let marked = match (how, record) {
                // After a run, nobody is left who could be told, or could overlap.
                (Revoke::Safely { reason }, Some(record)) if record.hold.is_none_or(|hold| hold.in_use) => {
                    Record { revoked: Some(reason.clone()), ..record.clone() }
                }
                (Revoke::Safely { .. }, None) => {
                    return Ok(Revoked::Impossible(
                        "its holder is not a dlock and would not see the mark; --now frees it on the spot".to_owned(),
                    ));
                }
                (Revoke::Safely { .. }, Some(record)) => {
                    let removed = self.remove(name, &contender.name, Some(record)).await?;
                    return Ok(if removed { Revoked::Freed } else { Revoked::NotHeld });
                }
                (Revoke::Now { reason }, record) => {
                    return self.free(name, &contender.name, record, from, reason).await;
                }
            };
            match self.ensemble.call_one(Request::set_data(&path, &marked.to_bytes(), stat.version)).await? {
                Ok(_) => return Ok(Revoked::Marked),
                Err(Refusal::NoNode) => return Ok(Revoked::NotHeld),
                Err(Refusal::BadVersion) => {}
                Err(why) => return Err(refusal(why, format_args!("cannot mark {path}"))),
            }
        }
        bail!("{name} changes all the time")
    }
}

/// How much longer a hold lasts, by our own clock: good enough to be shown.
fn left(stat: Stat, record: &Record) -> Option<Duration> {
    let lasted = clock::wall().duration_since(server_date(stat.ctime)).unwrap_or_default();
    record.lasts().map(|lasts| lasts.saturating_sub(lasted))
}

/// What is known of a holder: of another program's, only its node. One that is alone and has not noted
/// down when it was its turn had it when the one before it let go, or when it came.
pub(super) fn holder(stat: Stat, record: Option<Record>, released: Option<Stat>) -> Holder {
    let czxid = Some(token(stat.czxid));
    let Some(record) = record else { return Holder { fencing_token: czxid, ..Holder::default() } };
    let noted = record.acquired_ms.and_then(|ms| i64::try_from(ms).ok());
    let acquired = noted.unwrap_or_else(|| released.map_or(stat.ctime, |released| released.mtime.max(stat.ctime)));
    Holder {
        fencing_token: record.hold.map(|hold| hold.token).or(record.slot.map(|slot| slot.token)).or(czxid),
        acquired_at: Some(server_date(acquired)),
        ttl: Some(record.ttl()),
        expires_in: left(stat, &record),
        slot: record.slot.map(|slot| slot.number),
        ..Holder::from(record.who)
    }
}

fn waiter(stat: Stat, record: Option<Record>) -> Waiter {
    let fencing_token = Some(token(stat.czxid));
    let waiting_since = Some(server_date(stat.ctime));
    match record {
        Some(record) => Waiter { fencing_token, waiting_since, ttl: Some(record.ttl()), ..Waiter::from(record.who) },
        None => Waiter { fencing_token, waiting_since, ..Waiter::default() },
    }
}
