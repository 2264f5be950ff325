//! Each verb against a real etcd, with the faults that a proxy cannot place: a request applied twice, a
//! lease that ends between two requests.

mod history;
mod leader;
mod queueing;
mod releasing;
mod tokens;

use std::time::Duration;

use dlock::backend::etcd::lease_id;
use dlock::backend::{Address, Ask, Attempt, Backend, Released, Renewal, Revoke, Revoked, etcd};
use dlock::clock;
use dlock::lock::{Mode, State};
use etcd_client::{Txn, TxnOp};

use super::{PATIENCE, busy, ending, granted, told};
use crate::support::etcd::Etcd;

const LONG: Duration = PATIENCE.attempt;

fn open(server: &Etcd, member: usize) -> etcd::Etcd {
    let url = format!("etcd://{}", server.endpoints()[member]);
    etcd::Etcd::open(&Address::parse(&url).unwrap(), PATIENCE).unwrap()
}

fn ask(name: &str) -> Ask {
    Ask { ttl: Duration::from_secs(30), ..super::ask(name, Mode::Exclusive) }
}

async fn delete_lease(etcd: &mut etcd::Etcd, ask: &Ask) {
    etcd.members.revoke_lease(lease_id(&ask.name, ask.who.owner.as_str())).await.unwrap();
}

#[tokio::test]
async fn a_lock_is_granted_renewed_released_and_handed_on() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (ask("job/sub"), ask("job/sub"));
    let lease = granted(&mut a, &first).await;
    assert_eq!(granted(&mut a, &first).await.token, lease.token, "asking again finds what was granted");
    let waiting = busy(&mut b, &second).await;
    assert_eq!(waiting.ahead, Some(0));
    assert_eq!(waiting.holder.unwrap().owner.as_deref(), Some(first.who.owner.as_str()));

    let Renewal::Held(grant) = a.renew(&lease).await.unwrap() else { panic!("lost") };
    assert!(grant.from > lease.grant.from && grant.ttl == Duration::from_secs(30));

    let state = a.inspect(&first.name).await.unwrap();
    assert_eq!((state.state, state.holders.len(), state.waiters.len()), (State::Held, 1, 1));
    assert_eq!(state.holders[0].fencing_token, Some(lease.token));
    assert!(state.holders[0].expires_in.unwrap() <= Duration::from_secs(30));

    let end = ending(&lease);
    let released_at = clock::wall() - Duration::from_millis(1);
    assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done);
    assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done, "an unanswered release is found again");
    told(&mut b).await;
    let next = granted(&mut b, &second).await;
    assert!(next.token > lease.token && next.grant.from < clock::now());
    let mut other = end.clone();
    other.last_run.as_mut().unwrap().command = "another".to_owned();
    assert_eq!(a.release(&lease, &other).await.unwrap(), Released::NotOurs);
    assert_eq!(a.inspect(&first.name).await.unwrap().last_run, end.last_run);
    b.note_start(&next).await.unwrap();
    let shown = tokio::select! {
        _ = b.changed() => panic!("nothing changes"),
        state = a.inspect(&first.name) => state.unwrap().holders.remove(0),
    };
    assert!(shown.acquired_at.unwrap() >= released_at, "others see since when it is held, not since when it waits");
}

#[tokio::test]
async fn who_does_not_wait_leaves_no_trace_and_jumps_no_queue() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let holder = ask("n");
    let lease = granted(&mut a, &holder).await;
    let hasty = Ask { queue: false, ..ask("n") };
    busy(&mut b, &hasty).await;
    let leases = b.members.call(async |mut client| client.leases().await).await.unwrap();
    assert_eq!(leases.leases().len(), 1, "only the holder's lease is left");
    assert!(b.inspect(&holder.name).await.unwrap().waiters.is_empty());
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    granted(&mut b, &hasty).await;

    let readers = Ask { mode: Mode::Shared, ..ask("m") };
    granted(&mut a, &readers).await;
    granted(&mut b, &Ask { mode: Mode::Shared, queue: false, ..ask("m") }).await;
    busy(&mut b, &ask("m")).await;
    busy(&mut a, &Ask { mode: Mode::Shared, queue: false, ..ask("m") }).await;
}

#[tokio::test]
async fn a_place_whose_lease_ended_is_taken_again_at_the_end() {
    let server = Etcd::new();
    let (mut a, mut b, mut c) = (open(&server, 0), open(&server, 0), open(&server, 0));
    let (first, second, third) = (ask("n"), ask("n"), ask("n"));
    let lease = granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    assert_eq!(busy(&mut c, &third).await.ahead, Some(1));
    delete_lease(&mut a, &second).await;
    told(&mut c).await;
    assert_eq!(busy(&mut c, &third).await.ahead, Some(0));
    assert_eq!(busy(&mut b, &second).await.ahead, Some(1));
    // And the same when it became free in the meantime: no grant on a dead lease.
    delete_lease(&mut a, &third).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    told(&mut b).await;
    granted(&mut b, &second).await;
    assert_eq!(busy(&mut c, &third).await.ahead, Some(0));
}

#[tokio::test]
async fn loss_is_seen_at_once_and_only_when_the_server_says_so() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let first = ask("n");
    let lease = granted(&mut a, &first).await;
    tokio::join!(told(&mut a), delete_lease(&mut b, &first));
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Lost(_)));

    // The key alone, with the lease alive; then the same key anew.
    let lease = granted(&mut a, &first).await;
    let (_, key) = a.keys.own(&first.name, &first.who.owner);
    b.members.transact(Txn::new().and_then([TxnOp::delete(key, None)])).await.unwrap();
    told(&mut a).await;
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Lost(_)));
    let again = granted(&mut a, &first).await;
    assert!(again.token > lease.token);
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Lost(_)));
    assert!(matches!(a.renew(&again).await.unwrap(), Renewal::Held(_)));
}

