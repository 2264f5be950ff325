//! The domain: what a lock is, who may hold it and until when. Pure values and rules; no I/O, no clock
//! but the instants handed in.
//!
//! ```text
//! t0 ── renew ── renew ──────── signal_at ──── kill_at ── end ── the server's own expiry
//!       ttl/3                   first signal   SIGKILL    last instant we may claim the lock
//! ```

mod contender;
mod history;
mod pattern;
pub mod queue;
pub mod runs;
mod state;
mod vanished;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use humantime::format_duration;
use serde::{Deserialize, Serialize};

pub use crate::clock::rfc3339;
use crate::clock::{self, Instant};
pub use contender::{Contender, Holder, Identity, LONGEST_NOTE, OwnerId, Record};
pub use history::{History, LastRun, Outcome, Revocation, StoredHistory};
pub use pattern::Selector;
pub use queue::Contends;
pub use runs::Runs;
pub use state::{LockState, NodeState, State};
pub use vanished::SeenHolders;

/// The name of a lock: checked once when it comes in, encoded where a backend has no room for a slash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct LockName(String);

const LONGEST_NAME: usize = 200;

impl LockName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as one path segment: `job/sub` is `job%2Fsub`, so it never lies inside `job`.
    pub fn encoded(&self) -> String {
        self.0.replace('/', "%2F")
    }

    /// The inverse of [`encoded`](Self::encoded); `None` for what no name of ours encodes to.
    pub fn decode(segment: &str) -> Option<LockName> {
        segment.replace("%2F", "/").parse().ok().filter(|name: &LockName| name.encoded() == segment)
    }
}

impl FromStr for LockName {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<LockName> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._:@+-/".contains(c);
        ensure!(!text.is_empty(), "a lock name must not be empty");
        ensure!(
            text.len() <= LONGEST_NAME,
            "a lock name has at most {LONGEST_NAME} characters, this one has {}",
            text.len()
        );
        if let Some(wrong) = text.chars().find(|&c| !allowed(c)) {
            bail!("a lock name has only A-Z a-z 0-9 . _ : @ + - and /, not {wrong:?}");
        }
        if text.split('/').any(|segment| matches!(segment, "" | "." | "..")) {
            bail!("a lock name must not begin or end with a slash, or have //, /./ or /../ in it");
        }
        Ok(LockName(text.to_owned()))
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The ways of holding a lock together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    #[default]
    Exclusive,
    Shared,
    /// Up to this many holders at once, two or more.
    Slots(u32),
}

impl Mode {
    /// How many may hold the lock at once in this mode; contenders must agree on it.
    pub fn slots(self) -> u32 {
        match self {
            Mode::Exclusive | Mode::Shared => 1,
            Mode::Slots(n) => n,
        }
    }

    /// As JSON and the databases' procedures call it.
    pub fn word(self) -> &'static str {
        match self {
            Mode::Exclusive => "exclusive",
            Mode::Shared => "shared",
            Mode::Slots(_) => "slots",
        }
    }

    /// The inverse of the [`Display`](fmt::Display) form, as backends store it: `exclusive`, `shared`, `slots:3`.
    pub fn parse(text: &str) -> Option<Mode> {
        match text {
            "exclusive" => Some(Mode::Exclusive),
            "shared" => Some(Mode::Shared),
            _ => text.strip_prefix("slots:")?.parse().ok().filter(|&n| n >= 2).map(Mode::Slots),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Slots(n) => write!(f, "slots:{n}"),
            other => f.write_str(other.word()),
        }
    }
}

/// A fencing token: greater at every later exclusive grant of the same lock, and a positive i64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Token(pub u64);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What the server confirmed, counted from before the request that set it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    pub from: Instant,
    pub ttl: Duration,
    /// What this backend's notion of time may be off by.
    pub slack: Duration,
}

/// How a run wants its lease kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    pub ttl: Duration,
    pub kill_after: Duration,
}

/// The instants the guardian acts at, and the one after which the lock is not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deadlines {
    pub signal_at: Instant,
    pub kill_at: Instant,
    pub end: Instant,
}

impl Deadlines {
    /// Of a command that runs under somebody else's lease.
    pub const NEVER: Deadlines = Deadlines { signal_at: Instant::NEVER, kill_at: Instant::NEVER, end: Instant::NEVER };

