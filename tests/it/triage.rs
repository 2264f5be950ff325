//! The verbs around `run`: acquire, renew and release, metrics, and standing for a lock again.

use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Bed, FileBed, lines, until};

fn sh(shell: &str, bed: &dyn Bed, script: &str) -> (Option<i32>, String) {
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    let path = format!("{}:{}", dlock.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let out = Command::new(shell).args(["-euc", script]).env("PATH", path).env("DLOCK_BACKEND", bed.url()).output();
    let out = out.unwrap();
    (out.status.code(), String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr))
}

#[test]
fn acquire_works_in_every_shell() {
    let bed = FileBed::new();
    for shell in ["sh", "bash", "dash"] {
        let script = "eval \"$(dlock acquire --name deploy --ttl 20m)\"
            test \"$DLOCK_NAME\" = deploy; test \"$DLOCK_FENCING_TOKEN\" -gt 0
            dlock run -n -q --name deploy -- echo no || echo busy=$?
            dlock renew --name deploy --owner \"$DLOCK_OWNER\" --ttl 1h
            dlock release --name deploy --owner \"$DLOCK_OWNER\"
            dlock run -n --name deploy -- echo free
            dlock release --name deploy --owner \"$DLOCK_OWNER\" 2>/dev/null || echo gone=$?";
        assert_eq!(sh(shell, &bed, script), (Some(0), "busy=75\nfree\ngone=79\n".into()), "{shell}");
    }
}

/// `eval` of nothing succeeds; what a failed acquire prints does not.
#[test]
fn no_shell_goes_on_without_the_lock() {
    let bed = FileBed::new();
    let holder = bed.dlock().run("deploy").sh("echo up; exec sleep 1000").spawn();
    until("it to be held", || holder.stdout().contains("up"));
    let failures =
        [("-n --name deploy", 75), ("-n -E 3 --name deploy", 3), ("-n -E 0 --name deploy", 75), ("--name a/../b", 64)];
    let failures = failures.into_iter().chain([("--nonsense", 64), ("--name x -b redis://127.0.0.1:1", 69)]);
    for (arguments, code) in failures.chain([("--name x --config /nonexistent", 78)]) {
        for shell in ["sh", "bash", "dash"] {
            let acquire = format!("dlock acquire -q {arguments} 2>/dev/null");
            let ways = [
                format!("eval \"$({acquire})\"; echo on"),
                format!(
                    "set +e; DLOCK_OWNER=old DLOCK_FENCING_TOKEN=7; eval \"$({acquire})\" && echo on; exit $? $DLOCK_OWNER $DLOCK_FENCING_TOKEN"
                ),
                format!("if eval \"$({acquire})\"; then echo on; else exit $?; fi"),
            ];
            for script in ways {
                assert_eq!(sh(shell, &bed, &script), (Some(code), String::new()), "{shell}: {script}");
            }
            if code != 75 || !arguments.contains("-E") {
                let script = format!("lock=$({acquire}) || exit; eval \"$lock\"; echo on");
                assert_eq!(sh(shell, &bed, &script), (Some(code), String::new()), "{shell}: {script}");
            }
            let (_, said) = sh(shell, &bed, &format!("export $({acquire}) 2>/dev/null && echo on"));
            assert_eq!(said, "", "{shell}: {arguments}");
        }
    }
    let json = bed.dlock().args(["acquire", "-n", "-q", "--name", "deploy", "--json"]).ended().expect(75);
    assert_eq!(json.stdout, "");
}

#[test]
fn a_lock_that_nobody_was_told_of_is_let_go() {
    let bed = FileBed::new();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    bed.dlock().args(["acquire", "--name", "x"]).ended_writing_to(full).expect(125).saying("released again");
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
}