#[tokio::test]
async fn slots_are_unique_among_holders_and_tokens_grow_in_each() {
    let server = Etcd::new();
    let mut etcds = Vec::new();
    for _ in 0..4 {
        etcds.push(open(&server, 0));
    }
    let asks: Vec<_> = (0..4).map(|_| Ask { mode: Mode::Slots(2), ..ask("n") }).collect();
    let zero = granted(&mut etcds[0], &asks[0]).await;
    let one = granted(&mut etcds[1], &asks[1]).await;
    assert_eq!((zero.slot, one.slot), (Some(0), Some(1)));
    assert_eq!(busy(&mut etcds[2], &asks[2]).await.ahead, Some(0));
    assert_eq!(busy(&mut etcds[3], &asks[3]).await.ahead, Some(1));
    assert!(matches!(
        etcds[3].try_acquire(&Ask { mode: Mode::Slots(3), ..ask("n") }).await.unwrap(),
        Attempt::OtherSlots(_)
    ));
    assert!(matches!(etcds[3].try_acquire(&ask("n")).await.unwrap(), Attempt::OtherSlots(_)));
    assert_eq!(busy(&mut etcds[3], &asks[3]).await.ahead, Some(1));

    assert!(matches!(etcds[0].renew(&zero).await.unwrap(), Renewal::Held(_)));
    assert_eq!(etcds[0].release(&zero, &ending(&zero)).await.unwrap(), Released::Done);
    told(&mut etcds[2]).await;
    let next = granted(&mut etcds[2], &asks[2]).await;
    assert!(next.slot == Some(0) && next.token > zero.token);
    // The one behind hears that it is the first now, and waits for any of the holders.
    told(&mut etcds[3]).await;
    busy(&mut etcds[3], &asks[3]).await;
    assert_eq!(etcds[1].release(&one, &ending(&one)).await.unwrap(), Released::Done);
    told(&mut etcds[3]).await;
    let last = granted(&mut etcds[3], &asks[3]).await;
    assert!(last.slot == Some(1) && last.token > one.token);
    let state = etcds[0].inspect(&asks[0].name).await.unwrap();
    assert_eq!(
        state.holders.iter().map(|holder| holder.fencing_token).collect::<Vec<_>>(),
        [Some(next.token), Some(last.token)]
    );
}

#[tokio::test]
async fn an_unanswered_grant_is_found_again_and_counted_from_a_renewal() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let first = ask("n");
    a.members.grant_lease(lease_id(&first.name, first.who.owner.as_str()), first.ttl).await.unwrap();
    let before = clock::now();
    let lease = granted(&mut b, &first).await;
    assert!(lease.grant.from >= before);
    a.withdraw(&first).await.unwrap();
    assert_eq!(a.inspect(&first.name).await.unwrap().state, State::Free, "withdrawing frees what we did not know of");
    a.withdraw(&first).await.unwrap();
}

#[tokio::test]
async fn a_list_has_every_lock_once_over_all_pages() {
    let server = Etcd::new();
    let mut a = open(&server, 0);
    let mut names: Vec<String> = (0..160).map(|n| format!("lock/{n}")).collect();
    names.extend(["a".to_owned(), "a-b".to_owned(), "a/b".to_owned()]);
    for (n, name) in names.iter().enumerate() {
        let lease = granted(&mut a, &ask(name)).await;
        if n % 3 == 0 {
            a.release(&lease, &ending(&lease)).await.unwrap();
        }
    }
    let (mut found, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = a.list(after).await.unwrap();
        found.extend(page.locks.iter().map(|lock| lock.name.to_string()));
        pages += 1;
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert!(pages > 1);
    found.sort();
    names.sort();
    assert_eq!(found, names);
}

#[tokio::test]
async fn a_slot_that_was_taken_behind_us_is_taken() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (Ask { mode: Mode::Slots(2), ..ask("n") }, Ask { mode: Mode::Slots(2), ..ask("n") });
    a.enter(&first).await.unwrap();
    assert_eq!(granted(&mut b, &second).await.slot, Some(0));
    assert_eq!(granted(&mut a, &first).await.slot, Some(1));
}

#[tokio::test]
async fn the_next_waits_for_the_end_of_one_that_vanished_but_not_of_one_whose_time_was_over() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (Ask { ttl: Duration::from_secs(3), ..ask("n") }, ask("n"));
    granted(&mut a, &first).await;
    assert!(busy(&mut b, &second).await.ask_again < clock::now() + Duration::from_secs(1));
    delete_lease(&mut a, &first).await;
    let gone = clock::now();
    told(&mut b).await;
    let waiting = busy(&mut b, &second).await;
    assert_eq!(waiting.ahead, Some(0));
    clock::sleep_until(waiting.ask_again).await;
    let lease = granted(&mut b, &second).await;
    assert!(gone.elapsed() >= first.ttl);

    // Let go of, even by force: at once.
    busy(&mut a, &first).await;
    let holder = a.inspect(&first.name).await.unwrap().holders.remove(0);
    assert_eq!(a.revoke(&first.name, &holder, &Revoke::Now { reason: "stuck".into() }).await.unwrap(), Revoked::Freed);
    assert!(granted(&mut a, &first).await.token > lease.token);

    // Not renewed: at once when its time is over.
    b.withdraw(&second).await.unwrap();
    busy(&mut b, &second).await;
    told(&mut b).await;
    granted(&mut b, &second).await;
}
