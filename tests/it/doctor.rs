//! `dlock doctor` on every backend alike: the probe lock, the timeline, and the machine it runs on. What it finds in a sick
//! server is tested beside that server's other tests.

use std::process::Command;

use serde_json::Value;

use crate::support::{Bed, FileBed, Log, examined, may_mount};

#[test]
fn a_probe_lock_that_is_held_is_a_finding_of_its_own() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = bed.dlock().run("dlock-doctor").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let told = examined(bed.dlock().env("DLOCK_CONNECT_TIMEOUT", "200ms"), 75);
    told.says("probe", "broken", &format!("pid {}", holder.pid()));
    told.about("file-system");
}

#[test]
fn the_doctor_leaves_nothing_to_be_seen_behind() {
    let bed = FileBed::new();
    examined(bed.dlock(), 0);
    assert_eq!(bed.dlock().arg("status").ended().expect(0).stdout, "no locks\n");
    assert_eq!(bed.dlock().args(["status", "--json"]).ended().expect(0).stdout, "[]\n");
    assert_eq!(bed.dlock().args(["words", "--", "status", ""]).ended().expect(0).stdout, "");
}

#[test]
fn the_timeline_is_that_of_a_run() {
    let bed = FileBed::new();
    let told = examined(bed.dlock().env("DLOCK_KILL_AFTER", "2s").env("DLOCK_TTL", "30s"), 0);
    let at = |n: usize| (told.timeline[n]["what"].as_str().unwrap(), told.timeline[n]["seconds"].as_f64().unwrap());
    assert_eq!((at(1), at(2)), (("first signal", 27.1), ("SIGKILL", 29.1)));
    assert_eq!((at(3), at(4)), (("last instant we may claim it", 29.7), ("end of the lease", 30.0)));
}

/// Needs the right to make namespaces.
#[test]
fn a_process_table_of_others_is_found() {
    let bed = FileBed::new();
    examined(bed.dlock(), 0).says("process-table", "fine", "/proc");
    if may_mount() {
        let dlock = assert_cmd::cargo::cargo_bin!("dlock");
        let mut unshare = Command::new("unshare");
        unshare.args(["--pid", "--fork"]).arg(dlock).args(["doctor", "--json"]).env("DLOCK_BACKEND", bed.url());
        let out = unshare.output().unwrap();
        let report: Value = serde_json::from_slice(&out.stdout).unwrap();
        let findings = report["findings"].as_array().unwrap();
        let found = findings.iter().find(|finding| finding["check"] == "process-table").unwrap();
        assert_eq!((out.status.code(), &found["verdict"]), (Some(69), &"broken".into()), "{report}");
    }
}
