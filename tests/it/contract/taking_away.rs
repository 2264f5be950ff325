//! What every backend must do when an operator takes a lock away: the cases of `contract` about `force-release`.

use super::*;

pub fn force_release_tells_the_holder_and_the_next_gets_it(bed: &dyn Bed) {
    let (name, log) = (unique("revoke"), Log::new());
    // A ttl so long that a renewal cannot be what notices.
    let holder = holding(bed, &name, &["--ttl", "1h"], &log);
    let waiter = bed.dlock().run(&name).args(log.witness(&["for=20"])).spawn();
    await_waiters(bed, &name, 1);
    bed.dlock().args(["force-release", &name]).ended().expect(64).saying("--yes");
    let pid = format!("pid {}", holder.pid());
    let told = bed.dlock().args(["force-release", &name, "--yes", "--reason", "stuck since noon"]).ended().expect(0);
    assert!(told.stdout.contains(&pid), "{told:#?}");
    holder.ended().expect(79).saying("stuck since noon");
    waiter.ended().expect(0);
    log.assert_no_overlap();
    let nobody = bed.dlock().args(["force-release", &name, "--yes"]).ended().expect(0);
    assert!(nobody.stdout.contains("nobody holds it"), "{nobody:#?}");
}

pub fn force_release_now_frees_it_on_the_spot(bed: &dyn Bed) {
    let (name, log) = (unique("now"), Log::new());
    let holder = holding(bed, &name, &["--ttl", "60s"], &log);
    holder.signal(Signal::SIGSTOP);
    bed.dlock().args(["force-release", &name, "--yes", "--now"]).ended().expect(0);
    bed.dlock().run(&name).args(["-w", "20s"]).sh("exit 0").ended().expect(0);
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(79);
    assert!(token(bed, &name) > log.runs()[0].token);
}

fn take_now(bed: &dyn Bed, name: &str, reason: &str) {
    let told = bed.dlock().args(["force-release", name, "--yes", "--now", "--reason", reason]).ended().expect(0);
    assert!(told.stdout.contains("taken from"), "{told:#?}");
}

pub fn force_release_now_tells_the_holder_and_the_record_why(bed: &dyn Bed) {
    let (name, log) = (unique("why"), Log::new());
    // A ttl so long that a renewal cannot be what notices.
    let holder = holding(bed, &name, &["--ttl", "1h"], &log);
    take_now(bed, &name, "stuck, and not released");
    let ended = holder.ended().expect(79).saying("force-release --now (stuck, and not released)");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:#?}");
    let last = status(bed, &name)["last_run"].clone();
    assert_eq!((&last["outcome"], &last["reason"]), (&"lost".into(), &"stuck, and not released".into()), "{last}");
    assert_eq!(last["fencing_token"], log.runs()[0].token, "{last}");
    bed.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
    let last = status(bed, &name)["last_run"].clone();
    assert_eq!((&last["outcome"], &last["reason"]), (&"exited".into(), &Value::Null), "{last}");
}

pub fn a_holder_that_comes_late_to_its_loss_still_learns_why(bed: &dyn Bed) {
    let (name, log) = (unique("late"), Log::new());
    let holder = holding(bed, &name, &["--ttl", "60s"], &log);
    holder.signal(Signal::SIGSTOP);
    take_now(bed, &name, "stuck");
    assert_eq!(status(bed, &name)["last_run"]["reason"], "stuck");
    bed.dlock().run(&name).args(["-w", "20s"]).sh("exit 4").ended().expect(4);
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(79).saying("force-release --now (stuck)");
    // It has nothing to say about those who came after it.
    let last = status(bed, &name)["last_run"].clone();
    assert_eq!((&last["exit_code"], &last["reason"]), (&4.into(), &Value::Null), "{last}");
}

pub fn a_command_that_ends_as_its_lock_is_taken_away_is_lost_for_that_reason(bed: &dyn Bed) {
    let (name, dlock) = (unique("own"), assert_cmd::cargo::cargo_bin!("dlock").display().to_string());
    let script = format!("{dlock} force-release {name} --yes --now --reason suicide >/dev/null; exit 0");
    let ended = bed.dlock().run(&name).sh(&script).ended().expect(79).saying("force-release --now (suicide)");
    assert_eq!(ended.stderr.lines().count(), 1, "{ended:#?}");
    let last = status(bed, &name)["last_run"].clone();
    assert_eq!((&last["outcome"], &last["reason"]), (&"lost".into(), &"suicide".into()), "{last}");
}

