//! The recipe: ask; if the lock is busy, wait for the wake-up lock of the one in front, and ask again. Where there is
//! none to wait for (a pooler, an SQL client without a session of its own), ask again and again.

use std::time::Duration;

use anyhow::Result;

use super::answer::{self, ACQUIRED, Acquired, Queued};
use super::session::Parameters;
use super::{Postgres, ascii, plain};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{Contender, Grant, Mode, messages};

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
    /// It is our turn, as far as the one in front was all that blocked us.
    woken: bool,
}

impl Postgres {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let (from, answer) = self.ask(ask).await?;
        self.place = None;
        Ok(match answer {
            Acquired::Granted { token, slot } => {
                self.hears_of_revocation = false;
                Attempt::Granted(Lease {
                    name: ask.name.clone(),
                    owner: ask.who.owner.clone(),
                    token,
                    slot,
                    grant: Grant { from, ttl: ask.ttl, slack: Duration::ZERO },
                    descriptors: Vec::new(),
                })
            }
            Acquired::Busy(queued) => Attempt::Busy(self.queue(ask, queued)),
            Acquired::OtherSlots(other) => {
                let (theirs, holder) = (other.mode, other.into_holder());
                let host = holder.host.map(|host| format!(" on {host}")).unwrap_or_default();
                let who = holder.owner.unwrap_or_default() + &host;
                Attempt::OtherSlots(messages::other_slots(who, theirs, ask.mode))
            }
            Acquired::AlreadyRan => Attempt::AlreadyRan,
        })
    }

    async fn ask(&mut self, ask: &Ask) -> Result<(Instant, Acquired)> {
        let sql = format!(
            "SELECT {ACQUIRED} FROM dlock.acquire($1, $2, $3 * interval '1 s', $4, $5, $6, $7, $8::json, $9, $10, $11)"
        );
        let (name, owner, ttl) = (ask.name.as_str(), ask.who.owner.as_str(), ask.ttl.as_secs_f64());
        let (mode, slots) = (word(ask.mode), i32::try_from(ask.mode.slots())?);
        let (once, who) = (ask.once.as_deref().map(plain), ascii(&ask.who.to_json()));
        let (wake, session) = (self.client.channel(), self.client.process().await?);
        let again = self.place.as_ref().is_some_and(|place| !place.woken);
        let with: &Parameters<'_> =
            &[&name, &owner, &ttl, &mode, &slots, &ask.queue, &once, &who, &wake, &session, &again];
        let answer = self.client.call_installed(&sql, with).await?;
        let (version, acquired) = answer::acquired(answer.row()?)?;
        self.client.check_version(version)?;
        Ok((answer.from, acquired))
    }

    /// What follows for our place.
    fn queue(&mut self, ask: &Ask, queued: Queued) -> Busy {
        // Those far behind keep no connection between two questions, so that there is one left for others.
        let far = queued.ahead >= queued.room;
        let behind = queued.behind.filter(|_| !far);
        let due = clock::now() + until_next_question(ask, &queued, behind);
        let late = if behind.is_some() { LATE.min(ask.ttl.min(PLACE) / 6) } else { Duration::ZERO };
        if ask.queue {
            self.place = Some(Place { behind, due, woken: false });
        }
        if far {
            self.client.disconnect();
        }
        Busy { holder: queued.holder.map(Contender::into_holder), ahead: Some(queued.ahead), ask_again: due + late }
    }

    /// Returns when the wake-up lock of the one in front has fallen, or it is time to ask again. What is abandoned half-way
    /// ends on the server within a second.
    pub(super) async fn wait_in_queue(&mut self) {
        let Some(place) = &mut self.place else { return };
        let Some(behind) = place.behind else { return std::future::pending().await };
        while !place.due.has_passed() {
            let patience = place.due.remaining().as_secs_f64();
            let woken = self.client.call("SELECT dlock.await($1, $2 * interval '1 s')", &[&behind, &patience]).await;
            match woken.and_then(|answer| answer.map(|answer| Ok(answer.row()?.try_get(0)?)).transpose()) {
                Ok(Some(false)) => {}
                Ok(Some(true)) => {
                    place.woken = true;
                    return;
                }
                // The connection is gone, and our place will be if we do not ask for it.
                Err(_) if self.client.session().is_none() => return,
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

/// In time to keep our place, and when the first lease before us ends. A lock with slots is released by any of several
/// holders. A session of PostgreSQL waits for one lock at a time, and only its holder can release that: so the wake-up lock
/// of one holder says nothing of the others, and those who wait for a slot ask again and again.
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
