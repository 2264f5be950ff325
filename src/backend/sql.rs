//! What PostgreSQL and MySQL have in common: what their procedures answer, as values (this is the only place that knows
//! their words), and what follows from it for a waiter, and for `dlock doctor`.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde_json::Value;
use tokio::task::JoinSet;

use super::{Address, Ask, Attempt, Busy, Finding, Forgotten, Patience, Reheld, Released, Renewal, Revoked};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::{Contender, Grant, History, Identity, LastRun, LockName, Mode, Token};

/// How long a place in the queue lasts unless asked again; functions.sql and procedures.sql have the same number.
const PLACE: Duration = Duration::from_secs(10);
/// How often the first waiter asks where it cannot wait for a wake-up lock. Those behind it ask less often.
const RECHECK: Duration = Duration::from_millis(100);
/// How late a server that waits for us may be to say that nothing has happened.
const LATE: Duration = Duration::from_millis(500);
/// How long to step back when the server has no connection left.
const STEP_BACK: Duration = Duration::from_millis(100);

/// How long a server that can be written to waits for another one to say the same. A replica, or a port where nobody
/// listens, says otherwise in no time.
const ANOTHER: Duration = Duration::from_millis(250);

/// What a contender that has to wait is told.
pub struct Queued {
    pub holder: Option<Contender>,
    /// Waiters before us.
    pub ahead: usize,
    /// Until the first lease before us ends.
    pub next_end: Duration,
    /// Whose wake-up lock to wait for, if there is one and we may.
    pub behind: Option<i64>,
    /// How many waiters may stay connected.
    pub room: usize,
}

/// Our place in the queue, as far as we know.
pub struct Place {
    pub name: LockName,
    /// Whose wake-up lock to wait for.
    pub behind: Option<i64>,
    /// When to ask again at the latest.
    pub due: Instant,
    /// Those far behind keep no connection between two questions, so that there is one left for others.
    pub is_far_behind: bool,
    /// It is our turn, as far as the one in front was all that blocked us.
    pub woken: bool,
}

/// The lock is ours.
pub fn granted(ask: &Ask, token: i64, slot: Option<u32>, from: Instant) -> (Attempt, Option<Place>) {
    let grant = Grant { from, ttl: ask.ttl, slack: Duration::ZERO };
    (Attempt::Granted(ask.lease(Token(token.unsigned_abs()), slot, grant)), None)
}

impl Queued {
    /// What follows for whoever asked.
    pub fn wait(self, ask: &Ask) -> (Attempt, Option<Place>) {
        let is_far_behind = self.ahead >= self.room;
        let behind = self.behind.filter(|_| !is_far_behind);
        let due = clock::now() + self.until_next_question(ask, behind);
        let late = if behind.is_some() { LATE.min(ask.ttl.min(PLACE) / 6) } else { Duration::ZERO };
        let place = Place { name: ask.name.clone(), behind, due, is_far_behind, woken: false };
        let busy = Busy { holder: self.holder, ahead: Some(self.ahead), ask_again: due + late };
        (Attempt::Busy(busy), ask.queue.then_some(place))
    }

    /// In time to keep our place, and when the first lease before us ends. A lock with slots is released by any of several
    /// holders. A session waits for one lock at a time, and only its holder can release that: so the wake-up lock of one
    /// holder says nothing of the others, and those who wait for a slot ask again and again.
    fn until_next_question(&self, ask: &Ask, behind: Option<i64>) -> Duration {
        let kept = (ask.ttl.min(PLACE) / 3).min(self.next_end + Duration::from_millis(1));
        match (behind, ask.mode) {
            (Some(_), Mode::Exclusive | Mode::Shared) => kept,
            _ => {
                let place = u32::try_from(self.ahead).unwrap_or(u32::MAX).saturating_add(1);
                kept.min(RECHECK.saturating_mul(place))
            }
        }
    }
}

/// What a procedure says has become of it, and why.
pub struct Outcome {
    pub word: String,
    pub reason: String,
}

impl Outcome {
    /// `held` is the lease as it is if it was renewed.
    pub fn renewed(self, held: Grant) -> Result<Renewal> {
        Ok(match self.word.as_str() {
            "held" => Renewal::Held(held),
            "revoked" => Renewal::Revoked(self.reason),
            "force released" => Renewal::ForceReleased(self.reason),
            "lost" => Renewal::Lost(self.reason),
            other => bail!("the database answers a renewal with {other:?}"),
        })
    }

    pub fn released(self) -> Result<Released> {
        Ok(match self.word.as_str() {
            "done" => Released::Done,
            "not ours" => Released::NotOurs,
            "force released" => Released::ForceReleased(self.reason),
            other => bail!("the database answers a release with {other:?}"),
        })
    }

    pub fn reheld(self) -> Result<Reheld> {
        Ok(match self.word.as_str() {
            "done" => Reheld::Done,
            "not held" => Reheld::NotOurs,
            "force released" => Reheld::ForceReleased(self.reason),
            "revoked" => Reheld::Revoked(self.reason),
            "running" => Reheld::Running,
            other => bail!("the database answers a renewal of what is kept with {other:?}"),
        })
    }

    pub fn revoked(self) -> Result<Revoked> {
        Ok(match self.word.as_str() {
            "marked" => Revoked::Marked,
            "freed" => Revoked::Freed,
            "not held" => Revoked::NotHeld,
            other => bail!("the database answers a revocation with {other:?}"),
        })
    }

