//! `dlock run` and its options, on the file backend, which needs no server.

use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Bed, Dlock, FileBed, Log, Redis, is_alive, living_with, unique, until};

#[test]
fn without_any_backend_the_default_directory_is_made_and_used() {
    let dlock = Dlock::new();
    let state = dlock.home().join("state/dlock");
    let state = if nix::unistd::geteuid().is_root() { "/var/lib/dlock".into() } else { state };
    let name = unique("default");
    let script = format!("test -e {}/{name}.lock && echo there", state.display());
    assert_eq!(dlock.run(&name).sh(&script).ended().expect(0).silently().stdout, "there\n");
    for suffix in ["lock", "d"] {
        let path = state.join(format!("{name}.{suffix}"));
        let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path));
    }
}

#[test]
fn exec_failures_are_126_and_127() {
    let bed = FileBed::new();
    bed.dlock().run("x").args(["--", "/nonexistent/program"]).ended().expect(127).saying("not found");
    bed.dlock().run("x").args(["--", "/etc/passwd"]).ended().expect(126).saying("cannot be executed");
    bed.dlock().run("x").args(["--", "/"]).ended().expect(126);
}

#[test]
fn a_script_without_a_shebang_runs_as_in_a_shell() {
    let bed = FileBed::new();
    let script = bed.dir().join("script");
    std::fs::write(&script, "echo ran\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(bed.dlock().run("x").arg("--").arg(&script).ended().expect(0).stdout, "ran\n");
}

#[test]
fn the_commands_own_flags_are_left_to_it() {
    let bed = FileBed::new();
    let ended = bed.dlock().run("x").args(["--", "echo", "--ttl", "-n", "--", "--help"]).ended().expect(0);
    assert_eq!(ended.stdout, "--ttl -n -- --help\n");
}

#[test]
fn a_command_string_goes_to_the_shell() {
    let bed = FileBed::new();
    assert_eq!(bed.dlock().run("x").args(["-c", "echo $((1+1))"]).ended().expect(0).stdout, "2\n");
    let with_shell = bed.dlock().env("SHELL", "/bin/bash").run("x").args(["-c", "echo ${BASH_VERSION:+bash}"]);
    assert_eq!(with_shell.ended().expect(0).stdout, "bash\n");
}

#[test]
fn stdin_directory_umask_and_open_descriptors_are_the_commands_own() {
    let bed = FileBed::new();
    let input = bed.dir().join("input");
    std::fs::write(&input, "from stdin\n").unwrap();
    let script = format!("umask 027; cd {}; exec \"$@\" < input 9< input", bed.dir().display());
    let in_shell = |before: &[&str], args: &[&str]| {
        let out =
            std::process::Command::new("sh").args(["-c", &script, "sh"]).args(before).args(args).output().unwrap();
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    };
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let url = bed.url();
    let shell = |args: &[&str]| in_shell(&[&dlock, "run", "-b", &url, "--name", "x", "--"], args);
    assert_eq!(shell(&["cat"]), "from stdin\n");
    assert_eq!(shell(&["pwd"]).trim(), std::fs::canonicalize(bed.dir()).unwrap().display().to_string());
    assert_eq!(shell(&["sh", "-c", "umask"]).trim(), "0027");
    assert_eq!(shell(&["sh", "-c", "cat <&9"]), "from stdin\n");
    // Nothing of ours is open in the command: it has what it would have without dlock.
    let descriptors = ["sh", "-c", "ls /proc/self/fd"];
    assert_eq!(shell(&descriptors), in_shell(&[], &descriptors));
}

#[test]
fn no_backend_url_or_password_reaches_the_command() {
    let server = Redis::with(&["--requirepass", "sesame"]);
    let config = server.dir().join("config.toml");
    std::fs::write(&config, format!("[backends.b]\nurl = '{}'\npassword = 'sesame'\n", server.url())).unwrap();
    std::fs::set_permissions(&config, std::fs::Permissions::from_mode(0o600)).unwrap();
    let dlock = Dlock::new().run("x").arg("--config").arg(&config).args(["-b", "b"]);
    let ended = dlock.sh("env; cat /proc/$PPID/cmdline").ended().expect(0);
    assert!(!ended.stdout.contains("sesame") && !ended.stdout.contains("redis://"), "{ended:#?}");
}

#[test]
fn a_timeout_ends_the_command_with_124() {
    let bed = FileBed::new();
    let log = Log::new();
    let dlock = bed.dlock().run("x").args(["--timeout", "100ms", "-k", "100ms"]);
    dlock.args(log.witness(&["ignore-term"])).ended().expect(124).saying("--timeout");
    bed.dlock()
        .run("x")
        .args(["--timeout", "100ms", "--signal", "INT"])
        .sh("trap 'echo int; exit' INT; while :; do sleep 0.01; done")
        .ended()
        .expect(124);
    bed.dlock().run("x").args(["--timeout", "1h"]).sh("exit 4").ended().expect(4).silently();
}

#[test]
fn leftovers_are_ended_and_told_of() {
    let bed = FileBed::new();
    let mark = unique("left");
    let script = "setsid sleep 1000 & exit 3";
    let ended = bed.dlock().env("MARK", &mark).run("x").sh(script).ended().expect(3);
    assert!(ended.stderr.contains("left 1 process"), "{ended:#?}");
    assert!(living_with(&mark).is_empty());
}

#[test]
fn leftovers_can_be_waited_for_under_the_lock() {
    let bed = FileBed::new();
    let go = bed.dir().join("go");
    let script = format!("(while [ ! -e {} ]; do sleep 0.01; done) & exit 3", go.display());
    let mut running = bed.dlock().run("x").args(["--leftovers", "wait"]).sh(&script).spawn();
    until("the lock to be held", || bed.dlock().args(["status", "--exit-code", "x"]).ended().code == Some(75));
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(75);
    assert!(!running.has_ended());
    std::fs::write(&go, "").unwrap();
    running.ended().expect(3).silently();
}

#[test]
fn leftovers_can_be_left_alone_outside_the_lock() {
    let bed = FileBed::new();
    let mark = unique("leave");
    let dlock = bed.dlock().env("MARK", &mark).run("x").args(["--leftovers", "leave"]);
    dlock.sh("setsid sleep 1000 & exit 3").ended().expect(3).silently();
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
    let left = living_with(&mark);
    assert_eq!(left.len(), 1, "the daemon, and no guardian");
    crate::support::signal(left[0], Signal::SIGKILL);
}

#[test]
fn on_lost_signal_gives_the_command_a_moment() {
    let bed = FileBed::new();
    let ready = bed.dir().join("ready");
    let script =
        format!("trap 'echo cleaned up; exit 0' TERM; touch {}; while :; do sleep 0.01; done", ready.display());
    for (how, said) in [("signal", "cleaned up\n"), ("kill", "")] {
        let running = bed.dlock().run("x").args(["--on-lost", how]).sh(&script).spawn();
        until("the command to run", || ready.exists());
        std::fs::remove_file(&ready).unwrap();
        std::fs::remove_file(bed.lock_file("x")).unwrap();
        let ended = running.ended().expect(79).saying("lost the lock");
        assert_eq!(ended.stdout, said, "--on-lost {how}");
    }
}

#[test]
fn hold_at_least_leaves_no_process_that_keeps_a_pipe_open() {
    let bed = FileBed::new();
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let script = format!("{dlock} run -b {} --name x --hold-at-least 1h -- true | cat", bed.url());
    let out = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(out.status.success(), "cat sees the end of the pipe although the lock is kept: {out:?}");
    let flock = std::process::Command::new("flock").arg("-n").arg(bed.lock_file("x")).arg("true").status().unwrap();
    assert_eq!(flock.code(), Some(1), "flock(1) is kept out as well");
    let state = bed.dlock().args(["status", "--json", "x"]).ended().expect(0).stdout;
    let state: Value = serde_json::from_str(&state).unwrap();
    assert!(state[0]["holders"][0]["expires_in_ms"].as_u64().unwrap() > 3_000_000, "{state}");
    // The process that keeps it can be killed, and the lock is kept all the same.
    let mut holder = Vec::new();
    until("one process to keep it", || {
        holder = living_with(&bed.url());
        holder.len() == 1
    });
    crate::support::signal(holder[0], Signal::SIGKILL);
    until("it to be gone", || !is_alive(holder[0]));
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(75);
    bed.dlock().args(["force-release", "--now", "--yes", "x"]).ended().expect(0);
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
}

#[test]
fn explain_shows_the_timeline_and_runs_nothing() {
    let bed = FileBed::new();
    let dlock = bed.dlock().env("DLOCK_TTL", "60s").run("x").args(["--explain", "-w", "5"]);
    let shown = dlock.sh("touch ran").ended().expect(0).silently().stdout;
    for part in ["SIGTERM", "SIGKILL", "58.200s", "$DLOCK_TTL", "flag", "default"] {
        assert!(shown.contains(part), "{part} is missing: {shown}");
    }
    assert!(!bed.lock_file("x").exists());
}

#[test]
fn verbose_tells_and_json_is_json() {
    let bed = FileBed::new();
    let ended = bed.dlock().run("x").args(["-v", "--log", "json"]).sh("exit 0").ended().expect(0);
    let events: Vec<Value> = ended.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let kinds: Vec<_> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["acquired", "released"]);
    assert!(events.iter().all(|event| event["name"] == "x" && event["time"].is_string()));
    bed.dlock().run("x").arg("-v").sh("exit 0").ended().expect(0).saying("acquired with token");
}

#[test]
fn a_wait_ends_the_deadlock_of_two_locks_that_are_nested_in_different_order() {
    let (bed, dlock) = (FileBed::new(), assert_cmd::cargo::cargo_bin!("dlock").display().to_string());
    // Each takes the other's lock when both have their own.
    let nested = |own: &str, other: &str, inner: &str| {
        let meet = format!(": > {own}.held; until [ -e {other}.held ]; do sleep 0.01; done");
        let script = format!("cd {} && {meet}; {dlock} run --name {other} {inner}", bed.dir().display());
        bed.dlock().run(own).sh(&script).spawn()
    };
    let patient = nested("a", "b", "-- echo in");
    let other = nested("b", "a", "--wait 300ms -- echo no");
    assert_eq!(other.ended().expect(75).stdout, "");
    assert_eq!(patient.ended().expect(0).silently().stdout, "in\n");
}