/// The steps of a CI job are processes of their own that share a file of variables.
#[test]
fn the_steps_of_a_ci_job_share_a_lock() {
    let bed = FileBed::new();
    let env = bed.dir().join("env");
    let step =
        |script: &str| sh("sh", &bed, &format!("cd {}; ENV_FILE={}; {script}", bed.dir().display(), env.display()));
    let load = "set -a; . $ENV_FILE; set +a;";
    assert_eq!(step("dlock acquire --name deploy --ttl 10m >>$ENV_FILE").0, Some(0));
    assert_eq!(step(&format!("{load} dlock renew --name deploy --ttl 10m")).0, Some(0));
    assert_eq!(step(&format!("{load} dlock fence target -- touch deployed")).0, Some(0));
    assert_eq!(step("dlock acquire -n -q --name deploy").0, Some(75));
    assert_eq!(step(&format!("{load} dlock release --name deploy")).0, Some(0));
    assert_eq!(step("dlock acquire -n -q --name deploy").0, Some(0));
}

#[test]
fn an_acquired_lock_is_seen_and_can_be_taken_away() {
    let bed = FileBed::new();
    let json = bed.dlock().args(["acquire", "--name", "x", "--ttl", "10m", "--json"]).ended().expect(0).stdout;
    let acquired: Value = serde_json::from_str(&json).unwrap();
    let state = bed.dlock().args(["status", "--json", "x"]).ended().expect(0).stdout;
    let state: Value = serde_json::from_str(&state).unwrap();
    let holder = &state[0]["holders"][0];
    assert_eq!((&holder["owner"], &holder["fencing_token"]), (&acquired["owner"], &acquired["fencing_token"]));
    assert!(holder["expires_in_ms"].as_u64().unwrap() > 590_000, "{holder}");

    let owner = acquired["owner"].as_str().unwrap();
    let renew = || bed.dlock().args(["renew", "--name", "x", "--owner", owner]).ended();
    renew().expect(0).silently();
    bed.dlock().args(["force-release", "x", "--yes", "--reason", "maintenance"]).ended().expect(0);
    renew().expect(79).saying("maintenance");
    bed.dlock().args(["force-release", "x", "--yes", "--now"]).ended().expect(0);
    renew().expect(79).saying("force-release --now (no reason given)");
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
}

#[test]
fn a_lock_that_a_run_keeps_is_not_released_behind_its_back() {
    let bed = FileBed::new();
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let ended = bed.dlock().run("x").sh(&format!("{dlock} renew --name x && {dlock} release --name x")).ended();
    ended.expect(64).saying("releases it by itself");
    bed.dlock().args(["release", "--name", "x"]).ended().expect(64).saying("DLOCK_OWNER");
}

#[test]
fn events_for_machines_have_fields_and_are_whole() {
    let bed = FileBed::new();
    let long = "\u{61c}x".repeat(200);
    let held = bed.dlock().run("x").args(["--", "sh", "-c", "echo up; exec sleep 1000", &long]).spawn();
    until("the command to run", || held.stdout().contains("up"));
    let event = |line: &str| -> Value { serde_json::from_str(line).unwrap() };
    let busy = bed.dlock().run("x").args(["-n", "--log", "json"]).sh("echo no").ended().expect(75).stderr;
    assert!(!busy.contains('\u{61c}'), "{busy}");
    let busy = event(&busy);
    assert_eq!((&busy["event"], &busy["holder"]["pid"]), (&"busy".into(), &held.pid().into()));
    drop(held);
    let run = bed.dlock().run("x").args(["-v", "--log", "json", "--timeout", "100ms"]).sh("exec sleep 1000").ended();
    let events: Vec<Value> = run.stderr.lines().map(event).collect();
    // A busy machine has more to tell: that the guardian of the run before holds the lock still, or that this one is slow.
    let one = |kind: &str| events.iter().find(|event| event["event"] == kind).unwrap_or_else(|| panic!("{events:?}"));
    let acquired = one("acquired");
    assert!(acquired["fencing_token"].as_u64().unwrap() > 0 && acquired["waited_ms"].is_u64(), "{events:?}");
    assert_eq!(one("timed-out")["after_ms"], 100);
}

