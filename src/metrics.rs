//! Metrics of the runs of each lock, in the text format that Prometheus' node exporter collects. The file
//! is its own memory: it is read, counted on and replaced as a whole, under a lock of its own.

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use nix::fcntl::OFlag;

use crate::clock;
use crate::lock::LockName;
use crate::openat::{self, Dir};

/// What one run adds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub acquired: bool,
    pub busy: bool,
    pub lost: bool,
    pub failed: bool,
    pub succeeded: bool,
    pub waited: Duration,
    pub held: Duration,
}

/// Every metric: its name, its kind and what it means.
pub const METRICS: [(&str, &str, &str); 7] = [
    ("dlock_acquisitions_total", "counter", "How often the lock was acquired."),
    ("dlock_busy_total", "counter", "How often a run gave up because the lock was busy."),
    ("dlock_lost_total", "counter", "How often the lock was lost or taken away while the command ran."),
    ("dlock_failures_total", "counter", "How often a command ended in another way than with exit code 0."),
    ("dlock_wait_seconds_total", "counter", "Time spent waiting for the lock."),
    ("dlock_hold_seconds_total", "counter", "Time the lock was held."),
    ("dlock_last_success_timestamp_seconds", "gauge", "When a command last ended with exit code 0."),
];

/// Values by metric and by the text between the braces.
type Samples = BTreeMap<(String, String), f64>;

pub fn add(path: &Path, name: &LockName, tally: &Tally) -> Result<()> {
    let about = || format!("cannot write metrics to {}", path.display());
    let place = openat::resolve(path).with_context(about)?;
    let file = Metrics { dir: &place.dir, path: &place.name };
    let _guard = file.lock().with_context(about)?;
    let mut samples = file.read().with_context(|| format!("cannot read {}", path.display()))?;
    count(&mut samples, name, tally);
    file.write(&samples).with_context(about)
}

/// The file, and those beside it that are needed to change it.
struct Metrics<'a> {
    dir: &'a Dir,
    path: &'a Path,
}

impl Metrics<'_> {
    /// Whoever can read the guard could lock it, and keep every run from its end.
    fn lock(&self) -> IoResult<File> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let guard = self.dir.open_file(&self.beside("lock"), OFlag::O_RDWR | OFlag::O_CREAT, 0o600)?;
        let until = clock::now() + PATIENCE;
        while guard.try_lock().is_err() {
            if until.has_passed() {
                return Err(Error::new(ErrorKind::TimedOut, "somebody else has it locked"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(guard)
    }

    fn read(&self) -> IoResult<Samples> {
        match self.dir.open_file(self.path, OFlag::O_RDONLY, 0) {
            // What is not ours, or not even text, is forgotten.
            Ok(mut file) => {
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes)?;
                Ok(parse(&String::from_utf8_lossy(&bytes)))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Samples::new()),
            Err(error) => Err(error),
        }
    }

    fn write(&self, samples: &Samples) -> IoResult<()> {
        let fresh = self.beside("new");
        // Of a run that died here, or of somebody who hopes that we write to it.
        let _ = self.dir.remove(&fresh);
        let write = |file: &mut File| {
            // Whoever collects it is another user, whatever the umask of a job is.
            file.set_permissions(Permissions::from_mode(0o644))?;
            file.write_all(render(samples).as_bytes())
        };
        self.dir.replace(self.path, fresh.as_os_str(), 0o600, write).map(drop)
    }

    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{suffix}"));
        name.into()
    }
}

fn count(samples: &mut Samples, name: &LockName, tally: &Tally) {
    let label = format!("name=\"{name}\"");
    let mut add = |metric: &str, value: f64| *samples.entry((metric.to_owned(), label.clone())).or_default() += value;
    let once = |happened: bool| if happened { 1.0 } else { 0.0 };
    add("dlock_acquisitions_total", once(tally.acquired));
    add("dlock_busy_total", once(tally.busy));
    add("dlock_lost_total", once(tally.lost));
    add("dlock_failures_total", once(tally.failed));
    add("dlock_wait_seconds_total", tally.waited.as_secs_f64());
    add("dlock_hold_seconds_total", tally.held.as_secs_f64());
    if tally.succeeded {
        let now = clock::wall().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        samples.insert(("dlock_last_success_timestamp_seconds".into(), label), now);
    }
}

fn parse(text: &str) -> Samples {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        let (metric, label) = series.strip_suffix('}')?.split_once('{')?;
        let known = METRICS.iter().any(|(name, ..)| *name == metric);
        let value = value.parse::<f64>().ok().filter(|value| value.is_finite() && known)?;
        Some(((metric.to_owned(), label.to_owned()), value))
    };
    text.lines().filter_map(sample).collect()
}

fn render(samples: &Samples) -> String {
    let mut text = String::new();
    for (metric, kind, help) in METRICS {
        text += &format!("# HELP {metric} {help}\n# TYPE {metric} {kind}\n");
        for ((_, label), value) in samples.iter().filter(|((one, _), _)| one == metric) {
            text += &format!("{metric}{{{label}}} {value}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_on_from_what_is_there_and_forgets_garbage() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dlock.prom");
        std::fs::write(&path, "dlock_busy_total{name=\"a\"} 4\nnonsense\ndlock_busy_total{name=\"b\"} NaN\n").unwrap();
        let name: LockName = "a".parse().unwrap();
        let busy = Tally { busy: true, ..Tally::default() };
        add(&path, &name, &busy).unwrap();
        let done = Tally { acquired: true, succeeded: true, held: Duration::from_millis(1500), ..Tally::default() };
        add(&path, &name, &done).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for line in [
            "dlock_busy_total{name=\"a\"} 5",
            "dlock_acquisitions_total{name=\"a\"} 1",
            "dlock_hold_seconds_total{name=\"a\"} 1.5",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is missing:\n{text}");
        }
        assert!(!text.contains("nonsense") && !text.contains("NaN"));
        assert_eq!(text.matches("# TYPE").count(), METRICS.len());
    }
}
