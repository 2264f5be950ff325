//! Calls of the schema's functions: one at a time, over one connection that is made when it is needed and dropped whenever
//! it is in doubt. How long a call may take is its caller's affair.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::SystemTime;

use anyhow::{Context, Result};
use futures_util::{StreamExt, TryStreamExt};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio_postgres::tls::NoTlsStream;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Connection, Error, Row};

use super::errors::{MISSING, NO_CONNECTION_LEFT, REPEATABLE, explain, is_about, says};
use super::settings::Settings;
use super::{connect, schema};
use crate::backend::net::Bounded;
use crate::backend::sql::connected;
use crate::backend::{Address, Patience};
use crate::clock::{self, Instant};
use crate::exit::Fault;

const MOST_ROWS: usize = 1000;

pub struct Client {
    pub settings: Settings,
    pub patience: Patience,
    /// Where others tell us that it is worth asking again.
    channel: String,
    /// Taken out by whoever uses it, and put back only after a whole answer: a future that is dropped
    /// half-way takes the connection with it.
    pub session: Option<Session>,
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

    /// Calls what has to be there, and makes it if it is not.
    pub async fn call_installed(&mut self, sql: &str, with: &Parameters<'_>) -> Result<Answer> {
        if let Some(answer) = self.call(sql, with).await? {
            return Ok(answer);
        }
        loop {
            let session = self.connected().await?;
            match schema::install(&session, &self.settings.schema).await {
                // Calls of an older version were in the way.
                Err(error) if is_about(&error, &REPEATABLE) => {}
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

    /// Calls it and, if there is a channel to `listen` on, hears of later changes from then on. In `sql`, `dlock.` stands
    /// for the schema, whatever it is called.
    pub async fn ask(&mut self, listen: Option<String>, sql: &str, with: &Parameters<'_>) -> Result<Option<Answer>> {
        let sql = sql.replace("dlock.", &format!("{}.", self.settings.schema));
        loop {
            let mut session = self.connected().await?;
            let unconfirmed = session.heard.unconfirmed.load(Relaxed);
            let from = clock::now();
            let answer = match &listen {
                Some(channel) => session.query_listening(channel, &sql, with).await,
                None => session.query(&sql, with).await,
            };
            match answer {
                Ok(_) if session.heard.unconfirmed.load(Relaxed) != unconfirmed => {
                    return Err(Fault::Unreachable.because("the standby has not confirmed what the primary has done"));
                }
                Ok(rows) => {
                    self.session = Some(session);
                    return Ok(Some(Answer { from, rows }));
                }
                Err(error) if says(&error, &REPEATABLE) => self.session = Some(session),
                Err(error) if says(&error, &MISSING) => return Ok(None),
                Err(error) => return Err(explain(error)),
            }
        }
    }

    async fn connected(&mut self) -> Result<Session> {
        if let Some(session) = self.session.take().filter(|session| !session.client.is_closed()) {
            return Ok(session);
        }
        let is_full = |error: &_| is_about(error, &NO_CONNECTION_LEFT);
        connected(self.patience, is_full, async || connect::open(&self.settings.servers).await).await
    }
}

/// A value for a query, and its type in SQL: named, so that the server need not be asked for it first.
pub trait Parameter: Sync {
    fn typed(&self) -> (&(dyn ToSql + Sync), Type);
}

macro_rules! parameters {
    ($($rust:ty: $sql:ident),*) => {
        $(impl Parameter for $rust {
            fn typed(&self) -> (&(dyn ToSql + Sync), Type) {
                (self, Type::$sql)
            }
        })*
    };
}

parameters!(&str: TEXT, String: TEXT, Option<String>: TEXT, i64: INT8, i32: INT4, Option<i32>: INT4, f64: FLOAT8, Option<SystemTime>: TIMESTAMPTZ, bool: BOOL);

pub type Parameters<'a> = [&'a dyn Parameter];

pub struct Session {
    client: tokio_postgres::Client,
    heard: Arc<Heard>,
    listening: bool,
    /// What the server, or a pooler before it, calls the process that serves us.
    pub process: Option<i32>,
    driver: AbortHandle,
}

/// What the server says without being asked.
#[derive(Default)]
struct Heard {
    /// A notification, or the end of the connection.
    news: Notify,
    /// Commits that did not wait for the standby they should have waited for.
    unconfirmed: AtomicUsize,
}

impl Session {
    pub fn new(
        client: tokio_postgres::Client,
        connection: Connection<Bounded, NoTlsStream>,
        process: Option<i32>,
    ) -> Session {
        let heard = Arc::new(Heard::default());
        let driver = tokio::spawn(listen(connection, heard.clone())).abort_handle();
        Session { client, heard, listening: false, process, driver }
    }

    /// Asks for notifications on `channel` in the same round trip as the next query. They are hints: if
    /// the server cannot send them, all goes on without.
    pub async fn query_listening(
        &mut self,
        channel: &str,
        sql: &str,
        with: &Parameters<'_>,
    ) -> Result<Vec<Row>, Error> {
        if self.listening {
            return self.query(sql, with).await;
        }
        let ask = format!("LISTEN {channel}");
        let (listening, rows) = tokio::join!(self.client.batch_execute(&ask), self.query(sql, with));
        self.listening = listening.is_ok();
        rows
    }

    pub async fn query(&self, sql: &str, with: &Parameters<'_>) -> Result<Vec<Row>, Error> {
        let rows = self.client.query_typed_raw(sql, with.iter().map(|one| one.typed())).await?;
        // No question of ours has more of an answer; a malicious server might.
        rows.take(MOST_ROWS).try_collect().await
    }

    pub async fn query_one(&self, sql: &str) -> Result<Row> {
        self.query(sql, &[]).await.map_err(explain)?.into_iter().next().context("the server answered nothing")
    }

    /// Statements that answer nothing.
    pub async fn execute(&self, sql: &str) -> Result<(), Error> {
        self.client.batch_execute(sql).await
    }

    /// Returns when a notification has come, or the connection has ended.
    pub async fn news(&self) {
        self.heard.news.notified().await;
    }
}

impl Drop for Session {
    /// Left alone, the driver would keep the connection until an answer came that may never come.
    fn drop(&mut self) {
        self.driver.abort();
    }
}

async fn listen(mut connection: Connection<Bounded, NoTlsStream>, heard: Arc<Heard>) {
    while let Some(Ok(message)) = poll_fn(|task| connection.poll_message(task)).await {
        match message {
            AsyncMessage::Notification(_) => heard.news.notify_one(),
            // Its text is translated, and its code is that of any warning.
            AsyncMessage::Notice(notice) if notice.routine() == Some("SyncRepWaitForLSN") => {
                heard.unconfirmed.fetch_add(1, Relaxed);
            }
            _ => {}
        }
    }
    heard.news.notify_one();
}
