//! What is MariaDB's and MySQL's own: their errors, their SQL clients, replicas and clusters.

mod errors;
mod faults;
mod replication;
mod sql;
mod tls;
mod waiting;

use crate::databases::{beating, used};
use crate::support::{Dlock, Log, Running};

/// A run that beats until it is told to end.
fn holding(url: &str, name: &str, options: &[&str], log: &Log) -> Running {
    beating(on(url).run(name).args(options).args(log.witness(&[])), log)
}

fn on(url: &str) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", url).env("DLOCK_CONNECT_TIMEOUT", "30s")
}
