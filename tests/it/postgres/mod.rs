//! What is PostgreSQL's own: its errors, its SQL clients, its faults.

mod doctor;
mod errors;
mod faults;
mod replication;
mod sql;
pub mod tls;
mod upgrade;
mod waiting;
mod wake_up;

use crate::support::{Bed, Log, Postgres, Running, until};

/// A run that beats until it is ended.
fn holding(url: &str, name: &str, options: &[&str], log: &Log) -> Running {
    let before = log.runs().len();
    let running = on(url).run(name).args(options).args(log.witness(&["ignore-term"])).spawn();
    log.await_runs(before + 1, 1);
    running
}

fn on(url: &str) -> crate::support::Dlock {
    crate::support::Dlock::new().env("DLOCK_BACKEND", url)
}

/// One run, so that the schema is there.
fn used(server: &Postgres) {
    server.dlock().run("first").sh("exit 0").ended().expect(0).silently();
}

fn await_waiters(server: &Postgres, name: &str, count: usize) {
    let waits = "token IS NULL AND expires > clock_timestamp()";
    let sql = format!("SELECT count(*) FROM dlock.contenders WHERE name = '{name}' AND {waits}");
    // Waiters may have taken every connection there is; then the server has none for us yet.
    until(&format!("{count} waiter(s) for {name}"), || server.try_sql(&sql) == Ok(count.to_string()));
}
