//! Locks as metrics, in Prometheus' text format.

use std::time::Duration;

use anyhow::Result;

use crate::clock::{self, rfc3339::timestamp};
use crate::lock::{LastRun, LockName, LockState};
use crate::report::print;

/// Every metric and what it means. They are named apart from those of `--metrics-file`: one collector may read both.
pub const METRICS: [(&str, &str); 8] = [
    ("dlock_lock_held", "How many hold the lock."),
    ("dlock_lock_held_since_timestamp_seconds", "Since when the lock is held, by whoever has held it longest."),
    ("dlock_lock_expires_timestamp_seconds", "When the first lease ends unless it is renewed."),
    ("dlock_lock_waiters", "How many wait for the lock."),
    ("dlock_lock_oldest_waiter_timestamp_seconds", "Since when somebody waits for the lock."),
    ("dlock_lock_last_success_timestamp_seconds", "When a command last ended with exit code 0."),
    ("dlock_lock_last_exit_code", "The exit code of the last command; missing if it has none."),
    ("dlock_lock_last_duration_seconds", "How long the last command took."),
];

/// A lock, and its value of each metric.
pub type Samples = (LockName, [Option<f64>; METRICS.len()]);

pub fn samples(state: &LockState) -> Samples {
    let expires_in: Option<Duration> = state.holders.iter().filter_map(|holder| holder.expires_in).min();
    let values = [
        Some(state.holders.len() as f64),
        state.held_since().map(timestamp),
        // A record may claim any ttl.
        expires_in.and_then(|left| clock::wall().checked_add(left)).map(timestamp),
        Some(state.waiters.len() as f64),
        state.oldest_waiter().map(timestamp),
        state.last_success().map(timestamp),
        state.last_run.as_ref().and_then(|run| run.exit_code).map(f64::from),
        state.last_run.as_ref().and_then(LastRun::duration).map(|took| took.as_secs_f64()),
    ];
    (state.name.clone(), values)
}

/// Prints the metrics of all locks of a backend, a few locks at a time.
pub fn expose(backend: &str, all: &[Samples]) -> Result<()> {
    let backend = escaped(backend);
    for (at, (metric, help)) in METRICS.iter().enumerate() {
        print(format!("# HELP {metric} {help}\n# TYPE {metric} gauge\n"))?;
        for some in all.chunks(1000) {
            let values = some.iter().filter_map(|(name, values)| Some((name, values[at]?)));
            let line = |(name, value)| format!("{metric}{{name=\"{name}\",backend=\"{backend}\"}} {value}\n");
            print(values.map(line).collect::<String>())?;
        }
    }
    Ok(())
}

fn escaped(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_backend_is_escaped_as_a_label() {
        assert_eq!(super::escaped("a\"b\\c"), "a\\\"b\\\\c");
    }
}
