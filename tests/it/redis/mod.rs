//! Redis: every kind of server that stands for one, programs of other people on the same locks, and what
//! happens when servers and networks fail.

mod doctor;
mod faults;
mod hostile;
pub mod interop;
pub mod kinds;
pub mod queue;
mod records;

use serde_json::Value;

use crate::support::{Bed, until};

pub fn status(bed: &dyn Bed, name: &str) -> Value {
    let json = bed.dlock().args(["status", "--json", name]).ended().expect(0).stdout;
    serde_json::from_str::<Value>(&json).unwrap()[0].clone()
}

pub fn await_waiters(bed: &dyn Bed, name: &str, count: usize) {
    until(&format!("{count} waiter(s)"), || status(bed, name)["waiters"].as_array().unwrap().len() == count);
}

/// Whatever another program does in Python with the client libraries that `tests/run` installs.
pub fn python(script: &str, args: &[&str]) -> std::process::Command {
    let mut python = std::process::Command::new(crate::support::target("test-python/bin/python"));
    python.args(["-c", script]).args(args);
    python
}
