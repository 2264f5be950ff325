//! What every backend keeps of the runs of a lock: the cases of `contract` about `history`, notes and `forget`.

use super::*;

fn history(bed: &dyn Bed, name: &str) -> Value {
    serde_json::from_str(&bed.dlock().args(["history", name, "--json"]).ended().expect(0).silently().stdout).unwrap()
}

pub fn runs(bed: &dyn Bed, name: &str) -> Vec<Value> {
    history(bed, name)["runs"].as_array().unwrap().clone()
}

pub fn history_tells_of_the_last_runs_newest_first(bed: &dyn Bed) {
    let name = unique("runs");
    bed.dlock().run(&name).args(["--note", "the first"]).sh("exit 0").ended().expect(0);
    bed.dlock().run(&name).sh("kill -KILL $$").ended().expect(137);
    bed.dlock().run(&name).args(["--once", "k"]).sh("exit 3").ended().expect(3);
    let history = history(bed, &name);
    let runs = history["runs"].as_array().unwrap();
    let ended: Vec<_> = runs.iter().map(|run| (run["outcome"].as_str().unwrap(), run["exit_code"].as_i64())).collect();
    assert_eq!(ended, [("exited", Some(3)), ("signaled", Some(137)), ("exited", Some(0))], "{history}");
    assert!(runs.windows(2).all(|pair| pair[0]["fencing_token"].as_u64() > pair[1]["fencing_token"].as_u64()));
    assert_eq!((&runs[2]["note"], &runs[0]["once"]), (&"the first".into(), &"k".into()), "{history}");
    for run in runs {
        for field in ["owner", "host", "pid", "user", "command", "waited_ms", "duration_ms", "started_at_s"] {
            assert!(!run[field].is_null(), "{field}: {run}");
        }
    }
    // The success is known although two runs came after it.
    assert_eq!(history["last_success_at_s"], runs[2]["ended_at_s"], "{history}");
    assert_eq!(status(bed, &name)["last_run"], runs[0]);
    let table = bed.dlock().args(["history", &name, "-n", "2"]).ended().expect(0).silently().stdout;
    assert!(table.contains("signal 9") && table.contains("2 runs: median") && !table.contains("the first"), "{table}");
}

pub fn history_is_bounded(bed: &dyn Bed) {
    let name = unique("bounded");
    let run = |keep: &str, code: i32| {
        bed.dlock().run(&name).args(["--history", keep]).sh(&format!("exit {code}")).ended().expect(code);
    };
    run("3", 0);
    (1..=4).for_each(|code| run("3", code));
    let codes = || runs(bed, &name).iter().map(|run| run["exit_code"].as_i64().unwrap()).collect::<Vec<_>>();
    assert_eq!(codes(), [4, 3, 2]);
    assert!(history(bed, &name)["last_success_at_s"].is_u64(), "the success is forgotten with its run");
    bed.dlock().args(["check", &name, "--last-success-within", "1h"]).ended().expect(0);
    run("0", 5);
    assert_eq!(codes(), [5]);
}

/// Whoever asks first finds it: the next run, or somebody who only looks.
pub fn a_run_whose_dlock_was_killed_has_vanished(bed: &dyn Bed) {
    for looks_first in [true, false] {
        let (name, log) = (unique("vanished"), Log::new());
        let mut holder = holding(bed, &name, &["--ttl", "3s", "--note", "doomed"], &log);
        until("the run to be noted", || bed.would_miss(&name));
        holder.kill();
        if looks_first {
            until("the run to vanish", || runs(bed, &name).first().is_some_and(|run| run["outcome"] == "vanished"));
        }
        bed.dlock().run(&name).sh("exit 0").ended().expect(0);
        let runs = runs(bed, &name);
        assert_eq!(runs.len(), 2, "{runs:?}");
        let vanished = &runs[1];
        assert_eq!((&runs[0]["outcome"], &vanished["outcome"]), (&"exited".into(), &"vanished".into()), "{runs:?}");
        assert_eq!(vanished["fencing_token"], log.runs()[0].token, "{vanished}");
        assert_eq!((&vanished["exit_code"], &vanished["note"]), (&Value::Null, &"doomed".into()), "{vanished}");
    }
}

