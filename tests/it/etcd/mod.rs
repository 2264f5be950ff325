//! What is particular to etcd: its other clients, its errors, its faults, and clusters of it.

mod cluster;
mod doctor;
mod errors;
mod faults;
mod interop;
mod queue;
mod records;
mod tokens;

use crate::support::etcd::Etcd;
use crate::support::{Bed, Log, Running, until};

/// A run that lives until it is ended, in four processes of which three got away from dlock's group.
fn stubborn(bed: &dyn Bed, name: &str, ttl: &str, log: &Log) -> Running {
    let dlock = bed.dlock().run(name).args(["--ttl", ttl]).args(log.witness(&["ignore-term", "daemons=3"]));
    let running = dlock.spawn();
    log.await_runs(1, 4);
    running
}

/// The one after it, in the queue for sure.
fn next(bed: &dyn Bed, etcd: &Etcd, name: &str, log: &Log) -> Running {
    let next = bed.dlock().run(name).args(["--ttl", "3s"]).args(log.witness(&["for=20"])).spawn();
    until("the next to be in the queue", || etcd.contenders(name).len() == 2);
    next
}
