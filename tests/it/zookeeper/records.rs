//! Nodes beside a lock's own that no dlock ever makes.

use nix::sys::signal::Signal;

use crate::support::{Bed, Log, ZooKeeperBed, kazoo_at, unique};

#[test]
fn strange_nodes_neither_lose_nor_free_a_lock() {
    let (server, name, log) = (ZooKeeperBed::shared(), unique("strange"), Log::new());
    let holder = server.dlock().run(&name).args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let does = |path: &str, what: &str| {
        let out = kazoo_at(server.port, path, "-").arg(what).output().unwrap();
        assert!(out.status.success(), "{out:?}");
    };
    for beside in ["once-", "once-%zz", "slot-x", "slot-99999999999999999999", "slot-0"] {
        does(&format!("/dlock-meta/{name}/{beside}"), "add");
    }
    for stranger in ["no-number", "_c_short-lock-0000000099", "__lock__99999999999999999999999"] {
        does(&format!("/dlock/{name}/{stranger}"), "add");
    }
    server.dlock().args(["status", &name]).ended().expect(0).silently();
    server.dlock().run(&name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
    log.await_beat();
    // Whatever ends in a number holds the lock for Curator, so it does for us.
    does(&format!("/dlock/{name}/_c_short-lock-0000000099"), "remove");
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();
    // A slot's node stays, whoever left it there: somebody may be at work.
    let slots = server.dlock().run(&name).args(["-n", "--slots", "2"]).sh("echo $DLOCK_SLOT").ended();
    assert_eq!(slots.expect(0).silently().stdout, "1\n");
}
