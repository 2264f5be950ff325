//! What a contender's node says about it. Written by dlocks, perhaps of another version, and read with
//! distrust; other programs store anything or nothing.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::clock::{self, Instant};
use crate::lock::{Identity, Token};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    #[serde(flatten)]
    pub who: Identity,
    pub ttl_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acquired_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Slot>,
    /// An operator wants the lock back, for this reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
}

/// The session has ended, and others are kept out all the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// For how long after the node was created.
    pub lasts_ms: u64,
    /// Of the grant.
    pub token: Token,
    /// Somebody may be at work under it, as after `dlock acquire`.
    pub in_use: bool,
}

impl Hold {
    pub fn new(lasts: Duration, token: Token, in_use: bool) -> Hold {
        Hold { lasts_ms: u64::try_from(lasts.as_millis()).unwrap_or(u64::MAX), token, in_use }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    pub number: u32,
    /// The czxid of the slot's own node, which grows with every holder of the slot.
    pub token: Token,
}

const LONGEST_REASON: usize = 500;

impl Record {
    pub fn new(who: &Identity, ttl: Duration) -> Record {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        Record { who: who.clone(), ttl_ms, acquired_ms: None, slot: None, revoked: None, hold: None }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers always serialise")
    }

    pub fn from_bytes(bytes: &[u8]) -> Option<Record> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut read: Record = serde_json::from_str(text).ok()?;
        read.who = Identity::from_json(text)?;
        read.revoked = read.revoked.map(|reason| reason.chars().take(LONGEST_REASON).collect());
        Some(read)
    }

    pub fn acquire_now(&mut self) {
        let since = clock::wall().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.acquired_ms = u64::try_from(since.as_millis()).ok();
    }

    /// Of the session or, once that has ended, of the hold.
    pub fn ttl(&self) -> Duration {
        self.lasts().unwrap_or(Duration::from_millis(self.ttl_ms))
    }

    /// How long a hold lasts; `None` for what is none.
    pub fn lasts(&self) -> Option<Duration> {
        self.hold.map(|hold| Duration::from_millis(hold.lasts_ms))
    }
}

/// A server's date, for people and for comparing with other dates of servers.
pub fn server_date(millis: i64) -> SystemTime {
    let since = Duration::from_millis(u64::try_from(millis).unwrap_or(0));
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

/// The server's clock, without asking it: a date of its own and when we got it.
#[derive(Clone, Copy, Debug)]
pub struct ServerClock {
    pub date: i64,
    pub read: Instant,
}

impl ServerClock {
    /// Not later than it is on the server.
    pub fn now(self) -> SystemTime {
        server_date(self.date) + self.read.elapsed()
    }
}
