//! Getting the lock: queue, modes, tokens and who is kept out.

use std::time::Duration;

use dlock::backend::redis::Redis;
use dlock::backend::redis::answer::number;
use dlock::backend::{Ask, Attempt, Backend, Released, Renewal, Revoke, Revoked};
use dlock::clock;
use dlock::lock::{Mode, State, Token};
use redis::Value;

use super::super::{busy, ending, granted, told};
use super::{Server, ask};

#[tokio::test]
async fn waiters_are_served_in_order_and_each_is_told() {
    let server = Server::start();
    let (mut a, mut b, mut c) = (server.client(), server.client(), server.client());
    let asks = [ask(Mode::Exclusive), ask(Mode::Exclusive), ask(Mode::Exclusive)];
    let first = granted(&mut a, &asks[0]).await;
    assert_eq!(busy(&mut b, &asks[1]).await.ahead, Some(0));
    let third = busy(&mut c, &asks[2]).await;
    assert_eq!((third.ahead, third.holder.unwrap().owner), (Some(1), Some(asks[0].who.owner.to_string())));
    assert_eq!(a.release(&first, &ending(&first)).await.unwrap(), Released::Done);
    assert_eq!(busy(&mut c, &asks[2]).await.ahead, Some(1));
    told(&mut b).await;
    let second = granted(&mut b, &asks[1]).await;
    assert!(second.token > first.token);
    told(&mut c).await;
    assert_eq!(busy(&mut c, &asks[2]).await.ahead, Some(0));
    b.release(&second, &ending(&second)).await.unwrap();
    told(&mut c).await;
    assert!(granted(&mut c, &asks[2]).await.token > second.token);
}

#[tokio::test]
async fn asking_again_finds_the_same_grant() {
    let server = Server::start();
    let one = ask(Mode::Exclusive);
    let first = granted(&mut server.client(), &one).await;
    let again = granted(&mut server.client(), &one).await;
    assert_eq!(first.token, again.token);
    assert!(again.grant.from > first.grant.from);
}

#[tokio::test]
async fn an_acquire_that_arrives_after_its_owner_left_gets_nothing() {
    let server = Server::start();
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    let mut late = server.client();
    for client in [&mut a, &mut late] {
        client.inspect(&one.name).await.unwrap();
    }
    server.freeze();
    tokio::select! {
        biased;
        answer = a.try_acquire(&one) => panic!("{answer:?} by a server that is stopped"),
        () = tokio::time::sleep(Duration::from_millis(20)) => {}
    }
    server.thaw();
    a.withdraw(&one).await.unwrap();
    let error = late.try_acquire(&one).await.unwrap_err();
    assert!(format!("{error:#}").contains("WITHDRAWN"), "{error:#}");
    granted(&mut a, &ask(Mode::Exclusive)).await;
}

#[tokio::test]
async fn nobody_gets_a_deleted_lock_before_its_holder_has_ended() {
    let server = Server::start();
    for loss in [&["DEL", "dlock:job/a"][..], &["FLUSHALL"]] {
        let (mut a, mut b) = (server.client(), server.client());
        let (one, two) = (ask(Mode::Exclusive), ask(Mode::Exclusive));
        let lease = granted(&mut a, &one).await;
        busy(&mut b, &two).await;
        server.does(loss).await;
        told(&mut b).await;
        busy(&mut b, &two).await;
        busy(&mut server.client(), &Ask { queue: false, ..ask(Mode::Exclusive) }).await;
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
        told(&mut b).await;
        let next = granted(&mut b, &two).await;
        assert!(next.token > lease.token);
        b.release(&next, &ending(&next)).await.unwrap();
    }
}

/// The server loses its data, and nobody is granted anything for it.
async fn vouches(server: &Server, waiter: &mut Redis, ask: &Ask) {
    server.does(&["FLUSHALL"]).await;
    busy(waiter, ask).await;
    busy(&mut server.client(), &Ask { queue: false, ..ask.clone() }).await;
}

#[tokio::test]
async fn a_server_that_loses_its_data_twice_is_told_twice_and_by_whoever_asks() {
    let server = Server::start();
    let (mut a, mut b, mut c) = (server.client(), server.client(), server.client());
    let [one, two, three] = [ask(Mode::Exclusive), ask(Mode::Exclusive), ask(Mode::Exclusive)];
    let lease = granted(&mut a, &one).await;
    busy(&mut b, &two).await;
    vouches(&server, &mut b, &two).await;
    // It has never seen the holder itself.
    busy(&mut c, &three).await;
    b.withdraw(&two).await.unwrap();
    told(&mut c).await;
    busy(&mut c, &three).await;
    vouches(&server, &mut c, &three).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
    told(&mut c).await;
    granted(&mut c, &three).await;
}

