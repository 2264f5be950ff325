//! What the scripts answer. Nobody else knows their words.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::resp::Value;
use crate::backend::{Reheld, Released, Renewal, Revoked};
use crate::clock::Instant;
use crate::lock::{Mode, Term, Token, messages};

pub enum Acquire {
    Granted(Grant),
    Busy(Busy),
    AlreadyRan,
    /// The lock is in use with another number of slots.
    OtherSlots(Mode),
}

pub struct Grant {
    pub token: Token,
    pub slot: Option<u32>,
    pub ttl: Duration,
    /// What the lock's key holds while it is ours.
    pub value: String,
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
    /// Its lease does not end before this.
    pub ends: Instant,
    /// For how long it may last if it was renewed after we looked.
    pub lasts: Duration,
}

/// `from` is when the server was asked, or earlier.
pub fn acquire(reply: &Value, from: Instant) -> Result<Acquire> {
    let (word, rest) = word(reply)?;
    Ok(match (word.as_str(), rest) {
        ("granted", [token, slot, ttl, value]) => Acquire::Granted(Grant {
            token: Token(token.number().context("a grant without a token")?),
            slot: slot.number(),
            ttl: millis(ttl).context("a grant without a ttl")?,
            value: text(value),
        }),
        ("busy", [ahead, again, value, holder, details, seen]) => Acquire::Busy(Busy {
            ahead: ahead.number().context("a queue without a length")?,
            again: millis(again),
            value: non_empty(value),
            holder: non_empty(holder),
            seen: seen_at(from, seen, text(details)).context("busy, but by whom")?,
        }),
        ("ran", []) => Acquire::AlreadyRan,
        ("other-slots", [theirs]) => Acquire::OtherSlots(Mode::Slots(theirs.number().unwrap_or_default())),
        _ => bail!("an acquire was answered with {reply:?}"),
    })
}

fn seen_at(from: Instant, reply: &Value, details: String) -> Option<Seen> {
    let [token, owner, left, lasts] = reply.items() else { return None };
    let (ends, lasts) = (from + millis(left)?, millis(lasts)?);
    Some(Seen { token: token.text()?, owner: owner.text()?, details, ends, lasts })
}

/// `held` is the lease as it is if it was renewed.
pub fn renew(reply: &Value, held: Term) -> Result<Renewal> {
    let (word, rest) = word(reply)?;
    Ok(match (word.as_str(), rest) {
        ("held", []) => Renewal::Held(held),
        ("revoked", [reason]) => Renewal::Revoked(short(reason)),
        ("taken", [reason]) => Renewal::Taken(short(reason)),
        // Deleted, evicted, or never known to a replica that became the master.
        ("lost", []) => Renewal::Lost("its key is gone from Redis".to_owned()),
        ("lost-to", [owner]) => Renewal::Lost(format!("its key in Redis now belongs to {}", short(owner))),
        ("lost-to-several", [mode]) => {
            Renewal::Lost(format!("our lease is gone from Redis; now it is {}", short(mode)))
        }
        _ => bail!("a renewal was answered with {reply:?}"),
    })
}

pub fn release(reply: &Value) -> Result<Released> {
    let (word, rest) = word(reply)?;
    Ok(match (word.as_str(), rest) {
        ("released", []) => Released::Done,
        ("gone", []) => Released::NotOurs,
        ("taken", [reason]) => Released::Taken(text(reason)),
        _ => bail!("a release was answered with {reply:?}"),
    })
}

pub fn rehold(reply: &Value) -> Result<Reheld> {
    let (word, rest) = word(reply)?;
    Ok(match (word.as_str(), rest) {
        ("done", []) => Reheld::Done,
        ("gone", []) => Reheld::NotOurs,
        ("running", []) => Reheld::Running,
        ("revoked", [reason]) => Reheld::Revoked(text(reason)),
        ("taken", [reason]) => Reheld::Taken(text(reason)),
        _ => bail!("a hold was answered with {reply:?}"),
    })
}

pub fn revoke(reply: &Value) -> Result<Revoked> {
    let (word, _) = word(reply)?;
    Ok(match word.as_str() {
        "marked" => Revoked::Marked,
        "freed" => Revoked::Freed,
        "gone" => Revoked::NotHeld,
        "foreign" => Revoked::Impossible(messages::FOREIGN_HOLDER.to_owned()),
        _ => bail!("a revoke was answered with {reply:?}"),
    })
}

fn word(reply: &Value) -> Result<(String, &[Value])> {
    let [word, rest @ ..] = reply.items() else { bail!("a script answered {reply:?}") };
    Ok((text(word), rest))
}

fn text(value: &Value) -> String {
    value.text().unwrap_or_default()
}

/// Other people's text, for a line that is shown.
fn short(value: &Value) -> String {
    text(value).chars().take(500).collect()
}

fn non_empty(value: &Value) -> Option<String> {
    value.text().filter(|text| !text.is_empty())
}

fn millis(value: &Value) -> Option<Duration> {
    value.number().map(Duration::from_millis)
}
