//! Places that an operator deletes, and turns that an operator takes away.

use super::*;

/// As a careless operator might.
async fn delete_place(operator: &mut ZooKeeper, of: &ZooKeeper) {
    operator.visit().await.unwrap();
    let path = &of.place.as_ref().unwrap().path;
    operator.ensemble.call_one(Request::delete(path, wire::ANY_VERSION)).await.unwrap().unwrap();
}

#[tokio::test]
async fn nobody_starts_while_one_whose_place_was_deleted_may_be_running() {
    let server = Server::shared();
    let [mut holder, mut next, mut later] = [server.client(), server.client(), server.client()];
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (first, second) = (Ask { mode, ..ask("deleted", mode) }, ask("deleted", Mode::Exclusive));
        let lease = granted(holder.try_acquire(&first).await.unwrap());
        busy(next.try_acquire(&second).await.unwrap());
        delete_place(&mut later, &holder).await;
        hinted(&mut next).await;
        assert_eq!(busy(next.try_acquire(&second).await.unwrap()).ahead, Some(0));
        // The next may give up: those who come then have never seen the one that was deleted.
        next.withdraw(&second).await.unwrap();
        later.end_visit().await;
        let hasty = Ask { queue: false, ..ask("deleted", Mode::Exclusive) };
        busy(later.try_acquire(&hasty).await.unwrap());
        let third = ask("deleted", Mode::Exclusive);
        assert_eq!(busy(later.try_acquire(&third).await.unwrap()).ahead, Some(0));
        // It notices, ends its command, and says so.
        assert!(matches!(holder.renew(&lease).await.unwrap(), Renewal::Lost(_)));
        assert_eq!(holder.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
        hinted(&mut later).await;
        let last = granted(later.try_acquire(&third).await.unwrap());
        assert!(last.token > lease.token);
        assert_eq!(later.release(&last, &ending(&last)).await.unwrap(), Released::Done);
    }
    next.visit().await.unwrap();
    assert!(next.ensemble.children("/dlock-meta/~alive/deleted").await.unwrap().is_empty());
}

#[tokio::test]
async fn those_who_share_a_lock_need_not_wait_for_one_of_them() {
    let server = Server::shared();
    let [mut one, mut other] = [server.client(), server.client()];
    let readers = || ask("shared-deleted", Mode::Shared);
    granted(one.try_acquire(&readers()).await.unwrap());
    delete_place(&mut other, &one).await;
    other.end_visit().await;
    granted(other.try_acquire(&readers()).await.unwrap());
}

#[tokio::test]
async fn a_waiter_whose_place_was_deleted_takes_a_new_one_and_is_in_nobodys_way() {
    let server = Server::shared();
    let [mut holder, mut second, mut third] = [server.client(), server.client(), server.client()];
    let [mine, yours, theirs] = [(); 3].map(|()| ask("requeued", Mode::Exclusive));
    let lease = granted(holder.try_acquire(&mine).await.unwrap());
    busy(second.try_acquire(&yours).await.unwrap());
    assert_eq!(busy(third.try_acquire(&theirs).await.unwrap()).ahead, Some(2));
    delete_place(&mut holder, &second).await;
    hinted(&mut second).await;
    assert_eq!(busy(second.try_acquire(&yours).await.unwrap()).ahead, Some(2));
    hinted(&mut third).await;
    assert_eq!(busy(third.try_acquire(&theirs).await.unwrap()).ahead, Some(1));
    holder.release(&lease, &ending(&lease)).await.unwrap();
    hinted(&mut third).await;
    let next = granted(third.try_acquire(&theirs).await.unwrap());
    third.release(&next, &ending(&next)).await.unwrap();
    hinted(&mut second).await;
    assert!(granted(second.try_acquire(&yours).await.unwrap()).token > next.token);
}

#[tokio::test]
async fn whoever_is_freed_by_force_is_not_waited_for() {
    let server = Server::shared();
    let [mut holder, mut next, mut operator] = [server.client(), server.client(), server.client()];
    for mode in [Mode::Exclusive, Mode::Slots(2)] {
        let (first, second) = (ask("forced", mode), ask("forced", mode));
        granted(holder.try_acquire(&first).await.unwrap());
        let held = operator.inspect(&first.name).await.unwrap().holders[0].clone();
        assert_eq!(
            operator.revoke(&first.name, &held, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
            Revoked::Freed
        );
        let lease = granted(next.try_acquire(&second).await.unwrap());
        assert_eq!(lease.slot, held.slot);
        next.release(&lease, &ending(&lease)).await.unwrap();
        holder.withdraw(&first).await.unwrap();
    }
}

#[tokio::test]
async fn what_is_taken_away_before_we_look_is_not_ours() {
    let server = Server::shared();
    let [mut holder, mut next, mut operator] = [server.client(), server.client(), server.client()];
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (first, second) = (ask("early", Mode::Exclusive), ask("early", mode));
        let lease = granted(holder.try_acquire(&first).await.unwrap());
        busy(next.try_acquire(&second).await.unwrap());
        holder.release(&lease, &ending(&lease)).await.unwrap();
        let held = operator.inspect(&first.name).await.unwrap().holders[0].clone();
        let safely = Revoke::Safely { reason: "maintenance".into() };
        assert_eq!(operator.revoke(&first.name, &held, &safely).await.unwrap(), Revoked::Marked);
        let error = next.try_acquire(&second).await.expect_err("nothing is started under it");
        assert!(Fault::of(&error) == Fault::NotOurs && format!("{error:#}").contains("maintenance"), "{error:#}");
        assert_eq!(operator.inspect(&first.name).await.unwrap().state, State::Free);
    }
}