    /// With SIGKILL at least this long before the end. The first signal moves with it.
    pub fn with_margin(self, margin: Duration) -> Deadlines {
        let kill_at = self.kill_at.min(self.end - margin);
        Deadlines { signal_at: self.signal_at - self.kill_at.since(kill_at), kill_at, end: self.end }
    }

    /// A renewal only ever moves them later.
    pub fn later_of(self, other: Deadlines) -> Deadlines {
        Deadlines {
            signal_at: self.signal_at.max(other.signal_at),
            kill_at: self.kill_at.max(other.kill_at),
            end: self.end.max(other.end),
        }
    }

    /// When the guardian must have been done; if not, dlock helps it while there is time.
    pub fn backstop(self) -> Instant {
        self.kill_at + self.end.since(self.kill_at) / 2
    }
}

const SHORTEST_TTL: Duration = Duration::from_secs(1);
const LONGEST_TTL: Duration = Duration::from_secs(7 * 24 * 3600);
const LONGEST_ATTEMPT: Duration = Duration::from_secs(2);
const LONGEST_DEFAULT_KILL_AFTER: Duration = Duration::from_secs(5);
/// Between SIGKILL and the end of the lease, at the least: ending a tree of 100 processes was seen to take up to 106 ms on
/// a busy machine. Where that is not enough, the guardian notices and takes more.
const SHORTEST_MARGIN: Duration = Duration::from_millis(150);

impl LeaseTiming {
    pub fn new(ttl: Duration, kill_after: Option<Duration>) -> Result<LeaseTiming> {
        ensure!(ttl >= SHORTEST_TTL, "a ttl of {} is too short: the least is 1s", format_duration(ttl));
        ensure!(ttl <= LONGEST_TTL, "a ttl of {} is too long: the most is 7days", format_duration(ttl));
        let kill_after = kill_after.unwrap_or((ttl / 6).min(LONGEST_DEFAULT_KILL_AFTER));
        let timing = LeaseTiming { ttl, kill_after };
        let needed = timing.renew_every() + timing.attempt() + kill_after + timing.margin() + ttl / 100;
        ensure!(
            needed <= ttl,
            "a ttl of {} cannot hold a renewal ({} + {}), --kill-after ({}) and the margins ({}): \
             raise --ttl or lower --kill-after",
            format_duration(ttl),
            rounded(timing.renew_every()),
            rounded(timing.attempt()),
            format_duration(kill_after),
            rounded(timing.margin() + ttl / 100),
        );
        Ok(timing)
    }

    pub fn renew_every(self) -> Duration {
        self.ttl / 3
    }

    /// How long one request may take before it counts as unanswered.
    pub fn attempt(self) -> Duration {
        (self.ttl / 6).min(LONGEST_ATTEMPT)
    }

    /// What lies between SIGKILL and the last instant we may claim the lock.
    pub fn margin(self) -> Duration {
        (self.ttl / 50).max(SHORTEST_MARGIN)
    }

    /// The deadlines that follow from what the server confirmed. A server that grants less than was
    /// asked for brings them all forward.
    pub fn deadlines(self, grant: Grant) -> Deadlines {
        let fit = self.shortened_to(grant.ttl);
        let end = grant.from + fit.ttl.mul_f64(0.99) - grant.slack;
        let kill_at = end - fit.margin();
        Deadlines { signal_at: kill_at - fit.kill_after, kill_at, end }
    }

    /// The same in proportion, for a server that grants less than was asked for.
    pub fn shortened_to(self, granted: Duration) -> LeaseTiming {
        if granted >= self.ttl {
            return self;
        }
        let share = granted.as_secs_f64() / self.ttl.as_secs_f64();
        LeaseTiming { ttl: granted, kill_after: self.kill_after.mul_f64(share) }
    }
}

