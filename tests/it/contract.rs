//! What every backend must do, in the same words: one list of cases, run on each bed. A new backend is
//! one more line at the end.

mod bad_records;
mod history;
mod holding_together;
mod taking_away;

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Bed, Dlock, Log, await_waiters, is_alive, lines, living_with, status, unique, until};
use bad_records::*;
use history::*;
use holding_together::*;
use taking_away::*;

macro_rules! cases {
    ($bed:expr; $($case:ident)*) => { $(
        #[test]
        fn $case() {
            super::$case(&$bed);
        }
    )* };
}

macro_rules! on {
    ($backend:ident, $bed:expr) => {
        mod $backend {
            cases! { $bed;
                a_command_runs_alone_and_its_exit_code_is_ours
                a_command_sees_name_owner_and_token
                tokens_grow_from_run_to_run
                a_busy_lock_is_75_at_once_and_says_who_holds_it
                waiting_ends_when_its_time_is_up
                a_waiter_gets_the_lock_when_it_is_released
                many_contenders_never_overlap
                waiters_are_served_in_order
                ahead_of_us_are_those_who_wait_longer_and_no_holder
                a_waiter_that_is_told_to_stop_leaves_nothing_behind
                shared_holders_hold_together_and_keep_an_exclusive_one_out
                slots_let_so_many_in_and_number_them
                a_single_slot_has_a_number_too
                another_number_of_slots_is_65
                once_runs_once_per_key
                a_failed_run_does_not_count_as_once
                hold_at_least_keeps_others_out_after_dlock_has_gone
                status_tells_of_holders_and_waiters
                status_tells_how_the_last_run_ended
                a_lock_nobody_used_is_free
                names_with_a_slash_are_locks_of_their_own
                force_release_tells_the_holder_and_the_next_gets_it
                force_release_now_frees_it_on_the_spot
                force_release_now_tells_the_holder_and_the_record_why
                a_holder_that_comes_late_to_its_loss_still_learns_why
                a_command_that_ends_as_its_lock_is_taken_away_is_lost_for_that_reason
                all_of_several_holders_learn_why
                an_acquired_lock_that_was_taken_away_says_why
                force_release_acts_only_on_the_token_it_was_given
                a_nested_run_is_refused_or_reentrant
                an_acquired_lock_lives_for_its_ttl_and_is_renewed_and_released_by_its_owner
                the_doctor_tries_the_backend_and_judges_it
                a_killed_dlock_takes_its_command_along
                a_stopped_dlock_loses_the_lock_but_never_overlaps
                history_tells_of_the_last_runs_newest_first
                history_is_bounded
                a_run_whose_dlock_was_killed_has_vanished
                history_says_who_took_a_lock_away
                a_note_is_shown_to_others
                what_is_forgotten_takes_no_token_back
                nonsense_in_its_records_neither_loses_nor_frees_a_lock
                an_acquired_lock_survives_nonsense_in_its_records
                tokens_grow_over_nonsense
            }
        }
    };
}

/// A run that holds the lock until the file it is given appears.
fn holding(bed: &dyn Bed, name: &str, options: &[&str], log: &Log) -> crate::support::Running {
    let before = log.runs().len();
    let running = bed.dlock().run(name).args(options).args(log.witness(&[])).spawn();
    log.await_runs(before + 1, 1);
    running
}

fn a_command_runs_alone_and_its_exit_code_is_ours(bed: &dyn Bed) {
    let name = unique("alone");
    bed.dlock().run(&name).sh("echo hello; exit 7").ended().expect(7).silently();
    let ended = bed.dlock().run(&name).sh("echo hello").ended().expect(0).silently();
    assert_eq!(ended.stdout, "hello\n");
    bed.dlock().run(&name).sh("kill -KILL $$").ended().expect(137).silently();
}

fn a_command_sees_name_owner_and_token(bed: &dyn Bed) {
    let name = unique("sees");
    let script = "echo \"$DLOCK_NAME $DLOCK_OWNER $DLOCK_FENCING_TOKEN ${DLOCK_SLOT-none}\"";
    let dlock = bed.dlock().env("DLOCK_FENCING_TOKEN", "1").env("DLOCK_SLOT", "9").run(&name).sh(script);
    let ended = dlock.ended().expect(0);
    let words: Vec<_> = ended.stdout.split_whitespace().collect();
    assert_eq!((words[0], words[3]), (name.as_str(), "none"));
    assert!(words[2].parse::<i64>().unwrap() > 1, "{words:?}");
    assert!(!words[1].is_empty());
}

