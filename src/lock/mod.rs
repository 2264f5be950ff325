//! The domain: what a lock is, who may hold it and until when. Pure values and rules; no I/O, no clock
//! but the instants handed in.

mod contender;
mod history;
pub mod messages;
mod pattern;
pub mod queue;
pub mod runs;
mod state;
mod timing;
mod vanished;

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};

pub use crate::clock::rfc3339;
pub use contender::{Contender, Holder, Identity, LONGEST_NOTE, OwnerId, Record, Waiter};
pub use history::{History, LastRun, Outcome, Revocation};
pub use pattern::Selector;
pub use queue::Contends;
pub use runs::Runs;
pub use state::{LockState, NodeState, State};
pub use timing::{Deadlines, Grant, LeaseTiming, rounded};
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
            Mode::Exclusive => f.write_str("exclusive"),
            Mode::Shared => f.write_str("shared"),
            Mode::Slots(n) => write!(f, "slots:{n}"),
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

#[cfg(test)]
mod tests {
    use super::*;

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
