//! What the functions of the schema answer, as values.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::Value;
use tokio_postgres::Row;

use super::session::Answer;
use crate::backend::sql::{Described, Outcome, Place, Queued, contender, granted, history, run};
use crate::backend::{Ask, Attempt};
use crate::lock::{Contender, LockState};

/// What of it [`acquired`] reads, in this order.
pub const ACQUIRED: &str =
    "outcome, token, slot, holder::text, ahead, date_part('epoch', next_end), behind, room, version";

/// The version of the schema, its answer, and our place if we wait.
pub fn acquired(answer: &Answer, ask: &Ask) -> Result<(i32, (Attempt, Option<Place>))> {
    let row = answer.row()?;
    let holder = row.try_get::<_, Option<&str>>(3)?.map(contender).transpose()?;
    let attempt = match row.try_get(0)? {
        "granted" => {
            let slot = row.try_get::<_, Option<i32>>(2)?.map(i32::unsigned_abs);
            granted(ask, row.try_get(1)?, slot, answer.from)
        }
        "busy" => {
            let (ahead, room) = (row.try_get::<_, i64>(4)?.try_into()?, row.try_get::<_, i32>(7)?.try_into()?);
            let next_end = Duration::try_from_secs_f64(row.try_get::<_, f64>(5)?.max(0.0))?;
            Queued { holder, ahead, next_end, behind: row.try_get(6)?, room }.wait(ask)
        }
        "other slots" => (ask.differs_from(holder.context("nobody uses other slots")?), None),
        "already ran" => (Attempt::AlreadyRan, None),
        other => bail!("dlock.acquire says {other:?}"),
    };
    Ok((row.try_get(8)?, attempt))
}

/// Of a function that says why, or of one that has nothing to add.
pub fn outcome(row: &Row) -> Result<Outcome> {
    let reason = if row.len() > 1 { row.try_get::<_, Option<String>>(1)? } else { None };
    Ok(Outcome { word: row.try_get(0)?, reason: reason.unwrap_or_default() })
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
    let (holders, waiters) = all.partition(|one| one.fencing_token.is_some());
    let runs = status.vanished.into_iter().chain(status.last_run).chain(status.earlier);
    let history = history(runs.filter_map(run).collect(), status.last_success_at.as_deref());
    Ok(LockState::of(status.name.parse()?, "postgres", holders, waiters, history))
}
