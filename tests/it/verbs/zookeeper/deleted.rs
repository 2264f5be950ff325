//! Places that an operator deletes, and turns that an operator takes away.

use dlock::backend::zookeeper::ZooKeeper;
use dlock::backend::zookeeper::wire::{self, Request};
use dlock::backend::{Ask, Backend, Released, Renewal, Revoke, Revoked};
use dlock::exit::Fault;
use dlock::lock::{Mode, State};

use super::{ZooKeeperBed, ask, busy, ending, granted, open, told};

/// As a careless operator might.
async fn delete_place(operator: &mut ZooKeeper, of: &ZooKeeper) {
    operator.visit().await.unwrap();
    let path = &of.place.as_ref().unwrap().path;
    operator.ensemble.call_one(Request::delete(path, wire::ANY_VERSION)).await.unwrap().unwrap();
}

#[tokio::test]
async fn nobody_starts_while_one_whose_place_was_deleted_may_be_running() {
    let server = ZooKeeperBed::shared();
    let [mut holder, mut next, mut later] = [open(&server), open(&server), open(&server)];
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (first, second) = (Ask { mode, ..ask("deleted", mode) }, ask("deleted", Mode::Exclusive));
        let lease = granted(&mut holder, &first).await;
        busy(&mut next, &second).await;
        delete_place(&mut later, &holder).await;
        told(&mut next).await;
        assert_eq!(busy(&mut next, &second).await.ahead, Some(0));
        // The next may give up: those who come then have never seen the one that was deleted.
        next.withdraw(&second).await.unwrap();
        later.end_visit().await;
        let hasty = Ask { queue: false, ..ask("deleted", Mode::Exclusive) };
        busy(&mut later, &hasty).await;
        let third = ask("deleted", Mode::Exclusive);
        assert_eq!(busy(&mut later, &third).await.ahead, Some(0));
        // It notices, ends its command, and says so.
        assert!(matches!(holder.renew(&lease).await.unwrap(), Renewal::Lost(_)));
        assert_eq!(holder.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
        told(&mut later).await;
        let last = granted(&mut later, &third).await;
        assert!(last.token > lease.token);
        assert_eq!(later.release(&last, &ending(&last)).await.unwrap(), Released::Done);
    }
    next.visit().await.unwrap();
    assert!(next.ensemble.children("/verbs-meta/~alive/deleted").await.unwrap().is_empty());
}

#[tokio::test]
async fn those_who_share_a_lock_need_not_wait_for_one_of_them() {
    let server = ZooKeeperBed::shared();
    let [mut one, mut other] = [open(&server), open(&server)];
    let readers = || ask("shared-deleted", Mode::Shared);
    granted(&mut one, &readers()).await;
    delete_place(&mut other, &one).await;
    other.end_visit().await;
    granted(&mut other, &readers()).await;
}

#[tokio::test]
async fn a_waiter_whose_place_was_deleted_takes_a_new_one_and_is_in_nobodys_way() {
    let server = ZooKeeperBed::shared();
    let [mut holder, mut second, mut third] = [open(&server), open(&server), open(&server)];
    let [mine, yours, theirs] = [(); 3].map(|()| ask("requeued", Mode::Exclusive));
    let lease = granted(&mut holder, &mine).await;
    busy(&mut second, &yours).await;
    assert_eq!(busy(&mut third, &theirs).await.ahead, Some(1));
    delete_place(&mut holder, &second).await;
    told(&mut second).await;
    assert_eq!(busy(&mut second, &yours).await.ahead, Some(1));
    told(&mut third).await;
    assert_eq!(busy(&mut third, &theirs).await.ahead, Some(0));
    holder.release(&lease, &ending(&lease)).await.unwrap();
    told(&mut third).await;
    let next = granted(&mut third, &theirs).await;
    third.release(&next, &ending(&next)).await.unwrap();
    told(&mut second).await;
    assert!(granted(&mut second, &yours).await.token > next.token);
}

#[tokio::test]
async fn whoever_is_freed_by_force_is_not_waited_for() {
    let server = ZooKeeperBed::shared();
    let [mut holder, mut next, mut operator] = [open(&server), open(&server), open(&server)];
    for mode in [Mode::Exclusive, Mode::Slots(2)] {
        let (first, second) = (ask("forced", mode), ask("forced", mode));
        granted(&mut holder, &first).await;
        let held = operator.inspect(&first.name).await.unwrap().holders[0].clone();
        assert_eq!(
            operator.revoke(&first.name, &held, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
            Revoked::Freed
        );
        let lease = granted(&mut next, &second).await;
        assert_eq!(lease.slot, held.slot);
        next.release(&lease, &ending(&lease)).await.unwrap();
        holder.withdraw(&first).await.unwrap();
    }
}

#[tokio::test]
async fn what_is_taken_away_before_we_look_is_not_ours() {
    let server = ZooKeeperBed::shared();
    let [mut holder, mut next, mut operator] = [open(&server), open(&server), open(&server)];
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (first, second) = (ask("early", Mode::Exclusive), ask("early", mode));
        let lease = granted(&mut holder, &first).await;
        busy(&mut next, &second).await;
        holder.release(&lease, &ending(&lease)).await.unwrap();
        let held = operator.inspect(&first.name).await.unwrap().holders[0].clone();
        let safely = Revoke::Safely { reason: "maintenance".into() };
        assert_eq!(operator.revoke(&first.name, &held, &safely).await.unwrap(), Revoked::Marked);
        let error = next.try_acquire(&second).await.expect_err("nothing is started under it");
        assert!(Fault::of(&error) == Fault::NotOurs && format!("{error:#}").contains("maintenance"), "{error:#}");
        assert_eq!(operator.inspect(&first.name).await.unwrap().state, State::Free);
    }
}
