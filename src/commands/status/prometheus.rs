//! Locks as metrics, in Prometheus' text format. All samples of a metric stand together there, but locks come page by
//! page: what does not fit into a little memory waits in files that have no name. Nothing is printed before all is known,
//! so that whoever collects it never gets half of it.

use std::io::{BufWriter, Read, Seek, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::{SpooledTempFile, spooled_tempfile};

use crate::clock::{self, rfc3339::timestamp};
use crate::lock::{LastRun, LockState};
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

/// How much of one metric is kept in memory.
const ROOM: usize = 1 << 19;

pub struct Exposition {
    backend: String,
    /// The samples of each metric.
    samples: [BufWriter<SpooledTempFile>; METRICS.len()],
}

impl Exposition {
    pub fn new(backend: &str) -> Exposition {
        let escaped = backend.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        let samples = std::array::from_fn(|_| BufWriter::new(spooled_tempfile(ROOM)));
        Exposition { backend: escaped, samples }
    }

    pub fn add(&mut self, states: &[LockState]) -> Result<()> {
        for state in states {
            for ((samples, (metric, _)), value) in self.samples.iter_mut().zip(METRICS).zip(values(state)) {
                let Some(value) = value else { continue };
                writeln!(samples, "{metric}{{name=\"{}\",backend=\"{}\"}} {value}", state.name, self.backend)
                    .context("cannot write to a temporary file")?;
            }
        }
        Ok(())
    }

    pub fn finish(self) -> Result<()> {
        for (samples, (metric, help)) in self.samples.into_iter().zip(METRICS) {
            print(format!("# HELP {metric} {help}\n# TYPE {metric} gauge\n"))?;
            let mut samples = samples.into_inner().context("cannot write to a temporary file")?;
            samples.rewind()?;
            let mut chunk = vec![0; 1 << 16];
            loop {
                match samples.read(&mut chunk).context("cannot read a temporary file")? {
                    0 => break,
                    length => print(&chunk[..length])?,
                }
            }
        }
        Ok(())
    }
}

fn values(state: &LockState) -> [Option<f64>; METRICS.len()] {
    let expires_in: Option<Duration> = state.holders.iter().filter_map(|holder| holder.expires_in).min();
    [
        Some(state.holders.len() as f64),
        state.held_since().map(timestamp),
        // A record may claim any ttl.
        expires_in.and_then(|left| clock::wall().checked_add(left)).map(timestamp),
        Some(state.waiters.len() as f64),
        state.oldest_waiter().map(timestamp),
        state.last_success().map(timestamp),
        state.last_run.as_ref().and_then(|run| run.exit_code).map(f64::from),
        state.last_run.as_ref().and_then(LastRun::duration).map(|took| took.as_secs_f64()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backend_is_escaped_as_a_label() {
        assert_eq!(Exposition::new("a\"b\\c").backend, "a\\\"b\\\\c");
    }
}
