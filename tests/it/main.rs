//! Everything that is tested against real servers: through the real binary and, in `verbs`, through the library.
// How long a test waits has nothing to do with a lease.
#![allow(clippy::unwrap_used, clippy::disallowed_methods)]

mod assets;
mod bad_input;
mod bad_records;
mod completions;
mod config;
mod contract;
mod doctor;
mod etcd;
mod fence;
mod file;
mod guardian;
mod hard_to_end;
mod hooks;
mod matrix;
mod metrics;
mod monitoring;
mod notify;
mod operating;
mod partition;
mod patience;
mod planted;
mod postgres;
mod pressure;
mod readme;
mod redis;
mod redlock;
mod run;
mod signals;
mod support;
mod torn;
mod triage;
mod verbs;
mod zookeeper;
