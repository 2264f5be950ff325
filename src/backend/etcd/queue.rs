//! The queue of a lock as etcd keeps it: contenders in the order of their keys' create revisions.
//!
//! Ours carry a card that says who they are and what they want; whoever carries none is a foreign
//! mutex, which wants the lock for itself alone.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use etcd_client::{GetResponse, KeyValue, TxnOpResponse, TxnResponse};
use serde::{Deserialize, Serialize};

use crate::clock;
use crate::lock::{Holder, Identity, Mode, Token, Waiter, may_hold};

pub struct Contender {
    pub key: Vec<u8>,
    /// What its key dies with.
    pub lease: i64,
    pub created: i64,
    pub modified: i64,
    who: Option<Identity>,
    pub card: Option<Card>,
}

/// What a contender of ours says about itself, beside its [`Identity`], in the value of its key.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Card {
    mode: Mode,
    ttl_ms: u64,
    waiting_since: String,
    /// Set by those that had to wait, or take a slot, once they hold the lock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_since: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    slot: Option<u32>,
    /// Set by those that leave their key behind them; with slots the key then shows the token no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<Token>,
}

impl Card {
    pub fn new(mode: Mode, ttl: Duration) -> Card {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        Card { mode, ttl_ms, waiting_since: date_now(), held_since: None, slot: None, token: None }
    }

    /// The card of a contender that holds the lock from now on.
    pub fn holding(self, slot: Option<u32>) -> Card {
        Card { held_since: Some(date_now()), slot, ..self }
    }

    pub fn to_json(&self, who: &Identity) -> String {
        #[derive(Serialize)]
        struct Value<'a> {
            #[serde(flatten)]
            who: &'a Identity,
            #[serde(flatten)]
            card: &'a Card,
        }
        serde_json::to_string(&Value { who, card: self }).expect("strings and numbers always serialise")
    }
}

impl Contender {
    pub fn mode(&self) -> Mode {
        self.card.as_ref().map_or(Mode::Exclusive, |card| card.mode)
    }

    pub fn is_foreign(&self) -> bool {
        self.card.is_none()
    }

    pub fn slot(&self) -> Option<u32> {
        self.card.as_ref().and_then(|card| card.slot)
    }

    /// The create revision of the key, which is its order in the queue. Holders of slots need not take
    /// them in that order, so their token is the revision at which they took the slot.
    pub fn token(&self) -> Token {
        let shown = if self.slot().is_some() { self.modified } else { self.created };
        self.card.as_ref().and_then(|card| card.token).unwrap_or(Token(shown.unsigned_abs()))
    }

    /// Whether its process has gone, and the key stays until its lease ends.
    pub fn is_left_behind(&self) -> bool {
        self.card.as_ref().is_some_and(|card| card.token.is_some())
    }

    /// The value of this contender's key once its process has gone and the key stays; `None` if foreign.
    pub fn left_behind(&self, token: Token) -> Option<String> {
        let (who, card) = (self.who.as_ref()?, self.card.clone()?);
        Some(Card { token: Some(token), ..card }.to_json(who))
    }

    /// The same with another ttl.
    pub fn left_behind_for(&self, ttl: Duration) -> Option<String> {
        let (who, card) = (self.who.as_ref()?, self.card.clone()?);
        Some(Card { ttl_ms: u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX), ..card }.to_json(who))
    }

    pub fn holder(&self) -> Holder {
        let (who, card) = (self.who.clone(), self.card.as_ref());
        let since = card.and_then(|card| date(card.held_since.as_deref().unwrap_or(&card.waiting_since)));
        Holder {
            fencing_token: Some(self.token()),
            acquired_at: since,
            ttl: card.map(|card| Duration::from_millis(card.ttl_ms)),
            slot: self.slot(),
            ..who.map_or_else(|| Holder { owner: Some(self.foreign_owner()), ..Holder::default() }, Holder::from)
        }
    }

    pub fn waiter(&self) -> Waiter {
        let (who, card) = (self.who.clone(), self.card.as_ref());
        Waiter {
            waiting_since: card.and_then(|card| date(&card.waiting_since)),
            ttl: card.map(|card| Duration::from_millis(card.ttl_ms)),
            ..who.map_or_else(|| Waiter { owner: Some(self.foreign_owner()), ..Waiter::default() }, Waiter::from)
        }
    }

    /// A foreign mutex says nothing but the id of its lease, with which etcdctl can find it.
    fn foreign_owner(&self) -> String {
        format!("lease {:x}", self.lease)
    }
}

