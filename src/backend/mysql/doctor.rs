//! What `dlock doctor` should know about a server: whatever could undo a grant, or keep us from renewing.

use std::collections::BTreeMap;

use anyhow::{Context, Result};

use super::answer::get;
use super::client::Client;
use crate::backend::doctor::{Checkup, Finding, micros};
use crate::backend::sql;
use crate::clock;

/// What any user can ask. The settings that not every server has are asked for by their names.
const SQL: &str = "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED) AS clock, CONNECTION_ID() AS connection;
    SHOW GLOBAL VARIABLES WHERE Variable_name IN ('version', 'innodb_flush_log_at_trx_commit', 'log_bin', 'sync_binlog',
        'max_connections', 'wsrep_on', 'rpl_semi_sync_master_enabled', 'rpl_semi_sync_source_enabled');
    SHOW GLOBAL STATUS WHERE Variable_name IN ('Threads_connected', 'Slaves_connected', 'wsrep_cluster_size',
        'wsrep_cluster_status', 'Rpl_semi_sync_master_status', 'Rpl_semi_sync_source_status',
        'Rpl_semi_sync_master_clients', 'Rpl_semi_sync_source_clients');
    SHOW SESSION STATUS LIKE 'Ssl_cipher';
    SELECT COUNT(*) AS triggers FROM information_schema.TRIGGERS
        WHERE TRIGGER_SCHEMA = DATABASE() AND TRIGGER_NAME LIKE 'dlock!_%' ESCAPE '!'";

pub async fn examine(client: &mut Client) -> Result<Checkup> {
    let before = micros(clock::wall());
    let answer = client.call(SQL).await?.context("dlock's tables are gone again")?;
    let ours = i64::midpoint(before, micros(clock::wall()));
    let row = answer.row()?;
    let server = Server::read(answer.results.get(1..4).context("the server did not tell its settings")?)?;
    let (used, usable) = (server.number("threads_connected"), server.number("max_connections"));
    let stays_here = client.settings.servers.iter().all(|server| server.is_local);
    let findings = vec![
        Finding::of("mysql-version", server.version()),
        server.durability(),
        server.replicas(),
        sql::connections("mysql-connections", used, usable, "raise max_connections"),
        sql::privacy("mysql-tls", stays_here || !server.get("ssl_cipher").is_empty()),
        proxy(get::<u32>(row, "connection")? != client.connection_id().await?),
        by_hand(answer.results.get(4).and_then(|rows| rows.first()).map(|row| get(row, "triggers")).transpose()?),
    ];
    Ok(Checkup { findings, clock_offset_us: Some(get::<i64>(row, "clock")? - ours) })
}

/// Variables and status, by their names in lower case.
struct Server(BTreeMap<String, String>);

impl Server {
    fn read(results: &[Vec<mysql_async::Row>]) -> Result<Server> {
        let pair = |row| Ok((get::<String>(row, "Variable_name")?.to_ascii_lowercase(), get(row, "Value")?));
        results.iter().flatten().map(pair).collect::<Result<_>>().map(Server)
    }

    fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    fn number(&self, name: &str) -> i64 {
        self.get(name).parse().unwrap_or(0)
    }

    /// By the name that MariaDB has, or that MySQL has.
    fn semi_sync(&self, what: &str) -> &str {
        let known = [format!("rpl_semi_sync_master_{what}"), format!("rpl_semi_sync_source_{what}")];
        known.iter().map(|name| self.get(name)).find(|value| !value.is_empty()).unwrap_or("")
    }

    fn is_cluster(&self) -> bool {
        self.get("wsrep_on") == "ON"
    }

    fn version(&self) -> String {
        let version = self.get("version");
        if version.contains("MariaDB") { version.to_owned() } else { format!("MySQL {version}") }
    }

    fn durability(&self) -> Finding {
        const CHECK: &str = "mysql-durability";
        let off = match (self.get("innodb_flush_log_at_trx_commit"), self.get("log_bin"), self.get("sync_binlog")) {
            _ if self.is_cluster() => return Finding::of(CHECK, "a commit is on every node of the cluster"),
            ("1" | "3", "OFF", _) | ("1" | "3", _, "1") => None,
            ("1" | "3", _, often) => Some(format!("sync_binlog is {often}, not 1")),
            (often, _, _) => Some(format!("innodb_flush_log_at_trx_commit is {often}, not 1")),
        };
        sql::durability(CHECK, off, "set it to 1 in the server's configuration")
    }

    fn replicas(&self) -> Finding {
        const CHECK: &str = "mysql-replicas";
        if self.is_cluster() {
            return self.cluster();
        }
        let (enabled, on) = (self.semi_sync("enabled") == "ON", self.semi_sync("status") == "ON");
        let clients = self.semi_sync("clients");
        match (enabled, on, self.number("slaves_connected")) {
            (true, true, _) if clients != "0" => Finding::of(CHECK, "a commit waits for a semi-synchronous replica"),
            (true, ..) => Finding::of(CHECK, "semi-synchronous replication is on, but no replica answers").weak(
                "nothing is granted or renewed until one does: a failover would forget it",
                "repair the replica, or turn rpl_semi_sync off",
            ),
            (false, _, 0) => Finding::of(CHECK, "there is no replica that is known of"),
            (false, _, count) => Finding::of(CHECK, format!("{count} replica(s), all of them asynchronous")).weak(
                "a failover forgets the last grants, and lets a second holder in",
                "turn on semi-synchronous replication on both sides",
            ),
        }
    }

    fn cluster(&self) -> Finding {
        const CHECK: &str = "mysql-cluster";
        let (size, status) = (self.number("wsrep_cluster_size"), self.get("wsrep_cluster_status"));
        match size {
            _ if status != "Primary" => {
                Finding::of(CHECK, format!("this node is not in the majority of its cluster ({status})"))
                    .broken("it grants nothing", "name the other nodes in the URL as well")
            }
            0..=2 => Finding::of(CHECK, format!("a Galera cluster of {size}"))
                .weak("it stops when it loses a node", "use three, or add an arbitrator (garbd)"),
            size => Finding::of(CHECK, format!("a Galera cluster of {size}, and this node is in its majority")),
        }
    }
}

fn proxy(proxied: bool) -> Finding {
    let what = if proxied {
        "a proxy stands before the server: waiters ask again and again instead of being woken"
    } else {
        "no proxy stands before the server"
    };
    Finding::of("mysql-proxy", what)
}

/// Only those who may make triggers see them.
fn by_hand(triggers: Option<u64>) -> Finding {
    let what = match triggers {
        Some(1..) => "triggers keep rows from being changed by hand",
        _ => "no trigger that this user can see keeps rows from being changed by hand",
    };
    Finding::of("mysql-triggers", what)
}
