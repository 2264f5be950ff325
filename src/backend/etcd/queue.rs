//! A lock as etcd keeps it: contenders' keys in the order of their create revisions, and what is stored beside them. A
//! contender's key without a record of ours is another program's mutex, which wants the lock exclusively.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use etcd_client::{GetOptions, GetResponse, KeyValue, SortOrder, SortTarget, TxnOp, TxnOpResponse, TxnResponse};
use serde::{Deserialize, Serialize};

use super::keys::Keys;
use crate::clock;
use crate::lock::{
    Contender, Contends, Identity, LastRun, LockName, Mode, Record, Runs, StoredHistory, Token, rfc3339,
};

/// A contender's key.
pub struct Entry {
    pub key: Vec<u8>,
    /// The key is deleted when this lease ends.
    pub lease: i64,
    pub created: i64,
    modified: i64,
    pub record: Option<Record<Details>>,
}

/// What a contender of ours stores beside its [`Identity`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Details {
    mode: Mode,
    pub ttl_ms: u64,
    #[serde(with = "rfc3339")]
    waiting_since: SystemTime,
    /// Set once it holds the lock and has lasted a moment.
    #[serde(default, with = "rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub held_since: Option<SystemTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// Set by those that leave their key behind; with slots the key's revision is then no longer the token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<Token>,
}

impl Record<Details> {
    pub fn waiting(who: &Identity, mode: Mode, ttl: Duration) -> Record<Details> {
        let (ttl_ms, waiting_since) = (clock::millis(ttl), clock::wall());
        let details = Details { mode, ttl_ms, waiting_since, held_since: None, slot: None, token: None };
        Record { who: who.clone(), details }
    }
}

impl Entry {
    fn details(&self) -> Option<&Details> {
        self.record.as_ref().map(|record| &record.details)
    }

    pub fn slot(&self) -> Option<u32> {
        self.details()?.slot
    }

    pub fn ttl(&self) -> Option<Duration> {
        Some(Duration::from_millis(self.details()?.ttl_ms))
    }

    /// The create revision of the key, which is its order in the queue. Holders of slots need not take
    /// them in that order, so their token is the revision at which they took the slot.
    pub fn token(&self) -> Token {
        let shown = if self.slot().is_some() { self.modified } else { self.created };
        self.details().and_then(|details| details.token).unwrap_or(Token(shown.unsigned_abs()))
    }

    /// Whether its process is gone, and the key stays until its lease ends.
    pub fn is_left_behind(&self) -> bool {
        self.details().is_some_and(|details| details.token.is_some())
    }

    pub fn contender(&self) -> Contender {
        let waiting_since = self.details().map(|details| details.waiting_since);
        let held_since = self.details().and_then(|details| details.held_since);
        let waits_for_slot = matches!(self.mode(), Mode::Slots(_)) && self.slot().is_none();
        // Another program says nothing but the id of its lease, with which etcdctl can find it.
        let foreign = || Contender { owner: Some(format!("lease {:x}", self.lease)), ..Contender::default() };
        Contender {
            mode: self.mode(),
            fencing_token: (!waits_for_slot).then(|| self.token()),
            slot: self.slot(),
            waiting_since,
            acquired_at: held_since.or(waiting_since),
            ttl: self.ttl(),
            ..self.record.as_ref().map_or_else(foreign, |record| record.who.clone().into())
        }
    }
}

impl Contends for Entry {
    fn mode(&self) -> Mode {
        self.details().map_or(Mode::Exclusive, |details| details.mode)
    }
}

impl From<&KeyValue> for Entry {
    fn from(kv: &KeyValue) -> Entry {
        Entry {
            key: kv.key().to_vec(),
            lease: kv.lease(),
            created: kv.create_revision(),
            modified: kv.mod_revision(),
            record: Record::from_json(kv.value()),
        }
    }
}

/// What a transaction read, in the order it was asked for.
pub struct Reads {
    ranges: std::vec::IntoIter<TxnOpResponse>,
    pub revision: i64,
    pub raft_term: u64,
}

