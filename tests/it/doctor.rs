//! `dlock doctor` on what is sick: it says what is wrong, to people and as JSON, however little works.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::Value;

use crate::support::etcd::Etcd;
use crate::support::{Bed, Clock, Dlock, FileBed, Log, Pooler, Postgres, Redis, Redlock, ZooKeeperBed, may_mount};

struct Told {
    findings: Vec<Value>,
    timeline: Value,
}

impl Told {
    /// What was found by a check, with its verdict before it.
    #[track_caller]
    fn about(&self, check: &str) -> Vec<String> {
        let of = |finding: &&Value| finding["check"] == check;
        let said = |finding: &Value| format!("{}: {}", finding["verdict"].as_str().unwrap(), finding["what"]);
        let found: Vec<_> = self.findings.iter().filter(of).map(said).collect();
        assert!(!found.is_empty(), "nothing about {check}: {:#?}", self.findings);
        found
    }

    #[track_caller]
    fn says(&self, check: &str, start: &str, words: &str) {
        let found = self.about(check);
        assert!(found.iter().any(|one| one.starts_with(start) && one.contains(words)), "{found:?}");
    }
}

#[track_caller]
fn examined(dlock: Dlock, code: i32) -> Told {
    let ended = dlock.args(["doctor", "--json"]).ended().expect(code).silently();
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(code == 0 || report["healthy"] == false);
    Told { findings: report["findings"].as_array().unwrap().clone(), timeline: report["timeline"].clone() }
}

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
    let told = examined(etcd.dlock(), 69);
    assert_eq!(
        told.about("etcd-members").len(),
        3 - told.findings.iter().filter(|one| one["check"] == "etcd-version").count()
    );
    told.says("probe", "broken", "");
}

#[test]
fn a_replica_tells_its_role() {
    let master = Redis::new();
    let replica = master.replica(&[]);
    let told = examined(replica.dlock(), 69);
    told.says("probe", "broken", "READONLY");
    told.says("redis-role", "broken", &format!("a replica of 127.0.0.1:{}", master.port()));
    examined(master.dlock(), 0).says("redis-role", "fine", "master");
}

#[test]
fn who_is_not_let_in_is_told_so_with_77() {
    let server = Redis::with(&["--requirepass", "secret"]);
    examined(server.dlock(), 77).says("probe", "broken", "wants a password");
    let nobody = Dlock::new().env("DLOCK_BACKEND", "redis://127.0.0.1:1");
    let told = examined(nobody, 69);
    told.says("probe", "broken", "refused");
    assert!(told.findings.iter().all(|one| one["check"] != "examine"), "the same twice: {:?}", told.findings);
}

#[test]
fn a_redlock_without_a_majority_says_what_each_node_says() {
    let bed = Redlock::of(3);
    examined(bed.dlock(), 0).says("redlock-nodes", "fine", "3 of 3 nodes answer, and 2 must");
    bed.nodes[0].kill();
    examined(bed.dlock(), 0).says("redlock-nodes", "weak", &format!("127.0.0.1:{}", bed.nodes[0].port()));
    bed.nodes[1].daemon().freeze();
    let told = examined(bed.dlock(), 69);
    for node in &bed.nodes[..2] {
        told.says("redlock-nodes", "broken", &format!("127.0.0.1:{}: ", node.port()));
    }
    told.says("redis-role", "fine", &format!("127.0.0.1:{}: ", bed.nodes[2].port()));
}

#[test]
fn one_server_under_two_names_is_not_two_nodes() {
    let nodes = [Redis::new(), Redis::new()];
    let (one, other) = (nodes[0].port(), nodes[1].port());
    let url = format!("redlock://127.0.0.1:{one},localhost:{one},127.0.0.1:{other}");
    let dlock = || Dlock::new().env("DLOCK_BACKEND", &url);
    let told = examined(dlock(), 69);
    told.says("redlock-independence", "broken", &format!("127.0.0.1:{one} and localhost:{one}"));
    let text = dlock().arg("doctor").ended().expect(69).silently().stdout;
    assert!(text.contains("FAIL  one and the same server") && text.contains("name every server once"), "{text}");
    examined(Redlock::of(3).dlock(), 0).says("redlock-independence", "fine", "3 nodes");
}

#[test]
fn a_redlock_node_that_came_back_empty_is_behind_the_others() {
    let bed = Redlock::of(3);
    // As if it had been granted long before the restart.
    let token = |node: &Redis| drop(node.does(&["SET", "{dlock:job}:token", "1700000000000000"]));
    bed.nodes.iter().for_each(token);
    examined(bed.dlock(), 0).says("redlock-agreement", "fine", "agree about the");
    bed.nodes[2].restart();
    let told = examined(bed.dlock(), 0);
    told.says(
        "redlock-tokens",
        "weak",
        &format!("127.0.0.1:{} does not know the last token of job", bed.nodes[2].port()),
    );
    assert_eq!(told.about("redlock-tokens").len(), 1);
    bed.dlock().args(["doctor", "--strict"]).ended().expect(1);
    bed.nodes[1].restart();
    let told = examined(bed.dlock(), 0);
    assert!(told.findings.iter().any(|one| one["why"].as_str().unwrap().contains("a majority has come back")));
    bed.dlock().run("job").sh("exit 0").ended().expect(0);
    examined(bed.dlock(), 0).says("redlock-agreement", "fine", "agree about the");
    // Forgotten without a restart: what one node lacks it may have missed, but not nearly all.
    for n in 0..12 {
        let now = format!("{}000000", nix::time::clock_gettime(nix::time::ClockId::CLOCK_REALTIME).unwrap().tv_sec());
        bed.nodes[..2].iter().for_each(|node| drop(node.does(&["SET", &format!("{{dlock:many/{n}}}:token"), &now])));
    }
    examined(bed.dlock(), 0).says("redlock-tokens", "weak", "nor of 11 more");
}

