//! PostgreSQL: lease rows on the database's own clock, for those whose only shared service is their
//! database.
//!
//! The protocol is the functions in schema `dlock` (`prefix` gives it another name): `tables.sql` and
//! `functions.sql` define and document them, SQL clients use the same ones, and every verb here is one
//! call of one of them, in one round trip and one transaction. So this file knows no queue and no rule
//! about who may hold: it asks, with the owner as the key, and repeats safely. If the lock is busy, it waits for the
//! wake-up lock of the one in front and asks again. Where there is none to wait for (a pooler, an SQL client without a
//! session of its own), it asks again and again.
//!
//! The token is a column of the lock's row, which is never deleted: at every grant it becomes one more, or
//! the microseconds since the epoch if that is more still, so that it grows even over a restored backup.
//!
//! A lease is as good as the server's clock: a step forward ends it early. A restart or a failover does
//! not: leases from before are counted anew, for a whole ttl from the first look at them. No client vouches for
//! another: what a failover to an *asynchronous* standby forgets is gone.

pub mod answer;
mod connect;
mod doctor;
mod errors;
mod schema;
mod session;
mod settings;

use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;

use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Patience, Reheld, Released,
    Renewal, Revoke, Revoked,
};
use crate::clock::{self, Instant};
use crate::lock::{Grant, Holder, LastRun, LockName, LockState, OwnerId, Token};

use super::sql::Place;
use answer::{ACQUIRED, outcome};
use errors::{UNWRITABLE, is_about};
use session::{Client, Parameters};
pub use settings::PARAMETERS;

const LOCKS_PER_PAGE: i64 = 100;

pub struct Postgres {
    client: Client,
    /// While we wait.
    place: Option<Place>,
    /// While we hold the lock: we have asked to be notified when it is revoked.
    hears_of_revocation: bool,
}

impl Postgres {
    pub fn open(address: &Address, patience: Patience) -> Result<Postgres> {
        Ok(Postgres { client: Client::new(address, patience)?, place: None, hears_of_revocation: false })
    }

    /// Returns when the wake-up lock of the one in front has fallen, or it is time to ask again. What is abandoned half-way
    /// ends on the server within a second.
    async fn wait_in_queue(&mut self) {
        let Some(place) = &self.place else { return };
        let Some(behind) = place.behind else { return std::future::pending().await };
        while !place.due.has_passed() {
            let patience = place.due.remaining().as_secs_f64();
            let woken = self.client.call("SELECT dlock.await($1, $2 * interval '1 s')", &[&behind, &patience]).await;
            match woken.and_then(|answer| answer.map(|answer| Ok(answer.row()?.try_get(0)?)).transpose()) {
                Ok(Some(false)) => {}
                Ok(Some(true)) => return,
                // The connection is gone, and our place will be if we do not ask for it.
                Err(_) if self.client.session.is_none() => return,
                // The server does not let us wait: then we ask when it is time.
                Ok(None) | Err(_) => return std::future::pending().await,
            }
        }
    }

    async fn revoke_for(&mut self, name: &LockName, from: &Holder, reason: &str, now: bool) -> Result<Revoked> {
        let (Some(owner), Some(token)) = (from.owner.as_deref(), from.fencing_token) else {
            return Ok(Revoked::NotHeld);
        };
        let (name, token) = (name.as_str(), number(token)?);
        let run = ascii(&LastRun::cut_short(from, reason).to_json());
        let with: &Parameters<'_> = &[&name, &owner, &token, &reason, &now, &run];
        let answer = self.client.call("SELECT dlock.revoke($1, $2, $3, $4, $5, $6::json)", with).await?;
        answer.map_or(Ok(Revoked::NotHeld), |answer| outcome(answer.row()?)?.revoked())
    }

    /// Why a lock is not ours any more, if an operator has freed it. The release before is certain, and its answer would
    /// get lost if this took longer than a request may.
    async fn why_force_released(&mut self, lease: &Lease, asked: Instant) -> Option<String> {
        let left = self.client.patience.attempt.saturating_sub(asked.elapsed()) / 2;
        match tokio::time::timeout(left, self.renew(lease)).await.ok()?.ok()? {
            Renewal::ForceReleased(reason) => Some(reason),
            _ => None,
        }
    }
}

/// The SQL that makes the schema, for an administrator.
pub fn schema(address: &Address) -> Result<String> {
    Ok(schema::script(&settings::Settings::of(address)?.schema))
}

/// JSON in plain ASCII, which a database of any encoding can keep.
fn ascii(json: &str) -> String {
    let mut ascii = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            c if c.is_ascii() => ascii.push(c),
            c => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| ascii.push_str(&format!("\\u{unit:04x}"))),
        }
    }
    ascii
}

/// A key in plain ASCII, each in its own way.
fn plain(key: &str) -> String {
    ascii(&key.replace('\\', "\\\\"))
}

fn number(token: Token) -> Result<i64> {
    i64::try_from(token.0).context("the token is not one of PostgreSQL's")
}

