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

use crate::databases::{self, used};
use crate::support::{Dlock, Log, Running};

/// A run that beats until it is killed.
fn holding(url: &str, name: &str, options: &[&str], log: &Log) -> Running {
    databases::holding(on(url), name, options, log)
}

fn on(url: &str) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", url)
}