#[tokio::test]
async fn a_holder_that_has_let_go_is_not_vouched_for() {
    let server = Server::start();
    let (mut a, mut b) = (server.client(), server.client());
    let (one, two) = (ask(Mode::Exclusive), ask(Mode::Exclusive));
    for loss in [&["DEL", "dlock:job/a"][..], &["FLUSHALL"], &["PING"]] {
        let lease = granted(&mut a, &one).await;
        busy(&mut b, &two).await;
        server.does(loss).await;
        a.release(&lease, &ending(&lease)).await.unwrap();
        let next = granted(&mut b, &two).await;
        b.release(&next, &ending(&next)).await.unwrap();
        server.does(&["FLUSHALL"]).await;
    }
    // Nor one whose grant did not count, and who asks again.
    granted(&mut a, &one).await;
    busy(&mut b, &two).await;
    a.withdraw(&one).await.unwrap();
    let next = granted(&mut b, &two).await;
    busy(&mut a, &one).await;
    b.release(&next, &ending(&next)).await.unwrap();
    told(&mut a).await;
    granted(&mut a, &one).await;
}

#[tokio::test]
async fn a_foreign_holder_is_vouched_for_as_long_as_its_key_was_to_last() {
    let server = Server::start();
    server.does(&["SET", "dlock:job/a", "their-uuid", "NX", "PX", "1500"]).await;
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    busy(&mut a, &one).await;
    vouches(&server, &mut a, &one).await;
    until_granted(&mut a, &one).await;
}

