//! What the procedures answer, as values.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use mysql_async::Row;
use mysql_async::prelude::FromValue;

use super::client::Answer;
use crate::backend::sql::{Outcome, Place, Queued, contender, granted, history, run};
use crate::backend::{Ask, Attempt};
use crate::lock::{Contender, LastRun, LockState};

/// A column by its name; null is `None` where the type has room for it.
pub fn get<T: FromValue>(row: &Row, column: &str) -> Result<T> {
    let value = row.get_opt(column).with_context(|| format!("the server's answer has no {column}"))?;
    value.map_err(|_| anyhow::anyhow!("the server's {column} makes no sense"))
}

/// The version of the schema, its answer, and our place if we wait.
pub fn acquired(answer: &Answer, ask: &Ask) -> Result<(i32, (Attempt, Option<Place>))> {
    let row = answer.row()?;
    let holder = || get::<Option<String>>(row, "holder")?.map(|json| contender(&json)).transpose();
    let attempt = match get::<String>(row, "outcome")?.as_str() {
        "granted" => {
            let slot = get::<Option<i64>>(row, "slot")?.map(u32::try_from).transpose()?;
            granted(ask, get(row, "token")?, slot, answer.from)
        }
        "busy" => {
            let (holder, ahead, room) = (holder()?, get(row, "ahead")?, get(row, "room")?);
            let left = get::<Option<i64>>(row, "next_end")?.unwrap_or(0).max(0);
            let next_end = Duration::from_micros(left.unsigned_abs());
            Queued { holder, ahead, next_end, behind: get(row, "behind")?, room }.wait(ask)
        }
        "other slots" => (ask.differs_from(holder()?.context("nobody uses other slots")?), None),
        "already ran" => (Attempt::AlreadyRan, None),
        other => bail!("dlock_ask says {other:?}"),
    };
    Ok((get(row, "version")?, attempt))
}

/// Of a procedure that says why, or of one that has nothing to add.
pub fn outcome(row: &Row) -> Result<Outcome> {
    let reason = row.get_opt::<Option<String>, _>("reason").and_then(Result::ok).flatten();
    Ok(Outcome { word: get(row, "outcome")?, reason: reason.unwrap_or_default() })
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
        match (one.fencing_token, expires_in) {
            (Some(_), Some(_)) => holders.push(one),
            (None, Some(_)) => waiters.push(one),
            // Nobody has asked for the lock since it vanished.
            (Some(_), None) if !get::<bool>(row, "kept")? => {
                let ended_at = crate::clock::wall().checked_sub(Duration::from_micros(left.unsigned_abs()));
                runs.insert(0, LastRun { ended_at, ..LastRun::vanished(&one) });
            }
            _ => {}
        }
    }
    let earlier: Option<String> = get(lock, "runs")?;
    let earlier = earlier.unwrap_or_default();
    runs.extend(earlier.lines().filter_map(|line| serde_json::from_str(line).ok()).filter_map(run));
    let succeeded: Option<String> = get(lock, "last_success")?;
    let history = history(runs, succeeded.as_deref());
    Ok(LockState::of(name.parse()?, "mysql", holders, waiters, history))
}
