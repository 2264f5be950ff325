//! PostgreSQL: lease rows on the database's own clock, for those whose only shared service is their
//! database.
//!
//! The protocol is the functions in schema `dlock` (`prefix` gives it another name): `tables.sql` and
//! `protocol.sql` define and document them, SQL clients use the same ones, and every verb here is one
//! call of one of them, in one round trip and one transaction. So this file knows no queue and no rule
//! about who may hold: it asks, with the owner as the key, and repeats safely.
//!
//! The token is a column of the lock's row, which is never deleted: at every grant it becomes one more, or
//! the microseconds since the epoch if that is more still, so that it grows even over a restored backup.
//!
//! A lease is as good as the server's clock: a step forward ends it early. A restart or a failover does
//! not: leases from before are counted anew. What a failover to an *asynchronous* standby forgets is gone.

mod answer;
mod client;
mod examine;
mod explain;
mod passfile;
mod process;
mod queue;
mod revoke;
mod schema;
mod session;
mod settings;
pub mod status;
mod tls;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Lease, Page, Patience, Reheld, Released, Renewal, Revoke, Revoked,
};
use crate::clock;
use crate::lock::{Holder, LockName, LockState, Mode, OwnerId, Term, Token};

use client::{Answer, Client};
use queue::{Ear, Place};
use session::Parameters;
pub use settings::PARAMETERS;
use status::Status;

const LOCKS_PER_PAGE: i64 = 100;

pub struct Postgres {
    client: Client,
    /// As far as we know we have a place in the queue.
    place: Option<Place>,
    held: Held,
    /// Whether the server lets us wait for bells, as far as we know.
    bells: bool,
    /// The process that has planned our release.
    rehearsed: Option<i32>,
    /// How often in a row a bell fell for nothing.
    in_vain: u32,
}

/// What we know of the lease that is ours.
#[derive(Default)]
struct Held {
    /// What was asked for, and what it is renewed for.
    ttl: Option<Duration>,
    /// We had to wait for it.
    contended: bool,
    /// It was handed over, and has not been renewed since.
    handed_over: bool,
    /// It was time to renew it for the first time.
    settled: bool,
}

impl Held {
    fn is_fresh(&self) -> bool {
        self.ttl.is_some() && !self.settled
    }
}

impl Postgres {
    pub fn open(address: &Address, patience: Patience) -> Result<Postgres> {
        let client = Client::new(address, patience)?;
        Ok(Postgres { client, place: None, held: Held::default(), bells: true, rehearsed: None, in_vain: 0 })
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
        if let Some(lease) = self.handed_over(ask) {
            return Ok(Attempt::Granted(lease));
        }
        if self.place.is_none()
            && ask.mode == Mode::Exclusive
            && ask.once.is_none()
            && let Some(lease) = self.take(ask).await?
        {
            return Ok(Attempt::Granted(lease));
        }
        let mut attempt = self.ask(ask, Ear::AsItIs).await?;
        if self.place.as_ref().is_some_and(|place| place.behind.is_none()) && !self.client.hears() {
            attempt = self.ask(ask, Ear::Open).await?;
        }
        Ok(attempt)
    }

    fn full_term(&self, lease: &Lease) -> Term {
        match self.held {
            Held { ttl: Some(ttl), handed_over: true, .. } => Term { from: clock::now(), ttl, ..lease.term },
            _ => lease.term,
        }
    }

