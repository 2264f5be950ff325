//! One connection.

use std::collections::BTreeMap;

use anyhow::Result;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Error, OptsBuilder, Row};

use super::answer::get;
use super::errors::{explain, has_no_tls, may_want_tls, read_only};
use super::settings::Server;
use crate::backend::sql::{two_can_be_written_to, writable};
use crate::backend::sslmode::Encryption;
use crate::exit::Fault;

/// No question of ours has more of an answer; a malicious server might.
const MOST_ROWS: usize = 100_000;

pub struct Session {
    pub conn: Conn,
}

impl Session {
    /// Connects to the one server that can be written to: two would each have a holder, unless they are the nodes of one
    /// cluster, or one server by two names. Then it is the first that is named.
    pub async fn open(servers: &[Server]) -> Result<Session> {
        if let [server] = servers {
            return Session::begin(server).await;
        }
        let mut all = writable(servers, |server| async move { Session::begin_writable(&server).await }).await?;
        let (place, (session, identity)) = all.remove(0);
        if let Some((other, _)) = all.iter().find(|(_, (_, other))| *other != identity) {
            let labels = [place, *other].map(|place| (place, servers[place].label.as_str()));
            return Err(two_can_be_written_to(labels, "name only those of one cluster, and make replicas read_only"));
        }
        Ok(session)
    }

    async fn begin(server: &Server) -> Result<Session> {
        let encrypted = || server.options.clone().ssl_opts(server.tls.clone());
        let begun = match server.encryption {
            Encryption::Never => log_in(server.options.clone()).await,
            Encryption::Always => log_in(encrypted()).await,
            Encryption::IfOffered => match log_in(encrypted()).await {
                Err(error) if has_no_tls(&error) => log_in(server.options.clone()).await,
                begun => begun,
            },
            Encryption::IfWanted => match log_in(server.options.clone()).await {
                Err(error) if may_want_tls(&error) => match log_in(encrypted()).await {
                    // A server without TLS has said all there is to say before.
                    Err(other) if !may_want_tls(&other) => Err(error),
                    encrypted => encrypted,
                },
                begun => begun,
            },
        };
        begun.map(|conn| Session { conn }).map_err(|error| error.context(server.label.clone()))
    }

    /// With which server it is that can be written to: all nodes of a Galera cluster are one.
    async fn begin_writable(server: &Server) -> Result<(Session, String)> {
        const SQL: &str =
            "SELECT @@global.read_only AS read_only, CONCAT(@@hostname, ':', @@port, ' ', @@server_id) AS id;
            SHOW GLOBAL VARIABLES LIKE 'wsrep_on';
            SHOW GLOBAL STATUS WHERE Variable_name IN ('wsrep_cluster_state_uuid', 'wsrep_ready')";
        let mut session = Session::begin(server).await?;
        let results = session.query(SQL).await.map_err(explain)?;
        let row = results.first().and_then(|rows| rows.first()).ok_or_else(read_only)?;
        if get(row, "read_only")? {
            return Err(read_only().context(server.label.clone()));
        }
        let pair = |row| Ok((get::<String>(row, "Variable_name")?, get::<String>(row, "Value")?));
        let told = results[1..].iter().flatten().map(pair).collect::<Result<BTreeMap<_, _>>>()?;
        let told = |name| told.get(name).map_or("", String::as_str);
        let identity = match (told("wsrep_on"), told("wsrep_ready")) {
            ("ON", "ON") => told("wsrep_cluster_state_uuid").to_owned(),
            ("ON", _) => {
                let why = "this node of the cluster is not in its majority, or is not ready yet";
                return Err(Fault::Unreachable.because(why).context(server.label.clone()));
            }
            _ => get(row, "id")?,
        };
        Ok((session, identity))
    }

    /// Whether semi-synchronous replicas have what was committed before: the server stops waiting for them if they take too
    /// long, and waits again when they have caught up.
    pub async fn has_replica(&mut self) -> Result<bool> {
        const SQL: &str = "SHOW GLOBAL STATUS WHERE Variable_name IN ('Rpl_semi_sync_master_status', \
                           'Rpl_semi_sync_source_status')";
        let results = self.query(SQL).await.map_err(explain)?;
        let is_on = |row| Ok(get::<String>(row, "Value")? == "ON");
        results.iter().flatten().map(is_on).try_fold(false, |any, on: Result<bool>| Ok(any | on?))
    }

    /// The rows of each result.
    pub async fn query(&mut self, sql: &str) -> Result<Vec<Vec<Row>>, Error> {
        let (mut results, mut count) = (Vec::new(), 0);
        let mut answer = self.conn.query_iter(sql).await?;
        while !answer.is_empty() {
            let mut rows = Vec::new();
            while let Some(row) = answer.next().await? {
                count += 1;
                if count <= MOST_ROWS {
                    rows.push(row);
                }
            }
            results.push(rows);
        }
        Ok(results)
    }
}

async fn log_in(options: OptsBuilder) -> Result<Conn> {
    Conn::new(options).await.map_err(explain)
}