fn token(bed: &dyn Bed, name: &str) -> u64 {
    bed.dlock().run(name).sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0).stdout.trim().parse().unwrap()
}

fn tokens_grow_from_run_to_run(bed: &dyn Bed) {
    let name = unique("grow");
    let tokens: Vec<_> = (0..5).map(|_| token(bed, &name)).collect();
    assert!(tokens.windows(2).all(|pair| pair[0] < pair[1]), "{tokens:?}");
}

fn a_busy_lock_is_75_at_once_and_says_who_holds_it(bed: &dyn Bed) {
    let (name, log) = (unique("busy"), Log::new());
    let holder = holding(bed, &name, &[], &log);
    let says = format!("held by {}", nix::unistd::gethostname().unwrap().to_string_lossy());
    bed.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75).saying(&says);
    bed.dlock().run(&name).args(["--wait", "0"]).sh("echo no").ended().expect(75);
    bed.dlock().run(&name).args(["-n", "-E", "9", "-q"]).sh("echo no").ended().expect(9).silently();
    log.await_beat();
    drop(holder);
}

fn waiting_ends_when_its_time_is_up(bed: &dyn Bed) {
    let (name, log) = (unique("patience"), Log::new());
    let _holder = holding(bed, &name, &[], &log);
    let ended = bed.dlock().run(&name).args(["-w", "300ms"]).sh("echo no").ended().expect(75);
    assert_eq!(ended.stdout, "");
    assert_eq!(status(bed, &name)["waiters"].as_array().unwrap().len(), 0);
}

fn a_waiter_gets_the_lock_when_it_is_released(bed: &dyn Bed) {
    let (name, log) = (unique("handover"), Log::new());
    let holder = holding(bed, &name, &[], &log);
    let waiter = bed.dlock().run(&name).args(log.witness(&["for=20"])).spawn();
    await_waiters(bed, &name, 1);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    waiter.ended().expect(0).silently();
    assert_eq!(log.runs().len(), 2);
    log.assert_no_overlap();
}

fn many_contenders_never_overlap(bed: &dyn Bed) {
    let (name, log) = (unique("many"), Log::new());
    let start = || bed.dlock().run(&name).args(["--ttl", "10s"]).args(log.witness(&["for=15"])).spawn();
    let contenders: Vec<_> = (0..8).map(|_| start()).collect();
    for contender in contenders {
        contender.ended().expect(0).silently();
    }
    assert_eq!(log.runs().len(), 8);
    log.assert_no_overlap();
}

fn waiters_are_served_in_order(bed: &dyn Bed) {
    if !bed.abilities().in_order {
        return;
    }
    let (name, log, dir) = (unique("order"), Log::new(), tempfile::tempdir().unwrap());
    let order = dir.path().join("order");
    let holder = holding(bed, &name, &[], &log);
    let waiters: Vec<_> = (0..4)
        .map(|n| {
            let waiter = bed.dlock().run(&name).sh(&format!("echo {n} >>{}", order.display())).spawn();
            await_waiters(bed, &name, n + 1);
            waiter
        })
        .collect();
    holder.signal(Signal::SIGTERM);
    for waiter in waiters {
        waiter.ended().expect(0);
    }
    assert_eq!(lines(&order), ["0", "1", "2", "3"]);
}

fn ahead_of_us_are_those_who_wait_longer_and_no_holder(bed: &dyn Bed) {
    if !bed.abilities().in_order {
        return;
    }
    let slots = &["--slots", "2"][..];
    for (holders, count, options) in [(&[][..], 1, &[][..]), (slots, 2, slots), (&["--shared"], 2, &[])] {
        let (name, log) = (unique("ahead"), Log::new());
        let _holders: Vec<_> = (0..count).map(|_| holding(bed, &name, holders, &log)).collect();
        let mut waiters = Vec::new();
        for ahead in 0..3 {
            let waiter = bed.dlock().run(&name).args(options).args(["--log", "json"]).sh("exit 0").spawn();
            until("it to say that it waits", || waiter.stderr().ends_with('\n'));
            let said: Value = serde_json::from_str(waiter.stderr().lines().next().unwrap()).unwrap();
            assert_eq!((&said["event"], &said["ahead"]), (&"waiting".into(), &ahead.into()), "{said}");
            waiters.push(waiter);
        }
    }
}

