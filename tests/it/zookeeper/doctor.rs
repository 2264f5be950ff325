//! What the doctor finds about ZooKeeper.

use crate::support::{Bed, Dlock, ZooKeeperBed, examined};

#[test]
fn zookeeper_without_a_login_is_open_to_everybody() {
    let bed = ZooKeeperBed::shared();
    examined(bed.dlock(), 0).says("zookeeper-authentication", "weak", "everybody can");
    let login = bed.url().replace("://", "://doctor:secret@") + "?prefix=guarded";
    examined(Dlock::new().env("DLOCK_BACKEND", login), 0).says("zookeeper-authentication", "fine", "logs in");
}