impl From<&KeyValue> for Contender {
    fn from(kv: &KeyValue) -> Contender {
        let (who, card) = read_card(kv.value()).unzip();
        Contender {
            key: kv.key().to_vec(),
            lease: kv.lease(),
            created: kv.create_revision(),
            modified: kv.mod_revision(),
            who,
            card,
        }
    }
}

/// What a key's value says; nothing, if it is not one of ours.
pub fn read_card(value: &[u8]) -> Option<(Identity, Card)> {
    let text = String::from_utf8_lossy(value);
    Some((Identity::from_json(&text)?, serde_json::from_str(&text).ok()?))
}

/// One look at a queue, and at what was read along with it.
pub struct Queue {
    pub contenders: Vec<Contender>,
    /// The single keys that were read along with it, in the order they were asked for.
    beside: Vec<Option<KeyValue>>,
    pub revision: i64,
    pub raft_term: u64,
}

impl Queue {
    pub fn read(answer: &TxnResponse) -> Result<Queue> {
        Queue::from_ranges(answer, ranges(answer))
    }

    /// The same from a part of an answer: the range that is the queue, and those beside it.
    pub fn from_ranges(answer: &TxnResponse, mut ranges: impl Iterator<Item = GetResponse>) -> Result<Queue> {
        let header = answer.header().context("etcd answered without a header")?;
        let queue = ranges.next().context("etcd answered without the range that was asked for")?;
        Ok(Queue {
            contenders: queue.kvs().iter().map(Contender::from).collect(),
            beside: ranges.map(|mut range| range.take_kvs().into_iter().next()).collect(),
            revision: header.revision(),
            raft_term: header.raft_term(),
        })
    }

    /// The value of a key that was read along with the queue, if there is such a key.
    pub fn beside(&self, nth: usize) -> Option<String> {
        let kv = self.beside.get(nth)?.as_ref()?;
        Some(String::from_utf8_lossy(kv.value()).into_owned())
    }

    pub fn find(&self, key: &str) -> Option<usize> {
        self.contenders.iter().position(|contender| contender.key == key.as_bytes())
    }

    pub fn holders(&self) -> impl Iterator<Item = &Contender> {
        self.contenders
            .iter()
            .enumerate()
            .filter(|(at, one)| holds(one.mode(), &self.contenders[..*at]))
            .map(|(_, c)| c)
    }

    pub fn waiters(&self) -> impl Iterator<Item = &Contender> {
        self.contenders
            .iter()
            .enumerate()
            .filter(|(at, one)| !holds(one.mode(), &self.contenders[..*at]))
            .map(|(_, c)| c)
    }

    /// The lowest slot that nobody has.
    pub fn free_slot(&self) -> u32 {
        (0..).find(|slot| self.contenders.iter().all(|one| one.slot() != Some(*slot))).unwrap_or_default()
    }
}

/// Whether a contender holds the lock, with these before it. A foreign mutex among them cannot know of
/// slots and would take its turn alone.
pub fn holds(mode: Mode, ahead: &[Contender]) -> bool {
    let modes: Vec<Mode> = ahead.iter().map(Contender::mode).collect();
    modes.iter().all(|other| other.slots() == mode.slots()) && may_hold(mode, &modes)
}

/// The terms of somebody before us that ours do not agree with.
pub fn other_terms(mode: Mode, ahead: &[Contender]) -> Option<String> {
    let other = ahead.iter().find(|one| !one.is_foreign() && one.mode().slots() != mode.slots())?;
    let who = other.who.as_ref().map_or("somebody", |who| who.owner.as_str());
    Some(format!("{who} uses it with --slots {}, not {}", other.mode().slots(), mode.slots()))
}

/// What a transaction read, in the order it was asked for.
pub fn ranges(answer: &TxnResponse) -> impl Iterator<Item = GetResponse> {
    answer.op_responses().into_iter().filter_map(|response| match response {
        TxnOpResponse::Get(range) => Some(range),
        _ => None,
    })
}

fn date_now() -> String {
    humantime::format_rfc3339_millis(clock::wall()).to_string()
}

fn date(text: &str) -> Option<SystemTime> {
    humantime::parse_rfc3339(text).ok()
}