fn a_waiter_that_is_told_to_stop_leaves_nothing_behind(bed: &dyn Bed) {
    let (name, log) = (unique("stop"), Log::new());
    let _holder = holding(bed, &name, &[], &log);
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130), (Signal::SIGHUP, 129)] {
        let mark = unique("mark");
        let waiter = bed.dlock().env("MARK", &mark).run(&name).sh("echo no").spawn();
        await_waiters(bed, &name, 1);
        waiter.signal(signal);
        assert_eq!(waiter.ended().expect(code).stdout, "");
        assert_eq!(status(bed, &name)["waiters"].as_array().unwrap().len(), 0);
        until("no process of it to be left", || living_with(&mark).is_empty());
    }
}

fn once_runs_once_per_key(bed: &dyn Bed) {
    let name = unique("once");
    let run =
        |key: &str| bed.dlock().run(&name).args(["--once", key]).sh("echo ran").ended().expect(0).silently().stdout;
    assert_eq!(run("monday"), "ran\n");
    assert_eq!(run("monday"), "");
    assert_eq!(run("tuesday"), "ran\n");
    assert_eq!(run("monday"), "");
}

fn a_failed_run_does_not_count_as_once(bed: &dyn Bed) {
    let name = unique("fail");
    bed.dlock().run(&name).args(["--once", "k"]).sh("exit 3").ended().expect(3);
    bed.dlock().run(&name).args(["--once", "k"]).sh("exit 0").ended().expect(0);
    bed.dlock().run(&name).args(["--once", "k"]).sh("exit 5").ended().expect(0);
}

fn hold_at_least_keeps_others_out_after_dlock_has_gone(bed: &dyn Bed) {
    let name = unique("hold");
    let began = std::time::Instant::now();
    bed.dlock().run(&name).args(["--hold-at-least", "4s"]).sh("exit 0").ended().expect(0).silently();
    if began.elapsed() < Duration::from_secs(3) {
        bed.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    }
    bed.dlock().run(&name).sh("exit 0").ended().expect(0);
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(3900), "let in after {waited:?}");
}

fn status_tells_of_holders_and_waiters(bed: &dyn Bed) {
    let (name, log) = (unique("tell"), Log::new());
    let holder = holding(bed, &name, &["--ttl", "20s"], &log);
    let waiter = bed.dlock().run(&name).sh("echo no").spawn();
    await_waiters(bed, &name, 1);
    let state = status(bed, &name);
    let seen = &state["holders"][0];
    assert_eq!(
        (&state["name"], &state["state"], &state["mode"]),
        (&name.as_str().into(), &"held".into(), &"exclusive".into())
    );
    assert_eq!((&seen["pid"], &seen["ttl_ms"]), (&holder.pid().into(), &20_000.into()));
    assert!(seen["command"].as_str().unwrap().contains("witness"), "{seen}");
    assert_eq!(seen["fencing_token"].as_u64(), Some(log.runs()[0].token));
    assert!(seen["acquired_at"].as_str().unwrap().ends_with('Z'), "{seen}");
    assert_eq!(state["waiters"][0]["pid"], waiter.pid());
    assert!(state["waiters"][0]["waiting_since"].as_str().unwrap().ends_with('Z'));

    bed.dlock().args(["status", "--exit-code", &name]).ended().expect(75);
    let table = bed.dlock().args(["status", &name]).ended().expect(0).stdout;
    assert!(table.contains(&name) && table.contains("held"), "{table}");
    let all = bed.dlock().args(["status", "--json"]).ended().expect(0).stdout;
    let all: Value = serde_json::from_str(&all).unwrap();
    assert!(all.as_array().unwrap().iter().any(|one| one["name"] == name), "{all}");
}

