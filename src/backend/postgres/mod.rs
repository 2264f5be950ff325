//! PostgreSQL: lease rows on the database's own clock, for those whose only shared service is their
//! database.
//!
//! The protocol is the functions in schema `dlock` (`prefix` gives it another name): `tables.sql` and
//! `functions.sql` define and document them, SQL clients use the same ones, and every verb here is one
//! call of one of them, in one round trip and one transaction. So this file knows no queue and no rule
//! about who may hold: it asks, with the owner as the key, and repeats safely.
//!
//! The token is a column of the lock's row, which is never deleted: at every grant it becomes one more, or
//! the microseconds since the epoch if that is more still, so that it grows even over a restored backup.
//!
//! A lease is as good as the server's clock: a step forward ends it early. A restart or a failover does
//! not: leases from before are counted anew, for a whole ttl from the first look at them. No client vouches for
//! another: what a failover to an *asynchronous* standby forgets is gone.

mod answer;
mod client;
mod doctor;
mod errors;
mod passfile;
mod recipe;
mod schema;
mod session;
mod settings;
pub mod status;
mod stream;
mod tls;

use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Lease, Page, Patience, Reheld, Released, Renewal, Revoke, Revoked,
};
use crate::clock::{self, Instant};
use crate::lock::{Holder, LastRun, LockName, LockState, OwnerId, Term, Token};

use answer::Renewed;
use client::{Answer, Client};
use errors::is_unwritable;
use recipe::Place;
use session::Parameters;
pub use settings::PARAMETERS;
use status::Status;

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

    async fn revoke_for(&mut self, name: &LockName, from: &Holder, reason: &str, now: bool) -> Result<Revoked> {
        let (Some(owner), Some(token)) = (from.owner.as_deref(), from.fencing_token) else {
            return Ok(Revoked::NotHeld);
        };
        let (name, token) = (name.as_str(), number(token)?);
        let run = now.then(|| ascii(&LastRun::cut_short(from, reason).to_json()));
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&reason, Type::TEXT),
            (&now, Type::BOOL),
            (&run, Type::TEXT),
        ];
        let answer = self.client.call("SELECT dlock.revoke($1, $2, $3, $4, $5, $6::json)", with).await?;
        answer.map_or(Ok(Revoked::NotHeld), |answer| answer::revoked(answer.row()?))
    }

    /// Why a lock is not ours any more, if an operator has freed it. The release before is certain, and its answer would
    /// get lost if this took longer than a request may.
    async fn why_force_released(&mut self, lease: &Lease, asked: Instant) -> Option<String> {
        let left = self.client.patience().saturating_sub(asked.elapsed()) / 2;
        match tokio::time::timeout(left, self.renew(lease)).await.ok()?.ok()? {
            Renewal::Taken(reason) => Some(reason),
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
        self.acquire(ask).await
    }

    async fn changed(&mut self) -> Result<()> {
        if self.place.is_some() {
            self.wait_in_queue().await;
        } else if !self.hears_of_revocation && self.client.channel().is_some() {
            // The command is no short one: the lock is renewed, in order to be notified of a revocation from here on.
            self.hears_of_revocation = true;
        } else {
            self.client.news().await;
        }
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        let (name, owner) = (ask.name.as_str(), ask.who.owner.as_str());
        self.place = None;
        self.client.call("SELECT dlock.withdraw($1, $2)", &[(&name, Type::TEXT), (&owner, Type::TEXT)]).await?;
        // With the session, the wake-up lock falls.
        self.client.disconnect();
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        const SQL: &str = "SELECT outcome, reason FROM dlock.renew($1, $2, $3, make_interval(secs => $4), $5, $6)";
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        let (seconds, wake) = (lease.term.ttl.as_secs_f64(), self.client.channel());
        let session = self.client.process().await?;
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&seconds, Type::FLOAT8),
            (&wake, Type::TEXT),
            (&session, Type::INT4),
        ];
        let Some(answer) = self.client.call_listening(SQL, with).await? else {
            return Ok(Renewal::Lost("the lock's schema is gone, or is another version's".to_owned()));
        };
        Ok(match answer::renewed(answer.row()?)? {
            Renewed::Held => Renewal::Held(Term { from: answer.from, ..lease.term }),
            Renewed::Revoked(reason) => Renewal::Revoked(reason),
            Renewed::ForceReleased(reason) => Renewal::Taken(reason),
            Renewed::Lost(why) => Renewal::Lost(why),
        })
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        const SQL: &str = "SELECT dlock.release($1, $2, $3, $4::json, $5, make_interval(secs => $6), $7)";
        let asked = clock::now();
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        let last_run = ending.last_run.as_ref().map(|run| ascii(&run.to_json()));
        let once =
            ending.last_run.as_ref().filter(|run| run.succeeded()).and_then(|run| run.once.as_deref()).map(plain);
        let keep = ending.hold_until.map_or(0.0, |until| until.remaining().as_secs_f64());
        let session = self.client.process().await?;
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&last_run, Type::TEXT),
            (&once, Type::TEXT),
            (&keep, Type::FLOAT8),
            (&session, Type::INT4),
        ];
        let Some(answer) = self.client.call(SQL, with).await? else { return Ok(Released::NotOurs) };
        if answer.row()?.try_get(0)? {
            return Ok(Released::Done);
        }
        let why = self.why_force_released(lease, asked).await;
        Ok(why.map_or(Released::NotOurs, Released::Taken))
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        const SQL: &str = "SELECT outcome, reason FROM dlock.rehold($1, $2, make_interval(secs => $3))";
        let with: &Parameters<'_> =
            &[(&name.as_str(), Type::TEXT), (&owner.as_str(), Type::TEXT), (&ttl.as_secs_f64(), Type::FLOAT8)];
        let answer = self.client.call(SQL, with).await?;
        answer.map_or(Ok(Reheld::NotOurs), |answer| answer::reheld(answer.row()?))
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        let never_used = LockState::free(name.clone(), "postgres");
        let answer = self.client.call("SELECT dlock.status($1)::text", &[(&name.as_str(), Type::TEXT)]).await?;
        let Some(answer) = answer else { return Ok(never_used) };
        match answer.row()?.try_get(0)? {
            Some(status) => Status::parse(status)?.into_state(),
            None => Ok(never_used),
        }
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        const SQL: &str = "SELECT dlock.status(l.name)::text FROM dlock.locks l
            WHERE l.name > coalesce($1, '') COLLATE \"C\" ORDER BY l.name LIMIT $2";
        let with: &Parameters<'_> = &[(&after, Type::TEXT), (&LOCKS_PER_PAGE, Type::INT8)];
        let Some(Answer { rows, .. }) = self.client.call(SQL, with).await? else { return Ok(Page::default()) };
        let read = |row: &Row| Status::parse(row.try_get(0)?)?.into_state();
        let locks = rows.iter().map(read).collect::<Result<Vec<_>>>()?;
        let full = i64::try_from(rows.len())? == LOCKS_PER_PAGE;
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
            Err(error) if is_unwritable(&error) => self.revoke_for(name, from, &ascii(reason), now).await,
            revoked => revoked,
        }
    }
}
