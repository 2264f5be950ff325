//! Locks as metrics, in Prometheus' text format. All samples of a metric stand together there, but locks come page by
//! page: what does not fit into a little memory waits in files that have no name. Nothing is printed before all is known,
//! so that whoever collects it never gets half of it.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};

use crate::clock;
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

pub struct Exposition {
    backend: String,
    groups: [Group; METRICS.len()],
}

impl Exposition {
    pub fn new(backend: &str) -> Exposition {
        let escaped = backend.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        Exposition { backend: escaped, groups: Default::default() }
    }

    pub fn add(&mut self, states: &[LockState]) -> Result<()> {
        for state in states {
            for ((group, (metric, _)), value) in self.groups.iter_mut().zip(METRICS).zip(values(state)) {
                if let Some(value) = value {
                    group
                        .add(&format!("{metric}{{name=\"{}\",backend=\"{}\"}} {value}\n", state.name, self.backend))?;
                }
            }
        }
        Ok(())
    }

    pub fn finish(&mut self) -> Result<()> {
        for (group, (metric, help)) in self.groups.iter_mut().zip(METRICS) {
            print(format!("# HELP {metric} {help}\n# TYPE {metric} gauge\n"))?;
            group.print()?;
        }
        Ok(())
    }
}

fn values(state: &LockState) -> [Option<f64>; METRICS.len()] {
    let expires_in: Option<Duration> = state.holders.iter().filter_map(|holder| holder.expires_in).min();
    [
        Some(state.holders.len() as f64),
        state.held_since().map(seconds),
        // A record may claim any ttl.
        expires_in.and_then(|left| clock::wall().checked_add(left)).map(seconds),
        Some(state.waiters.len() as f64),
        state.oldest_waiter().map(seconds),
        state.last_success().map(seconds),
        state.last_run.as_ref().and_then(|run| run.exit_code).map(f64::from),
        state.last_run.as_ref().and_then(LastRun::duration).map(|took| took.as_secs_f64()),
    ]
}

fn seconds(at: SystemTime) -> f64 {
    let millis = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    millis as f64 / 1e3
}

/// The samples of one metric.
#[derive(Default)]
struct Group {
    text: Vec<u8>,
    earlier: Option<File>,
}

impl Group {
    const ROOM: usize = 1 << 19;

    fn add(&mut self, line: &str) -> Result<()> {
        if self.text.len() + line.len() > Group::ROOM {
            let file = match &mut self.earlier {
                Some(file) => file,
                None => self.earlier.insert(nameless_file().context("cannot make a temporary file")?),
            };
            file.write_all(&self.text).context("cannot write to a temporary file")?;
            self.text.clear();
        }
        self.text.extend_from_slice(line.as_bytes());
        Ok(())
    }

    fn print(&mut self) -> Result<()> {
        if let Some(file) = &mut self.earlier {
            file.rewind()?;
            let mut chunk = vec![0; 1 << 16];
            loop {
                match file.read(&mut chunk).context("cannot read a temporary file")? {
                    0 => break,
                    length => print(&chunk[..length])?,
                }
            }
        }
        print(&self.text)
    }
}

fn nameless_file() -> std::io::Result<File> {
    let random = getrandom::u64().map_err(std::io::Error::from)?;
    let path = std::env::temp_dir().join(format!("dlock-{}-{random:016x}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_into_memory_is_kept_in_order() {
        let mut group = Group::default();
        let line = "x".repeat(1000) + "\n";
        for _ in 0..2000 {
            group.add(&line).unwrap();
        }
        assert!(group.text.len() <= Group::ROOM);
        let mut file = group.earlier.unwrap();
        file.rewind().unwrap();
        let mut all = String::new();
        file.read_to_string(&mut all).unwrap();
        all += std::str::from_utf8(&group.text).unwrap();
        assert!(all == line.repeat(2000));
    }

    #[test]
    fn a_backend_is_escaped_as_a_label() {
        assert_eq!(Exposition::new("a\"b\\c").backend, "a\\\"b\\\\c");
    }
}
