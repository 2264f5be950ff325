//! What tells programs how the locks are: `check`, metrics, the schemas of what is printed as JSON, and the rules for
//! Prometheus.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Bed, Dlock, Ended, FileBed, Log, Running, until};

fn docs(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(path)
}

/// Feeds a program, which must be content with it.
#[track_caller]
fn content(program: &mut Command, input: &str) {
    let mut child = program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}\n{input}");
}

/// Holds the lock `x`, and has somebody wait for it.
fn busy(bed: &FileBed, log: &Log) -> (Running, Running) {
    let holder = bed.dlock().run("x").args(["--note", "see|this"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiter = bed.dlock().run("x").sh("exit 0").spawn();
    until("a waiter", || bed.dlock().args(["status", "--json", "x"]).ended().stdout.contains("waiting_since\":\"2"));
    (holder, waiter)
}

fn check(bed: &FileBed, args: &[&str]) -> Ended {
    bed.dlock().arg("check").args(args).ended().silently()
}

#[track_caller]
fn says(ended: Ended, code: i32, words: &[&str]) {
    let line = ended.expect(code).stdout;
    assert!(line.lines().count() == 1 && words.iter().all(|word| line.contains(word)), "{words:?} {line}");
    assert!(line.matches('|').count() <= 1, "{line}");
}

#[test]
fn check_compares_locks_with_limits() {
    let (bed, log) = (FileBed::new(), Log::new());
    bed.dlock().run("good").sh("exit 0").ended().expect(0);
    bed.dlock().run("bad").sh("exit 3").ended().expect(3);
    let _busy = busy(&bed, &log);

    says(check(&bed, &["good"]), 0, &["DLOCK OK - good: free, last run: exit 0, "]);
    let daily = ["--last-success-within", "26h"];
    says(check(&bed, &["good", daily[0], daily[1]]), 0, &["| good_last_success=", "s;;93600;0\n"]);
    says(
        check(&bed, &["bad", daily[0], daily[1]]),
        2,
        &["DLOCK CRITICAL - bad: never succeeded (last run: exit 3) | "],
    );
    says(check(&bed, &["new", daily[0], daily[1]]), 2, &["new: never ran", "new_last_success=U"]);
    says(check(&bed, &["good", "--last-success-within", "0"]), 2, &["good: no success for ", "the limit is 0s"]);
    let nearly = ["good", "--last-success-within", "1h", "--warn", "0%"];
    says(check(&bed, &nearly), 1, &["DLOCK WARNING - good", "s;0;3600;0"]);

    says(check(&bed, &["x", "--held-at-most", "1h"]), 0, &["DLOCK OK - x: held for ", "x_held=", ";;3600;0"]);
    says(check(&bed, &["x", "--held-at-most", "0"]), 2, &["x: held by ", "see¦this", " for ", "the limit is 0s"]);
    says(check(&bed, &["x", "--waiting-at-most", "0"]), 2, &["somebody has waited for ", "x_waiting="]);
    says(check(&bed, &["x", "--waiting-at-most", "1h"]), 0, &["DLOCK OK"]);
    says(check(&bed, &["good", "--held-at-most", "0", "--waiting-at-most", "0"]), 0, &["good_held=0s;;0;0"]);

    says(check(&bed, &["*", "--held-at-most", "1h"]), 0, &["DLOCK OK - 3 locks | "]);
    says(check(&bed, &["*d", "--name", "x", daily[0], daily[1]]), 2, &["2 of 3 locks: ", "bad: never", "x: never"]);
}

#[test]
fn what_cannot_be_checked_is_unknown() {
    let bed = FileBed::new();
    for (args, word) in [
        (&["nothing-*"][..], "no lock has such a name"),
        (&[], "which lock?"),
        (&["x", "--held-at-most", "soon"], "--held-at-most"),
        (&["x", "--frobnicate"], "--frobnicate"),
        (&["x", "--config", "/nonexistent"], "/nonexistent"),
        (&["x", "-b", "redis://127.0.0.1:1"], "cannot be reached"),
    ] {
        says(check(&bed, args), 3, &["DLOCK UNKNOWN - ", word]);
        let json = bed.dlock().arg("check").args(args).arg("--json").ended().silently().expect(3).stdout;
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["status"], "unknown", "{json}");
    }
    let mut flock = Command::new("flock");
    flock.arg("--no-fork").arg(bed.lock_file("x")).args(["sleep", "1000"]);
    let _flock = crate::support::Daemon::spawn(flock, &bed.dir().join("flock.log"));
    until("flock to hold it", || bed.dlock().args(["status", "--exit-code", "x"]).ended().code == Some(75));
    says(check(&bed, &["x", "--held-at-most", "1h"]), 3, &["nobody knows since when", "x_held=U"]);
}

#[test]
fn status_as_metrics_is_what_prometheus_reads() {
    let (bed, log) = (FileBed::new(), Log::new());
    bed.dlock().run("good").sh("exit 0").ended().expect(0);
    let _busy = busy(&bed, &log);
    let text = bed.dlock().args(["status", "--format", "prometheus"]).ended().expect(0).silently().stdout;
    content(Command::new("promtool").args(["check", "metrics"]), &text);
    let value = |metric: &str, name: &str| {
        let start = format!("{metric}{{name=\"{name}\",backend=\"{}\"}} ", bed.url());
        text.lines().find_map(|line| line.strip_prefix(&start)?.parse::<f64>().ok())
    };
    assert_eq!((value("dlock_lock_held", "x"), value("dlock_lock_held", "good")), (Some(1.0), Some(0.0)), "{text}");
    assert_eq!((value("dlock_lock_waiters", "x"), value("dlock_lock_last_exit_code", "good")), (Some(1.0), Some(0.0)));
    for (metric, name) in
        [("held_since_timestamp", "x"), ("oldest_waiter_timestamp", "x"), ("last_success_timestamp", "good")]
    {
        let at = value(&format!("dlock_lock_{metric}_seconds"), name).unwrap();
        assert!(at > 1.7e9, "{metric} {at}");
    }
    assert!(value("dlock_lock_last_duration_seconds", "good").is_some(), "{text}");
    assert_eq!(value("dlock_lock_held_since_timestamp_seconds", "good"), None);
    let empty = FileBed::new().dlock().args(["status", "--format", "prometheus"]).ended().expect(0).stdout;
    content(Command::new("promtool").args(["check", "metrics"]), &empty);
    bed.dlock().args(["status", "--format", "prometheus", "--watch"]).ended().expect(64);
}

#[test]
fn the_rules_for_prometheus_fire_when_they_should() {
    let (rules, tests) = (docs("prometheus/dlock-rules.yml"), docs("prometheus/dlock-rules.test.yml"));
    content(Command::new("promtool").args(["check", "rules"]).arg(rules), "");
    content(Command::new("promtool").args(["test", "rules"]).arg(tests), "");
}

/// One document a line, each of which has to be as the schema says, and to have nothing else in it.
#[track_caller]
fn validated(schema: &str, documents: &str) {
    const VALIDATE: &str = "
import json, sys
from jsonschema import Draft202012Validator as V
def closed(part):
    if isinstance(part, list):
        return [closed(one) for one in part]
    if not isinstance(part, dict):
        return part
    part = {key: closed(value) for key, value in part.items()}
    return {**part, 'additionalProperties': False} if 'properties' in part and 'type' in part else part
schema = json.load(open(sys.argv[1]))
V.check_schema(schema)
schema = closed(schema)
documents = [json.loads(line) for line in sys.stdin if line.strip()]
assert documents
for document in documents:
    V(schema).validate(document)
";
    content(Command::new("python3").args(["-c", VALIDATE]).arg(docs(&format!("schema/{schema}.json"))), documents);
}

#[test]
fn what_is_printed_as_json_is_as_its_schema_says() {
    let (bed, log) = (FileBed::new(), Log::new());
    bed.dlock().run("good").args(["--once", "k", "--note", "n"]).sh("exit 0").ended().expect(0);
    let _busy = busy(&bed, &log);
    let on_a_line = |args: &[&str]| {
        let text = bed.dlock().args(args).ended().expect(0).silently().stdout;
        serde_json::from_str::<Value>(&text).unwrap().to_string()
    };
    validated("status", &on_a_line(&["status", "--json"]));
    validated("status", &on_a_line(&["status", "--json", "unused"]));
    validated("history", &on_a_line(&["history", "--json", "good"]));
    validated("history", &on_a_line(&["history", "--json", "--name", "unused"]));
    validated("check", &on_a_line(&["check", "--json", "x", "good", "--held-at-most", "1h"]));
    validated("check", &bed.dlock().args(["check", "--json"]).ended().expect(3).stdout);
    validated("doctor", &on_a_line(&["doctor", "--json"]));
    let loud = |dlock: Dlock| dlock.args(["-v", "--log", "json"]);
    let mut events = loud(bed.dlock().run("x")).arg("-n").sh("exit 0").ended().expect(75).stderr;
    events += &loud(bed.dlock().run("other")).args(["--timeout", "0.1"]).sh("sleep 100").ended().expect(124).stderr;
    events += &loud(bed.dlock().run("good")).args(["--once", "k"]).sh("exit 0").ended().expect(0).stderr;
    events += &loud(bed.dlock().run("other")).args(["--", "/nonexistent"]).ended().expect(127).stderr;
    events += &loud(bed.dlock().arg("status")).args(["-b", "redis://127.0.0.1:1"]).ended().expect(69).stderr;
    events += &loud(bed.dlock().run("x")).args(["--wait", "0.1"]).sh("exit 0").ended().expect(75).stderr;
    events += &loud(bed.dlock().run("other")).sh("sleep 1000 & exit 0").ended().expect(0).stderr;
    let hook = loud(bed.dlock().run("other")).args(["--on-event", "exit 7"]).sh("exec sleep 1000").spawn();
    until("a hook that failed", || hook.stderr().contains("hook-failed"));
    hook.signal(Signal::SIGTERM);
    events += &hook.ended().expect(143).stderr;
    let kinds =
        ["busy", "waiting", "acquired", "released", "timed-out", "already-ran", "failed", "leftovers", "hook-failed"];
    assert!(kinds.iter().all(|kind| events.contains(&format!("\"{kind}\""))), "{events}");
    validated("event", &events);
}

/// Dates that jq and shells can calculate with, and how long a lock has been held.
#[test]
fn json_has_seconds_beside_its_dates() {
    let (bed, log) = (FileBed::new(), Log::new());
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    let _busy = busy(&bed, &log);
    let state: Value = serde_json::from_str(&bed.dlock().args(["status", "--json", "x"]).ended().stdout).unwrap();
    let (holder, waiter, run) = (&state[0]["holders"][0], &state[0]["waiters"][0], &state[0]["last_run"]);
    assert!(holder["held_ms"].is_u64() && state[0].get("last_success_at_s").is_some(), "{state}");
    for (object, key) in [(holder, "acquired_at"), (waiter, "waiting_since"), (run, "started_at"), (run, "ended_at")] {
        let seconds = object[&format!("{key}_s")].as_u64().unwrap();
        let date = Command::new("date").args(["+%s", "-d", object[key].as_str().unwrap()]).output().unwrap();
        assert_eq!(String::from_utf8(date.stdout).unwrap().trim(), seconds.to_string(), "{key}: {object}");
    }
}
