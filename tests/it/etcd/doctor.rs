//! What the doctor finds in an etcd that is sick.

use crate::support::etcd::Etcd;
use crate::support::{Bed, examined, until};

#[test]
fn a_full_etcd_shows_its_alarm() {
    let quota = ["--quota-backend-bytes", "65536"].map(str::to_owned);
    let mut etcd = Etcd::with_options("http", &quota, &[]);
    etcd.await_health();
    let filler = "x".repeat(20_000);
    while etcd.etcdctl().args(["put", "filler", &filler]).output().unwrap().status.success() {}
    let told = examined(etcd.dlock(), 69);
    told.says("probe", "broken", "database space exceeded");
    told.says("etcd-alarm", "broken", "Nospace");
    told.says("etcd-leader", "fine", "leads");
    told.says("etcd-version", "", " ms");
    let text = etcd.dlock().arg("doctor").ended().expect(69).silently().stdout;
    assert!(text.contains("FAIL  the alarm Nospace") && text.contains("etcdctl alarm disarm"), "{text}");
}

#[test]
fn an_etcd_without_a_majority_names_who_is_missing() {
    let mut etcd = Etcd::cluster();
    etcd.members[1].kill();
    etcd.members[2].freeze();
    // Before that, the one that is left may still believe in its leader.
    until("the majority to be missed", || {
        !etcd.etcdctl().args(["--command-timeout=1s", "get", "x"]).output().unwrap().status.success()
    });
    let told = examined(etcd.dlock(), 69);
    let answered = told.findings.iter().filter(|one| one["check"] == "etcd-version").count();
    assert_eq!(told.about("etcd-members").len(), 3 - answered, "{:#?}", told.findings);
    told.says("probe", "broken", "");
}
