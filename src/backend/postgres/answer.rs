//! What the functions of the schema answer, as values: the only place that knows their words.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use tokio_postgres::Row;

use crate::backend::described::{Described, contender, run};
use crate::backend::{Forgotten, Reheld, Renewal, Revoked};
use crate::lock::{Contender, Grant, History, LockState, Token};

/// What `dlock.acquire` says, in the order of [`ACQUIRED`].
pub enum Acquired {
    Granted {
        token: Token,
        slot: Option<u32>,
    },
    Busy(Queued),
    /// In use by this contender with another number of slots.
    OtherSlots(Contender),
    AlreadyRan,
}

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

pub const ACQUIRED: &str =
    "outcome, token, slot, holder::text, ahead, date_part('epoch', next_end), behind, room, version";

/// The version of the schema, and its answer.
pub fn acquired(row: &Row) -> Result<(i32, Acquired)> {
    let holder = row.try_get::<_, Option<&str>>(3)?.map(contender).transpose()?;
    let answer = match row.try_get(0)? {
        "granted" => Acquired::Granted {
            token: Token(row.try_get::<_, i64>(1)?.unsigned_abs()),
            slot: row.try_get::<_, Option<i32>>(2)?.map(i32::unsigned_abs),
        },
        "busy" => Acquired::Busy(Queued {
            holder,
            ahead: usize::try_from(row.try_get::<_, i64>(4)?)?,
            next_end: Duration::try_from_secs_f64(row.try_get::<_, f64>(5)?.max(0.0))?,
            behind: row.try_get(6)?,
            room: usize::try_from(row.try_get::<_, i32>(7)?)?,
        }),
        "other slots" => Acquired::OtherSlots(holder.context("nobody uses other slots")?),
        "already ran" => Acquired::AlreadyRan,
        other => bail!("dlock.acquire says {other:?}"),
    };
    Ok((row.try_get(8)?, answer))
}

fn reason(row: &Row) -> Result<String> {
    Ok(row.try_get::<_, Option<String>>(1)?.unwrap_or_default())
}

/// `held` is the lease as it is if it was renewed.
pub fn renewed(row: &Row, held: Grant) -> Result<Renewal> {
    Ok(match row.try_get(0)? {
        "held" => Renewal::Held(held),
        "revoked" => Renewal::Revoked(reason(row)?),
        "force released" => Renewal::ForceReleased(reason(row)?),
        "lost" => Renewal::Lost(reason(row)?),
        other => bail!("dlock.renew says {other:?}"),
    })
}

pub fn reheld(row: &Row) -> Result<Reheld> {
    Ok(match row.try_get(0)? {
        "done" => Reheld::Done,
        "not held" => Reheld::NotOurs,
        "force released" => Reheld::ForceReleased(reason(row)?),
        "revoked" => Reheld::Revoked(reason(row)?),
        "running" => Reheld::Running,
        other => bail!("dlock.rehold says {other:?}"),
    })
}

pub fn revoked(row: &Row) -> Result<Revoked> {
    Ok(match row.try_get(0)? {
        "marked" => Revoked::Marked,
        "freed" => Revoked::Freed,
        "not held" => Revoked::NotHeld,
        other => bail!("dlock.revoke says {other:?}"),
    })
}

pub fn forgotten(row: &Row) -> Result<Forgotten> {
    Ok(match row.try_get(0)? {
        "done" => Forgotten::Done,
        "nothing" => Forgotten::Nothing,
        "in use" => Forgotten::InUse,
        other => bail!("dlock.forget says {other:?}"),
    })
}

/// Reads what `dlock.status` says.
pub fn state(json: &str) -> Result<LockState> {
    #[derive(Deserialize)]
    struct Status {
        name: String,
        last_run: Option<Value>,
        earlier: Vec<Value>,
        last_success_at: Option<String>,
        contenders: Vec<Described>,
        vanished: Vec<Value>,
    }
    let status: Status = serde_json::from_str(json).context("the server's status makes no sense")?;
    let all = status.contenders.into_iter().map(Contender::from);
    let (holders, waiters) = all.partition(|one| one.token.is_some());
    let runs = status.vanished.into_iter().chain(status.last_run).chain(status.earlier);
    let runs = runs.filter_map(run).collect();
    let last_success_at = status.last_success_at.and_then(|at| humantime::parse_rfc3339(&at).ok());
    let history = History { runs, last_success_at };
    Ok(LockState::of(status.name.parse()?, "postgres", holders, waiters, history))
}
