//! How the procedures of the databases describe a contender, and a run that has vanished: as JSON.

use std::time::Duration;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::lock::{Contender, Identity, LastRun, Mode, Token};

#[derive(Deserialize)]
pub struct Described {
    owner: String,
    /// Whatever the contender stored; an SQL client may have stored anything.
    who: Option<Value>,
    mode: String,
    slots: u32,
    fencing_token: Option<Token>,
    slot: Option<u32>,
    since: String,
    ttl_ms: u64,
    expires_in_ms: Option<i64>,
    revoked: Option<String>,
}

impl From<Described> for Contender {
    fn from(described: Described) -> Contender {
        let mode = match described.mode.as_str() {
            "shared" => Mode::Shared,
            "slots" => Mode::Slots(described.slots),
            _ => Mode::Exclusive,
        };
        let who = described.who.and_then(|who| Identity::from_json(&who.to_string()));
        let since = humantime::parse_rfc3339(&described.since).ok();
        Contender {
            who: who.filter(|who| who.owner.as_str() == described.owner),
            foreign_owner: Some(described.owner),
            token: described.fencing_token,
            slot: described.slot,
            waiting_since: since,
            acquired_at: since,
            ttl: Some(Duration::from_millis(described.ttl_ms)),
            expires_in: described.expires_in_ms.map(|left| Duration::from_millis(left.max(0).unsigned_abs())),
            revoked: described.revoked.is_some(),
            ..Contender::unknown(mode)
        }
    }
}

pub fn contender(json: &str) -> Result<Contender> {
    let described: Described =
        serde_json::from_str(json).context("the server's description of a holder makes no sense")?;
    Ok(described.into())
}

/// A run as its dlock described it, or what the database says of one that vanished.
pub fn run(stored: Value) -> Option<LastRun> {
    #[derive(Deserialize)]
    struct Gone {
        vanished: Described,
        ended_at: String,
    }
    let text = stored.to_string();
    let Ok(gone) = serde_json::from_value::<Gone>(stored) else { return LastRun::from_json(&text) };
    let run = LastRun::vanished(&Contender::from(gone.vanished).into_holder());
    Some(LastRun { ended_at: humantime::parse_rfc3339(&gone.ended_at).ok(), ..run })
}
