//! What the doctor finds in a Redis that is sick.

use crate::support::{Bed, Dlock, Redis, examined};

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
