//! Redis: every kind of server that stands for one, programs of other people on the same locks, and what
//! happens when servers and networks fail.

mod doctor;
mod faults;
mod hostile;
pub mod interop;
pub mod kinds;
pub mod queue;
mod records;

/// Whatever another program does in Python with the client libraries that `tests/run` installs.
pub fn python(script: &str, args: &[&str]) -> std::process::Command {
    let mut python = std::process::Command::new(crate::support::target("test-python/bin/python"));
    python.args(["-c", script]).args(args);
    python
}