#[async_trait(?Send)]
impl Backend for Postgres {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let sql = format!(
            "SELECT {ACQUIRED} FROM dlock.acquire($1, $2, $3 * interval '1 s', $4, $5, $6, $7, $8::json, $9, $10)"
        );
        let (name, owner, ttl) = (ask.name.as_str(), ask.who.owner.as_str(), ask.ttl.as_secs_f64());
        let (mode, slots) = (ask.mode.word(), i32::try_from(ask.mode.slots())?);
        let (once, who) = (ask.once.as_deref().map(plain), ascii(&ask.who.to_json()));
        let (wake, session) = (self.client.channel(), self.client.process().await?);
        let with: &Parameters<'_> = &[&name, &owner, &ttl, &mode, &slots, &ask.queue, &once, &who, &wake, &session];
        let answer = self.client.call_installed(&sql, with).await?;
        let (version, (attempt, place)) = answer::acquired(&answer, ask)?;
        schema::check(version, &self.client.settings.schema)?;
        if place.as_ref().is_some_and(|place| place.is_far_behind) {
            self.client.session = None;
        }
        (self.place, self.hears_of_revocation) = (place, false);
        Ok(attempt)
    }

    async fn changed(&mut self) -> Result<()> {
        if self.place.is_some() {
            self.wait_in_queue().await;
        } else if !self.hears_of_revocation && self.client.channel().is_some() {
            // The command is no short one: the lock is renewed, in order to be notified of a revocation from here on.
            self.hears_of_revocation = true;
        } else if let Some(session) = &self.client.session {
            session.news().await;
        } else {
            std::future::pending().await
        }
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        self.place = None;
        let with: &Parameters<'_> = &[&ask.name.as_str(), &ask.who.owner.as_str()];
        self.client.call("SELECT dlock.withdraw($1, $2)", with).await?;
        // With the session, the wake-up lock falls.
        self.client.session = None;
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        const SQL: &str = "SELECT outcome, reason FROM dlock.renew($1, $2, $3, $4 * interval '1 s', $5, $6)";
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        let (ttl, wake) = (lease.grant.ttl.as_secs_f64(), self.client.channel());
        let session = self.client.process().await?;
        let with: &Parameters<'_> = &[&name, &owner, &token, &ttl, &wake, &session];
        let Some(answer) = self.client.ask(wake.clone(), SQL, with).await? else {
            return Ok(Renewal::Lost("the lock's schema is gone, or is another version's".to_owned()));
        };
        outcome(answer.row()?)?.renewed(Grant { from: answer.from, ..lease.grant })
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        const SQL: &str = "SELECT dlock.release($1, $2, $3, $4::json, $5, $6 * interval '1 s', $7, $8, $9)";
        let asked = clock::now();
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        let run = ending.last_run.as_ref();
        let last_run = run.map(|run| ascii(&run.to_json()));
        let success = run.filter(|run| run.succeeded());
        let once = success.and_then(|run| run.once.as_deref()).map(plain);
        let succeeded = success.and_then(|run| run.ended_at);
        let keep = ending.hold_until.map_or(0.0, |until| until.remaining().as_secs_f64());
        let (session, runs) = (self.client.process().await?, i32::try_from(ending.keep)?);
        let with: &Parameters<'_> = &[&name, &owner, &token, &last_run, &once, &keep, &session, &runs, &succeeded];
        let Some(answer) = self.client.call(SQL, with).await? else { return Ok(Released::NotOurs) };
        if answer.row()?.try_get(0)? {
            return Ok(Released::Done);
        }
        let why = self.why_force_released(lease, asked).await;
        Ok(why.map_or(Released::NotOurs, Released::ForceReleased))
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        const SQL: &str = "SELECT outcome, reason FROM dlock.rehold($1, $2, $3 * interval '1 s')";
        let answer = self.client.call(SQL, &[&name.as_str(), &owner.as_str(), &ttl.as_secs_f64()]).await?;
        answer.map_or(Ok(Reheld::NotOurs), |answer| outcome(answer.row()?)?.reheld())
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        let answer = self.client.call("SELECT dlock.status($1)::text", &[&name.as_str()]).await?;
        let status: Option<String> = match answer {
            Some(answer) => answer.row()?.try_get(0)?,
            None => None,
        };
        status.map_or_else(|| Ok(LockState::free(name.clone(), "postgres")), |status| answer::state(&status))
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let with: &Parameters<'_> = &[&name.as_str(), &what.once().map(plain)];
        let answer = self.client.call("SELECT dlock.forget($1, $2)", with).await?;
        answer.map_or(Ok(Forgotten::Nothing), |answer| outcome(answer.row()?)?.forgotten())
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        const SQL: &str = "SELECT dlock.status(l.name)::text FROM dlock.locks l
            WHERE l.name > coalesce($1, '') COLLATE \"C\" ORDER BY l.name LIMIT $2";
        let Some(answer) = self.client.call(SQL, &[&after, &LOCKS_PER_PAGE]).await? else { return Ok(Page::default()) };
        let locks = answer.rows.iter().map(|row| answer::state(row.try_get(0)?)).collect::<Result<Vec<_>>>()?;
        let full = i64::try_from(locks.len())? == LOCKS_PER_PAGE;
        let next = locks.last().filter(|_| full).map(|last| last.name.to_string());
        Ok(Page { locks, next })
    }

    async fn examine(&mut self) -> Result<Checkup> {
        doctor::examine(&mut self.client).await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let (reason, now) = match how {
            Revoke::Safely { reason } => (reason.as_str(), false),
            Revoke::Now { reason } => (reason.as_str(), true),
        };
        match self.revoke_for(name, from, reason, now).await {
            // No reason must keep a lock from being taken away because the database has no letters for it.
            Err(error) if is_about(&error, &UNWRITABLE) => self.revoke_for(name, from, &ascii(reason), now).await,
            revoked => revoked,
        }
    }
}
