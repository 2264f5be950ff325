//! The recipe: ask; if the lock is busy, wait for the wake-up lock of the one in front, and ask again. Where there is
//! none to wait for (a proxy, another node of a cluster, an SQL client without a session of its own), ask again and again.

use std::time::Duration;

use anyhow::Result;

use super::answer::{self, Acquired, Queued, get};
use super::{Mysql, call, optional, text};
use crate::backend::{Ask, Attempt, Busy};
use crate::clock::{self, Instant};
use crate::lock::{Contender, Grant, LockName, Mode};

/// How long a place in the queue lasts unless asked again; procedures.sql has the same number.
const PLACE: Duration = Duration::from_secs(10);
/// How often the first waiter asks where it cannot wait for a wake-up lock. Those behind it ask less often.
const RECHECK: Duration = Duration::from_millis(100);
/// How late a server that waits for us may be to say that nothing has happened.
const LATE: Duration = Duration::from_millis(500);

/// Our place in the queue, as far as we know.
pub(super) struct Place {
    name: LockName,
    /// Whose wake-up lock to wait for.
    behind: Option<i64>,
    /// When to ask again at the latest.
    due: Instant,
    /// It is our turn, as far as the one in front was all that blocked us.
    woken: bool,
}

impl Mysql {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let (from, answer) = self.ask(ask).await?;
        self.place = None;
        Ok(match answer {
            Acquired::Granted { token, slot } => {
                let lease = ask.lease(token, slot, Grant { from, ttl: ask.ttl, slack: Duration::ZERO });
                self.watch(&lease);
                Attempt::Granted(lease)
            }
            Acquired::Busy(queued) => Attempt::Busy(self.queue(ask, queued).await),
            Acquired::OtherSlots(other) => ask.differs_from(other),
            Acquired::AlreadyRan => Attempt::AlreadyRan,
        })
    }

    async fn ask(&mut self, ask: &Ask) -> Result<(Instant, Acquired)> {
        let sql = call(
            "dlock_ask",
            &[
                text(ask.name.as_str()),
                text(ask.who.owner.as_str()),
                ask.ttl.as_micros().to_string(),
                text(word(ask.mode)),
                ask.mode.slots().to_string(),
                ask.queue.to_string(),
                optional(ask.once.as_deref().map(text)),
                text(&ask.who.to_json()),
                self.session().await?,
                self.place.as_ref().is_some_and(|place| !place.woken).to_string(),
            ],
        );
        let answer = self.client.call_installed(&sql).await?;
        let (version, acquired) = answer::acquired(answer.row()?)?;
        self.client.check_version(version)?;
        Ok((answer.from, acquired))
    }

    /// What follows for our place.
    async fn queue(&mut self, ask: &Ask, queued: Queued) -> Busy {
        // Those far behind keep no connection between two questions, so that there is one left for others.
        let far = queued.ahead >= queued.room;
        let behind = queued.behind.filter(|_| !far);
        let due = clock::now() + until_next_question(ask, &queued, behind);
        let late = if behind.is_some() { LATE.min(ask.ttl.min(PLACE) / 6) } else { Duration::ZERO };
        if ask.queue {
            self.place = Some(Place { name: ask.name.clone(), behind, due, woken: false });
        }
        if far {
            self.client.quit().await;
        }
        let holder = queued.holder.map(Contender::into_holder);
        Busy { holder, ahead: Some(queued.ahead), ask_again: due + late }
    }

    /// Returns when the wake-up lock of the one in front has fallen, or it is time to ask again. The server sees within a
    /// second when we abandon this half-way.
    pub(super) async fn wait_in_queue(&mut self) {
        let Some(place) = &mut self.place else { return };
        let Some(behind) = place.behind else { return std::future::pending().await };
        while !place.due.has_passed() {
            let patience = place.due.remaining().as_secs_f64();
            let sql = call("dlock_await", &[text(place.name.as_str()), behind.to_string(), format!("{patience:.3}")]);
            let answer = self.client.call(&sql).await;
            match answer.and_then(|answer| answer.map(|answer| get(answer.row()?, "woken")).transpose()) {
                Ok(Some(Some(0))) => {}
                Ok(Some(Some(woken))) => {
                    place.woken = woken == 1;
                    return;
                }
                // The connection is gone, and our place will be if we do not ask for it.
                Err(_) if !self.client.is_connected() => return,
                // The server does not let us wait: then we ask when it is time.
                Ok(None | Some(None)) | Err(_) => return std::future::pending().await,
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
/// holders, and a session waits for one wake-up lock at a time: so those who wait for a slot ask again and again.
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
