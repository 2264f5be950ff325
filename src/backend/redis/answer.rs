//! What the scripts answer. Nobody else knows their words.

use std::str::FromStr;
use std::time::Duration;

use redis::{FromRedisValue, ParsingError, Value};

use crate::backend::{FOREIGN_HOLDER, Forgotten, Reheld, Released, Renewal, Revoked};
use crate::lock::{Mode, Token};

/// How much of other people's text is shown (characters).
const LONGEST: usize = 500;

pub enum Acquire {
    Granted {
        token: Token,
        slot: Option<u32>,
        ttl: Duration,
        /// What the lock's key holds while it is ours.
        value: String,
    },
    Busy(Busy),
    AlreadyRan,
    /// The lock is in use with another number of slots.
    OtherSlots(Mode),
}

pub struct Busy {
    pub ahead: u32,
    /// When a lease or somebody's turn ends by itself.
    pub again: Option<Duration>,
    /// What the lock's key holds.
    pub value: Option<String>,
    pub holder: Option<String>,
    pub seen: Seen,
}

/// What the server said when it was last busy. One that has lost its data since is told by it that a command may
/// still run under a lock that it knows nothing about.
pub struct Seen {
    pub token: String,
    pub owner: String,
    pub details: String,
    /// Its lease does not end before this, counted from the request.
    pub left: Duration,
    /// For how long it may last if it was renewed after we looked.
    pub lasts: Duration,
}

/// Why a lease was not extended; nothing if it was.
pub struct NotRenewed(pub Option<Renewal>);

/// What the words of a type's answers mean, each with what belongs to it.
macro_rules! answers {
    ($type:ty: $($answer:pat => $meaning:expr,)+) => {
        impl FromRedisValue for $type {
            fn from_redis_value(reply: Value) -> Result<$type, ParsingError> {
                $crate::backend::redis::answer::understood(reply, |word, rest| {
                    Some(match (word, rest) {
                        $($answer => $meaning,)+
                        _ => return None,
                    })
                })
            }
        }
    };
}
pub(in crate::backend) use answers;

answers! { Acquire:
    ("granted", [token, slot, ttl, value]) => Acquire::Granted {
        token: Token(number(token)?),
        slot: number(slot),
        ttl: millis(ttl)?,
        value: text(value)?,
    },
    ("busy", [ahead, again, value, holder, token, owner, details, left, lasts]) => Acquire::Busy(Busy {
        ahead: number(ahead)?,
        again: millis(again),
        value: non_empty(value),
        holder: non_empty(holder),
        seen: Seen {
            token: text(token)?,
            owner: text(owner)?,
            details: text(details)?,
            left: millis(left)?,
            lasts: millis(lasts)?,
        },
    }),
    ("ran", []) => Acquire::AlreadyRan,
    ("other-slots", [theirs]) => Acquire::OtherSlots(Mode::Slots(number(theirs).unwrap_or_default())),
}

answers! { NotRenewed:
    ("held", []) => NotRenewed(None),
    ("revoked", [reason]) => NotRenewed(Some(Renewal::Revoked(shown(reason)))),
    ("taken", [reason]) => NotRenewed(Some(Renewal::ForceReleased(shown(reason)))),
    ("lost", [value]) => NotRenewed(Some(Renewal::Lost(match shown(value).as_str() {
        // Deleted, evicted, or never known to a replica that became the master.
        "" => "its key is gone from Redis".to_owned(),
        several if several.starts_with('=') => format!("our lease is gone from Redis; now it is {}", &several[1..]),
        owner => format!("its key in Redis now belongs to {owner}"),
    }))),
}

answers! { Released:
    ("released", []) => Released::Done,
    ("gone", []) => Released::NotOurs,
    ("taken", [reason]) => Released::ForceReleased(shown(reason)),
}

answers! { Reheld:
    ("done", []) => Reheld::Done,
    ("gone", []) => Reheld::NotOurs,
    ("running", []) => Reheld::Running,
    ("revoked", [reason]) => Reheld::Revoked(shown(reason)),
    ("taken", [reason]) => Reheld::ForceReleased(shown(reason)),
}

answers! { Revoked:
    ("marked", []) => Revoked::Marked,
    ("freed", []) => Revoked::Freed,
    ("gone", []) => Revoked::NotHeld,
    ("foreign", []) => Revoked::Impossible(FOREIGN_HOLDER.to_owned()),
}

answers! { Forgotten:
    ("done", []) => Forgotten::Done,
    ("nothing", []) => Forgotten::Nothing,
    ("in-use", []) => Forgotten::InUse,
}

/// Reads a script's answer: a word, and what belongs to it.
pub fn understood<T>(reply: Value, read: impl FnOnce(&str, &[Value]) -> Option<T>) -> Result<T, ParsingError> {
    let answer = match items(&reply) {
        [word, rest @ ..] => text(word).and_then(|word| read(&word, rest)),
        [] => None,
    };
    answer.ok_or_else(|| format!("{reply:?}").chars().take(LONGEST).collect::<String>().into())
}

/// What a person could read of it; programs of other people put any bytes into their locks.
pub fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => Some(text.clone()),
        Value::Int(number) => Some(number.to_string()),
        _ => None,
    }
}

pub fn number<T: FromStr>(value: &Value) -> Option<T> {
    text(value)?.parse().ok()
}

pub fn millis(value: &Value) -> Option<Duration> {
    number(value).map(Duration::from_millis)
}

pub fn items(value: &Value) -> &[Value] {
    match value {
        Value::Array(items) => items,
        _ => &[],
    }
}

pub fn non_empty(value: &Value) -> Option<String> {
    text(value).filter(|text| !text.is_empty())
}

/// Other people's text, for a line that is shown.
pub fn shown(value: &Value) -> String {
    text(value).unwrap_or_default().chars().take(LONGEST).collect()
}
