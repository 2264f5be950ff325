//! A contender of another program that says what it likes.

use nix::sys::signal::Signal;

use crate::support::{Bed, Log, etcd, unique};

#[test]
fn a_strange_contender_neither_loses_nor_frees_a_lock() {
    let (server, name, log) = (etcd::shared(), unique("strange"), Log::new());
    let holder = server.dlock().run(&name).args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    for (n, nonsense) in ["", "{", "garbage \u{202e}", "{\"owner\":7}", "[["].iter().enumerate() {
        server.ctl(&["put", "--", &format!("dlock/{name}/{:x}", 0x7000 + n), nonsense]);
        server.dlock().args(["status", &name]).ended().expect(0).silently();
        server.dlock().run(&name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
        log.await_beat();
    }
    // A foreign mutex holds the lock for as long as its key is there.
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();
    server.dlock().run(&name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
    server.ctl(&["del", "--prefix", &format!("dlock/{name}/70")]);
    server.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}
