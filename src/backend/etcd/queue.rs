//! The queue of a lock as etcd keeps it: contenders' keys in the order of their create revisions. A key without a record
//! of ours is another program's mutex, which wants the lock exclusively.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use etcd_client::{GetResponse, KeyValue, TxnOpResponse, TxnResponse};
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::lock::{Contender, Contends, Identity, Mode, Record, Token};

/// A contender's key.
pub struct Entry {
    pub key: Vec<u8>,
    /// The key is deleted when this lease ends.
    pub lease: i64,
    pub created: i64,
    pub modified: i64,
    pub record: Option<Record<Details>>,
}

/// What a contender of ours stores beside its [`Identity`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Details {
    mode: Mode,
    ttl_ms: u64,
    waiting_since: String,
    /// Set by those that had to wait, or take a slot, once they hold the lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    held_since: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slot: Option<u32>,
    /// Set by those that leave their key behind; with slots the key's revision is then no longer the token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<Token>,
}

impl Record<Details> {
    pub fn waiting(who: &Identity, mode: Mode, ttl: Duration) -> Record<Details> {
        let (ttl_ms, waiting_since) = (millis(ttl), date_now());
        let details = Details { mode, ttl_ms, waiting_since, held_since: None, slot: None, token: None };
        Record { who: who.clone(), details }
    }

    /// Of one that holds the lock from now on.
    pub fn holding(mut self, slot: Option<u32>) -> Record<Details> {
        (self.details.held_since, self.details.slot) = (Some(date_now()), slot);
        self
    }

    /// Of one whose process is gone, and whose key stays.
    pub fn left_behind(mut self, token: Token) -> Record<Details> {
        self.details.token = Some(token);
        self
    }

    pub fn with_ttl(mut self, ttl: Duration) -> Record<Details> {
        self.details.ttl_ms = millis(ttl);
        self
    }
}

impl Entry {
    fn details(&self) -> Option<&Details> {
        self.record.as_ref().map(|record| &record.details)
    }

    pub fn is_foreign(&self) -> bool {
        self.record.is_none()
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

    /// Whether this may be its token, if only the key was read.
    pub fn may_have(&self, token: Token) -> bool {
        [self.token().0, self.created.unsigned_abs(), self.modified.unsigned_abs()].contains(&token.0)
    }

    /// Whether its process is gone, and the key stays until its lease ends.
    pub fn is_left_behind(&self) -> bool {
        self.details().is_some_and(|details| details.token.is_some())
    }

    pub fn contender(&self) -> Contender {
        let details = self.details();
        let waiting_since = details.and_then(|details| date(&details.waiting_since));
        let held_since = details.and_then(|details| date(details.held_since.as_deref()?));
        let waits_for_slot = matches!(self.mode(), Mode::Slots(_)) && self.slot().is_none();
        Contender {
            who: self.record.as_ref().map(|record| record.who.clone()),
            // Another program says nothing but the id of its lease, with which etcdctl can find it.
            foreign_owner: Some(format!("lease {:x}", self.lease)),
            token: (!waits_for_slot).then(|| self.token()),
            slot: self.slot(),
            waiting_since,
            acquired_at: held_since.or(waiting_since),
            ttl: self.ttl(),
            ..Contender::unknown(self.mode())
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
    ranges: std::vec::IntoIter<GetResponse>,
    pub revision: i64,
    pub raft_term: u64,
}

impl Reads {
    pub fn of(answer: &TxnResponse) -> Result<Reads> {
        let header = answer.header().context("etcd answered without a header")?;
        let read = |response| match response {
            TxnOpResponse::Get(range) => Some(range),
            _ => None,
        };
        let ranges: Vec<_> = answer.op_responses().into_iter().filter_map(read).collect();
        Ok(Reads { ranges: ranges.into_iter(), revision: header.revision(), raft_term: header.raft_term() })
    }

    pub fn range(&mut self) -> Result<GetResponse> {
        self.ranges.next().context("etcd answered without the range that was asked for")
    }

    /// The next range, if that is a queue or a part of one.
    pub fn entries(&mut self) -> Result<Vec<Entry>> {
        Ok(self.range()?.kvs().iter().map(Entry::from).collect())
    }

    /// The next range, if that is a single key: its value.
    pub fn value(&mut self) -> Result<Option<String>> {
        Ok(self.range()?.kvs().first().map(|kv| String::from_utf8_lossy(kv.value()).into_owned()))
    }
}

fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)
}

fn date_now() -> String {
    humantime::format_rfc3339_millis(clock::wall()).to_string()
}

fn date(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(text).ok()
}