#[test]
fn a_hostile_command_line_cannot_break_the_table() {
    let bed = FileBed::new();
    let hostile = "\u{1b}[2J\u{9b}2J\u{1b}]0;owned\u{7}\nx held root@evil\u{202e}\u{61c}\u{200b}";
    let script = "echo up; exec sleep 1000";
    let running = bed.dlock().run("x").args(["--", "sh", "-c", script, hostile]).spawn();
    until("the command to run", || running.stdout().contains("up"));
    let table = bed.dlock().arg("status").ended().expect(0).stdout;
    assert_eq!(table.lines().count(), 2, "{table:?}");
    assert!(
        table.chars().all(|c| c == '\n' || !c.is_control()) && !table.contains(['\u{202e}', '\u{200b}', '\u{61c}']),
        "{table:?}"
    );
    let busy = bed.dlock().run("x").arg("-n").sh("echo no").ended().expect(75);
    assert_eq!(busy.stderr.lines().count(), 1, "{busy:#?}");
    // JSON has its own way of writing such things, and says exactly what was run.
    let json = bed.dlock().args(["status", "--json"]).ended().expect(0).stdout;
    assert!(!json.contains(['\u{202e}', '\u{200b}', '\u{61c}', '\u{9b}']), "{json:?}");
    let state: Value = serde_json::from_str(&json).unwrap();
    assert!(state[0]["holders"][0]["command"].as_str().unwrap().ends_with(hostile), "{state}");
}

#[test]
fn metrics_are_counted_on_from_run_to_run() {
    let bed = FileBed::new();
    let file = bed.dir().join("dlock.prom");
    let run = |script: &str| bed.dlock().env("DLOCK_METRICS_FILE", &file).run("x").arg("-n").sh(script).ended();
    run("exit 0").expect(0).silently();
    run("exit 3").expect(3);
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    run(&format!("env -u DLOCK_HELD -u DLOCK_OWNER {dlock} run -n -q --name x -- true; exit 0")).expect(0);
    let text = std::fs::read_to_string(&file).unwrap();
    for line in ["acquisitions_total{name=\"x\"} 3", "busy_total{name=\"x\"} 1", "failures_total{name=\"x\"} 1"] {
        assert!(text.contains(&format!("dlock_{line}\n")), "{line}: {text}");
    }
    // An acquire counts, too, on what an older dlock has written; and the collector may read it.
    std::fs::write(&file, "# TYPE dlock_busy_total counter\ndlock_busy_total{name=\"x\"} 1\n").unwrap();
    let script = format!("umask 077; exec {dlock} acquire --name x --ttl 1s");
    let mut acquire = Command::new("sh");
    acquire.args(["-c", &script]).env("DLOCK_METRICS_FILE", &file).env("DLOCK_BACKEND", bed.url());
    assert!(acquire.output().unwrap().status.success());
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(
        text.contains("acquisitions_total{name=\"x\"} 1\n") && text.contains("busy_total{name=\"x\"} 1\n"),
        "{text}"
    );
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&file).unwrap()) & 0o777, 0o644);
    let nowhere = bed.dlock().run("x").args(["--metrics-file", "/nonexistent/x"]).sh("exit 0");
    nowhere.ended().expect(0).saying("no metrics");
}

#[test]
fn keep_trying_stands_again_until_it_succeeds() {
    let bed = FileBed::new();
    let count = bed.dir().join("count");
    let script = format!("echo $$ >>{0}; test $(wc -l <{0}) -ge 3", count.display());
    let mut running = bed.dlock().run("x").args(["--keep-trying"]).sh(&script).spawn();
    let pid = running.pid();
    until("the second round", || lines(&count).len() >= 2);
    assert!(!running.has_ended() && running.pid() == pid);
    running.ended().expect(0).silently();
    assert_eq!(lines(&count).len(), 3);
}

#[test]
fn keep_trying_stands_again_after_a_loss_and_stops_when_told_to() {
    let bed = FileBed::new();
    let rounds = bed.dir().join("rounds");
    let script = format!("echo $DLOCK_FENCING_TOKEN >>{}; exec sleep 1000", rounds.display());
    let running = bed.dlock().run("x").arg("--keep-trying").sh(&script).spawn();
    until("the first round", || lines(&rounds).len() == 1);
    std::fs::remove_file(bed.lock_file("x")).unwrap();
    until("the second round", || lines(&rounds).len() == 2);
    running.signal(Signal::SIGTERM);
    running.ended().expect(143);
    let tokens: Vec<u64> = lines(&rounds).iter().map(|line| line.parse().unwrap()).collect();
    assert!(tokens[0] < tokens[1]);
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
}
