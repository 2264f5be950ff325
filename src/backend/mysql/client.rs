//! Calls of dlock's procedures: one at a time, over one connection that is made when it is needed and dropped whenever it
//! is in doubt. How long a call may take is its caller's affair.

use std::time::Duration;

use anyhow::{Context, Result};
use mysql_async::Row;

use super::errors::{explain, has_no_connection_left, is_missing, is_worth_repeating};
use super::schema;
use super::session::Session;
use super::settings::Settings;
use crate::backend::sql::connected;
use crate::backend::{Address, Patience};
use crate::clock::{self, Instant};
use crate::exit::Fault;

/// How long to step aside at the most after a deadlock.
const STEP_ASIDE: Duration = Duration::from_millis(20);

pub struct Client {
    pub settings: Settings,
    pub patience: Patience,
    /// Taken out by whoever uses it, and put back only after a whole answer: a future that is dropped
    /// half-way takes the connection with it.
    pub session: Option<Session>,
}

/// The rows of each result, and an instant at which the request had not been written yet.
pub struct Answer {
    pub from: Instant,
    pub results: Vec<Vec<Row>>,
}

impl Answer {
    pub fn row(&self) -> Result<&Row> {
        self.results.first().and_then(|rows| rows.first()).context("the server answered nothing")
    }

    /// Whether what was done counts only if a replica has it.
    fn waits_for_replica(&self) -> bool {
        let told = self.row().ok().and_then(|row| row.get_opt::<Option<bool>, _>("semi_sync"));
        told.is_some_and(|told| told.ok().flatten().unwrap_or(false))
    }

    pub fn rows(&self, result: usize) -> &[Row] {
        self.results.get(result).map_or(&[], Vec::as_slice)
    }
}

impl Client {
    pub fn new(address: &Address, patience: Patience) -> Result<Client> {
        Ok(Client { settings: Settings::of(address)?, patience, session: None })
    }

    /// The connection that is ours as long as we are connected, as the server, or a proxy before it, called it at the
    /// log-in. A proxy calls it otherwise than the server behind it.
    pub async fn connection_id(&mut self) -> Result<u32> {
        let session = self.connected().await?;
        Ok(self.session.insert(session).conn.id())
    }

    /// Says goodbye when nothing more is to be asked soon: a server logs connections that just end.
    pub async fn quit(&mut self) {
        if let Some(session) = self.session.take() {
            // Nothing is lost if it cannot be said.
            let _ = session.conn.disconnect().await;
        }
    }

    /// The last question for now.
    pub async fn call_and_quit(&mut self, sql: &str) -> Result<Option<Answer>> {
        let answer = self.call(sql).await;
        self.quit().await;
        answer
    }

    /// Calls what has to be there, and makes it if it is not.
    pub async fn call_installed(&mut self, sql: &str) -> Result<Answer> {
        if let Some(answer) = self.call(sql).await? {
            return Ok(answer);
        }
        let mut session = self.connected().await?;
        schema::install(&mut session, &self.settings).await?;
        self.session = Some(session);
        let answer = self.call(sql).await?;
        answer.ok_or_else(|| Fault::Config.because(schema::half_there(&self.settings.prefix)))
    }

    /// Calls what may not be there: `None` if it is not. In `sql`, `dlock_` stands for the prefix.
    pub async fn call(&mut self, sql: &str) -> Result<Option<Answer>> {
        let sql = schema::prefixed(sql, &self.settings.prefix);
        loop {
            let mut session = self.connected().await?;
            let from = clock::now();
            match session.query(&sql).await {
                Ok(results) => {
                    let answer = Answer { from, results };
                    if answer.waits_for_replica() && !session.has_replica().await? {
                        return Err(Fault::Unreachable.because("no replica has confirmed what the primary has done"));
                    }
                    self.session = Some(session);
                    return Ok(Some(answer));
                }
                Err(error) if is_worth_repeating(&error) => {
                    self.session = Some(session);
                    // Those who were in each other's way should not come back as one.
                    let random = f64::from(getrandom::u32().unwrap_or_default()) / f64::from(u32::MAX);
                    tokio::time::sleep(STEP_ASIDE.mul_f64(random)).await;
                }
                Err(error) if is_missing(&error) => {
                    self.session = Some(session);
                    return Ok(None);
                }
                Err(error) => return Err(explain(error)),
            }
        }
    }

    async fn connected(&mut self) -> Result<Session> {
        if let Some(session) = self.session.take() {
            return Ok(session);
        }
        connected(self.patience, has_no_connection_left, async || Session::open(&self.settings.servers).await).await
    }
}
