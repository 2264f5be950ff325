//! Keys of a lock that hold what no dlock ever puts there.

use nix::sys::signal::Signal;

use crate::support::{Bed, Dlock, Log, Redis, Redlock, until};

fn make_a_list(server: &Redis, key: &str) {
    server.does(&["DEL", key]);
    server.does(&["RPUSH", key, "nonsense"]);
}

/// One line that says what is wrong, and nothing was started.
#[track_caller]
fn refused(dlock: Dlock, saying: &str) {
    let ended = dlock.ended().expect(125).saying(saying);
    assert_eq!((ended.stdout.as_str(), ended.stderr.lines().count()), ("", 1), "{ended:#?}");
}

#[track_caller]
fn still_held(bed: &dyn Bed, log: &Log) {
    assert_eq!(crate::support::status(bed, "x")["state"], "held");
    bed.dlock().run("x").args(["-n", "-q"]).sh("echo no").ended().expect(75);
    log.await_beat();
}

#[test]
fn a_held_lock_survives_them_and_a_free_one_is_refused() {
    let (server, log) = (Redis::new(), Log::new());
    let holder = server.dlock().run("x").args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let owner = server.does(&["GET", "dlock:x"]);
    for number in ["exclusive 1 18446744073709551615 1 1 {}", "exclusive nan inf -1 99999999999 {}"] {
        server.does(&["HSET", "{dlock:x}:details", &owner, number]);
        still_held(&server, &log);
    }
    for part in ["last", "token", "slots", &format!("note:{owner}")] {
        make_a_list(&server, &format!("{{dlock:x}}:{part}"));
        still_held(&server, &log);
    }
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();
    server.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0).silently();

    make_a_list(&server, "{dlock:x}:once");
    refused(server.dlock().run("x").args(["--once", "k"]).sh("echo no"), "overwritten");
    make_a_list(&server, "dlock:x");
    refused(server.dlock().run("x").sh("echo no"), "overwritten");
    refused(server.dlock().args(["status", "x"]), "overwritten");
    refused(server.dlock().args(["force-release", "--yes", "x"]), "overwritten");
}

#[test]
fn on_one_node_of_a_redlock() {
    on_so_many_nodes_of_a_redlock(1);
}

#[test]
fn on_all_nodes_of_a_redlock() {
    on_so_many_nodes_of_a_redlock(3);
}

fn on_so_many_nodes_of_a_redlock(bad: usize) {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("x").args(["--ttl", "12s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let own_note = format!("note:{}", bed.nodes[0].does(&["GET", "dlock:x"]));
    let nodes: Vec<&Redis> = bed.nodes.iter().take(bad).collect();
    for node in &nodes {
        for part in ["last", "held", "taken", "token", "details", "queue", "places", &own_note] {
            make_a_list(node, &format!("{{dlock:x}}:{part}"));
        }
    }
    still_held(&bed, &log);
    for node in &nodes {
        let ends = || node.does(&["PEXPIRETIME", "dlock:x"]).parse::<i64>().unwrap();
        let before = ends();
        until("a renewal", || ends() > before);
    }
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();

    // Neither what was done once nor the lock itself can be made out: a majority that can be is enough.
    let run = || bed.dlock().run("x").args(["-n", "--once", "k"]);
    for key in ["{dlock:x}:once", "dlock:x"] {
        nodes.iter().for_each(|node| make_a_list(node, key));
        if bad == 1 {
            run().sh("exit 3").ended().expect(3).silently();
            bed.dlock().args(["status", "x"]).ended().expect(0).silently();
        } else {
            refused(run().sh("echo no"), "overwritten");
        }
    }
}
