//! Metrics of the runs of each lock, in the text format that Prometheus' node exporter collects. The file
//! is its own memory: it is read, counted on and replaced as a whole, under a lock of its own. A file that has anything
//! else in it is somebody else's, and stays as it is.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::OFlag;

use super::Tally;
use crate::clock::{self, rfc3339::timestamp};
use crate::exit::Fault;
use crate::lock::LockName;
use crate::openat::{self, Place};

/// Every metric: its name, its kind and what it means.
pub const METRICS: [(&str, &str, &str); 12] = [
    ("dlock_acquisitions_total", "counter", "How often the lock was acquired."),
    ("dlock_busy_total", "counter", "How often a run gave up because the lock was busy."),
    ("dlock_lost_total", "counter", "How often the lock was lost or taken away while the command ran."),
    ("dlock_failures_total", "counter", "How often a command ended in another way than with exit code 0."),
    ("dlock_wait_seconds_total", "counter", "Time spent waiting for the lock."),
    ("dlock_hold_seconds_total", "counter", "Time the lock was held."),
    (WAIT, "histogram", "How long runs waited for the lock."),
    (HOLD, "histogram", "How long runs held the lock."),
    (HELD_SINCE, "gauge", "Since when the last run that acquired the lock holds it; 0 when it does not."),
    ("dlock_last_exit_code", "gauge", "With what the last command ended."),
    ("dlock_last_duration_seconds", "gauge", "How long the last command ran."),
    ("dlock_last_success_timestamp_seconds", "gauge", "When a command last ended with exit code 0."),
];

const WAIT: &str = "dlock_wait_duration_seconds";
const HOLD: &str = "dlock_hold_duration_seconds";
const HELD_SINCE: &str = "dlock_held_since_timestamp_seconds";

/// The upper bounds of the histograms' buckets, in seconds: from a moment to a day.
const BUCKETS: [&str; 9] = ["0.1", "1", "10", "60", "600", "3600", "21600", "86400", "+Inf"];

const FOREIGN: &str = "it contains something other than dlock's metrics, and was left as it is; name another file";

/// Values by series: `METRIC{name="LOCK"}`.
type Samples = BTreeMap<String, f64>;

/// Refuses a file that has anything in it but metrics of dlock's. What else is wrong with it is a matter of writing it.
pub fn refuse_foreign(path: &Path) -> Result<()> {
    let Ok(place) = openat::resolve(path) else { return Ok(()) };
    match Metrics(place).read() {
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            Err(Fault::Config.because(format_args!("--metrics-file: {}: {error}", path.display())))
        }
        _ => Ok(()),
    }
}

/// Counts what is known when the command has been started. Nobody is kept waiting for it.
pub fn count_start(path: &Path, name: &LockName, tally: &Tally) -> Result<()> {
    change(path, name, Duration::from_millis(200), |series| start(series, tally))
}

/// Counts the rest.
pub fn count_end(path: &Path, name: &LockName, tally: &Tally) -> Result<()> {
    change(path, name, Duration::from_secs(5), |series| {
        if !tally.start_counted {
            start(series, tally);
        }
        end(series, tally);
    })
}

fn change(path: &Path, name: &LockName, patience: Duration, count: impl FnOnce(&mut Series)) -> Result<()> {
    let about = || format!("cannot write metrics to {}", path.display());
    let file = Metrics(openat::resolve(path).with_context(about)?);
    let _guard = file.lock(patience).with_context(about)?;
    let mut samples = file.read().with_context(|| format!("cannot read {}", path.display()))?;
    count(&mut Series { samples: &mut samples, name });
    file.write(&samples).with_context(about)
}

/// The file, and those beside it that are needed to change it.
struct Metrics(Place);

