//! MariaDB and MySQL: lease rows on the server's own clock, for those whose only shared service is their database.
//!
//! The protocol is the procedures `dlock_…` in the database that the URL names (`prefix` gives them another beginning):
//! `tables.sql` and `procedures.sql` define and document them, SQL clients use the same ones, and every verb here is one
//! call of one of them, in one round trip and one transaction. So this file knows no queue and no rule about who may
//! hold: it asks, with the owner as the key, and repeats safely. A grant counts when the call has answered, which is after
//! its commit: in a Galera cluster, one that is not certified is an error, and is asked for again. If the lock is busy,
//! it waits for the wake-up lock of the one in front and asks again. Where there is none to wait for (a proxy, another node
//! of a cluster, an SQL client without a session of its own), it asks again and again.
//!
//! The token is a column of the lock's row, which is never deleted: at every grant it becomes one more, or the microseconds
//! since the epoch if that is more still, so that it grows even over a restored backup.
//!
//! A lease counts by the clock in `UUID()`: in MariaDB it only goes forward while the server runs, whatever becomes of
//! the date; in MySQL it is the date. A lease that another server wrote, or this one before a restart, counts anew, for a
//! whole ttl from the first look at it: clocks of two servers are never compared. No client vouches for another: what a
//! failover to an *asynchronous* replica forgets is gone. `GET_LOCK` only wakes waiters up, and decides nothing.

mod answer;
mod client;
mod doctor;
mod errors;
mod option_file;
mod schema;
mod session;
mod settings;

use std::time::{Duration, SystemTime};

use anyhow::Result;
use async_trait::async_trait;

use super::sql::Place;
use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Patience, Reheld, Released,
    Renewal, Revoke, Revoked,
};
use crate::lock::{Grant, Holder, LastRun, LockName, LockState, OwnerId};

use answer::{get, outcome};
use client::Client;
pub use settings::PARAMETERS;

const LOCKS_PER_PAGE: usize = 100;
/// How often a holder looks whether an operator wants the lock back. The server has no way to tell it.
const LOOK: Duration = Duration::from_secs(1);

pub struct Mysql {
    client: Client,
    /// While we wait.
    place: Option<Place>,
    /// While we hold the lock: the call that looks whether it is still ours.
    look: Option<String>,
}

impl Mysql {
    pub fn open(address: &Address, patience: Patience) -> Result<Mysql> {
        Ok(Mysql { client: Client::new(address, patience)?, place: None, look: None })
    }

    /// The number of our connection, for wake-up locks; null where none may be used.
    async fn session(&mut self) -> Result<String> {
        let session = self.client.connection_id().await?;
        Ok(optional(self.client.settings.wakes_up.then_some(session)))
    }

    /// Returns when the wake-up lock of the one in front has fallen, or it is time to ask again. The server sees within a
    /// second when we abandon this half-way.
    async fn wait_in_queue(&mut self) {
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
                Err(_) if self.client.session.is_none() => return,
                // The server does not let us wait: then we ask when it is time.
                Ok(None | Some(None)) | Err(_) => return std::future::pending().await,
            }
        }
    }
}

/// The SQL that makes the tables and procedures, for an administrator.
pub fn schema(address: &Address) -> Result<String> {
    Ok(schema::script(&settings::Settings::of(address)?))
}

/// A call with these values, which are SQL already.
fn call(procedure: &str, with: &[String]) -> String {
    format!("CALL {procedure}({})", with.join(", "))
}

/// The lock, its holder and its token.
fn of_lease(lease: &Lease) -> [String; 3] {
    [text(lease.name.as_str()), text(lease.owner.as_str()), lease.token.to_string()]
}

/// A text as SQL, whatever it has in it and however the server reads a backslash.
fn text(text: &str) -> String {
    use std::fmt::Write;
    let mut sql = String::with_capacity(12 + 2 * text.len());
    sql.push_str("_utf8mb4 x'");
    for byte in text.bytes() {
        let _ = write!(sql, "{byte:02x}");
    }
    sql + "'"
}

fn optional(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "NULL".to_owned(), |value| value.to_string())
}

fn date(at: SystemTime) -> String {
    let date = humantime::format_rfc3339_millis(at).to_string();
    format!("'{}'", date.trim_end_matches('Z').replace('T', " "))
}