    pub fn forgotten(self) -> Result<Forgotten> {
        Ok(match self.word.as_str() {
            "done" => Forgotten::Done,
            "nothing" => Forgotten::Nothing,
            "in use" => Forgotten::InUse,
            other => bail!("the database answers what is to be forgotten with {other:?}"),
        })
    }
}

/// How the procedures describe a contender: as JSON.
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
        let who = who.filter(|who| who.owner.as_str() == described.owner);
        Contender {
            mode,
            owner: Some(described.owner),
            fencing_token: described.fencing_token,
            slot: described.slot,
            waiting_since: since,
            acquired_at: since,
            ttl: Some(Duration::from_millis(described.ttl_ms)),
            expires_in: described.expires_in_ms.map(|left| Duration::from_millis(left.max(0).unsigned_abs())),
            revoked: described.revoked.is_some(),
            ..who.map(Contender::from).unwrap_or_default()
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
    let run = LastRun::vanished(&gone.vanished.into());
    Some(LastRun { ended_at: humantime::parse_rfc3339(&gone.ended_at).ok(), ..run })
}

/// With what the database has stored of the last success.
pub fn history(runs: Vec<LastRun>, last_success_at: Option<&str>) -> History {
    History { runs, last_success_at: last_success_at.and_then(|at| humantime::parse_rfc3339(at).ok()) }
}

/// A name, or the beginning of names, that needs no quotes anywhere.
pub fn plain_name(name: &str, what: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    ensure!(
        (1..=32).contains(&name.len()) && name.chars().all(plain) && !name.starts_with(|c: char| c.is_ascii_digit()),
        "prefix {what}: up to 32 of a-z 0-9 _, no digit first, not {name:?}"
    );
    Ok(name.to_owned())
}

/// A parameter that is on unless it is off.
pub fn is_on(address: &Address, key: &str) -> Result<bool> {
    match address.param(key) {
        None | Some("on") => Ok(true),
        Some("off") => Ok(false),
        Some(other) => bail!("{key} is on or off, not {other:?}"),
    }
}

/// Opens a session. Many that begin in the same second may all want a connection, and few need it for long.
pub async fn connected<S>(
    patience: Patience,
    is_full: impl Fn(&anyhow::Error) -> bool,
    open: impl AsyncFn() -> Result<S>,
) -> Result<S> {
    let patient_until = clock::now() + patience.connect / 2;
    loop {
        match open().await {
            Err(error) if is_full(&error) && !patient_until.has_passed() => tokio::time::sleep(STEP_BACK).await,
            opened => return opened,
        }
    }
}

/// Those of several servers that can be written to, by their places. They are tried at the same time, since one that hangs
/// would eat up the others' time.
pub async fn writable<V, S, F>(servers: &[V], begin: impl Fn(V) -> F) -> Result<Vec<(usize, S)>>
where
    V: Clone,
    S: Send + 'static,
    F: Future<Output = Result<S>> + Send + 'static,
{
    let mut attempts = JoinSet::new();
    for (place, server) in servers.iter().cloned().enumerate() {
        let begun = begin(server);
        attempts.spawn(async move { (place, begun.await) });
    }
    let (mut writable, mut failures, mut patience) = (Vec::new(), Vec::new(), Duration::MAX);
    while let Ok(Some(attempt)) = tokio::time::timeout(patience, attempts.join_next()).await {
        match attempt? {
            (place, Ok(session)) => {
                writable.push((place, session));
                patience = ANOTHER;
            }
            (_, Err(error)) => failures.push(error),
        }
    }
    if writable.is_empty() {
        // A replica that is only down or read-only says less than a server that refuses us.
        let telling = failures.iter().position(|error| Fault::of(error) != Fault::Unreachable);
        let failure = (!failures.is_empty()).then(|| failures.swap_remove(telling.unwrap_or(0)));
        return Err(failure.unwrap_or_else(|| Fault::Unreachable.because("the URL names no server")));
    }
    writable.sort_by_key(|(place, _)| *place);
    Ok(writable)
}

/// Each of them would have a holder of its own.
pub fn two_can_be_written_to(mut labels: [(usize, &str); 2], advice: &str) -> anyhow::Error {
    labels.sort_unstable();
    Fault::Unreachable.because(format_args!(
        "two servers can be written to: {} and {}; a lock on one is none on the other, so {advice}",
        labels[0].1, labels[1].1
    ))
}

/// `off` is what could undo a commit, if there is something.
pub fn durability(check: &'static str, off: Option<String>, advice: &'static str) -> Finding {
    let Some(off) = off else { return Finding::of(check, "a commit survives a crash of the machine") };
    Finding::of(check, off).weak("a crash of the machine can undo a grant, and let a second holder in", advice)
}

pub fn connections(check: &'static str, used: i64, usable: i64, advice: &'static str) -> Finding {
    let found = Finding::of(check, format!("{used} of {usable} connections are in use"));
    if used * 10 < usable * 9 {
        return found;
    }
    found.weak("a holder whose connection breaks cannot renew without another", advice)
}

pub fn privacy(check: &'static str, is_private: bool) -> Finding {
    if is_private {
        return Finding::of(check, "the connection is encrypted, or does not leave this machine");
    }
    Finding::of(check, "the connection is not encrypted").weak(
        "whoever can listen on the network can take the lock away, or let a second holder in",
        "use sslmode=verify-full",
    )
}