impl Metrics {
    /// Whoever can read the guard could lock it, and keep every run from its end.
    fn lock(&self, patience: Duration) -> IoResult<File> {
        let guard = self.0.dir.open_file(self.beside("lock"), OFlag::O_RDWR | OFlag::O_CREAT, 0o600)?;
        let until = clock::now() + patience;
        while guard.try_lock().is_err() {
            if until.has_passed() {
                return Err(Error::new(ErrorKind::TimedOut, "somebody else has it locked"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(guard)
    }

    fn read(&self) -> IoResult<Samples> {
        // Ours have a few hundred bytes a lock.
        const LONGEST: u64 = 64 << 20;
        match self.0.dir.open_file(&self.0.name, OFlag::O_RDONLY, 0) {
            Ok(file) => {
                let mut bytes = Vec::new();
                file.take(LONGEST).read_to_end(&mut bytes)?;
                let text = String::from_utf8(bytes).ok().filter(|text| text.lines().all(is_ours));
                text.map(|text| parse(&text)).ok_or_else(|| Error::new(ErrorKind::InvalidData, FOREIGN))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Samples::new()),
            Err(error) => Err(error),
        }
    }

    fn write(&self, samples: &Samples) -> IoResult<()> {
        let fresh = self.beside("new");
        // Of a run that died here, or of somebody who hopes that we write to it.
        let _ = self.0.dir.remove(&fresh);
        let write = |file: &mut File| {
            // Whoever collects it is another user, whatever the umask of a job is.
            file.set_permissions(Permissions::from_mode(0o644))?;
            file.write_all(render(samples).as_bytes())
        };
        self.0.dir.replace(&self.0.name, fresh, write).map(drop)
    }

    fn beside(&self, suffix: &str) -> OsString {
        let mut name = self.0.name.clone();
        name.push(format!(".{suffix}"));
        name
    }
}

/// The series of one lock.
struct Series<'a> {
    samples: &'a mut Samples,
    name: &'a LockName,
}

impl Series<'_> {
    fn value(&mut self, metric: &str, label: &str) -> &mut f64 {
        self.samples.entry(series(metric, self.name.as_str(), label)).or_default()
    }

    fn add(&mut self, metric: &str, value: f64) {
        *self.value(metric, "") += value;
    }

    fn set(&mut self, metric: &str, value: f64) {
        *self.value(metric, "") = value;
    }

    /// Adds to a histogram, or only makes sure that it is there.
    fn observe(&mut self, metric: &str, span: Option<Duration>) {
        let seconds = span.unwrap_or_default().as_secs_f64();
        let once = f64::from(span.is_some());
        for bound in BUCKETS {
            let is_within = bound.parse().is_ok_and(|bound: f64| seconds <= bound);
            *self.value(&format!("{metric}_bucket"), &format!(",le=\"{bound}\"")) += once * f64::from(is_within);
        }
        self.add(&format!("{metric}_sum"), seconds);
        self.add(&format!("{metric}_count"), once);
    }
}

fn start(series: &mut Series, tally: &Tally) {
    series.add("dlock_acquisitions_total", f64::from(tally.acquired));
    series.add("dlock_busy_total", f64::from(tally.busy));
    series.add("dlock_wait_seconds_total", tally.waited.as_secs_f64());
    series.observe(WAIT, Some(tally.waited).filter(|_| tally.acquired || tally.busy));
    match tally.since {
        Some(since) => series.set(HELD_SINCE, timestamp(since)),
        None => series.add(HELD_SINCE, 0.0),
    }
}

fn end(series: &mut Series, tally: &Tally) {
    series.add("dlock_lost_total", f64::from(tally.lost));
    series.add("dlock_failures_total", f64::from(tally.exit_code.is_some_and(|code| code != 0)));
    series.add("dlock_hold_seconds_total", tally.held.as_secs_f64());
    series.observe(HOLD, tally.exit_code.map(|_| tally.held));
    // Another run may have the lock by now.
    if tally.since.is_some_and(|since| timestamp(since) == *series.value(HELD_SINCE, "")) {
        series.set(HELD_SINCE, 0.0);
    }
    if let Some(exit_code) = tally.exit_code {
        series.set("dlock_last_exit_code", exit_code.into());
        series.set("dlock_last_duration_seconds", tally.ran.as_secs_f64());
        if exit_code == 0 {
            series.set("dlock_last_success_timestamp_seconds", timestamp(clock::wall()));
        }
    }
}

fn is_ours(line: &str) -> bool {
    let about = line.strip_prefix("# HELP ").or(line.strip_prefix("# TYPE ")).unwrap_or(line);
    about.starts_with("dlock_") || line.trim().is_empty()
}

fn series(metric: &str, name: &str, label: &str) -> String {
    format!("{metric}{{name=\"{name}\"{label}}}")
}

/// What stands behind the name of a metric and behind that of a lock, for each of its series.
fn parts(kind: &str) -> Vec<(&'static str, String)> {
    if kind != "histogram" {
        return vec![("", String::new())];
    }
    let buckets = BUCKETS.iter().map(|bound| ("_bucket", format!(",le=\"{bound}\"")));
    buckets.chain([("_sum", String::new()), ("_count", String::new())]).collect()
}

fn parse(text: &str) -> Samples {
    let sample = |line: &str| {
        let (series, value) = line.rsplit_once(' ')?;
        Some((series.to_owned(), value.parse::<f64>().ok().filter(|value| value.is_finite())?))
    };
    text.lines().filter_map(sample).collect()
}

/// The metrics that are known, lock by lock.
fn render(samples: &Samples) -> String {
    let names: BTreeSet<&str> = samples.keys().filter_map(|series| series.split('"').nth(1)).collect();
    let mut text = String::new();
    for (metric, kind, help) in METRICS {
        let parts = parts(kind);
        let all = names.iter().flat_map(|name| {
            parts.iter().map(move |(suffix, label)| series(&format!("{metric}{suffix}"), name, label))
        });
        let line = |series: String| samples.get(&series).map(|value| format!("{series} {value}\n"));
        let lines: String = all.filter_map(line).collect();
        if !lines.is_empty() {
            text += &format!("# HELP {metric} {help}\n# TYPE {metric} {kind}\n{lines}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn counts_on_from_what_is_there_and_leaves_what_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dlock.prom");
        let name: LockName = "a".parse().unwrap();
        let run = |tally: &Tally| {
            count_start(&path, &name, tally)?;
            count_end(&path, &name, &Tally { start_counted: true, ..*tally })
        };
        for foreign in ["#!/bin/sh\nexit 0\n", "dlock_busy_total{name=\"a\"} 4\nnode_load1 3\n", "\0"] {
            std::fs::write(&path, foreign).unwrap();
            let refused = refuse_foreign(&path).unwrap_err();
            assert_eq!(Fault::of(&refused), Fault::Config, "{foreign:?}");
            assert!(run(&Tally::default()).is_err());
            assert_eq!(std::fs::read_to_string(&path).unwrap(), foreign);
        }
        std::fs::write(&path, "dlock_busy_total{name=\"a\"} 4\n\ndlock_busy_total{name=\"b\"} NaN\ndlock_old 7\n")
            .unwrap();
        refuse_foreign(&path).unwrap();
        let busy = Tally { busy: true, waited: Duration::from_secs(5), ..Tally::default() };
        count_end(&path, &name, &busy).unwrap();
        let done = Tally {
            acquired: true,
            held: Duration::from_millis(1500),
            since: Some(UNIX_EPOCH + Duration::from_millis(1500)),
            ran: Duration::from_millis(1400),
            exit_code: Some(0),
            ..Tally::default()
        };
        run(&done).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        for line in [
            "dlock_busy_total{name=\"a\"} 5",
            "dlock_acquisitions_total{name=\"a\"} 1",
            "dlock_hold_seconds_total{name=\"a\"} 1.5",
            "dlock_last_duration_seconds{name=\"a\"} 1.4",
            "dlock_last_exit_code{name=\"a\"} 0",
            "dlock_held_since_timestamp_seconds{name=\"a\"} 0",
            "dlock_wait_duration_seconds_bucket{name=\"a\",le=\"1\"} 1",
            "dlock_wait_duration_seconds_bucket{name=\"a\",le=\"10\"} 2",
            "dlock_wait_duration_seconds_bucket{name=\"a\",le=\"+Inf\"} 2",
            "dlock_wait_duration_seconds_sum{name=\"a\"} 5",
            "dlock_wait_duration_seconds_count{name=\"a\"} 2",
            "dlock_hold_duration_seconds_count{name=\"a\"} 1",
        ] {
            assert!(text.lines().any(|one| one == line), "{line} is missing:\n{text}");
        }
        assert!(!text.contains("dlock_old") && !text.contains("NaN"));
        assert_eq!(text.matches("# TYPE").count(), METRICS.len());
    }

    #[test]
    fn a_run_that_ends_leaves_the_start_of_the_next_one_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dlock.prom");
        let name: LockName = "a".parse().unwrap();
        let since = |seconds| {
            let since = Some(UNIX_EPOCH + Duration::from_secs(seconds));
            Tally { acquired: true, since, start_counted: true, ..Tally::default() }
        };
        count_start(&path, &name, &since(7)).unwrap();
        count_start(&path, &name, &since(9)).unwrap();
        count_end(&path, &name, &since(7)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("dlock_held_since_timestamp_seconds{name=\"a\"} 9\n"), "{text}");
    }
}