fn status_tells_how_the_last_run_ended(bed: &dyn Bed) {
    let name = unique("last");
    let last = || status(bed, &name)["last_run"].clone();
    bed.dlock().run(&name).sh("exit 4").ended().expect(4);
    assert_eq!((&last()["outcome"], &last()["exit_code"]), (&"exited".into(), &4.into()));
    bed.dlock().run(&name).sh("kill -USR1 $$").ended().expect(138);
    assert_eq!(last()["outcome"], "signaled");
    bed.dlock().run(&name).args(["--timeout", "50ms"]).sh("sleep 1000").ended().expect(124);
    assert_eq!(last()["outcome"], "timed_out");
    bed.dlock().run(&name).args(["--once", "k"]).sh("exit 0").ended().expect(0);
    assert_eq!(last()["once"], "k");
    assert!(last()["started_at"].as_str().unwrap() <= last()["ended_at"].as_str().unwrap());
    assert_eq!(status(bed, &name)["state"], "free");
    bed.dlock().args(["status", "--exit-code", &name]).ended().expect(0);
}

fn a_lock_nobody_used_is_free(bed: &dyn Bed) {
    let state = status(bed, &unique("unused"));
    assert_eq!((&state["state"], &state["last_run"]), (&"free".into(), &Value::Null));
}

fn names_with_a_slash_are_locks_of_their_own(bed: &dyn Bed) {
    let (name, log) = (unique("job"), Log::new());
    let _holder = holding(bed, &name, &[], &log);
    let sub = format!("{name}/sub");
    bed.dlock().run(&sub).arg("-n").sh("exit 0").ended().expect(0).silently();
    assert_eq!(status(bed, &sub)["name"], sub);
    let state = status(bed, &name);
    assert_eq!((state["holders"].as_array().unwrap().len(), state["waiters"].as_array().unwrap().len()), (1, 0));
}

fn a_nested_run_is_refused_or_reentrant(bed: &dyn Bed) {
    let (name, other) = (unique("nest"), unique("other"));
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let inner = format!("{dlock} run --name {name} -w 30s -- echo inner");
    let ended = bed.dlock().run(&name).sh(&inner).ended().expect(64);
    assert!(ended.stdout.is_empty() && ended.stderr.contains("--reentrant"), "{ended:#?}");

    let deep = format!("{dlock} run --name {other} -- sh -c '{inner}'");
    bed.dlock().run(&name).sh(&deep).ended().expect(64);
    bed.dlock().run(&name).sh(&format!("{dlock} run --name {other} -- echo fine")).ended().expect(0).silently();

    let reentrant = format!(
        "echo $DLOCK_FENCING_TOKEN; {dlock} run --reentrant --name {name} -- sh -c 'echo $DLOCK_FENCING_TOKEN; exit 6'"
    );
    let once = reentrant.replace("--reentrant", "--reentrant --once today");
    bed.dlock().run(&name).sh(&once).ended().expect(64).saying("--once");
    let ended = bed.dlock().run(&name).sh(&reentrant).ended().expect(6);
    let tokens: Vec<_> = ended.stdout.lines().collect();
    assert!(tokens.len() == 2 && tokens[0] == tokens[1], "{ended:#?}");
}

fn an_acquired_lock_lives_for_its_ttl_and_is_renewed_and_released_by_its_owner(bed: &dyn Bed) {
    let name = unique("acquired");
    let acquire = |ttl: &str| -> Value {
        let args = ["acquire", "--name", &name, "--ttl", ttl, "--json"];
        serde_json::from_str(&bed.dlock().args(args).ended().expect(0).silently().stdout).unwrap()
    };
    let change = |verb: &str, owner: &str| bed.dlock().args([verb, "--name", &name, "--owner", owner]).ended();
    let first = acquire("10m");
    let owner = first["owner"].as_str().unwrap();
    let held = status(bed, &name);
    assert_eq!((&held["state"], &held["holders"][0]["owner"]), (&"held".into(), &first["owner"]));
    bed.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    let timing = || {
        let holder = status(bed, &name)["holders"][0].clone();
        // To the minute: some count in seconds, some from before a slow request.
        ["ttl_ms", "expires_in_ms"].map(|key| (holder[key].as_u64().unwrap() + 30_000) / 60_000)
    };
    change("renew", owner).expect(0).silently();
    assert_eq!(timing(), [10, 10]);
    bed.dlock().args(["renew", "--name", &name, "--owner", owner, "--ttl", "1h"]).ended().expect(0).silently();
    assert_eq!(timing(), [60, 60]);
    change("renew", owner).expect(0).silently();
    assert_eq!(timing(), [60, 60]);
    change("renew", "nobody.1.2").expect(79);
    change("release", "nobody.1.2").expect(79);
    change("release", owner).expect(0).silently();
    change("release", owner).expect(79);
    change("renew", owner).expect(79);
    assert_eq!(status(bed, &name)["state"], "free");

    // Nobody renews this one: it ends by itself, and the next token is greater.
    let second = acquire("1s");
    let third = token(bed, &name);
    let tokens = [&first, &second].map(|one| one["fencing_token"].as_u64().unwrap());
    assert!(tokens[0] < tokens[1] && tokens[1] < third, "{tokens:?} {third}");
    change("renew", second["owner"].as_str().unwrap()).expect(79);
}

