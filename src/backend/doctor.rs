//! What backends tell `dlock doctor`.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// One thing that `dlock doctor` found out about a backend.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// A short stable name: `redis-eviction`, `etcd-version`.
    pub check: &'static str,
    pub verdict: Verdict,
    /// What is: "maxmemory-policy is allkeys-lru".
    pub what: String,
    /// Why it matters for the promise; empty if it is fine.
    pub why: String,
    /// What to do; empty if it is fine.
    pub advice: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    Fine,
    /// It works, but the promise has a hole.
    Weak,
    /// It does not work.
    Broken,
}

impl Finding {
    /// Fine, unless something else is said of it.
    pub fn of(check: &'static str, what: impl Into<String>) -> Finding {
        Finding { check, verdict: Verdict::Fine, what: what.into(), why: String::new(), advice: String::new() }
    }

    pub fn weak(self, why: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { verdict: Verdict::Weak, why: why.into(), advice: advice.into(), ..self }
    }

    pub fn broken(self, why: impl Into<String>, advice: impl Into<String>) -> Finding {
        Finding { verdict: Verdict::Broken, ..self.weak(why, advice) }
    }
}

/// What a backend says about itself.
#[derive(Clone, Debug, Default)]
pub struct Checkup {
    pub findings: Vec<Finding>,
    /// The server's date minus ours, in microseconds, give or take half a round trip; where it can be asked.
    pub clock_offset_us: Option<i64>,
}

/// A date, in microseconds.
pub fn micros(date: SystemTime) -> i64 {
    date.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}
