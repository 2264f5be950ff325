//! One connection, its notifications, and what the server's errors mean to us.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Result;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Connection, Error, Row, Socket};

use super::settings::Server;
use super::tls;
use crate::exit::Fault;

pub type Parameters<'a> = [(&'a (dyn ToSql + Sync), Type)];

pub struct Session {
    client: Client,
    heard: Arc<Heard>,
    listening: bool,
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
    /// Connects to whichever of the servers can be written to. They are tried at the same time, since
    /// one that hangs would eat up the others' time.
    pub async fn open(servers: &[Server]) -> Result<Session> {
        let mut attempts = JoinSet::new();
        for server in servers.iter().cloned() {
            attempts.spawn(async move {
                let opened = server.config.connect(server.tls).await;
                opened.map_err(|error| explain(error).context(server.label))
            });
        }
        let mut failure = Fault::Unreachable.because("the URL names no server");
        while let Some(attempt) = attempts.join_next().await {
            match attempt? {
                Ok((client, connection)) => {
                    let heard = Arc::new(Heard::default());
                    let driver = tokio::spawn(listen(connection, heard.clone())).abort_handle();
                    return Ok(Session { client, heard, listening: false, driver });
                }
                // A standby that is only down or read-only says less than a server that refuses us.
                Err(error) if Fault::of(&failure) == Fault::Unreachable => failure = error,
                Err(_) => {}
            }
        }
        Err(failure)
    }

    pub fn is_closed(&self) -> bool {
        self.client.is_closed()
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
        self.client.query_typed(sql, with).await
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns when a notification has come, or the connection has ended.
    pub async fn news(&self) {
        self.heard.news.notified().await;
    }

    /// How many commits the server made without the standby that should have confirmed them.
    pub fn unconfirmed(&self) -> usize {
        self.heard.unconfirmed.load(Ordering::Relaxed)
    }
}

impl Drop for Session {
    /// Left alone, the driver would keep the connection until an answer came that may never come.
    fn drop(&mut self) {
        self.driver.abort();
    }
}

async fn listen(mut connection: Connection<Socket, tls::Stream>, heard: Arc<Heard>) {
    while let Some(Ok(message)) = poll_fn(|task| connection.poll_message(task)).await {
        match message {
            AsyncMessage::Notification(_) => heard.news.notify_one(),
            // Its text is translated, and its code is that of any warning.
            AsyncMessage::Notice(notice) if notice.routine() == Some("SyncRepWaitForLSN") => {
                heard.unconfirmed.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }
    heard.news.notify_one();
}

/// Whether nothing was done and the same again may go well: what a default isolation level above READ
/// COMMITTED does to contenders that meet.
pub fn is_worth_repeating(error: &Error) -> bool {
    matches!(error.code(), Some(&SqlState::T_R_SERIALIZATION_FAILURE | &SqlState::T_R_DEADLOCK_DETECTED))
}

/// Whether the schema `dlock` is not there, or not all of it.
pub fn is_missing(error: &anyhow::Error) -> bool {
    let code = error.downcast_ref::<Error>().and_then(Error::code);
    matches!(code, Some(&SqlState::INVALID_SCHEMA_NAME | &SqlState::UNDEFINED_FUNCTION | &SqlState::UNDEFINED_TABLE))
}

/// Whether the server has no connection left for us.
pub fn is_crowded(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Error>().and_then(Error::code) == Some(&SqlState::TOO_MANY_CONNECTIONS)
}

/// Gives an error the exit code and the words it deserves.
pub fn explain(error: Error) -> anyhow::Error {
    let Some(code) = error.code() else { return explain_client(error) };
    let (fault, words) = match *code {
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            (Fault::Refused, "check the role, its password and pg_hba.conf")
        }
        SqlState::INSUFFICIENT_PRIVILEGE => (
            Fault::Refused,
            "the role needs USAGE on dlock's schema, and SELECT, INSERT, UPDATE, DELETE on all tables in it",
        ),
        SqlState::INVALID_CATALOG_NAME => (Fault::Config, "name an existing database in the URL"),
        SqlState::READ_ONLY_SQL_TRANSACTION => (Fault::Unreachable, READ_ONLY),
        SqlState::TOO_MANY_CONNECTIONS => {
            (Fault::Unreachable, "the server has no connection left: raise max_connections, or use a pooler")
        }
        SqlState::LOCK_NOT_AVAILABLE => {
            (Fault::Unreachable, "a transaction that has not ended yet keeps the lock's row to itself")
        }
        SqlState::UNDEFINED_FUNCTION | SqlState::INVALID_SCHEMA_NAME => {
            (Fault::Config, "dlock's schema is not there, or is another version's")
        }
        // Starting, stopping, out of memory or disk, cancelled: it may well be better the next time.
        ref other if ["08", "53", "57"].iter().any(|class| other.code().starts_with(class)) => {
            return anyhow::Error::new(error).context(Fault::Unreachable);
        }
        _ => return error.into(),
    };
    anyhow::Error::new(error).context(words).context(fault)
}

const READ_ONLY: &str = "the server is read-only, as a standby is: name the primary, or all servers of the cluster";

/// The client library tells its own errors apart only by their text.
fn explain_client(error: Error) -> anyhow::Error {
    let kind = std::error::Error::source(&error).and_then(|source| source.downcast_ref()).map(std::io::Error::kind);
    let cut_off = kind.is_some_and(|kind| kind != std::io::ErrorKind::InvalidData);
    let fault = match error.to_string().as_str() {
        "error performing TLS handshake" if !cut_off => Fault::Refused,
        // A password is wanted and there is none, or the server wants to see something else altogether.
        "invalid configuration" | "authentication error" => Fault::Refused,
        // What `target_session_attrs=read-write` finds on a standby.
        "error connecting to server" if kind == Some(std::io::ErrorKind::PermissionDenied) => {
            return anyhow::Error::new(error).context(READ_ONLY).context(Fault::Unreachable);
        }
        _ => Fault::Unreachable,
    };
    anyhow::Error::new(error).context(fault)
}
