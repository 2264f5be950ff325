//! What `dlock.acquire` says, and when to ask it again.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::client::Answer;
use super::status::Contender;
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock;
use crate::lock::{Mode, Term, Token};

/// What a place in the queue is worth unless asked again; protocol.sql has the same number.
pub const PLACE: Duration = Duration::from_secs(10);
/// How often the first waiter asks, should notifications not get through. Those behind it ask less often.
const RECHECK: Duration = Duration::from_millis(500);

pub fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Slots(_) => "slots",
    }
}

/// What was granted by this answer.
pub fn lease(ask: &Ask, answer: &Answer, token: i64, slot: Option<i32>) -> Lease {
    Lease {
        name: ask.name.clone(),
        owner: ask.who.owner.clone(),
        token: Token(token.unsigned_abs()),
        slot: slot.map(i32::unsigned_abs),
        term: Term { from: answer.from, ttl: ask.ttl, slack: Duration::ZERO },
        descriptors: Vec::new(),
    }
}

/// What `dlock.acquire` says.
pub fn outcome(ask: &Ask, answer: &Answer) -> Result<Attempt> {
    let row = answer.row()?;
    let holder = row.try_get::<_, Option<&str>>(5)?.map(Contender::parse).transpose()?;
    Ok(match row.try_get(0)? {
        "granted" => Attempt::Granted(lease(ask, answer, row.try_get(1)?, row.try_get(2)?)),
        "busy" => {
            let ahead = usize::try_from(row.try_get::<_, i64>(3)?)?;
            let next_end = Duration::try_from_secs_f64(row.try_get(4)?)?;
            let late = row.try_get::<_, Option<i64>>(9)?.map_or(Duration::ZERO, |_| grace(ask.ttl));
            Attempt::Busy(Busy {
                holder: holder.map(|holder| holder.to_holder()),
                ahead: Some(ahead),
                ask_again: clock::now() + until_next_question(ask.ttl, ahead, next_end) + late,
            })
        }
        "other terms" => Attempt::OtherTerms(holder.context("nobody has other terms")?.terms()),
        "already ran" => Attempt::AlreadyRan,
        other => bail!("dlock.acquire says {other:?}"),
    })
}

/// How long a server that waits for us may be late to say that nothing has happened.
pub fn grace(ttl: Duration) -> Duration {
    RECHECK.min(ttl.min(PLACE) / 6)
}

/// When a waiter asks again unasked: in time to keep its place, when the first lease before it ends,
/// and now and then in case a notification got lost.
fn until_next_question(ttl: Duration, ahead: usize, next_end: Duration) -> Duration {
    let behind = u32::try_from(ahead).unwrap_or(u32::MAX).saturating_add(1);
    RECHECK.saturating_mul(behind).min(ttl.min(PLACE) / 3).min(next_end + Duration::from_millis(1))
}