fn the_doctor_tries_the_backend_and_judges_it(bed: &dyn Bed) {
    let report = bed.dlock().args(["doctor", "--json"]).ended().expect(0).silently().stdout;
    let report: Value = serde_json::from_str(&report).unwrap();
    let steps: Vec<_> = report["latencies"].as_array().unwrap().iter().map(|step| step["step"].clone()).collect();
    assert_eq!(steps, ["connect and acquire", "renew", "release"]);
    let findings = report["findings"].as_array().unwrap();
    assert!(!findings.is_empty());
    for finding in findings {
        let fine = finding["verdict"] == "fine";
        assert!(
            fine == finding["why"].as_str().unwrap().is_empty()
                && fine == finding["advice"].as_str().unwrap().is_empty(),
            "{finding}"
        );
    }
    let healthy = report["healthy"].as_bool().unwrap();
    bed.dlock().args(["doctor", "--strict"]).ended().expect(i32::from(!healthy));
}

fn a_killed_dlock_takes_its_command_along(bed: &dyn Bed) {
    let (name, log, mark) = (unique("killed"), Log::new(), unique("mark"));
    let dlock: Dlock = bed.dlock().env("MARK", &mark).run(&name).args(["--ttl", "3s"]);
    let holder = dlock.args(log.witness(&["ignore-term", "daemons=3"])).spawn();
    log.await_runs(1, 4);
    let next = bed.dlock().run(&name).args(["--ttl", "3s"]).args(log.witness(&["for=20"])).spawn();
    await_waiters(bed, &name, 1);
    let pid = holder.pid();
    holder.signal(Signal::SIGKILL);
    next.ended().expect(0);
    assert!(!is_alive(pid) && living_with(&mark).is_empty());
    log.assert_no_overlap();
}

fn a_stopped_dlock_loses_the_lock_but_never_overlaps(bed: &dyn Bed) {
    let (name, log) = (unique("stopped"), Log::new());
    let dlock = bed.dlock().run(&name).args(["--ttl", "3s"]);
    let holder = dlock.args(log.witness(&["ignore-term", "daemons=3"])).spawn();
    log.await_runs(1, 4);
    let next = bed.dlock().run(&name).args(["--ttl", "3s"]).args(log.witness(&["for=20"])).spawn();
    await_waiters(bed, &name, 1);
    until("the run to be noted", || bed.would_miss(&name));
    holder.signal(Signal::SIGSTOP);
    next.ended().expect(0);
    log.assert_no_overlap();
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(79);
    // It may have come too late to say that it lost the lock.
    let runs = runs(bed, &name);
    assert_eq!((runs.len(), &runs[0]["outcome"]), (2, &"exited".into()), "{runs:?}");
    assert!(runs[1]["outcome"] == "lost" || runs[1]["outcome"] == "vanished", "{runs:?}");
    assert_eq!(runs[1]["fencing_token"], log.runs()[0].token, "{runs:?}");
}

on!(etcd, *crate::support::etcd::shared());
on!(file, crate::support::FileBed::new());
on!(redis, crate::support::Redis::new());
on!(redlock, crate::support::Redlock::of(3));
on!(mysql, *crate::support::Mysql::shared());
on!(postgres, *crate::support::Postgres::shared());
on!(zookeeper, crate::support::ZooKeeperBed::shared());
on!(valkey, crate::support::Redis::valkey());
