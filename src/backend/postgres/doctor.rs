//! What `dlock doctor` should know about a server: whatever could undo a grant, or keep us from renewing.

use anyhow::{Context, Result};

use super::session::Client;
use crate::backend::doctor::{Checkup, Finding, micros};
use crate::backend::sql;
use crate::clock;

/// What a role without further privileges can ask.
const SQL: &str = "SELECT dlock.version(), current_setting('server_version'), current_setting('fsync') = 'on',
    current_setting('full_page_writes') = 'on', (SELECT count(*) FROM pg_stat_replication),
    current_setting('synchronous_standby_names') <> '',
    (SELECT sum(numbackends) FROM pg_stat_database),
    current_setting('max_connections')::int8 - current_setting('superuser_reserved_connections')::int8,
    inet_client_addr() IS NULL OR inet_client_addr() << '127.0.0.0/8' OR inet_client_addr() = '::1'
        OR (SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()),
    (extract(epoch FROM clock_timestamp()) * 1000000)::int8, pg_backend_pid()";

pub async fn examine(client: &mut Client) -> Result<Checkup> {
    let before = micros(clock::wall());
    let answer = client.call(SQL, &[]).await?.context("the schema is gone again")?;
    let ours = i64::midpoint(before, micros(clock::wall()));
    let row = answer.row()?;
    let (schema, version): (i32, String) = (row.try_get(0)?, row.try_get(1)?);
    // A pooler calls the process that serves us by another number.
    let pooled = client.session.as_ref().and_then(|session| session.process) != Some(row.try_get(10)?);
    let findings = vec![
        Finding::of("postgres-version", format!("PostgreSQL {version}, dlock's schema is of version {schema}")),
        durability(row.try_get(2)?, row.try_get(3)?),
        standbys(row.try_get(4)?, row.try_get(5)?),
        sql::connections(
            "postgres-connections",
            row.try_get(6)?,
            row.try_get(7)?,
            "raise max_connections, or use a pooler",
        ),
        sql::privacy("postgres-tls", row.try_get(8)?),
        pooler(pooled, client.channel().is_some()),
    ];
    Ok(Checkup { findings, clock_offset_us: Some(row.try_get::<_, i64>(9)? - ours) })
}

fn durability(fsync: bool, full_page_writes: bool) -> Finding {
    let off = match (fsync, full_page_writes) {
        (true, true) => None,
        (false, _) => Some("fsync is off".to_owned()),
        (true, false) => Some("full_page_writes is off".to_owned()),
    };
    sql::durability("postgres-durability", off, "turn it on in postgresql.conf")
}

fn standbys(count: i64, synchronous: bool) -> Finding {
    const CHECK: &str = "postgres-standby";
    match (count, synchronous) {
        (0, false) => Finding::of(CHECK, "there is no standby"),
        (_, true) => Finding::of(CHECK, "a commit waits for a synchronous standby"),
        (count, false) => Finding::of(CHECK, format!("{count} standby(s), all of them asynchronous")).weak(
            "a failover forgets the last grants, and lets a second holder in",
            "name one in synchronous_standby_names",
        ),
    }
}

fn pooler(pooled: bool, listening: bool) -> Finding {
    const CHECK: &str = "postgres-pooler";
    match (pooled, listening) {
        (false, _) => Finding::of(CHECK, "no transaction pooler stands before the server"),
        (true, false) => Finding::of(CHECK, "a transaction pooler stands before the server, and listen is off"),
        (true, true) => Finding::of(CHECK, "a transaction pooler stands before the server, and listen is on").weak(
            "what a LISTEN asks for stays behind on connections that others use, and waiters are woken late",
            "add listen=off to the URL, or name the server itself",
        ),
    }
}
