//! The recipe: ask; if the lock is busy, wait for the wake-up lock of the one in front, and ask again. Where there is
//! none to wait for (a pooler, an SQL client without a session of its own), ask again and again.

use std::time::Duration;

use anyhow::Result;
use tokio_postgres::types::Type;

use super::answer::{self, ACQUIRED, Acquired, Outcome, Queued};
use super::session::Parameters;
use super::{Postgres, ascii, plain};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{Mode, Term};

/// How long a place in the queue lasts unless asked again; functions.sql has the same number.
const PLACE: Duration = Duration::from_secs(10);
/// How often the first waiter asks where it cannot wait for a wake-up lock. Those behind it ask less often.
const RECHECK: Duration = Duration::from_millis(100);
/// How late a server that waits for us may be to say that nothing has happened.
const LATE: Duration = Duration::from_millis(500);

/// Our place in the queue, as far as we know.
pub(super) struct Place {
    /// Whose wake-up lock to wait for.
    behind: Option<i64>,
    /// When to ask again at the latest.
    due: Instant,
}

impl Postgres {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let (from, Acquired { outcome, version }) = self.ask(ask).await?;
        self.client.check_version(version)?;
        self.place = None;
        Ok(match outcome {
            Outcome::Granted { token, slot } => {
                self.hears_of_revocation = false;
                Attempt::Granted(Lease {
                    name: ask.name.clone(),
                    owner: ask.who.owner.clone(),
                    token,
                    slot,
                    term: Term { from, ttl: ask.ttl, slack: Duration::ZERO },
                    descriptors: Vec::new(),
                })
            }
            Outcome::Busy(queued) => Attempt::Busy(self.queue(ask, &queued)),
            Outcome::OtherSlots(contender) => Attempt::OtherTerms(contender.terms()),
            Outcome::AlreadyRan => Attempt::AlreadyRan,
        })
    }

    async fn ask(&mut self, ask: &Ask) -> Result<(Instant, Acquired)> {
        let sql = format!(
            "SELECT {ACQUIRED} FROM dlock.acquire($1, $2, make_interval(secs => $3), $4, $5, $6, $7, $8::json, $9, $10,
             $11)"
        );
        let (name, owner, mode) = (ask.name.as_str(), ask.who.owner.as_str(), word(ask.mode));
        let (slots, ttl) = (i32::try_from(ask.mode.slots())?, ask.ttl.as_secs_f64());
        let (who, wake) = (ascii(&ask.who.to_json()), self.client.channel());
        let once = ask.once.as_deref().map(plain);
        let (session, again) = (self.client.process().await?, self.place.is_some());
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&ttl, Type::FLOAT8),
            (&mode, Type::TEXT),
            (&slots, Type::INT4),
            (&ask.queue, Type::BOOL),
            (&once, Type::TEXT),
            (&who, Type::TEXT),
            (&wake, Type::TEXT),
            (&session, Type::INT4),
            (&again, Type::BOOL),
        ];
        let answer = self.client.call_installed(&sql, with).await?;
        Ok((answer.from, answer::acquired(answer.row()?)?))
    }

    /// What follows for our place.
    fn queue(&mut self, ask: &Ask, queued: &Queued) -> Busy {
        // Those far behind keep no connection between two questions, so that there is one left for others.
        let far = queued.ahead >= queued.room;
        let behind = queued.behind.filter(|_| !far);
        let due = clock::now() + until_next_question(ask, queued, behind);
        let late = if behind.is_some() { LATE.min(ask.ttl.min(PLACE) / 6) } else { Duration::ZERO };
        if ask.queue {
            self.place = Some(Place { behind, due });
        }
        if far {
            self.client.disconnect();
        }
        Busy {
            holder: queued.holder.as_ref().map(|holder| holder.to_holder()),
            ahead: Some(queued.ahead),
            ask_again: due + late,
        }
    }

    /// Returns when the wake-up lock of the one in front has fallen, or it is time to ask again. What is abandoned half-way
    /// ends on the server within a second.
    pub(super) async fn wait_in_queue(&mut self) {
        let Some(Place { behind: Some(behind), due }) = self.place else { return std::future::pending().await };
        while !due.has_passed() {
            let patience = due.remaining().as_secs_f64();
            let with: &Parameters<'_> = &[(&behind, Type::INT8), (&patience, Type::FLOAT8)];
            let woken = self.client.call("SELECT dlock.await($1, make_interval(secs => $2))", with).await;
            match woken.map(|answer| answer.and_then(|answer| answer.row().and_then(|row| Ok(row.try_get(0)?)).ok())) {
                Ok(Some(false)) => {}
                Ok(Some(true)) => return,
                // The connection is gone, and our place will be if we do not ask for it.
                Err(_) if !self.client.is_connected() => return,
                // The server does not let us wait: then we ask when it is time.
                Ok(None) | Err(_) => return std::future::pending().await,
            }
        }
    }
}

fn word(mode: Mode) -> &'static str {
    match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Slots(_) => "slots",
    }
}

/// In time to keep our place, and when the first lease before us ends. A lock with slots is released by any of several,
/// and we can wait for one of them only.
fn until_next_question(ask: &Ask, queued: &Queued, behind: Option<i64>) -> Duration {
    let kept = (ask.ttl.min(PLACE) / 3).min(queued.next_end + Duration::from_millis(1));
    match (behind, ask.mode) {
        (Some(_), Mode::Exclusive | Mode::Shared) => kept,
        _ => {
            let place = u32::try_from(queued.ahead).unwrap_or(u32::MAX).saturating_add(1);
            kept.min(RECHECK.saturating_mul(place))
        }
    }
}
