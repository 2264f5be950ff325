//! What the doctor finds in a Redlock that is sick.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::support::{Bed, Clock, Dlock, Log, Redis, Redlock, Told, examined};

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
