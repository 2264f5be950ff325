//! What the procedures answer, as values: the only place that knows their words.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mysql_async::Row;
use mysql_async::prelude::FromValue;

use crate::backend::described::{contender, run};
use crate::backend::{Forgotten, Reheld, Released, Renewal, Revoked};
use crate::lock::{Contender, Grant, History, LastRun, LockState, Token};

/// What `dlock_ask` says.
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

/// A column by its name; null is `None` where the type has room for it.
pub fn get<T: FromValue>(row: &Row, column: &str) -> Result<T> {
    let value = row.get_opt(column).with_context(|| format!("the server's answer has no {column}"))?;
    value.map_err(|_| anyhow::anyhow!("the server's {column} makes no sense"))
}

/// The version of the schema, and its answer.
pub fn acquired(row: &Row) -> Result<(i32, Acquired)> {
    let holder = || get::<Option<String>>(row, "holder")?.map(|json| contender(&json)).transpose();
    let answer = match get::<String>(row, "outcome")?.as_str() {
        "granted" => Acquired::Granted {
            token: Token(get::<i64>(row, "token")?.unsigned_abs()),
            slot: get::<Option<i64>>(row, "slot")?.map(u32::try_from).transpose()?,
        },
        "busy" => Acquired::Busy(Queued {
            holder: holder()?,
            ahead: get(row, "ahead")?,
            next_end: Duration::from_micros(get::<Option<i64>>(row, "next_end")?.unwrap_or(0).max(0).unsigned_abs()),
            behind: get(row, "behind")?,
            room: get(row, "room")?,
        }),
        "other slots" => Acquired::OtherSlots(holder()?.context("nobody uses other slots")?),
        "already ran" => Acquired::AlreadyRan,
        other => bail!("dlock_ask says {other:?}"),
    };
    Ok((get(row, "version")?, answer))
}

fn outcome(row: &Row) -> Result<String> {
    get(row, "outcome")
}

fn reason(row: &Row) -> Result<String> {
    Ok(get::<Option<String>>(row, "reason")?.unwrap_or_default())
}

/// `held` is the lease as it is if it was renewed.
pub fn renewed(row: &Row, held: Grant) -> Result<Renewal> {
    Ok(match outcome(row)?.as_str() {
        "held" => Renewal::Held(held),
        "revoked" => Renewal::Revoked(reason(row)?),
        "force released" => Renewal::ForceReleased(reason(row)?),
        "lost" => Renewal::Lost(reason(row)?),
        other => bail!("dlock_extend says {other:?}"),
    })
}

pub fn released(row: &Row) -> Result<Released> {
    Ok(match outcome(row)?.as_str() {
        "done" => Released::Done,
        "not ours" => Released::NotOurs,
        "force released" => Released::ForceReleased(reason(row)?),
        other => bail!("dlock_end says {other:?}"),
    })
}

pub fn reheld(row: &Row) -> Result<Reheld> {
    Ok(match outcome(row)?.as_str() {
        "done" => Reheld::Done,
        "not held" => Reheld::NotOurs,
        "force released" => Reheld::ForceReleased(reason(row)?),
        "revoked" => Reheld::Revoked(reason(row)?),
        "running" => Reheld::Running,
        other => bail!("dlock_rehold says {other:?}"),
    })
}

pub fn revoked(row: &Row) -> Result<Revoked> {
    Ok(match outcome(row)?.as_str() {
        "marked" => Revoked::Marked,
        "freed" => Revoked::Freed,
        "not held" => Revoked::NotHeld,
        other => bail!("dlock_revoke says {other:?}"),
    })
}

pub fn forgotten(row: &Row) -> Result<Forgotten> {
    Ok(match outcome(row)?.as_str() {
        "done" => Forgotten::Done,
        "nothing" => Forgotten::Nothing,
        "in use" => Forgotten::InUse,
        other => bail!("dlock_forget says {other:?}"),
    })
}

/// What `dlock_status` says of each lock: its record, then its contenders.
pub fn states(locks: &[Row], contenders: &[Row]) -> Result<Vec<LockState>> {
    let mut queues = BTreeMap::<String, Vec<&Row>>::new();
    for row in contenders {
        queues.entry(get(row, "name")?).or_default().push(row);
    }
    let state = |row| {
        let name: String = get(row, "name")?;
        let queue = queues.remove(&name).unwrap_or_default();
        state(&name, row, &queue)
    };
    locks.iter().map(state).collect()
}

fn state(name: &str, lock: &Row, queue: &[&Row]) -> Result<LockState> {
    let (mut holders, mut waiters, mut runs) = (Vec::new(), Vec::new(), Vec::new());
    for row in queue {
        let (described, left): (String, i64) = (get(row, "described")?, get(row, "expires_in")?);
        let expires_in = u64::try_from(left).ok().map(Duration::from_micros);
        let one = Contender { expires_in, ..contender(&described)? };
        match (one.token, expires_in) {
            (Some(_), Some(_)) => holders.push(one),
            (None, Some(_)) => waiters.push(one),
            // Nobody has asked for the lock since it vanished.
            (Some(_), None) if !get::<bool>(row, "kept")? => {
                let ended_at = crate::clock::wall().checked_sub(Duration::from_micros(left.unsigned_abs()));
                runs.insert(0, LastRun { ended_at, ..LastRun::vanished(&one.into_holder()) });
            }
            _ => {}
        }
    }
    let earlier: Option<String> = get(lock, "runs")?;
    let earlier = earlier.unwrap_or_default();
    runs.extend(earlier.lines().filter_map(|line| serde_json::from_str(line).ok()).filter_map(run));
    let succeeded: Option<String> = get(lock, "last_success")?;
    let last_success_at = succeeded.and_then(|at| humantime::parse_rfc3339(&at).ok());
    let history = History { runs, last_success_at };
    Ok(LockState::of(name.parse()?, "mysql", holders, waiters, history))
}