pub fn all_of_several_holders_learn_why(bed: &dyn Bed) {
    if !bed.abilities().shared_and_slots {
        return;
    }
    for options in [&["--shared", "--ttl", "1h"][..], &["--slots", "3", "--ttl", "1h"]] {
        let (name, log) = (unique("several"), Log::new());
        let holders: Vec<_> = (0..3).map(|_| holding(bed, &name, options, &log)).collect();
        take_now(bed, &name, "all of them");
        for holder in holders {
            holder.ended().expect(79).saying("(all of them)");
        }
        let last = status(bed, &name)["last_run"].clone();
        assert_eq!((&last["outcome"], &last["reason"]), (&"lost".into(), &"all of them".into()), "{last}");
        bed.dlock().run(&name).args(["-n"]).sh("exit 0").ended().expect(0).silently();
    }
}

pub fn an_acquired_lock_that_was_taken_away_says_why(bed: &dyn Bed) {
    let name = unique("acquired");
    bed.dlock().run(&name).sh("exit 3").ended().expect(3);
    let acquired = bed.dlock().args(["acquire", "--name", &name, "--ttl", "10m", "--json"]).ended().expect(0).stdout;
    let acquired: Value = serde_json::from_str(&acquired).unwrap();
    take_now(bed, &name, "deploys are frozen");
    for verb in ["renew", "release"] {
        let change = bed.dlock().args([verb, "--name", &name, "--owner", acquired["owner"].as_str().unwrap()]).ended();
        change.expect(79).saying("force-release --now (deploys are frozen)");
    }
    // Nothing ran under it that could have ended otherwise.
    let last = status(bed, &name)["last_run"].clone();
    assert_eq!((&last["outcome"], &last["reason"]), (&"lost".into(), &"deploys are frozen".into()), "{last}");
    assert!(last["revoked_by"].is_string(), "{last}");
    // Marked first and freed then, it is on record once. Nobody but the operator could say later how it ended.
    bed.dlock().args(["acquire", "--name", &name, "--ttl", "10m"]).ended().expect(0);
    bed.dlock().args(["force-release", &name, "--yes", "--reason", "please stop"]).ended().expect(0);
    let marked = status(bed, &name);
    assert_eq!(
        (&marked["state"], &marked["last_run"]["reason"]),
        (&"revoked".into(), &"please stop".into()),
        "{marked}"
    );
    assert!(marked["last_run"]["revoked_by"].is_string(), "{marked}");
    take_now(bed, &name, "now");
    let json = bed.dlock().args(["history", &name, "--json"]).ended().expect(0).stdout;
    let history: Value = serde_json::from_str(&json).unwrap();
    let reasons: Vec<_> = history["runs"].as_array().unwrap().iter().map(|run| run["reason"].clone()).collect();
    assert_eq!(reasons, ["please stop".into(), "deploys are frozen".into(), Value::Null], "{history}");
    // What is only held on to after a run takes nothing away from how that ended.
    bed.dlock().run(&name).args(["--hold-at-least", "1h"]).sh("exit 5").ended().expect(5);
    take_now(bed, &name, "no need to wait");
    let last = status(bed, &name)["last_run"].clone();
    assert_eq!((&last["outcome"], &last["exit_code"]), (&"exited".into(), &5.into()), "{last}");
    bed.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

pub fn force_release_acts_only_on_the_token_it_was_given(bed: &dyn Bed) {
    let (name, log) = (unique("token"), Log::new());
    let holder = holding(bed, &name, &[], &log);
    let real = log.runs()[0].token;
    let take = |token: u64| bed.dlock().args(["force-release", &name, "--yes", "--token", &token.to_string()]).ended();
    take(real - 1).expect(79).saying("token");
    log.await_beat();
    take(real).expect(0);
    holder.ended().expect(79);
}
