//! Tokens are etcd's revisions, and a restored snapshot takes those back.

use crate::support::etcd::{Etcd, shared};
use crate::support::{Bed, Daemon, unique, until};

fn token(etcd: &Etcd, name: &str) -> u64 {
    let shown = etcd.dlock().run(name).sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0).silently().stdout;
    shown.trim().parse().unwrap()
}

#[test]
fn a_token_that_a_restored_snapshot_took_back_is_refused() {
    let (mut etcd, name) = (Etcd::new(), unique("restored"));
    token(&etcd, &name);
    let snapshot = etcd.directory().join("snapshot");
    etcd.ctl(&["snapshot", "save", snapshot.to_str().unwrap()]);
    let highest = (0..5).map(|_| token(&etcd, &name)).max().unwrap();
    let key = format!("dlock-meta/runs/{name}/last");
    let record = etcd.ctl(&["get", "--print-value-only", &key]);
    etcd.members[0].kill();
    etcd.members[0].restore(&snapshot);
    etcd.members[0].restart();
    etcd.await_health();
    // Somebody saved the records by other means, as etcdctl make-mirror does.
    etcd.ctl(&["put", &key, record.trim()]);

    let refused = etcd.dlock().run(&name).sh("echo ran").ended().expect(125);
    let refused = refused.saying(&highest.to_string()).saying("revisions went back").saying(&name).saying("etcd://");
    assert_eq!((refused.stdout.as_str(), refused.stderr.lines().count()), ("", 1), "{refused:#?}");
    assert!(etcd.contenders(&name).is_empty());
    // What it says to type helps.
    for command in refused.stderr.split("type: ").nth(1).unwrap().trim().split(" && ") {
        etcd.ctl(&[&["del"][..], &command.split_whitespace().skip(2).collect::<Vec<_>>()].concat());
    }
    token(&etcd, &name);
}

#[test]
fn whoever_waits_for_another_program_is_refused_as_well() {
    let (etcd, name, dir) = (shared(), unique("taken-back"), tempfile::tempdir().unwrap());
    etcd.dlock().run(&name).sh("exit 0").ended().expect(0);
    let mut foreign = etcd.etcdctl();
    foreign.arg("lock").arg(format!("dlock/{name}")).args(["--", "sleep", "1000"]);
    let mut foreign = Daemon::spawn(foreign, &dir.path().join("log"));
    until("etcdctl to hold the lock", || etcd.contenders(&name).len() == 1);
    let waiter = etcd.dlock().run(&name).sh("echo ran").spawn();
    until("dlock to wait", || etcd.contenders(&name).len() == 2);
    etcd.ctl(&["put", &format!("dlock-meta/released/{name}"), "9000000000000000000"]);
    let key = etcd.contenders(&name);
    let foreign_key = key.iter().find(|key| etcd.ctl(&["get", "--print-value-only", key]).trim().is_empty()).unwrap();
    etcd.ctl(&["del", foreign_key]);
    waiter.ended().expect(125).saying("9000000000000000000");
    foreign.kill();
}
