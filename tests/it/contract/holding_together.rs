//! What every backend must do where several may hold a lock: the cases of `contract` about `--shared` and `--slots`.

use super::*;

pub fn shared_holders_hold_together_and_keep_an_exclusive_one_out(bed: &dyn Bed) {
    if !bed.abilities().shared_and_slots {
        return refuses(bed, &["--shared"]);
    }
    let (name, log) = (unique("shared"), Log::new());
    let first = holding(bed, &name, &["--shared"], &log);
    let second = holding(bed, &name, &["--shared"], &log);
    bed.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    let state = status(bed, &name);
    assert_eq!((&state["mode"], state["holders"].as_array().unwrap().len()), (&"shared".into(), 2));

    let exclusive = bed.dlock().run(&name).sh("echo alone").spawn();
    await_waiters(bed, &name, 1);
    drop(first);
    log.await_beat();
    second.signal(Signal::SIGTERM);
    second.ended().expect(143);
    assert_eq!(exclusive.ended().expect(0).stdout, "alone\n");
}

fn refuses(bed: &dyn Bed, options: &[&str]) {
    bed.dlock().run(&unique("unsupported")).args(options).sh("echo no").ended().expect(64).saying("exclusive");
}

pub fn slots_let_so_many_in_and_number_them(bed: &dyn Bed) {
    if !bed.abilities().shared_and_slots {
        return refuses(bed, &["--slots", "2"]);
    }
    let (name, log, dir) = (unique("slots"), Log::new(), tempfile::tempdir().unwrap());
    let numbers = dir.path().join("numbers");
    let script = format!("echo $DLOCK_SLOT >>{}; exec sleep 1000", numbers.display());
    let start = || bed.dlock().run(&name).args(["--slots", "2"]).sh(&script).spawn();
    let (first, _second) = (start(), start());
    until("two slots to be taken", || lines(&numbers).len() == 2);
    let mut taken = lines(&numbers);
    taken.sort();
    assert_eq!(taken, ["0", "1"]);
    bed.dlock().run(&name).args(["--slots", "2", "-n"]).sh("echo no").ended().expect(75);
    let state = status(bed, &name);
    assert_eq!((&state["mode"], &state["slots"]), (&"slots".into(), &2.into()));

    let freed = &lines(&numbers)[0];
    let third = bed.dlock().run(&name).args(["--slots", "2"]).args(log.witness(&[])).spawn();
    await_waiters(bed, &name, 1);
    first.signal(Signal::SIGTERM);
    log.await_runs(1, 1);
    let holders = status(bed, &name)["holders"].as_array().unwrap().clone();
    let slot = holders.iter().find(|holder| holder["pid"] == third.pid()).unwrap()["slot"].to_string();
    // Which of the two came first is not known; that the slot is one of them and not the other's is.
    assert!(["0", "1"].contains(&slot.as_str()), "{slot} {freed}");
    assert_eq!(holders.len(), 2);
    assert_ne!(holders[0]["slot"], holders[1]["slot"]);
}

/// For scripts that say `--slots $N`.
pub fn a_single_slot_has_a_number_too(bed: &dyn Bed) {
    let (name, script) = (unique("single"), "echo ${DLOCK_SLOT-none}");
    let run = |options: &[&str]| bed.dlock().env("DLOCK_SLOT", "9").run(&name).args(options).sh(script).ended();
    assert_eq!(run(&["--slots", "1"]).expect(0).silently().stdout, "0\n");
    assert_eq!(run(&[]).expect(0).silently().stdout, "none\n");
    let acquired = bed.dlock().args(["acquire", "--name", &name, "--slots", "1", "--ttl", "10m"]).ended().expect(0);
    assert!(acquired.stdout.ends_with("DLOCK_SLOT=0\n"), "{acquired:#?}");
    // It is a lock like any without --slots.
    bed.dlock().run(&name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
}

pub fn another_number_of_slots_is_65(bed: &dyn Bed) {
    if !bed.abilities().shared_and_slots {
        return;
    }
    let (name, log) = (unique("terms"), Log::new());
    let _holder = holding(bed, &name, &["--slots", "3"], &log);
    bed.dlock().run(&name).args(["--slots", "2"]).sh("echo no").ended().expect(65).saying("--slots 3");
    bed.dlock().run(&name).sh("echo no").ended().expect(65);
    log.await_beat();
}