    async fn changed(&mut self) -> Result<()> {
        match self.place {
            Some(Place { behind: Some(_), .. }) => self.wait_for_bell().await,
            None if self.held.is_fresh() && self.client.channel().is_some() => {
                // The command is no short one: the lock is renewed, in order to be notified of a revocation from here on,
                // and to have the release planned.
                self.held.settled = true;
            }
            _ => self.client.news().await,
        }
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        let (name, owner) = (ask.name.as_str(), ask.who.owner.as_str());
        self.place = None;
        self.client.call("SELECT dlock.withdraw($1, $2)", &[(&name, Type::TEXT), (&owner, Type::TEXT)]).await?;
        // A grant may be on its way to us still, which is not ours any more.
        self.client.disconnect();
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        const SQL: &str =
            "SELECT outcome, reason FROM dlock.renew($1, $2, $3, make_interval(secs => $4), $5, $6, $7, $8)";
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        // More than a lease that was handed over has been so far.
        let ttl = self.held.ttl.unwrap_or(lease.term.ttl);
        let (seconds, wake) = (ttl.as_secs_f64(), self.client.channel());
        let process = self.process().await?;
        let rehearse = self.rehearsed != process;
        let ring = rehearse && !self.held.contended;
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&seconds, Type::FLOAT8),
            (&wake, Type::TEXT),
            (&process, Type::INT4),
            (&rehearse, Type::BOOL),
            (&ring, Type::BOOL),
        ];
        let Some(answer) = self.client.call_listening(SQL, with).await? else {
            return Ok(Renewal::Lost("the lock's schema is gone".to_owned()));
        };
        self.rehearsed = process;
        let (from, row) = (answer.from, answer.row()?);
        let reason = row.try_get::<_, Option<String>>(1)?.unwrap_or_default();
        Ok(match row.try_get(0)? {
            "held" => {
                self.held.handed_over = false;
                Renewal::Held(Term { from, ttl, ..lease.term })
            }
            "revoked" => Renewal::Revoked(reason),
            "lost" => match reason.strip_prefix(revoke::TAKEN) {
                Some(why) => Renewal::Taken(why.to_owned()),
                None => Renewal::Lost(reason),
            },
            other => bail!("dlock.renew says {other:?}"),
        })
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        const ALONE: &str = "SELECT dlock.let_go($1, $2, $3, $4::json)";
        const SQL: &str = "SELECT dlock.release($1, $2, $3, $4::json, $5, make_interval(secs => $6), $7)";
        let asked = clock::now();
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        let last_run = ending.last_run.as_ref().map(|run| ascii(&run.to_json()));
        let once =
            ending.last_run.as_ref().filter(|run| run.succeeded()).and_then(|run| run.once.as_deref()).map(plain);
        let keep = ending.hold_until.map_or(0.0, |until| until.remaining().as_secs_f64());
        let process = self.process().await?;
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&last_run, Type::TEXT),
            (&once, Type::TEXT),
            (&keep, Type::FLOAT8),
            (&process, Type::INT4),
        ];
        let alone = !self.held.contended && self.rehearsed.is_none() && once.is_none() && keep == 0.0;
        if alone
            && let Some(answer) = self.client.call(ALONE, &with[..4]).await?
            && answer.row()?.try_get::<_, Option<bool>>(0)? == Some(true)
        {
            return Ok(Released::Done);
        }
        let Some(answer) = self.client.call(SQL, with).await? else { return Ok(Released::NotOurs) };
        let ours: bool = answer.row()?.try_get(0)?;
        if ours {
            return Ok(Released::Done);
        }
        let why = self.why_taken_soon(&lease.name, &lease.owner, asked).await;
        Ok(why.map_or(Released::NotOurs, Released::Taken))
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        const SQL: &str = "SELECT outcome, reason FROM dlock.rehold($1, $2, make_interval(secs => $3))";
        let with: &Parameters<'_> =
            &[(&name.as_str(), Type::TEXT), (&owner.as_str(), Type::TEXT), (&ttl.as_secs_f64(), Type::FLOAT8)];
        let Some(answer) = self.client.call(SQL, with).await? else { return Ok(Reheld::NotOurs) };
        let row = answer.row()?;
        Ok(match row.try_get(0)? {
            "done" => Reheld::Done,
            "not ours" => {
                let why = self.why_taken(name, owner).await.unwrap_or_default();
                why.map_or(Reheld::NotOurs, Reheld::Taken)
            }
            "revoked" => Reheld::Revoked(row.try_get(1)?),
            "running" => Reheld::Running,
            other => bail!("dlock.rehold says {other:?}"),
        })
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
        examine::examine(&mut self.client).await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        self.take_away(name, from, how).await
    }
}
