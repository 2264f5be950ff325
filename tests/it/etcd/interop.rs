//! `etcdctl lock` is Go's `concurrency.Mutex` behind a command line: both sides keep each other out.

use std::path::PathBuf;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::etcd::{Etcd, shared};
use crate::support::{Bed, Daemon, lines, unique, until};

/// Files by which scripts and tests tell each other how far they are.
struct Stage {
    etcd: &'static Etcd,
    name: String,
    dir: TempDir,
}

impl Stage {
    fn new(stem: &str) -> Stage {
        Stage { etcd: shared(), name: unique(stem), dir: tempfile::tempdir().unwrap() }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn order(&self) -> Vec<String> {
        lines(&self.file("order"))
    }

    /// A script that takes note that it runs, waits until it may end, and leaves its name.
    fn visit(&self, who: &str) -> String {
        let dir = self.dir.path().display();
        // etcdctl leaves its command behind when it is killed; without the directory, it ends by itself.
        let wait = format!("until [ -e {dir}/{who}-go ] || [ ! -d {dir} ]; do sleep 0.01; done");
        format!("touch {dir}/{who}-in; {wait}; echo {who} >>{dir}/order")
    }

    fn await_entry(&self, who: &str) {
        until(&format!("{who} to hold the lock"), || self.file(&format!("{who}-in")).exists());
    }

    fn let_end(&self, who: &str) {
        std::fs::write(self.file(&format!("{who}-go")), "").unwrap();
    }

    fn await_contenders(&self, count: usize) {
        until(&format!("{count} contenders"), || self.etcd.contenders(&self.name).len() == count);
    }

    fn etcdctl(&self, script: &str) -> Daemon {
        let mut command = self.etcd.etcdctl();
        command.arg("lock").arg(format!("dlock/{}", self.name.replace('/', "%2F"))).args(["--", "sh", "-c", script]);
        Daemon::spawn(command, &self.file("etcdctl.log"))
    }

    fn status(&self) -> Value {
        let ended = self.etcd.dlock().args(["status", "--json", &self.name]).ended().expect(0);
        serde_json::from_str::<Value>(&ended.stdout).unwrap()[0].clone()
    }
}

#[test]
fn etcdctl_keeps_dlock_out_until_it_has_ended() {
    let stage = Stage::new("foreign/first");
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.await_entry("etcdctl");
    let dlock = || stage.etcd.dlock().run(&stage.name);
    dlock().arg("-n").sh("echo no").ended().expect(75).saying("held by lease ");
    stage.await_contenders(1);
    let state = stage.status();
    assert_eq!((&state["state"], &state["holders"][0]["pid"]), (&"held".into(), &Value::Null));
    assert!(state["holders"][0]["expires_in_ms"].as_u64().unwrap() <= 60_000, "{state}");

    let waiter = dlock().sh(&format!("echo dlock >>{}", stage.file("order").display())).spawn();
    stage.await_contenders(2);
    stage.let_end("etcdctl");
    waiter.ended().expect(0).silently();
    assert_eq!(stage.order(), ["etcdctl", "dlock"]);
}

#[test]
fn dlock_keeps_etcdctl_out_until_it_has_ended() {
    let stage = Stage::new("foreign/second");
    let holder = stage.etcd.dlock().run(&stage.name).sh(&stage.visit("dlock")).spawn();
    stage.await_entry("dlock");
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.let_end("etcdctl");
    stage.await_contenders(2);
    assert_eq!(stage.status()["waiters"][0]["pid"], Value::Null);
    stage.let_end("dlock");
    holder.ended().expect(0).silently();
    stage.await_entry("etcdctl");
    until("etcdctl's turn to be over", || stage.order() == ["dlock", "etcdctl"]);
}

#[test]
fn the_token_is_the_create_revision_that_every_etcd_client_sees() {
    let stage = Stage::new("revision");
    let holder =
        stage.etcd.dlock().run(&stage.name).sh(&format!("echo $DLOCK_FENCING_TOKEN; {}", stage.visit("dlock")));
    let holder = holder.spawn();
    stage.await_entry("dlock");
    let fields = stage.etcd.ctl(&["get", "-w", "fields", "--prefix", &format!("dlock/{}/", stage.name)]);
    stage.let_end("dlock");
    let token = holder.ended().expect(0).stdout;
    assert!(fields.contains(&format!("\"CreateRevision\" : {}", token.trim())), "{token} {fields}");
}

#[test]
fn many_of_both_never_overlap() {
    let stage = Stage::new("many");
    let dir = stage.dir.path().display();
    let script = format!(
        "mkdir {dir}/inside || echo overlap >>{dir}/bad; sleep 0.02; rmdir {dir}/inside; echo done >>{dir}/order"
    );
    let foreign: Vec<_> = (0..6).map(|_| stage.etcdctl(&script)).collect();
    let ours: Vec<_> = (0..6).map(|_| stage.etcd.dlock().run(&stage.name).sh(&script).spawn()).collect();
    for one in ours {
        one.ended().expect(0).silently();
    }
    until("everybody's turn", || stage.order().len() == 12);
    assert_eq!(lines(&stage.file("bad")), [""; 0]);
    drop(foreign);
}

#[test]
fn etcdctl_stands_alone_between_holders_of_slots() {
    let stage = Stage::new("slots");
    let start = |who: &str| stage.etcd.dlock().run(&stage.name).args(["--slots", "3"]).sh(&stage.visit(who)).spawn();
    let first = start("first");
    stage.await_entry("first");
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.await_contenders(2);
    let second = start("second");
    stage.await_contenders(3);
    stage.let_end("second");
    stage.let_end("first");
    first.ended().expect(0);
    stage.await_entry("etcdctl");
    assert_eq!(stage.order(), ["first"]);
    stage.let_end("etcdctl");
    second.ended().expect(0).silently();
    assert_eq!(stage.order(), ["first", "etcdctl", "second"]);
}

#[test]
fn etcdctl_waits_for_every_shared_holder() {
    let stage = Stage::new("shared");
    let start = |who: &str| stage.etcd.dlock().run(&stage.name).arg("--shared").sh(&stage.visit(who)).spawn();
    let (one, two) = (start("one"), start("two"));
    stage.await_entry("one");
    stage.await_entry("two");
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.await_contenders(3);
    stage.let_end("etcdctl");
    stage.let_end("one");
    one.ended().expect(0);
    assert_eq!(stage.order(), ["one"]);
    stage.let_end("two");
    two.ended().expect(0);
    until("etcdctl's turn to be over", || stage.order() == ["one", "two", "etcdctl"]);
}

#[test]
fn hold_at_least_keeps_etcdctl_out_too() {
    let stage = Stage::new("hold");
    stage.etcd.dlock().run(&stage.name).args(["--hold-at-least", "1h"]).sh("exit 0").ended().expect(0).silently();
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.await_contenders(2);
    let state = stage.status();
    assert_eq!((&state["state"], state["waiters"].as_array().unwrap().len()), (&"held".into(), 1));
    let rest = state["holders"][0]["expires_in_ms"].as_u64().unwrap();
    assert!(
        (1_800_000..=3_600_000).contains(&rest),
        "longer than any lease of a run, and no longer than asked: {rest}"
    );
    stage.etcd.dlock().args(["force-release", &stage.name, "--yes", "--now"]).ended().expect(0);
    stage.await_entry("etcdctl");
    stage.let_end("etcdctl");
}

#[test]
fn etcdctl_waits_for_the_end_of_what_was_acquired_for_longer_than_a_process() {
    let stage = Stage::new("tenure");
    let dlock =
        |verb: &str, options: &[&str]| stage.etcd.dlock().args([verb, "--name", &stage.name]).args(options).ended();
    let said = dlock("acquire", &["--ttl", "60s"]).expect(0).silently().stdout;
    let owner = said.lines().find_map(|line| line.strip_prefix("DLOCK_OWNER=")).unwrap();
    let expires = || stage.status()["holders"][0]["expires_in_ms"].as_u64().unwrap();
    assert!((1..=60_000).contains(&expires()), "{}", expires());
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.await_contenders(2);
    dlock("renew", &["--owner", owner, "--ttl", "10m"]).expect(0).silently();
    assert!((60_001..=600_000).contains(&expires()), "{}", expires());
    dlock("renew", &["--owner", "somebody.else"]).expect(79);
    assert!(said.contains(&format!("DLOCK_FENCING_TOKEN={}\n", stage.status()["holders"][0]["fencing_token"])));

    dlock("release", &["--owner", owner]).expect(0).silently();
    stage.await_entry("etcdctl");
    dlock("renew", &["--owner", owner]).expect(79);
    dlock("release", &["--owner", owner]).expect(79);
    stage.let_end("etcdctl");
}

#[test]
fn a_foreign_lock_can_only_be_taken_at_once() {
    let stage = Stage::new("take");
    let _foreign = stage.etcdctl(&stage.visit("etcdctl"));
    stage.await_entry("etcdctl");
    let take = |how: &[&str]| stage.etcd.dlock().args(["force-release", &stage.name, "--yes"]).args(how).ended();
    take(&[]).expect(77).saying("--now");
    assert_eq!(stage.status()["state"], "held");
    take(&["--now", "--reason", "stuck"]).expect(0);
    let state = stage.status();
    assert_eq!((&state["state"], &state["last_run"]["reason"]), (&"free".into(), &"stuck".into()), "{state}");
    stage.let_end("etcdctl");
}
