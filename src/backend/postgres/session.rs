//! One connection and its notifications.

use std::cmp::Ordering;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::TryStreamExt;
use tokio::io::AsyncReadExt;
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_postgres::tls::NoTlsStream;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Client, Connection, Error, NoTls, Row};

use super::errors::{explain, explain_login, may_want_tls, read_only};
use super::settings::Server;
use super::stream;
use crate::backend::net::Bounded;
use crate::exit::Fault;

/// How long a server that can be written to waits for another one to say the same. A standby, or a port where
/// nobody listens, says otherwise in no time.
const ANOTHER: Duration = Duration::from_millis(250);
const MOST_ROWS: usize = 1000;
/// What a server may send before we ask for more: otherwise it could fill our memory. A log-in is a few kilobytes, and
/// small messages take several times their size in memory.
const BEFORE_LOG_IN: usize = 1 << 20;
/// A page of `dlock status` may be large.
const AFTER_LOG_IN: usize = 32 << 20;

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

parameters!(&str: TEXT, String: TEXT, Option<String>: TEXT, i64: INT8, i32: INT4, Option<i32>: INT4, f64: FLOAT8, Option<f64>: FLOAT8, bool: BOOL);

pub type Parameters<'a> = [&'a dyn Parameter];

pub struct Session {
    client: Client,
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
    /// Connects to the one server that can be written to. They are tried at the same time, since one that hangs
    /// would eat up the others' time; and two that can be written to would each have a holder.
    pub async fn open(servers: &[Server]) -> Result<Session> {
        if let [server] = servers {
            return Session::begin(server.clone()).await;
        }
        let mut attempts = JoinSet::new();
        for (place, server) in servers.iter().cloned().enumerate() {
            attempts.spawn(async move { (place, Session::begin(server).await) });
        }
        let (mut failure, mut first) = (None, None::<(usize, Session)>);
        let mut patience = Duration::MAX;
        while let Ok(Some(attempt)) = tokio::time::timeout(patience, attempts.join_next()).await {
            let (place, session) = match attempt? {
                (place, Ok(session)) => (place, session),
                (_, Err(error)) => {
                    // A standby that is only down or read-only says less than a server that refuses us.
                    if failure.as_ref().is_none_or(|before| Fault::of(before) == Fault::Unreachable) {
                        failure = Some(error);
                    }
                    continue;
                }
            };
            patience = ANOTHER;
            let Some((before, other)) = first else {
                first = Some((place, session));
                continue;
            };
            first = Some(match compare(&other.identity().await?, &session.identity().await?) {
                Some(Ordering::Less) => (place, session),
                Some(Ordering::Greater) => (before, other),
                Some(Ordering::Equal) if before < place => (before, other),
                Some(Ordering::Equal) => (place, session),
                None => {
                    let labels = [before.min(place), before.max(place)].map(|place| servers[place].label.as_str());
                    return Err(Fault::Unreachable.because(format_args!(
                        "two servers can be written to: {}; a lock on one is none on the other, so name only those of one \
                         cluster",
                        labels.join(" and ")
                    )));
                }
            });
        }
        let failed = || failure.unwrap_or_else(|| Fault::Unreachable.because("the URL names no server"));
        first.map(|(_, session)| session).ok_or_else(failed)
    }

    async fn begin(mut server: Server) -> Result<Session> {
        let mut begun = log_in(&server).await;
        if server.allows_tls && begun.as_ref().is_err_and(may_want_tls) {
            server.config.ssl_mode(SslMode::Require);
            match log_in(&server).await {
                // A server without TLS has said all there is to say before.
                Err(error) if !error.is::<Error>() => {}
                encrypted => begun = encrypted,
            }
        }
        let (client, connection, process) = begun.map_err(|error| error.context(server.label.clone()))?;
        let heard = Arc::new(Heard::default());
        let driver = tokio::spawn(listen(connection, heard.clone())).abort_handle();
        let session = Session { client, heard, listening: false, process, driver };
        if server.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite {
            let row = session.query_one("SHOW transaction_read_only").await?;
            if row.try_get::<_, &str>(0)? != "off" {
                return Err(read_only().context(server.label));
            }
        }
        Ok(session)
    }

    async fn identity(&self) -> Result<Identity> {
        const SQL: &str =
            "SELECT pg_postmaster_start_time()::text, (SELECT system_identifier FROM pg_control_system()),
            ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int";
        let row = self.query_one(SQL).await?;
        Ok(Identity { started: row.try_get(0)?, cluster: row.try_get(1)?, timeline: row.try_get(2)? })
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
        let mut rows = pin!(self.client.query_typed_raw(sql, with.iter().map(|one| one.typed())).await?);
        let mut some = Vec::new();
        // No question of ours has more of an answer; a malicious server might.
        while some.len() < MOST_ROWS
            && let Some(row) = rows.try_next().await?
        {
            some.push(row);
        }
        Ok(some)
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

    /// How many commits the server made without the standby that should have confirmed them.
    pub fn unconfirmed(&self) -> usize {
        self.heard.unconfirmed.load(Relaxed)
    }
}

impl Drop for Session {
    /// Left alone, the driver would keep the connection until an answer came that may never come.
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Which server it is that can be written to.
struct Identity {
    started: String,
    /// The same for a primary and its standbys.
    cluster: i64,
    /// One more after every promotion.
    timeline: i32,
}

/// Which of two that can be written to is the later one; equal if they are one server, which may go by two names or stand
/// behind two poolers. A primary that has not noticed yet that a standby was promoted is the past, and all who see both
/// see that. Otherwise each would have a holder of its own.
fn compare(first: &Identity, second: &Identity) -> Option<Ordering> {
    match first.timeline.cmp(&second.timeline) {
        _ if first.cluster != second.cluster => None,
        Ordering::Equal if first.started != second.started => None,
        order => Some(order),
    }
}

async fn log_in(server: &Server) -> Result<(Client, Connection<Bounded, NoTlsStream>, Option<i32>)> {
    let socket = stream::open(&server.config, &server.tls).await?;
    let limit = Arc::new(AtomicUsize::new(BEFORE_LOG_IN));
    // The stream is encrypted already, if it is to be.
    let mut config = server.config.clone();
    config.ssl_mode(SslMode::Disable);
    let stream = Bounded::new(socket, limit.clone(), <[u8]>::len);
    let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(explain_login)?;
    limit.store(AFTER_LOG_IN, Relaxed);
    let process = process_id(&client).await;
    Ok((client, connection, process))
}

/// The server process that serves us, as it said at the log-in. The library writes it into a request to cancel, and
/// nowhere else. A pooler says something else, which is how we know one: behind it, nothing that belongs to a session is
/// ours.
async fn process_id(client: &Client) -> Option<i32> {
    let (mut request, stream) = tokio::io::duplex(64);
    client.cancel_token().cancel_query_raw(stream, NoTls).await.ok()?;
    // After its length and its code.
    request.read_u64().await.ok()?;
    request.read_i32().await.ok()
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