#[tokio::test]
async fn an_evicted_lock_is_kept_from_others_while_its_holder_may_run() {
    let server = Server::start();
    let (mut a, mut b) = (server.client(), server.client());
    let (one, two) = (Ask { ttl: Duration::from_secs(3), ..ask(Mode::Exclusive) }, ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    busy(&mut b, &two).await;
    server.does(&["DEL", "dlock:job/a", "{dlock:job/a}:holders", "{dlock:job/a}:details"]).await;
    told(&mut b).await;
    busy(&mut b, &two).await;
    until_granted(&mut b, &two).await;
    assert!(lease.grant.from.elapsed() > lease.grant.ttl, "granted {:?} after the first", lease.grant.from.elapsed());
}

#[tokio::test]
async fn a_foreign_program_excludes_us_and_is_shown_and_its_release_is_seen() {
    let server = Server::start();
    server.does(&["SET", "dlock:job/a", "their-uuid", "NX", "PX", "60000"]).await;
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    let theirs = busy(&mut a, &one).await.holder.unwrap();
    assert_eq!((theirs.owner.as_deref(), theirs.host), (Some("their-uuid"), None));
    let state = a.inspect(&one.name).await.unwrap();
    assert_eq!((state.state, state.holders.len(), state.waiters.len()), (State::Held, 1, 1));
    assert!(state.holders[0].expires_in.unwrap() > Duration::from_secs(30));
    let safely = Revoke::Safely { reason: "r".into() };
    assert!(matches!(a.revoke(&one.name, &state.holders[0], &safely).await.unwrap(), Revoked::Impossible(_)));
    server.does(&["DEL", "dlock:job/a"]).await;
    told(&mut a).await;
    granted(&mut a, &one).await;
    assert_eq!(server.does(&["SET", "dlock:job/a", "their-uuid", "NX", "PX", "60000"]).await, Value::Nil);
}

#[tokio::test]
async fn tokens_grow_over_the_loss_of_all_data() {
    let server = Server::start();
    let mut last = Token(0);
    for _ in 0..3 {
        let lease = granted(&mut server.client(), &ask(Mode::Exclusive)).await;
        assert!(lease.token > last && i64::try_from(lease.token.0).is_ok());
        last = lease.token;
        server.does(&["FLUSHALL"]).await;
    }
}

#[tokio::test]
async fn shared_holders_exclude_an_exclusive_one_which_later_ones_wait_behind() {
    let server = Server::start();
    let (mut a, mut b, mut x, mut c) = (server.client(), server.client(), server.client(), server.client());
    let (ask_a, ask_b, ask_x, ask_c) = (ask(Mode::Shared), ask(Mode::Shared), ask(Mode::Exclusive), ask(Mode::Shared));
    let lease_a = granted(&mut a, &ask_a).await;
    let lease_b = granted(&mut b, &ask_b).await;
    busy(&mut x, &ask_x).await;
    busy(&mut c, &ask_c).await;
    a.release(&lease_a, &ending(&lease_a)).await.unwrap();
    busy(&mut x, &ask_x).await;
    assert!(matches!(b.renew(&lease_b).await.unwrap(), Renewal::Held(_)));
    assert_eq!(server.does(&["SET", "dlock:job/a", "foreign", "NX"]).await, Value::Nil);
    b.release(&lease_b, &ending(&lease_b)).await.unwrap();
    told(&mut x).await;
    let lease_x = granted(&mut x, &ask_x).await;
    x.release(&lease_x, &ending(&lease_x)).await.unwrap();
    told(&mut c).await;
    granted(&mut c, &ask_c).await;
}

#[tokio::test]
async fn slots_are_unique_and_all_must_agree_on_their_number() {
    let server = Server::start();
    let asks = [ask(Mode::Slots(2)), ask(Mode::Slots(2)), ask(Mode::Slots(2))];
    let (mut a, mut b, mut c) = (server.client(), server.client(), server.client());
    let first = granted(&mut a, &asks[0]).await;
    let second = granted(&mut b, &asks[1]).await;
    assert_eq!((first.slot, second.slot), (Some(0), Some(1)));
    busy(&mut c, &asks[2]).await;
    for other in [Mode::Slots(3), Mode::Exclusive] {
        let reply = server.client().try_acquire(&ask(other)).await.unwrap();
        assert!(matches!(reply, Attempt::OtherSlots(_)), "{reply:?}");
    }
    a.release(&first, &ending(&first)).await.unwrap();
    told(&mut c).await;
    let third = granted(&mut c, &asks[2]).await;
    assert_eq!(third.slot, Some(0));
    assert!(third.token > first.token);
    let state = c.inspect(&asks[0].name).await.unwrap();
    assert_eq!((state.mode, state.slots, state.holders.len()), (Mode::Slots(2), 2, 2));
}

#[tokio::test]
async fn no_wait_leaves_no_trace_and_does_not_jump_the_queue() {
    let server = Server::start();
    let (mut a, mut b, one, two) = (server.client(), server.client(), ask(Mode::Exclusive), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    let hasty = Ask { queue: false, ..ask(Mode::Exclusive) };
    busy(&mut server.client(), &hasty).await;
    assert!(a.inspect(&one.name).await.unwrap().waiters.is_empty());
    busy(&mut b, &two).await;
    a.release(&lease, &ending(&lease)).await.unwrap();
    let free = busy(&mut server.client(), &hasty).await;
    assert!(free.holder.is_none(), "a waiter holds nothing: {free:?}");
    granted(&mut b, &two).await;
}

/// How soon a waiter is going to ask again.
async fn asks_again(waiter: &mut Redis, ask: &Ask) -> Duration {
    busy(waiter, ask).await.ask_again.remaining()
}

#[tokio::test]
async fn a_server_that_cannot_push_is_asked_more_often() {
    const OFTEN: Duration = Duration::from_millis(250);
    let long = || Ask { ttl: Duration::from_secs(3600), ..ask(Mode::Exclusive) };
    let server = Server::start();
    granted(&mut server.client(), &long()).await;
    assert!(asks_again(&mut server.client(), &ask(Mode::Exclusive)).await > 2 * OFTEN);
    for lacks in ["HELLO", "CLIENT"] {
        let server = Server::with(&["--rename-command", lacks, ""]);
        granted(&mut server.client(), &long()).await;
        let (mut waiter, two) = (server.client(), ask(Mode::Exclusive));
        let learns = async {
            while asks_again(&mut waiter, &two).await > OFTEN {
                // It learns what the server cannot do while it waits.
                let _ = tokio::time::timeout(Duration::from_millis(10), waiter.changed()).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), learns).await.expect("it asks as seldom as ever");
    }
}

async fn until_granted(redis: &mut Redis, ask: &Ask) {
    while let Attempt::Busy(busy) = redis.try_acquire(ask).await.unwrap() {
        clock::sleep_until(busy.ask_again).await;
    }
}

#[tokio::test]
async fn waiters_that_die_and_a_holder_that_dies_make_way() {
    let server = Server::start();
    let short = Ask { ttl: Duration::from_millis(200), ..ask(Mode::Exclusive) };
    granted(&mut server.client(), &short).await;
    let dead = [ask(Mode::Exclusive), ask(Mode::Exclusive)];
    for one in &dead {
        busy(&mut server.client(), one).await;
    }
    let (mut b, patient) = (server.client(), ask(Mode::Exclusive));
    until_granted(&mut b, &patient).await;
    // Passed over, not forgotten: who only seemed to be dead has its place.
    assert_eq!(server.does(&["ZCARD", "{dlock:job/a}:places"]).await, Value::Int(2));
    assert_eq!(busy(&mut server.client(), &ask(Mode::Exclusive)).await.ahead, Some(0));
    assert_eq!(busy(&mut server.client(), &dead[1]).await.ahead, Some(0));
    assert_eq!(busy(&mut server.client(), &dead[0]).await.ahead, Some(0));
    assert_eq!(busy(&mut server.client(), &dead[1]).await.ahead, Some(1));
}

#[tokio::test]
async fn what_is_known_of_the_dead_is_gone_in_the_end_but_not_before_a_lease() {
    const DAY: Duration = Duration::from_secs(86400);
    let server = Server::start();
    let long = Ask { ttl: 9 * DAY, ..ask(Mode::Exclusive) };
    let lease = granted(&mut server.client(), &long).await;
    busy(&mut server.client(), &ask(Mode::Exclusive)).await;
    assert!(matches!(server.client().renew(&lease).await.unwrap(), Renewal::Held(_)));
    for (part, least, most) in [("queue", 0, 2), ("places", 0, 2), ("details", 9, 11), ("holders", 9, 11)] {
        let left: u64 = number(&server.does(&["PTTL", &format!("{{dlock:job/a}}:{part}")]).await).unwrap();
        assert!((least * DAY..most * DAY).contains(&Duration::from_millis(left)), "{part}: {left} ms");
    }
}
