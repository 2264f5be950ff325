//! Three members: one of them may die, freeze or lose the others without costing anybody a lock.

use nix::sys::signal::Signal;

use super::next;
use crate::support::etcd::Etcd;
use crate::support::{Bed, Dlock, Log, Running, unique, until};

/// Long enough for an election on a machine that is busy.
const TTL: (&str, u64) = ("20s", 20_000_000_000);

/// A run in a cluster of its own, with one waiting for its end.
struct Scene {
    etcd: Etcd,
    log: Log,
    holder: Running,
    next: Running,
}

impl Scene {
    fn new(stem: &str) -> Scene {
        let (etcd, log, name) = (Etcd::cluster(), Log::new(), unique(stem));
        let holder = etcd.dlock().run(&name).args(["--ttl", TTL.0]).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        let next = next(&etcd, &etcd, &name, &log);
        Scene { etcd, log, holder, next }
    }

    fn leader(&self) -> usize {
        self.etcd.leader()
    }

    /// One that does not lead.
    fn follower(&self) -> usize {
        (self.leader() + 1) % 3
    }

    /// What happened costs neither the holder its lock nor the next its turn.
    fn survives(mut self) {
        let begun = self.log.runs()[0].last;
        until("the run to go on for longer than its lease", || {
            assert!(!self.holder.has_ended(), "{}", self.holder.stderr());
            self.log.runs()[0].last > begun + TTL.1 * 3 / 2
        });
        assert_eq!(self.log.runs().len(), 1);
        self.holder.signal(Signal::SIGTERM);
        self.holder.ended().expect(143);
        self.next.ended().expect(0);
        self.log.assert_no_overlap();
    }
}

#[test]
fn a_follower_may_be_killed() {
    let mut scene = Scene::new("follower");
    let victim = scene.follower();
    scene.etcd.members[victim].kill();
    scene.survives();
}

#[test]
fn the_leader_may_be_killed() {
    let mut scene = Scene::new("leader");
    let victim = scene.leader();
    scene.etcd.members[victim].kill();
    scene.survives();
}

#[test]
fn the_leader_may_freeze() {
    let scene = Scene::new("frozen-leader");
    scene.etcd.members[scene.leader()].freeze();
    scene.survives();
}

#[test]
fn the_member_we_talk_to_may_freeze() {
    let scene = Scene::new("frozen-first");
    scene.etcd.members[0].freeze();
    scene.survives();
}

#[test]
fn the_leader_may_lose_its_peers() {
    let scene = Scene::new("parted-leader");
    scene.etcd.part(scene.leader());
    scene.survives();
}

#[test]
fn the_member_we_talk_to_may_lose_its_peers() {
    let scene = Scene::new("parted-first");
    scene.etcd.part(0);
    scene.survives();
}

#[test]
fn a_frozen_member_at_the_head_of_the_list_does_not_keep_a_run_from_starting() {
    let etcd = Etcd::cluster();
    etcd.members[0].freeze();
    etcd.dlock().run(&unique("frozen-start")).sh("exit 0").ended().expect(0).silently();
}

#[test]
fn the_doctor_misses_members_that_are_down_or_not_named() {
    let mut etcd = Etcd::cluster();
    let findings = |dlock: Dlock| {
        let report = dlock.args(["doctor", "--json"]).ended().expect(0).stdout;
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        let findings = report["findings"].as_array().unwrap().clone();
        let bad = findings.into_iter().filter(|finding| finding["verdict"] != "fine");
        bad.map(|finding| (finding["check"].as_str().unwrap().to_owned(), finding["what"].to_string()))
            .collect::<Vec<_>>()
    };
    let of = |check: &str, findings: &[(String, String)]| {
        findings.iter().filter(|(name, _)| name == check).map(|(_, what)| what.clone()).collect::<Vec<_>>()
    };
    let healthy = findings(etcd.dlock());
    assert!(of("etcd-members", &healthy).is_empty() && of("etcd-endpoints", &healthy).is_empty(), "{healthy:?}");
    let one = Dlock::new().env("DLOCK_BACKEND", format!("etcd://127.0.0.1:{}", etcd.port()));
    assert!(of("etcd-endpoints", &findings(one))[0].contains("1 of 3"));
    // One that does not lead: while the others elect somebody, the doctor could only say that nobody answers.
    let follower = (etcd.leader() + 1) % 3;
    etcd.members[follower].kill();
    let missing = of("etcd-members", &findings(etcd.dlock()));
    assert!(missing.len() == 1 && missing[0].contains(&etcd.endpoints()[follower]), "{missing:?}");
}
