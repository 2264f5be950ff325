//! `--metrics-file`, read by those who read it in earnest.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::{Bed, FileBed, until};

/// What Prometheus' own tool says of it.
#[track_caller]
fn promtool_likes(file: &Path) {
    let mut check = Command::new("promtool");
    check.args(["check", "metrics"]).stdin(Stdio::from(std::fs::File::open(file).unwrap()));
    let said = check.output().unwrap();
    let text = std::fs::read_to_string(file).unwrap();
    assert!(said.status.success() && said.stdout.is_empty() && said.stderr.is_empty(), "{said:?}\n{text}");
}

fn value(file: &Path, series: &str) -> Option<f64> {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
}

#[test]
fn metrics_are_written_when_the_command_starts_and_when_it_has_ended() {
    let bed = FileBed::new();
    let (file, go) = (bed.dir().join("m.prom"), bed.dir().join("go"));
    // One lock before and one behind it.
    for name in ["a", "y/z"] {
        bed.dlock().run(name).arg("--metrics-file").arg(&file).sh("exit 0").ended().expect(0).silently();
    }
    let script = format!("while [ ! -e {} ]; do sleep 0.01; done; exit 3", go.display());
    let running = bed.dlock().run("x").arg("--metrics-file").arg(&file).sh(&script).spawn();
    let since = "dlock_held_since_timestamp_seconds{name=\"x\"}";
    until("the start", || value(&file, since).is_some_and(|since| since > 1.0));
    assert_eq!(value(&file, "dlock_acquisitions_total{name=\"x\"}"), Some(1.0));
    assert_eq!(value(&file, "dlock_wait_duration_seconds_count{name=\"x\"}"), Some(1.0));
    assert_eq!(value(&file, "dlock_last_exit_code{name=\"x\"}"), None);
    promtool_likes(&file);
    bed.dlock().run("x").args(["-n", "-q"]).arg("--metrics-file").arg(&file).sh("exit 0").ended().expect(75);
    assert!(value(&file, since).is_some_and(|since| since > 1.0), "it is still held");
    std::fs::write(&go, "").unwrap();
    running.ended().expect(3).silently();
    for (series, wanted) in [
        (since, 0.0),
        ("dlock_acquisitions_total{name=\"x\"}", 1.0),
        ("dlock_busy_total{name=\"x\"}", 1.0),
        ("dlock_failures_total{name=\"x\"}", 1.0),
        ("dlock_last_exit_code{name=\"x\"}", 3.0),
        ("dlock_hold_duration_seconds_bucket{name=\"x\",le=\"+Inf\"}", 1.0),
        ("dlock_hold_duration_seconds_count{name=\"x\"}", 1.0),
        ("dlock_wait_duration_seconds_count{name=\"x\"}", 2.0),
        ("dlock_last_exit_code{name=\"y/z\"}", 0.0),
    ] {
        assert_eq!(value(&file, series), Some(wanted), "{series}");
    }
    assert!(value(&file, "dlock_last_duration_seconds{name=\"x\"}").is_some_and(|seconds| seconds > 0.0));
    promtool_likes(&file);
}

#[test]
fn a_file_that_is_not_dlocks_own_is_refused_and_left_alone() {
    let bed = FileBed::new();
    let file = bed.dir().join("file");
    let run = || bed.dlock().run("x").arg("--metrics-file").arg(&file).sh("echo ran").ended();
    for foreign in ["#!/bin/sh\necho hello\n", "# HELP node_load1 1m load.\nnode_load1 3\n", "\n\0\n"] {
        std::fs::write(&file, foreign).unwrap();
        let refused = run().expect(78).saying("name another file");
        assert_eq!(refused.stdout, "", "nothing was started");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), foreign);
    }
    // One that became somebody else's meanwhile, too: after dlock has counted the start.
    std::fs::remove_file(&file).unwrap();
    let script = format!("until [ -s {0} ]; do sleep 0.01; done; echo 'echo hello' >{0}", file.display());
    let late = bed.dlock().run("x").arg("--metrics-file").arg(&file).sh(&script).ended();
    late.expect(0).saying("no metrics");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "echo hello\n");
    for own in
        ["", "\n", "# HELP dlock_busy_total Busy.\n# TYPE dlock_busy_total counter\ndlock_busy_total{name=\"x\"} 4\n"]
    {
        std::fs::write(&file, own).unwrap();
        run().expect(0).silently();
        promtool_likes(&file);
    }
    assert_eq!(value(&file, "dlock_busy_total{name=\"x\"}"), Some(4.0));
}
