//! The recipe: ask; if the lock is busy, wait for the wake-up lock of the one in front, and ask again. Where there is
//! none to wait for (a proxy, another node of a cluster, an SQL client without a session of its own), ask again and again.

use std::time::Duration;

use anyhow::Result;

use super::answer::{self, get};
use super::{Mysql, call, optional, schema, text};
use crate::backend::sql::{self, Acquired, Queued};
use crate::backend::{Ask, Attempt, Busy};
use crate::clock::Instant;
use crate::lock::{Grant, LockName};

/// Our place in the queue, as far as we know.
pub(super) struct Place {
    name: LockName,
    at: sql::Place,
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
                text(ask.mode.word()),
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
        schema::check(version)?;
        Ok((answer.from, acquired))
    }

    /// What follows for our place.
    async fn queue(&mut self, ask: &Ask, queued: Queued) -> Busy {
        if queued.is_far_behind() {
            self.client.quit().await;
        }
        let at = queued.place(ask);
        let busy = queued.busy(ask, &at);
        self.place = ask.queue.then(|| Place { name: ask.name.clone(), at, woken: false });
        busy
    }

    /// Returns when the wake-up lock of the one in front has fallen, or it is time to ask again. The server sees within a
    /// second when we abandon this half-way.
    pub(super) async fn wait_in_queue(&mut self) {
        let Some(place) = &mut self.place else { return };
        let Some(behind) = place.at.behind else { return std::future::pending().await };
        while !place.at.due.has_passed() {
            let patience = place.at.due.remaining().as_secs_f64();
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
