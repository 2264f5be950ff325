//! What the functions of the schema say, as values: the only place that knows their words.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio_postgres::Row;

use super::status::Contender;
use crate::backend::{Reheld, Revoked};
use crate::lock::Token;

/// What `dlock.acquire` says, in the order of [`ACQUIRED`].
pub struct Acquired {
    pub outcome: Outcome,
    /// Of the schema.
    pub version: i32,
}

pub enum Outcome {
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
    /// So many waiters may stay connected.
    pub room: usize,
}

pub const ACQUIRED: &str =
    "outcome, token, slot, holder::text, ahead, extract(epoch FROM next_end)::float8, behind, room, version";

pub fn acquired(row: &Row) -> Result<Acquired> {
    let holder = row.try_get::<_, Option<&str>>(3)?.map(Contender::parse).transpose()?;
    let outcome = match row.try_get(0)? {
        "granted" => Outcome::Granted {
            token: Token(row.try_get::<_, i64>(1)?.unsigned_abs()),
            slot: row.try_get::<_, Option<i32>>(2)?.map(i32::unsigned_abs),
        },
        "busy" => Outcome::Busy(Queued {
            holder,
            ahead: usize::try_from(row.try_get::<_, i64>(4)?)?,
            next_end: Duration::try_from_secs_f64(row.try_get::<_, f64>(5)?.max(0.0))?,
            behind: row.try_get(6)?,
            room: usize::try_from(row.try_get::<_, i32>(7)?)?,
        }),
        "other slots" => Outcome::OtherSlots(holder.context("nobody uses other slots")?),
        "already ran" => Outcome::AlreadyRan,
        other => bail!("dlock.acquire says {other:?}"),
    };
    Ok(Acquired { outcome, version: row.try_get(8)? })
}

/// What `dlock.renew` says; with the reason.
pub enum Renewed {
    Held,
    Revoked(String),
    ForceReleased(String),
    Lost(String),
}

pub fn renewed(row: &Row) -> Result<Renewed> {
    let reason = row.try_get::<_, Option<String>>(1)?.unwrap_or_default();
    Ok(match row.try_get(0)? {
        "held" => Renewed::Held,
        "revoked" => Renewed::Revoked(reason),
        "force released" => Renewed::ForceReleased(reason),
        "lost" => Renewed::Lost(reason),
        other => bail!("dlock.renew says {other:?}"),
    })
}

/// What `dlock.rehold` says.
pub fn reheld(row: &Row) -> Result<Reheld> {
    let reason = row.try_get::<_, Option<String>>(1)?.unwrap_or_default();
    Ok(match row.try_get(0)? {
        "done" => Reheld::Done,
        "not held" => Reheld::NotOurs,
        "force released" => Reheld::Taken(reason),
        "revoked" => Reheld::Revoked(reason),
        "running" => Reheld::Running,
        other => bail!("dlock.rehold says {other:?}"),
    })
}

/// What `dlock.revoke` says.
pub fn revoked(row: &Row) -> Result<Revoked> {
    Ok(match row.try_get(0)? {
        "marked" => Revoked::Marked,
        "freed" => Revoked::Freed,
        "not held" => Revoked::NotHeld,
        other => bail!("dlock.revoke says {other:?}"),
    })
}
