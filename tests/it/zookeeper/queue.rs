//! What a hand-over costs the server.

use crate::support::{ZooKeeperBed, assert_hand_overs_wake_one};

/// How many watches the end of a node has set off: every waiter that is woken has one.
#[test]
fn a_hand_over_wakes_one_waiter_not_all() {
    let bed = ZooKeeperBed::new("");
    let fired = || bed.server().figure("zk_sum_node_deleted_watch_count").unwrap().parse().unwrap();
    assert_hand_overs_wake_one(&bed, fired);
}