#[test]
fn redlock_nodes_that_name_different_holders_are_found() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let set = |node: usize, name: &str, owner: &str| bed.nodes[node].does(&["SET", &format!("dlock:{name}"), owner]);
    let ports: Vec<u16> = bed.nodes.iter().map(Redis::port).collect();
    set(0, "stray", "somebody");
    let told = examined(bed.dlock(), 0);
    told.says("redlock-agreement", "weak", "stray is on a minority of nodes only");
    told.says("redlock-agreement", "weak", &format!("127.0.0.1:{} says somebody", ports[0]));
    // However little time there is, and with a node that does not answer.
    let hasty = || bed.dlock().env("DLOCK_CONNECT_TIMEOUT", "3s");
    examined(hasty(), 0).says("redlock-agreement", "weak", "stray");
    bed.nodes[2].daemon().freeze();
    let told = examined(hasty(), 0);
    told.says("redlock-nodes", "weak", "2 of 3 nodes answer");
    told.says("redlock-agreement", "weak", "stray");
    bed.nodes[2].daemon().thaw();
    set(1, "stray", "somebody else");
    examined(bed.dlock(), 0).says("redlock-agreement", "weak", &format!("127.0.0.1:{} says somebody else", ports[1]));
    bed.nodes.iter().for_each(|node| drop(node.does(&["DEL", "dlock:stray"])));

    let holder = bed.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    examined(bed.dlock(), 0).says("redlock-agreement", "fine", "agree");
    set(2, "job", "a thief");
    let told = examined(bed.dlock(), 0);
    told.says("redlock-agreement", "weak", &format!("on 2 of 3 nodes, 127.0.0.1:{} says a thief", ports[2]));
    let text = bed.dlock().arg("doctor").ended().expect(0).silently().stdout;
    assert!(text.contains("WEAK  job is held by") && text.contains("appendfsync always"), "{text}");
    assert!(!text.contains("redlock-tokens"));
    drop(holder);
}

#[test]
fn redlocks_that_come_and_go_are_no_disagreement() {
    let (bed, stop) = (Redlock::of(3), AtomicBool::new(false));
    let url = bed.url();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    Dlock::new().env("DLOCK_BACKEND", &url).run("job").sh("exit 0").ended().expect(0);
                }
            });
        }
        let told: Vec<Told> = (0..3).map(|_| examined(bed.dlock(), 0)).collect();
        stop.store(true, Ordering::Relaxed);
        for told in told {
            told.says("redlock-agreement", "fine", "agree");
        }
    });
}

#[test]
fn the_clocks_of_redlock_nodes_are_compared() {
    let mut nodes: Vec<Redis> = (0..2).map(|_| Redis::new()).collect();
    nodes.push(Redis::with_clock(&[]));
    let bed = Redlock { nodes };
    examined(bed.dlock(), 0).says("redlock-clocks", "fine", "within");
    bed.nodes[2].clock().map(|clock: &Clock| clock.set_ahead(90)).unwrap();
    examined(bed.dlock(), 0).says("redlock-clocks", "weak", &format!("behind 127.0.0.1:{}", bed.nodes[2].port()));
}

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
    assert_eq!(bed.dlock().args(["words", "names"]).ended().expect(0).stdout, "");
}

#[test]
fn the_timeline_is_that_of_a_run() {
    let bed = FileBed::new();
    let told = examined(bed.dlock().env("DLOCK_KILL_AFTER", "2s").env("DLOCK_TTL", "30s"), 0);
    let at = |n: usize| (told.timeline[n]["what"].as_str().unwrap(), told.timeline[n]["seconds"].as_f64().unwrap());
    assert_eq!((at(1), at(2)), (("first signal", 27.1), ("SIGKILL", 29.1)));
    assert_eq!((at(3), at(4)), (("last instant we may claim it", 29.7), ("end of the lease", 30.0)));
}

#[test]
fn a_transaction_pooler_is_seen() {
    let server = Postgres::with(&[]);
    let pooler = Pooler::to(&server);
    examined(server.dlock(), 0).says("postgres-pooler", "fine", "no transaction pooler");
    let behind = |parameters: &str| Dlock::new().env("DLOCK_BACKEND", pooler.url(parameters));
    examined(behind("listen=off"), 0).says("postgres-pooler", "fine", "listen is off");
    examined(behind(""), 0).says("postgres-pooler", "weak", "listen is on");
}

#[test]
fn zookeeper_without_a_login_is_open_to_everybody() {
    let bed = ZooKeeperBed::shared();
    examined(bed.dlock(), 0).says("zookeeper-authentication", "weak", "everybody can");
    let login = bed.url().replace("://", "://doctor:secret@") + "?prefix=guarded";
    examined(Dlock::new().env("DLOCK_BACKEND", login), 0).says("zookeeper-authentication", "fine", "logs in");
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
