//! `--on-event`, `--warn-after`, and what is said while waiting. A hook may hang, fork, fail or leave its input unread:
//! nobody waits for it.

use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    Bed, Dlock, FileBed, Log, Terminal, children_of, is_alive, lines, living_with, signal, unique, until,
};

/// The events in a log of hooks that wrote down what they got.
fn events(log: &Path) -> Vec<Value> {
    lines(log).iter().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn kinds(log: &Path) -> Vec<String> {
    events(log).iter().map(|event| event["event"].as_str().unwrap().to_owned()).collect()
}

/// A hook that appends its event to a file, in one write.
fn noting(bed: &FileBed) -> (PathBuf, String) {
    let log = bed.dir().join("events");
    (log.clone(), format!("cat >>{}", log.display()))
}

fn child_called(pid: u32, name: &str) -> u32 {
    let mut found = None;
    until(name, || {
        let is_it = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|it| it.trim() == name);
        found = children_of(pid).into_iter().find(is_it);
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn a_hook_gets_the_event_and_the_name_of_the_lock() {
    let bed = FileBed::new();
    let (log, cat) = noting(&bed);
    let env = bed.dir().join("env");
    let hook = format!("{cat}; echo $DLOCK_EVENT $DLOCK_NAME >>{}", env.display());
    // However quiet, and from the environment.
    bed.dlock().env("DLOCK_ON_EVENT", hook).run("x").arg("-q").sh("exit 3").ended().expect(3).silently();
    until("both hooks", || lines(&env).len() == 2);
    let events = events(&log);
    let of = |kind: &str| events.iter().find(|event| event["event"] == kind).unwrap();
    assert_eq!((&of("acquired")["name"], &of("acquired")["level"]), (&"x".into(), &"info".into()));
    let released = of("released");
    assert_eq!(released["exit_code"], 3);
    assert_eq!(released["fencing_token"], of("acquired")["fencing_token"]);
    assert!(released["duration_ms"].is_u64(), "{released}");
    let mut told = lines(&env);
    told.sort();
    assert_eq!(told, ["acquired x", "released x"]);
}

#[test]
fn busy_failed_and_orphaned_call_the_hook_too() {
    let (bed, log) = (FileBed::new(), Log::new());
    let (file, cat) = noting(&bed);
    let mut holder = bed.dlock().run("x").args(["--on-event", &cat]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    until("acquired", || kinds(&file) == ["acquired"]);
    bed.dlock().run("x").args(["-n", "-q", "--on-event", &cat]).sh("exit 0").ended().expect(75);
    until("busy", || kinds(&file).len() == 2);
    let nowhere = Dlock::new().env("DLOCK_BACKEND", "redis://127.0.0.1:1").run("x").args(["--on-event", &cat]);
    nowhere.sh("exit 0").ended().expect(69);
    until("failed", || kinds(&file).len() == 3);
    holder.kill();
    until("orphaned", || kinds(&file).len() == 4);
    assert_eq!(kinds(&file), ["acquired", "busy", "failed", "orphaned"]);
    assert_eq!(events(&file)[2]["exit_code"], 69);
}

/// None of these is waited for: the lock is free for the next one while they still run.
#[test]
fn a_hook_that_hangs_forks_or_reads_nothing_delays_nothing_and_is_ended() {
    for hook in ["sleep 1000", "sleep 1000 & sleep 1000 & exit 0", "trap '' TERM HUP INT; while :; do sleep 1; done"] {
        let (bed, mark) = (FileBed::new(), unique("hook"));
        let dlock = bed.dlock().env("MARK", &mark).run("x").args(["--on-event", hook]);
        let ended = dlock.sh("kill -0 $$; echo ran").ended().expect(0).silently();
        assert_eq!(ended.stdout, "ran\n");
        assert!(!living_with(&mark).is_empty(), "{hook}: nobody has waited for it");
        bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
        until("every hook to be ended", || living_with(&mark).is_empty());
    }
}

/// Whoever reads what dlock and its command print sees its end when dlock ends.
#[test]
fn a_hook_keeps_no_reader_waiting() {
    let (bed, mark) = (FileBed::new(), unique("hook"));
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    let mut run = std::process::Command::new(dlock);
    run.args(["run", "-b", &bed.url(), "--name", "x", "--on-event", "yes; exec sleep 1000"]).env("MARK", &mark);
    let out = run.args(["--", "echo", "ran"]).output().unwrap();
    assert_eq!((out.stdout.as_slice(), out.stderr.as_slice()), (&b"ran\n"[..], &b""[..]));
    assert!(!living_with(&mark).is_empty(), "the hook still runs");
    until("every hook to be ended", || living_with(&mark).is_empty());
}

#[test]
fn a_hook_that_fails_or_takes_too_long_is_a_warning() {
    for (hook, why) in [("exit 7", "exit code 7"), ("kill -9 $$", "signal 9"), ("sleep 1000", "killed after 10 s")] {
        let bed = FileBed::new();
        let go = bed.dir().join("go");
        let script = format!("while [ ! -e {} ]; do sleep 0.01; done", go.display());
        let running = bed.dlock().run("x").args(["--on-event", hook]).sh(&script).spawn();
        until("a warning", || running.stderr().contains(why));
        std::fs::write(&go, "").unwrap();
        let said = running.ended().expect(0).saying("the --on-event command for acquired failed").stderr;
        assert_eq!(said.matches("for acquired").count(), 1, "{said}");
    }
}

/// The command's processes are killed, counted and waited for; a hook is none of them.
#[test]
fn a_hook_is_no_process_of_the_command() {
    for how in ["kill", "wait", "leave"] {
        let (bed, mark) = (FileBed::new(), unique("hook"));
        let hook = format!("test $DLOCK_EVENT = acquired && MARK={mark} exec sleep 1000");
        let pid = bed.dir().join("pid");
        let script = format!("echo $$ >{}; exec sleep 1000", pid.display());
        let running = bed.dlock().run("x").args(["--leftovers", how, "--on-event", &hook]).sh(&script).spawn();
        until("the hook and the command", || !living_with(&mark).is_empty() && lines(&pid).len() == 1);
        running.signal(Signal::SIGTERM);
        let ended = running.ended().expect(143);
        assert!(!ended.stderr.contains("left"), "{ended:#?}");
        assert!(!living_with(&mark).is_empty(), "{how}: it was ended with the command");
        until("the hook to be ended", || living_with(&mark).is_empty());
    }
}

#[test]
fn a_dlock_that_does_its_guardians_duty_spares_the_hooks() {
    let (bed, log, mark, command) = (FileBed::new(), Log::new(), unique("hook"), unique("command"));
    // Orphaned, and in a session of its own as well.
    let hook = format!("test $DLOCK_EVENT = acquired && MARK={mark} setsid sleep 5 & exit 0");
    let dlock = bed.dlock().run("x").args(["--on-event", &hook]);
    let dlock = dlock.args(log.witness(&["ignore-term", "daemons=2"])).arg(&command);
    let running = dlock.spawn();
    log.await_runs(1, 3);
    until("the hook", || !living_with(&mark).is_empty());
    signal(child_called(running.pid(), "guardian"), Signal::SIGKILL);
    running.ended().expect(125).saying("guardian");
    // Who runs the hooks was forked from dlock, has the same command line, and ends after it.
    let names =
        living_with(&command).into_iter().filter_map(|pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok());
    let left: Vec<_> = names.filter(|name| name.trim() != "dlock-hooks").collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!living_with(&mark).is_empty(), "it was taken for a process of the command");
}

/// A stopped process takes nothing: the socket fills up, and nobody cares.
#[test]
fn a_stopped_runner_of_hooks_stops_nobody_else() {
    let bed = FileBed::new();
    let go = bed.dir().join("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.01; done; exit 4", go.display());
    let running = bed.dlock().run("x").args(["--on-event", "true"]).sh(&script).spawn();
    let runner = child_called(running.pid(), "dlock-hooks");
    signal(runner, Signal::SIGSTOP);
    std::fs::write(&go, "").unwrap();
    running.ended().expect(4);
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
    signal(runner, Signal::SIGCONT);
    until("it to end", || !is_alive(runner));
}

#[test]
fn a_dlock_inside_of_a_hook_calls_none() {
    let bed = FileBed::new();
    let (log, cat) = noting(&bed);
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let done = bed.dir().join("done");
    let hook = format!("{cat}; {dlock} run --name inner -- true; echo >>{}", done.display());
    bed.dlock().env("DLOCK_ON_EVENT", hook).run("x").sh("exit 0").ended().expect(0).silently();
    until("both hooks to end", || lines(&done).len() == 2);
    assert!(events(&log).iter().all(|event| event["name"] == "x"), "{:?}", kinds(&log));
    assert_eq!(kinds(&log).len(), 2);
}

#[test]
fn standing_again_collects_the_runners_of_earlier_rounds() {
    let bed = FileBed::new();
    let rounds = bed.dir().join("rounds");
    let script = format!("echo >>{0}; test $(wc -l <{0}) -ge 4 && exec sleep 1000", rounds.display());
    let running = bed.dlock().run("x").args(["--keep-trying", "--on-event", "true"]).sh(&script).spawn();
    until("the fourth round", || lines(&rounds).len() == 4);
    // The guardian, the runner of this round and, at the most, that of the last.
    until("the others to be gone", || children_of(running.pid()).len() <= 3);
}

#[test]
fn a_long_run_is_warned_of_once_and_goes_on() {
    let bed = FileBed::new();
    let (log, cat) = noting(&bed);
    let go = bed.dir().join("go");
    let script = format!("while [ ! -e {} ]; do sleep 0.01; done; echo done", go.display());
    let dlock = bed.dlock().run("x").args(["--warn-after", "50ms", "--ttl", "1s", "--on-event", &cat]);
    let running = dlock.sh(&script).spawn();
    until("the warning", || kinds(&log).contains(&"held-long".to_owned()));
    std::thread::sleep(std::time::Duration::from_millis(200));
    std::fs::write(&go, "").unwrap();
    let ended = running.ended().expect(0).saying("run for more than 50ms");
    assert_eq!((ended.stdout.as_str(), ended.stderr.lines().count()), ("done\n", 1), "{ended:#?}");
    bed.dlock().run("x").args(["--warn-after", "1h"]).sh("exit 0").ended().expect(0).silently();
}

#[test]
fn a_log_says_whom_a_waiter_waits_for() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiter = |flags: &[&str]| bed.dlock().run("x").args(flags).sh("exit 0").spawn();
    let (json, text, silent) = (waiter(&["--log", "json"]), waiter(&["-v"]), waiter(&[]));
    until("both to say so", || json.stderr().contains("\"waiting\"") && text.stderr().contains("waiting for"));
    let said: Value = serde_json::from_str(json.stderr().lines().next().unwrap()).unwrap();
    assert_eq!((&said["level"], &said["holder"]["pid"]), (&"info".into(), &holder.pid().into()), "{said}");
    assert!(text.stderr().contains(&format!("pid {}", holder.pid())), "{}", text.stderr());
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    assert_eq!(json.ended().expect(0).stderr.lines().count(), 1, "once");
    text.ended().expect(0);
    silent.ended().expect(0).silently();
}

#[test]
fn a_job_that_was_suspended_for_too_long_says_so() {
    let bed = FileBed::new();
    let pid = bed.dir().join("pid");
    let mut terminal = Terminal::with_shell(&bed.url());
    let job = format!("echo $$ >{}; exec sleep 1000", pid.display());
    terminal.type_line(&format!("$DLOCK run --ttl 1s --name x -c '{job}'; echo code=$?"));
    until("the command to run", || lines(&pid).len() == 1);
    let command = lines(&pid)[0].parse().unwrap();
    terminal.press(b'\x1a');
    terminal.expect("Stopped");
    until("the guardian to end the command", || !is_alive(command));
    terminal.type_line("fg");
    terminal.expect("the job was suspended for");
    terminal.type_line("echo over=$?");
    terminal.expect("over=79");
}