#[async_trait(?Send)]
impl Backend for Mysql {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let (name, owner, who) = (text(ask.name.as_str()), text(ask.who.owner.as_str()), text(&ask.who.to_json()));
        let (ttl, mode, slots) = (ask.ttl.as_micros().to_string(), text(ask.mode.word()), ask.mode.slots().to_string());
        let (queue, once) = (ask.queue.to_string(), optional(ask.once.as_deref().map(text)));
        let (session, waits) = (self.session().await?, self.place.as_ref().is_some_and(|place| !place.woken));
        let with = [name, owner, ttl, mode, slots, queue, once, who, session, waits.to_string()];
        let answer = self.client.call_installed(&call("dlock_ask", &with)).await?;
        let (version, (attempt, place)) = answer::acquired(&answer, ask)?;
        schema::check(version)?;
        if let Attempt::Granted(lease) = &attempt {
            self.look = Some(call("dlock_watch", &of_lease(lease)));
        }
        self.place = place;
        if self.place.as_ref().is_some_and(|place| place.is_far_behind) {
            self.client.quit().await;
        }
        Ok(attempt)
    }

    async fn changed(&mut self) -> Result<()> {
        if self.place.is_some() {
            self.wait_in_queue().await;
            return Ok(());
        }
        let Some(look) = self.look.clone() else { return std::future::pending().await };
        loop {
            tokio::time::sleep(LOOK).await;
            // What goes wrong here is for the next renewal to find out.
            if let Some(answer) = self.client.call(&look).await?
                && !get::<bool>(answer.row()?, "changed")?
            {
                continue;
            }
            return Ok(());
        }
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        self.place = None;
        let with = [text(ask.name.as_str()), text(ask.who.owner.as_str())];
        // With the session, the wake-up lock falls.
        self.client.call_and_quit(&call("dlock_withdraw", &with)).await.map(drop)
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let ([name, owner, token], ttl) = (of_lease(lease), lease.grant.ttl.as_micros().to_string());
        let with = [name, owner, token, ttl, self.session().await?];
        let Some(answer) = self.client.call(&call("dlock_extend", &with)).await? else {
            return Ok(Renewal::Lost("dlock's tables are gone, or are another version's".to_owned()));
        };
        self.look = Some(call("dlock_watch", &of_lease(lease)));
        outcome(answer.row()?)?.renewed(Grant { from: answer.from, ..lease.grant })
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let run = ending.last_run.as_ref();
        let success = run.filter(|run| run.succeeded());
        let [name, owner, token] = of_lease(lease);
        let keep = ending.hold_until.map_or(0, |until| until.remaining().as_micros()).to_string();
        let (run, runs) = (optional(run.map(|run| text(&run.to_json()))), ending.keep.to_string());
        let once = optional(success.and_then(|run| run.once.as_deref()).map(text));
        let succeeded = optional(success.and_then(|run| run.ended_at).map(date));
        let with = [name, owner, token, keep, run, once, runs, succeeded, self.session().await?];
        let answer = self.client.call_and_quit(&call("dlock_end", &with)).await?;
        answer.map_or(Ok(Released::NotOurs), |answer| outcome(answer.row()?)?.released())
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let with = [text(name.as_str()), text(owner.as_str()), ttl.as_micros().to_string()];
        let answer = self.client.call_and_quit(&call("dlock_rehold", &with)).await?;
        answer.map_or(Ok(Reheld::NotOurs), |answer| outcome(answer.row()?)?.reheld())
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        let sql = call("dlock_status", &[text(name.as_str()), "NULL".to_owned(), "1".to_owned()]);
        let states = match self.client.call_and_quit(&sql).await? {
            Some(answer) => answer::states(answer.rows(0), answer.rows(1))?,
            None => Vec::new(),
        };
        Ok(states.into_iter().next().unwrap_or_else(|| LockState::free(name.clone(), "mysql")))
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let sql = call("dlock_forget", &[text(name.as_str()), optional(what.once().map(text))]);
        let answer = self.client.call_and_quit(&sql).await?;
        answer.map_or(Ok(Forgotten::Nothing), |answer| outcome(answer.row()?)?.forgotten())
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        let after = optional(after.as_deref().map(text));
        let sql = call("dlock_status", &["NULL".to_owned(), after, LOCKS_PER_PAGE.to_string()]);
        let Some(answer) = self.client.call(&sql).await? else { return Ok(Page::default()) };
        let locks = answer::states(answer.rows(0), answer.rows(1))?;
        let next = locks.last().filter(|_| locks.len() == LOCKS_PER_PAGE).map(|last| last.name.to_string());
        if next.is_none() {
            self.client.quit().await;
        }
        Ok(Page { locks, next })
    }

    async fn examine(&mut self) -> Result<Checkup> {
        let checkup = doctor::examine(&mut self.client).await;
        self.client.quit().await;
        checkup
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let (Some(owner), Some(token)) = (from.owner.as_deref(), from.fencing_token) else {
            return Ok(Revoked::NotHeld);
        };
        let (reason, now) = match how {
            Revoke::Safely { reason } => (reason.as_str(), false),
            Revoke::Now { reason } => (reason.as_str(), true),
        };
        let run = text(&LastRun::cut_short(from, reason).to_json());
        let with = [text(name.as_str()), text(owner), token.to_string(), text(reason), now.to_string(), run];
        let answer = self.client.call_and_quit(&call("dlock_revoke", &with)).await?;
        answer.map_or(Ok(Revoked::NotHeld), |answer| outcome(answer.row()?)?.revoked())
    }
}
