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
mod revoke;
mod schema;
mod session;
mod settings;
mod status;
mod tls;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use async_trait::async_trait;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{
    Address, Ask, Attempt, Backend, Busy, Checkup, Ending, Lease, Page, Patience, Reheld, Released, Renewal, Revoke,
    Revoked,
};
use crate::clock::{self, Instant};
use crate::lock::{Holder, LockName, LockState, OwnerId, Term, Token};
use answer::{PLACE, outcome, word};
use client::{Answer, Client};
use session::Parameters;
pub use settings::PARAMETERS;
use status::Status;

const LOCKS_PER_PAGE: i64 = 100;

pub struct Postgres {
    client: Client,
    /// As far as we know we have a place in the queue.
    place: Option<Place>,
    held: Held,
}

struct Place {
    /// It counts from then.
    from: Instant,
    /// The latest grant there was; ours will have a greater token.
    after: i64,
}

/// What we know of the lease that is ours.
#[derive(Default)]
struct Held {
    /// What was asked for, and what it is renewed for.
    ttl: Option<Duration>,
    /// Others wanted the lock too.
    contended: bool,
    /// It was handed over, and has not been renewed since.
    handed_over: bool,
}

impl Postgres {
    pub fn open(address: &Address, patience: Patience) -> Result<Postgres> {
        Ok(Postgres { client: Client::new(address, patience)?, place: None, held: Held::default() })
    }
}

impl Postgres {
    /// What whoever let go has granted us while we waited: for as long as our place was worth, and so counted from the
    /// question that it was the answer to. If much of that has passed, we had better ask.
    fn handed_over(&mut self, ask: &Ask) -> Option<Lease> {
        let (Place { from, after }, ttl) = (self.place.as_ref()?, ask.ttl.min(PLACE));
        let (from, grant) = (*from, self.client.grant()?);
        let (token, to) = grant.split_once(' ')?;
        let token = token.parse().ok().filter(|token| token > after)?;
        if to.split_once(' ')? != (ask.name.as_str(), ask.who.owner.as_str()) || (from + ttl / 2).has_passed() {
            return None;
        }
        self.place = None;
        self.held = Held { ttl: Some(ask.ttl), contended: true, handed_over: true };
        Some(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: Token(i64::unsigned_abs(token)),
            slot: None,
            term: Term { from, ttl, slack: Duration::ZERO },
            descriptors: Vec::new(),
        })
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
        let again = self.place.is_some();
        let function = if again { "contend" } else { "acquire" };
        let sql = format!(
            "SELECT outcome, token, slot, ahead, extract(epoch FROM next_end)::float8, holder::text, room, version,
             latest
             FROM dlock.{function}($1, $2, make_interval(secs => $3), $4, $5, $6, $7, $8::json, $9, $10)"
        );
        let (name, owner, mode) = (ask.name.as_str(), ask.who.owner.as_str(), word(ask.mode));
        let (slots, ttl) = (i32::try_from(ask.mode.slots())?, ask.ttl.as_secs_f64());
        let (who, wake) = (ascii(&ask.who.to_json()), self.client.channel());
        let once = ask.once.as_deref().map(plain);
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
            (&again, Type::BOOL),
        ];
        let answer = self.client.call_installed(&sql, with).await?;
        self.client.check_version(answer.row()?.try_get(7)?)?;
        let attempt = outcome(ask, &answer)?;
        self.place = match attempt {
            Attempt::Busy(_) if ask.queue => Some(Place {
                from: answer.from,
                after: answer.row()?.try_get::<_, Option<i64>>(8)?.unwrap_or(i64::MAX),
            }),
            _ => None,
        };
        self.held = Held { ttl: Some(ask.ttl), contended: again, handed_over: false };
        // Those far behind keep no connection between two questions, so that there is one left for others.
        let room = usize::try_from(answer.row()?.try_get::<_, i32>(6)?)?;
        if let Attempt::Busy(Busy { ahead: Some(ahead), .. }) = attempt
            && ahead >= room
        {
            self.client.disconnect();
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
        self.client.news().await;
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
        const SQL: &str = "SELECT outcome, reason FROM dlock.renew($1, $2, $3, make_interval(secs => $4), $5)";
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        // More than a lease that was handed over has been so far.
        let ttl = self.held.ttl.unwrap_or(lease.term.ttl);
        let (seconds, wake) = (ttl.as_secs_f64(), self.client.channel());
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&seconds, Type::FLOAT8),
            (&wake, Type::TEXT),
        ];
        let Some(answer) = self.client.call_listening(SQL, with).await? else {
            return Ok(Renewal::Lost("the lock's schema is gone".to_owned()));
        };
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
        let asked = clock::now();
        let function = if self.held.contended { "leave" } else { "release" };
        let sql = format!("SELECT dlock.{function}($1, $2, $3, $4::json, $5, make_interval(secs => $6))");
        let (name, owner, token) = (lease.name.as_str(), lease.owner.as_str(), number(lease.token)?);
        let last_run = ending.last_run.as_ref().map(|run| ascii(&run.to_json()));
        let once =
            ending.last_run.as_ref().filter(|run| run.succeeded()).and_then(|run| run.once.as_deref()).map(plain);
        let keep = ending.hold_until.map_or(0.0, |until| until.remaining().as_secs_f64());
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&token, Type::INT8),
            (&last_run, Type::TEXT),
            (&once, Type::TEXT),
            (&keep, Type::FLOAT8),
        ];
        let Some(answer) = self.client.call(&sql, with).await? else { return Ok(Released::NotOurs) };
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