pub fn history_says_who_took_a_lock_away(bed: &dyn Bed) {
    for how in [&["--yes"][..], &["--yes", "--now"]] {
        let (name, log) = (unique("taken"), Log::new());
        let holder = holding(bed, &name, &["--ttl", "1h"], &log);
        bed.dlock().args(["force-release", &name, "--reason", "disk full"]).args(how).ended().expect(0);
        holder.ended().expect(79);
        let runs = runs(bed, &name);
        let host = nix::unistd::gethostname().unwrap().to_string_lossy().into_owned();
        assert_eq!((runs.len(), &runs[0]["outcome"]), (1, &"lost".into()), "{runs:?}");
        assert_eq!(runs[0]["reason"], "disk full", "{runs:?}");
        assert!(runs[0]["revoked_by"].as_str().unwrap().ends_with(&format!("@{host}")), "{runs:?}");
        assert!(runs[0]["revoked_at_s"].is_u64(), "{runs:?}");
        let table = bed.dlock().args(["history", &name]).ended().expect(0).stdout;
        assert!(table.contains("taken away by ") && table.contains(": disk full"), "{table}");
    }
}

pub fn a_note_is_shown_to_others(bed: &dyn Bed) {
    let (name, log, note) = (unique("note"), Log::new(), "see \u{1b}[2J https://ci/7");
    let _holder = holding(bed, &name, &["--note", note], &log);
    let waiter = bed.dlock().run(&name).args(["--note", "patient"]).sh("exit 0").spawn();
    await_waiters(bed, &name, 1);
    let state = status(bed, &name);
    assert_eq!((&state["holders"][0]["note"], &state["waiters"][0]["note"]), (&note.into(), &"patient".into()));
    let busy = bed.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(75).saying("https://ci/7");
    let table = bed.dlock().args(["status", &name]).ended().expect(0).stdout;
    for text in [busy.stderr, table] {
        assert!(text.contains("https://ci/7") && !text.contains('\u{1b}'), "{text}");
    }
    drop(waiter);
    let acquired = unique("note");
    bed.dlock().args(["acquire", &acquired, "--ttl", "1h", "--note", "maintenance"]).ended().expect(0);
    bed.dlock().run(&acquired).arg("-n").sh("exit 0").ended().expect(75).saying("maintenance");
}

pub fn what_is_forgotten_takes_no_token_back(bed: &dyn Bed) {
    let name = unique("forget");
    let once = || bed.dlock().run(&name).args(["--once", "k"]).sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0).stdout;
    let forget = |more: &[&str]| bed.dlock().args(more).arg(&name).ended();
    let token = |text: String| text.trim().parse::<u64>().unwrap();
    let first = token(once());
    assert_eq!(once(), "");
    forget(&["history", "--forget-once", "other"]).expect(0).silently();
    assert_eq!(once(), "");
    forget(&["history", "--forget-once", "k"]).expect(0).silently();
    let second = token(once());
    assert_eq!(runs(bed, &name).len(), 2);
    forget(&["forget"]).expect(0).silently();
    let history = history(bed, &name);
    assert_eq!((history["runs"].as_array().unwrap().len(), &history["last_success_at"]), (0, &Value::Null));
    let third = token(once());
    assert!(first < second && second < third, "{first} {second} {third}");

    let log = Log::new();
    let holder = holding(bed, &name, &[], &log);
    forget(&["forget"]).expect(75).saying("nothing was forgotten");
    log.await_beat();
    drop(holder);
    let never = bed.dlock().args(["forget", &unique("never")]).ended().expect(0).stdout;
    assert!(never.contains("nothing is on record"), "{never}");
}