/// Milliseconds are as precise as anybody reads.
pub fn rounded(span: Duration) -> String {
    format_duration(Duration::from_millis(clock::millis(span))).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(n: u64) -> Duration {
        Duration::from_secs(n)
    }

    #[test]
    fn the_default_leaves_room_for_everything_before_the_end() {
        let timing = LeaseTiming::new(secs(30), None).unwrap();
        assert_eq!(timing.kill_after, secs(5));
        let t0 = Instant::from_nanos(0);
        let at = timing.deadlines(Grant { from: t0, ttl: secs(30), slack: Duration::ZERO });
        assert_eq!(at.end, t0 + Duration::from_millis(29_700));
        assert_eq!(at.kill_at, t0 + Duration::from_millis(29_100));
        assert_eq!(at.signal_at, t0 + Duration::from_millis(24_100));
        assert!(t0 + timing.renew_every() + timing.attempt() < at.signal_at);
    }

    #[test]
    fn the_shortest_ttl_still_fits() {
        let timing = LeaseTiming::new(secs(1), None).unwrap();
        assert_eq!(timing.kill_after, Duration::from_secs(1) / 6);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let error = LeaseTiming::new(secs(6), Some(secs(5))).unwrap_err().to_string();
        assert!(error.contains("6s") && error.contains("5s") && error.contains("raise --ttl"), "{error}");
        assert!(LeaseTiming::new(Duration::from_millis(999), None).is_err());
        assert!(LeaseTiming::new(secs(8 * 24 * 3600), None).is_err());
    }

    #[test]
    fn a_shorter_grant_brings_every_deadline_forward() {
        let timing = LeaseTiming::new(secs(30), None).unwrap();
        let t0 = Instant::from_nanos(0);
        let at = timing.deadlines(Grant { from: t0, ttl: secs(20), slack: secs(2) });
        assert_eq!(at.end, t0 + Duration::from_millis(17_800));
        assert!(at.signal_at < at.kill_at && at.kill_at < at.end);
        assert_eq!(at.kill_at.since(at.signal_at), secs(5) * 2 / 3, "--kill-after shrinks with it");
    }

    #[test]
    fn a_slow_guardian_begins_earlier_and_leaves_the_command_as_much_time_to_end() {
        let timing = LeaseTiming::new(secs(30), None).unwrap();
        let t0 = Instant::from_nanos(0);
        let at = timing.deadlines(Grant { from: t0, ttl: secs(30), slack: Duration::ZERO });
        assert_eq!(at.with_margin(Duration::from_millis(100)), at, "the ordinary margin is more than that");
        let earlier = at.with_margin(secs(3));
        assert_eq!(earlier.end.since(earlier.kill_at), secs(3));
        assert_eq!(earlier.kill_at.since(earlier.signal_at), secs(5));
        assert_eq!(earlier.end, at.end);
    }

    #[test]
    fn takes_what_the_contract_allows() {
        for good in ["a", "nightly-report", "A.b_c:d@e+f-g/h", &"x".repeat(200), "..a/b..", "..."] {
            assert!(good.parse::<LockName>().is_ok(), "{good}");
        }
    }

    #[test]
    fn refuses_everything_else() {
        for bad in
            ["", "/", "a/", "/a", "a//b", ".", "..", "a/./b", "a/..", "a b", "ä", "a\n", "a%2Fb", &"x".repeat(201)]
        {
            assert!(bad.parse::<LockName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn encoding_keeps_names_apart() {
        let name: LockName = "job/sub".parse().unwrap();
        assert_eq!(name.encoded(), "job%2Fsub");
        assert_eq!(LockName::decode("job%2Fsub"), Some(name));
        assert_eq!(LockName::decode("job%2fsub"), None);
        assert_eq!(LockName::decode("job/sub"), None);
    }

    #[test]
    fn a_mode_survives_its_text() {
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Slots(2), Mode::Slots(64)] {
            assert_eq!(Mode::parse(&mode.to_string()), Some(mode));
        }
        assert_eq!(Mode::parse("slots:1"), None);
        assert_eq!(Mode::parse("slots:x"), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_name_or_refused_and_names_survive_their_encoding(text in ".{0,220}") {
            if let Ok(name) = text.parse::<LockName>() {
                assert_eq!(name.as_str(), text);
                assert!(!name.encoded().contains('/'));
                assert_eq!(LockName::decode(&name.encoded()), Some(name));
            }
            let _ = LockName::decode(&text);
        }

        #[test]
        fn two_names_are_never_encoded_alike(a in "[a%2F/.]{1,6}", b in "[a%2F/.]{1,6}") {
            if let (Ok(a), Ok(b)) = (a.parse::<LockName>(), b.parse::<LockName>()) {
                assert_eq!(a == b, a.encoded() == b.encoded());
            }
        }
    }
}
