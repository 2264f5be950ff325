//! Calls of the schema's functions: one at a time, over one connection that is made when it is needed and
//! dropped whenever it is in doubt. How long a call may take is its caller's affair.

use std::time::Duration;

use anyhow::{Context, Result};
use tokio_postgres::Row;

use super::errors::{explain, has_no_connection_left, is_missing, is_worth_repeating};
use super::schema;
use super::session::{Parameters, Session};
use super::settings::Settings;
use crate::backend::{Address, Patience};
use crate::clock::{self, Instant};
use crate::exit::Fault;

/// How long to step back when the server has no connection left.
const STEP_BACK: Duration = Duration::from_millis(100);

pub struct Client {
    settings: Settings,
    pub patience: Patience,
    /// Where others tell us that it is worth asking again.
    channel: String,
    /// Taken out by whoever uses it, and put back only after a whole answer: a future that is dropped
    /// half-way takes the connection with it.
    session: Option<Session>,
}

/// Rows, and an instant at which the request had not been written yet.
pub struct Answer {
    pub from: Instant,
    pub rows: Vec<Row>,
}

impl Answer {
    pub fn row(&self) -> Result<&Row> {
        self.rows.first().context("the server answered nothing")
    }
}

impl Client {
    pub fn new(address: &Address, patience: Patience) -> Result<Client> {
        let settings = Settings::of(address)?;
        let random = getrandom::u64().context("the kernel gave no random bytes")?;
        let channel = format!("{}_{random:016x}", settings.schema);
        Ok(Client { settings, patience, channel, session: None })
    }

    /// Where a contender wants to be woken, if it can be.
    pub fn channel(&self) -> Option<String> {
        self.settings.listen.then(|| self.channel.clone())
    }

    /// The server's process that is ours as long as we are connected; none, if the user says that it is a pooler's.
    pub async fn process(&mut self) -> Result<Option<i32>> {
        if !self.settings.listen {
            return Ok(None);
        }
        let session = self.connected().await?;
        Ok(self.session.insert(session).process)
    }

    pub fn session(&self) -> Option<&Session> {
        self.session.as_ref()
    }

    pub fn disconnect(&mut self) {
        self.session = None;
    }

    /// Whether a schema of this version is one that we can talk to.
    pub fn check_version(&self, version: i32) -> Result<()> {
        schema::check(version, &self.settings.schema)
    }

    /// Calls what has to be there, and makes it if it is not.
    pub async fn call_installed(&mut self, sql: &str, with: &Parameters<'_>) -> Result<Answer> {
        if let Some(answer) = self.call(sql, with).await? {
            return Ok(answer);
        }
        loop {
            let session = self.connected().await?;
            match schema::install(&session, &self.settings.schema).await {
                // Calls of an older version were in the way.
                Err(error) if error.downcast_ref().is_some_and(is_worth_repeating) => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    self.session = Some(session);
                    break;
                }
            }
        }
        let answer = self.call(sql, with).await?;
        answer.ok_or_else(|| Fault::Config.because(schema::half_there(&self.settings.schema)))
    }

    /// Calls what may not be there: `None` if it is not.
    pub async fn call(&mut self, sql: &str, with: &Parameters<'_>) -> Result<Option<Answer>> {
        self.ask(None, sql, with).await
    }

    /// Calls it, and hears of later changes from then on.
    pub async fn call_listening(&mut self, sql: &str, with: &Parameters<'_>) -> Result<Option<Answer>> {
        self.ask(self.channel(), sql, with).await
    }

    /// In `sql`, `dlock.` stands for the schema, whatever it is called.
    async fn ask(&mut self, listen: Option<String>, sql: &str, with: &Parameters<'_>) -> Result<Option<Answer>> {
        let sql = sql.replace("dlock.", &format!("{}.", self.settings.schema));
        loop {
            let mut session = self.connected().await?;
            let unconfirmed = session.unconfirmed();
            let from = clock::now();
            let answer = match &listen {
                Some(channel) => session.query_listening(channel, &sql, with).await,
                None => session.query(&sql, with).await,
            };
            match answer {
                Ok(_) if session.unconfirmed() != unconfirmed => {
                    return Err(Fault::Unreachable.because("the standby has not confirmed what the primary has done"));
                }
                Ok(rows) => {
                    self.session = Some(session);
                    return Ok(Some(Answer { from, rows }));
                }
                Err(error) if is_worth_repeating(&error) => self.session = Some(session),
                Err(error) if is_missing(&error) => return Ok(None),
                Err(error) => return Err(explain(error)),
            }
        }
    }

    async fn connected(&mut self) -> Result<Session> {
        if let Some(session) = self.session.take().filter(|session| !session.is_closed()) {
            return Ok(session);
        }
        // Many that begin in the same second may all want a connection, and few need it for long.
        let patient_until = clock::now() + self.patience.connect / 2;
        loop {
            match Session::open(&self.settings.servers).await {
                Err(error) if has_no_connection_left(&error) && !patient_until.has_passed() => {
                    tokio::time::sleep(STEP_BACK).await;
                }
                opened => return opened,
            }
        }
    }
}
