//! What a contender's node stores beside its [`Identity`], and the servers' dates.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::clock::{self, Instant};
use crate::lock::{Identity, Record, Token};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Details {
    ttl_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acquired_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Slot>,
    /// Why an operator wants the lock back.
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
    pub fn lasting(self, lasts: Duration) -> Hold {
        Hold { lasts_ms: millis(lasts), ..self }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    pub number: u32,
    /// The czxid of the slot's own node, which grows with every holder of the slot.
    pub token: Token,
}

const LONGEST_REASON: usize = 500;

impl Details {
    /// How long a hold lasts; `None` for what is none.
    pub fn lasts(&self) -> Option<Duration> {
        self.hold.map(|hold| Duration::from_millis(hold.lasts_ms))
    }

    /// Of the session or, once that has ended, of the hold.
    pub fn ttl(&self) -> Duration {
        self.lasts().unwrap_or(Duration::from_millis(self.ttl_ms))
    }

    pub fn acquire_now(&mut self) {
        let since = clock::wall().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.acquired_ms = Some(millis(since));
    }
}

impl Record<Details> {
    pub fn of_waiter(who: &Identity, ttl: Duration) -> Record<Details> {
        let details = Details { ttl_ms: millis(ttl), acquired_ms: None, slot: None, revoked: None, hold: None };
        Record { who: who.clone(), details }
    }

    pub fn read(data: &[u8]) -> Option<Record<Details>> {
        let mut record = Record::<Details>::from_json(data)?;
        let reason = record.details.revoked;
        record.details.revoked = reason.map(|reason| reason.chars().take(LONGEST_REASON).collect());
        Some(record)
    }
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
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
