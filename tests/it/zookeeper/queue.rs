//! What a hand-over costs the server.

use crate::support::{ZooKeeperBed, cost_of_a_hand_over};

/// How many watches the end of a node has set off: every waiter that is woken has one.
#[test]
fn a_hand_over_wakes_one_waiter_not_all() {
    let cost = |waiters| {
        let bed = ZooKeeperBed::new("");
        let fired = || bed.server().figure("zk_sum_node_deleted_watch_count").unwrap().parse().unwrap();
        cost_of_a_hand_over(&bed, waiters, fired)
    };
    let (few, many) = (cost(6), cost(24));
    assert!((1..=few).contains(&many), "{few} with 6 waiters, {many} with 24");
}
