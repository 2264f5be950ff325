//! What is MariaDB's and MySQL's own: their errors, their SQL clients, replicas and clusters.

mod errors;
mod faults;
mod replication;
mod sql;
mod tls;
mod waiting;

use crate::support::{Bed, Dlock, Log, Mysql, Running, until};

/// A run that beats until it is told to end.
fn holding(url: &str, name: &str, options: &[&str], log: &Log) -> Running {
    let before = log.runs().len();
    let running = on(url).run(name).args(options).args(log.witness(&[])).spawn();
    log.await_runs(before + 1, 1);
    running
}

fn on(url: &str) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", url).env("DLOCK_CONNECT_TIMEOUT", "30s")
}

/// One run, so that the tables are there.
fn used(server: &Mysql) {
    server.dlock().run("first").sh("exit 0").ended().expect(0).silently();
}

fn await_waiters(server: &Mysql, name: &str, count: usize) {
    let sql = format!("SELECT COUNT(*) FROM dlock_contenders WHERE name = '{name}' AND token IS NULL");
    until(&format!("{count} waiter(s) for {name}"), || server.try_sql(&sql) == Ok(count.to_string()));
}
