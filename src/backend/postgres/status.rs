//! What the server's functions say about contenders, as JSON, turned into the domain's words.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::lock::{Holder, Identity, LastRun, LockState, Mode, State, Token, Waiter};

#[derive(Deserialize)]
pub struct Status {
    name: String,
    last_run: Option<Value>,
    contenders: Vec<Contender>,
}

#[derive(Deserialize)]
pub struct Contender {
    owner: String,
    /// Whatever the contender stored; an SQL client may have stored anything.
    who: Option<Value>,
    mode: String,
    slots: u32,
    fencing_token: Option<Token>,
    slot: Option<u32>,
    since: String,
    ttl_ms: u64,
    expires_in_ms: i64,
    revoked: Option<String>,
}

impl Status {
    pub fn parse(json: &str) -> Result<Status> {
        serde_json::from_str(json).context("the server's status makes no sense")
    }

    pub fn into_state(self) -> Result<LockState> {
        let mut lock = LockState::free(self.name.parse()?, "postgres");
        lock.last_run = self.last_run.and_then(|run| LastRun::from_json(&run.to_string()));
        let (holders, waiters): (Vec<_>, Vec<_>) = self.contenders.iter().partition(|one| one.fencing_token.is_some());
        if let Some(first) = holders.first().or(waiters.first()) {
            lock.mode = first.mode();
            lock.slots = lock.mode.slots();
        }
        if !holders.is_empty() {
            let revoked = holders.iter().any(|holder| holder.revoked.is_some());
            lock.state = if revoked { State::Revoked } else { State::Held };
        }
        lock.holders = holders.into_iter().map(Contender::to_holder).collect();
        lock.waiters = waiters.into_iter().map(Contender::to_waiter).collect();
        Ok(lock)
    }
}

impl Contender {
    pub fn parse(json: &str) -> Result<Contender> {
        serde_json::from_str(json).context("the server's description of a holder makes no sense")
    }

    /// For people who came with another number of slots.
    pub fn terms(&self) -> String {
        let holder = self.to_holder();
        let host = holder.host.map(|host| format!(" on {host}")).unwrap_or_default();
        let terms = if self.slots == 1 { "without --slots".to_owned() } else { format!("with --slots {}", self.slots) };
        format!("{}{host} uses it {terms}", self.owner)
    }

    fn mode(&self) -> Mode {
        match self.mode.as_str() {
            "shared" => Mode::Shared,
            "slots" => Mode::Slots(self.slots),
            _ => Mode::Exclusive,
        }
    }

    fn identity(&self) -> Option<Identity> {
        self.who.as_ref().and_then(|who| Identity::from_json(&who.to_string()))
    }

    fn since(&self) -> Option<SystemTime> {
        humantime::parse_rfc3339(&self.since).ok()
    }

    fn ttl(&self) -> Option<Duration> {
        Some(Duration::from_millis(self.ttl_ms))
    }

    fn expires_in(&self) -> Option<Duration> {
        Some(Duration::from_millis(self.expires_in_ms.max(0).unsigned_abs()))
    }

    pub fn to_holder(&self) -> Holder {
        Holder {
            owner: Some(self.owner.clone()),
            fencing_token: self.fencing_token,
            acquired_at: self.since(),
            ttl: self.ttl(),
            expires_in: self.expires_in(),
            slot: self.slot,
            ..self.identity().map(Holder::from).unwrap_or_default()
        }
    }

    fn to_waiter(&self) -> Waiter {
        Waiter {
            owner: Some(self.owner.clone()),
            waiting_since: self.since(),
            ttl: self.ttl(),
            expires_in: self.expires_in(),
            ..self.identity().map(Waiter::from).unwrap_or_default()
        }
    }
}