impl Reads {
    pub fn of(answer: &TxnResponse) -> Result<Reads> {
        let header = answer.header().context("etcd answered without a header")?;
        let ranges = answer.op_responses().into_iter();
        Ok(Reads { ranges, revision: header.revision(), raft_term: header.raft_term() })
    }

    /// The next range. What was written before it is passed over.
    pub fn range(&mut self) -> Result<GetResponse> {
        let read = |response| match response {
            TxnOpResponse::Get(range) => Some(range),
            _ => None,
        };
        self.ranges.find_map(read).context("etcd answered without the range that was asked for")
    }

    /// The next range, if that is a single key: its value.
    pub fn value(&mut self) -> Result<Option<String>> {
        Ok(self.range()?.kvs().first().map(|kv| text(kv.value())))
    }
}

/// A lock, read in one transaction.
pub struct View {
    pub queue: Vec<Entry>,
    pub runs: Runs<i64>,
    /// The latest token that was released.
    pub released: Option<Token>,
    /// Why contenders are asked to release the lock, or why their keys are gone; by the mark's key.
    marks: Vec<(Vec<u8>, String)>,
    /// The `once` key that was asked for is on record.
    pub ran_once: bool,
    pub revision: i64,
    pub raft_term: u64,
}

impl View {
    /// How many requests read one lock, without a `once` key.
    pub const REQUESTS: usize = 5;

    /// Reads the queue up to the contender with this create revision; all of it if that is 0.
    pub fn requests(keys: &Keys, name: &LockName, until: i64, once: Option<&str>) -> Vec<TxnOp> {
        let all = GetOptions::new().with_prefix();
        let in_order = all.clone().with_sort(SortTarget::Create, SortOrder::Ascend);
        let mut requests = vec![
            TxnOp::get(keys.queue(name), Some(in_order.with_max_create_revision(until))),
            TxnOp::get(keys.last_run(name), None),
            TxnOp::get(keys.all_noted(name), Some(all.clone())),
            TxnOp::get(keys.released(name), None),
            TxnOp::get(keys.marks(name), Some(all)),
        ];
        requests.extend(once.map(|once| TxnOp::get(keys.once(name, once), None)));
        requests
    }

    /// Reads the answers to [`requests`](Self::requests).
    pub fn read(reads: &mut Reads, until: i64, once: Option<&str>) -> Result<View> {
        let queue: Vec<Entry> = reads.range()?.kvs().iter().map(Entry::from).collect();
        let (history, notes) = (reads.range()?, reads.range()?);
        let released = reads.value()?.and_then(|token| token.parse().ok()).map(Token);
        let marks = reads.range()?.kvs().iter().map(|kv| (kv.key().to_vec(), text(kv.value()))).collect();
        let ran_once = once.is_some() && reads.value()?.is_some();
        // Of those behind us, nobody knows from a part of the queue whether they are there.
        let vanished = |token: Token| {
            (until == 0 || token.0 < until.unsigned_abs()) && !queue.iter().any(|one| one.token() == token)
        };
        let notes = notes.kvs().iter().filter_map(|kv| Some((text(kv.key()), LastRun::from_json(&text(kv.value()))?)));
        let history = history.kvs().first();
        let version = history.map_or(0, KeyValue::mod_revision);
        let history = history.map(|kv| StoredHistory::from_json(&text(kv.value()))).unwrap_or_default();
        let mut runs = Runs::new(history, version);
        runs.add_vanished(notes.filter(|(_, run)| vanished(run.fencing_token)));
        let (revision, raft_term) = (reads.revision, reads.raft_term);
        Ok(View { queue, runs, released, marks, ran_once, revision, raft_term })
    }

    pub fn position(&self, key: &str) -> Option<usize> {
        self.queue.iter().position(|entry| entry.key == key.as_bytes())
    }

    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.position(key).map(|at| &self.queue[at])
    }

    pub fn reason(&self, mark: &[u8]) -> Option<String> {
        self.marks.iter().find(|(key, _)| key == mark).map(|(_, reason)| reason.clone())
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
