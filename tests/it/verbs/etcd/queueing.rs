//! Who comes after whom, when those in between come and go.

use std::time::Duration;

use dlock::backend::{Ask, Attempt, Backend, Ending, Reheld, Released, Revoke, Revoked, etcd};
use dlock::clock;
use dlock::exit::Fault;
use dlock::lock::{Mode, State};
use etcd_client::{DeleteOptions, Txn, TxnOp};

use super::{ask, busy, delete_lease, ending, granted, open, told};
use crate::support::etcd::Etcd;

#[tokio::test]
async fn one_before_us_that_gave_up_leaves_us_behind_the_holder() {
    let server = Etcd::new();
    let (mut a, mut b, mut c) = (open(&server, 0), open(&server, 0), open(&server, 0));
    let [first, second, third] = [ask("job"), ask("job"), ask("job")];
    let lease = granted(&mut a, &first).await;
    assert_eq!(busy(&mut b, &second).await.ahead, Some(0));
    assert_eq!(busy(&mut c, &third).await.ahead, Some(1));
    b.withdraw(&second).await.unwrap();
    told(&mut c).await;
    assert_eq!(busy(&mut c, &third).await.ahead, Some(0));
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    told(&mut c).await;
    assert!(granted(&mut c, &third).await.token > lease.token);
}

/// A waiter does not read all records again when it looks again, unless some of them share the lock.
#[tokio::test]
async fn those_who_share_a_lock_are_never_taken_for_waiters() {
    let server = Etcd::new();
    let readers = [(); 3].map(|()| Ask { mode: Mode::Shared, ..ask("job") });
    for reader in &readers {
        granted(&mut open(&server, 0), reader).await;
    }
    let (mut a, mut b, first, second) = (open(&server, 0), open(&server, 0), ask("job"), ask("job"));
    for _ in 0..2 {
        assert_eq!(busy(&mut a, &first).await.ahead, Some(0));
        assert_eq!(busy(&mut b, &second).await.ahead, Some(1));
    }
}

#[tokio::test]
async fn one_before_us_that_released_and_left_its_key_is_waited_for() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (ask("job"), ask("job"));
    let lease = granted(&mut a, &first).await;
    assert_eq!(busy(&mut b, &second).await.ahead, Some(0));
    let hold_until = Some(clock::now() + Duration::from_secs(600));
    let kept = Ending { hold_until, ..ending(&lease) };
    assert_eq!(a.release(&lease, &kept).await.unwrap(), Released::Done);
    assert_eq!(busy(&mut b, &second).await.ahead, Some(0));
    assert_eq!(a.rehold(&first.name, &first.who.owner, Duration::ZERO).await.unwrap(), Reheld::Done);
    told(&mut b).await;
    assert!(granted(&mut b, &second).await.token > lease.token);
}

#[tokio::test]
async fn our_turn_does_not_come_when_our_own_key_is_gone() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (ask("job"), ask("job"));
    let lease = granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    delete_lease(&mut a, &second).await;
    let third = ask("job");
    let mut c = open(&server, 0);
    busy(&mut c, &third).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    // It has to take a new place, behind the other.
    assert_eq!(busy(&mut b, &second).await.ahead, Some(0));
    granted(&mut c, &third).await;
}

async fn revoke(operator: &mut etcd::Etcd, ask: &Ask) {
    let holder = operator.inspect(&ask.name).await.unwrap().holders.remove(0);
    assert_eq!(holder.owner.as_deref(), Some(ask.who.owner.as_str()));
    let safely = Revoke::Safely { reason: "maintenance".to_owned() };
    assert_eq!(operator.revoke(&ask.name, &holder, &safely).await.unwrap(), Revoked::Marked);
}

async fn is_taken_away(etcd: &mut etcd::Etcd, ask: &Ask) {
    let error = etcd.try_acquire(ask).await.expect_err("nothing is started under it");
    assert!(Fault::of(&error) == Fault::NotOurs && format!("{error:#}").contains("maintenance"), "{error:#}");
    assert_eq!(etcd.inspect(&ask.name).await.unwrap().state, State::Free);
}

#[tokio::test]
async fn what_is_taken_away_before_we_look_is_not_ours() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    for mode in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)] {
        let (first, second) = (Ask { mode, ..ask("job") }, Ask { mode, ..ask("job") });
        let lease = granted(&mut a, &first).await;
        b.enter(&second).await.unwrap();
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
        revoke(&mut a, &second).await;
        is_taken_away(&mut b, &second).await;
    }
    // And once more, for one that was told to wait before.
    let (first, second) = (ask("job"), ask("job"));
    let lease = granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    revoke(&mut a, &second).await;
    is_taken_away(&mut b, &second).await;
}

#[tokio::test]
async fn who_waits_for_one_that_vanished_hears_that_its_turn_is_taken_away() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (ask("job"), ask("job"));
    granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    delete_lease(&mut a, &first).await;
    told(&mut b).await;
    assert_eq!(busy(&mut b, &second).await.ahead, Some(0));
    let (_, ()) = tokio::join!(told(&mut b), revoke(&mut a, &second));
    is_taken_away(&mut b, &second).await;
}

/// Deletes every contender's key, as an operator who cleans up might.
async fn delete_all(etcd: &mut etcd::Etcd, ask: &Ask) {
    let everybody = TxnOp::delete(etcd.keys.queue(&ask.name), Some(DeleteOptions::new().with_prefix()));
    etcd.members.transact(Txn::new().and_then([everybody])).await.unwrap();
}

#[tokio::test]
async fn every_waiter_waits_out_a_holder_that_vanished_with_all_of_the_queue() {
    let server = Etcd::new();
    let (mut a, mut b, mut c) = (open(&server, 0), open(&server, 0), open(&server, 0));
    let [first, second, third] = [(); 3].map(|()| Ask { ttl: Duration::from_secs(5), ..ask("job") });
    granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    assert_eq!(busy(&mut c, &third).await.ahead, Some(1));
    delete_all(&mut a, &first).await;
    let gone = clock::now();
    // The one that was last is the first to come back.
    assert_eq!(busy(&mut c, &third).await.ahead, Some(0));
    assert_eq!(busy(&mut b, &second).await.ahead, Some(0));
    while let Attempt::Busy(waiting) = c.try_acquire(&third).await.unwrap() {
        clock::sleep_until(waiting.ask_again).await;
    }
    assert!(gone.elapsed() >= first.ttl);
}
