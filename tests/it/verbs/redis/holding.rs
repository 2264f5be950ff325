//! Keeping the lock and letting go of it: news, losses, revocation, records, lists.

use std::time::Duration;

use dlock::backend::redis::answer::text;
use dlock::backend::{Ask, Attempt, Backend, Ending, Lease, Released, Renewal, Revoke, Revoked};
use dlock::clock;
use dlock::lock::{Holder, LastRun, Mode, State, Token};

use super::super::{busy, ending, granted, told};
use super::{Server, ask};

#[tokio::test]
async fn a_release_that_was_answered_to_nobody_can_be_repeated() {
    let server = Server::start();
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    let next = granted(&mut server.client(), &ask(Mode::Exclusive)).await;
    server.client().release(&next, &ending(&next)).await.unwrap();
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    let never = Lease { owner: ask(Mode::Exclusive).who.owner, ..lease.clone() };
    assert_eq!(a.release(&never, &ending(&never)).await.unwrap(), Released::NotOurs);
}

#[tokio::test]
async fn the_holder_is_told_of_every_way_to_lose_the_lock() {
    let server = Server::start();
    for steal in [&["DEL", "dlock:job/a"][..], &["SET", "dlock:job/a", "thief"], &["FLUSHALL"]] {
        let (mut a, one) = (server.client(), ask(Mode::Exclusive));
        let lease = granted(&mut a, &one).await;
        assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Held(_)));
        tokio::select! {
            biased;
            told = a.changed() => panic!("{told:?} although nothing changed"),
            () = async { server.does(&["PING"]).await; } => {}
        }
        server.does(steal).await;
        told(&mut a).await;
        assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Lost(_)), "{steal:?}");
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
        server.does(&["DEL", "dlock:job/a"]).await;
    }
}

/// The holder has read its keys before they change, and reads them no more: only a push can tell it.
#[tokio::test]
async fn a_holder_is_told_of_a_forced_release_by_a_push() {
    let server = Server::start();
    let (mut a, mut operator, one) = (server.client(), server.client(), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    let seen = operator.inspect(&one.name).await.unwrap().holders.remove(0);
    let free = async {
        while !text(&server.does(&["INFO", "commandstats"]).await).unwrap().contains("cmdstat_mget:calls=1,") {}
        operator.revoke(&one.name, &seen, &Revoke::Now { reason: "stuck".into() }).await.unwrap()
    };
    let ((), freed) = tokio::join!(told(&mut a), free);
    assert_eq!(freed, Revoked::Freed);
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::ForceReleased(why) if why == "stuck"));
}

#[tokio::test]
async fn who_stops_listening_in_the_middle_keeps_the_connection() {
    let server = Server::start();
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    for _ in 0..3 {
        server.freeze();
        tokio::select! {
            told = a.changed() => panic!("{told:?} by a server that is stopped"),
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
        server.thaw();
        assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Held(_)));
    }
    let connections = text(&server.does(&["INFO", "stats"]).await).unwrap();
    // Ours, and the one that asks.
    assert!(connections.contains("total_connections_received:2\r\n"), "{connections}");
}

#[tokio::test]
async fn a_connection_with_a_request_that_was_given_up_is_never_used_again() {
    let server = Server::start();
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    server.freeze();
    tokio::select! {
        biased;
        renewal = a.renew(&lease) => panic!("{renewal:?} by a server that is stopped"),
        () = tokio::time::sleep(Duration::from_millis(20)) => {}
    }
    server.thaw();
    // Its answer would be taken for that of the next request.
    let state = a.inspect(&one.name).await.unwrap();
    assert_eq!(state.holders.len(), 1);
    let connections = text(&server.does(&["INFO", "stats"]).await).unwrap();
    // The old one, the new one, and the one that asks.
    assert!(connections.contains("total_connections_received:3\r\n"), "{connections}");
}

#[tokio::test]
async fn a_lease_counts_from_before_its_request_could_leave() {
    let server = Server::start();
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    a.inspect(&one.name).await.unwrap();
    let thaw = async || {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let thawed = clock::now();
        server.thaw();
        thawed
    };
    server.freeze();
    let (lease, thawed) = tokio::join!(granted(&mut a, &one), thaw());
    assert!(lease.grant.from < thawed);
    server.freeze();
    let (renewal, thawed) = tokio::join!(a.renew(&lease), thaw());
    assert!(matches!(renewal.unwrap(), Renewal::Held(grant) if grant.from < thawed));
}

#[tokio::test]
async fn a_renewal_of_our_own_is_no_news() {
    let server = Server::start();
    let (mut a, one) = (server.client(), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    for _ in 0..3 {
        // Listening comes to rest before the renewal: it has to read the keys first.
        tokio::select! {
            told = a.changed() => panic!("{told:?}"),
            () = tokio::time::sleep(Duration::from_millis(50)) => {}
        }
        assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::Held(_)));
    }
}

#[tokio::test]
async fn a_successful_run_is_on_record_and_its_once_key_too() {
    let server = Server::start();
    let (mut a, one) = (server.client(), Ask { once: Some("today".into()), ..ask(Mode::Exclusive) });
    let lease = granted(&mut a, &one).await;
    let mut failed = ending(&lease);
    failed.last_run = failed.last_run.map(|run| LastRun { exit_code: Some(1), once: one.once.clone(), ..run });
    a.release(&lease, &failed).await.unwrap();
    let lease = granted(&mut a, &one).await;
    let mut done = ending(&lease);
    done.last_run = done.last_run.map(|run| LastRun { once: one.once.clone(), ..run });
    a.release(&lease, &done).await.unwrap();
    assert!(matches!(a.try_acquire(&one).await.unwrap(), Attempt::AlreadyRan));
    let state = a.inspect(&one.name).await.unwrap();
    assert_eq!((state.state, state.last_run), (State::Free, done.last_run));
}

#[tokio::test]
async fn a_hold_keeps_others_out_until_its_end_without_us() {
    let server = Server::start();
    let (mut a, mut b, one, two) = (server.client(), server.client(), ask(Mode::Exclusive), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    busy(&mut b, &two).await;
    let until = clock::now() + Duration::from_millis(300);
    a.release(&lease, &Ending { hold_until: Some(until), ..ending(&lease) }).await.unwrap();
    drop(a);
    told(&mut b).await;
    loop {
        match b.try_acquire(&two).await.unwrap() {
            Attempt::Busy(busy) => clock::sleep_until(busy.ask_again).await,
            granted => break assert!(matches!(granted, Attempt::Granted(_))),
        }
    }
    // Redis keeps a hold in milliseconds of its own clock, cut off at both ends.
    assert!(until.remaining() <= lease.grant.slack, "granted {:?} too early", until.remaining());
}

#[tokio::test]
async fn a_revoked_holder_is_told_why_and_keeps_the_lock_until_it_lets_go() {
    let server = Server::start();
    let (mut a, mut operator, one) = (server.client(), server.client(), ask(Mode::Exclusive));
    let lease = granted(&mut a, &one).await;
    let seen = operator.inspect(&one.name).await.unwrap().holders.remove(0);
    let safely = Revoke::Safely { reason: "maintenance at six".into() };
    let another = Holder { fencing_token: Some(Token(1)), ..seen.clone() };
    assert_eq!(operator.revoke(&one.name, &another, &safely).await.unwrap(), Revoked::NotHeld);
    assert_eq!(operator.revoke(&one.name, &seen, &safely).await.unwrap(), Revoked::Marked);
    told(&mut a).await;
    match a.renew(&lease).await.unwrap() {
        Renewal::Revoked(reason) => assert_eq!(reason, "maintenance at six"),
        other => panic!("{other:?}"),
    }
    assert_eq!(operator.inspect(&one.name).await.unwrap().state, State::Revoked);
    busy(&mut operator, &Ask { queue: false, ..ask(Mode::Exclusive) }).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    let lease = granted(&mut a, &one).await;
    let seen = operator.inspect(&one.name).await.unwrap().holders.remove(0);
    assert_eq!(
        operator.revoke(&one.name, &seen, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
        Revoked::Freed
    );
    told(&mut a).await;
    assert!(matches!(a.renew(&lease).await.unwrap(), Renewal::ForceReleased(why) if why == "stuck"));
}

#[tokio::test]
async fn every_lock_is_listed_once() {
    let server = Server::start();
    let mut redis = server.client();
    for n in 0..300 {
        let one = Ask { name: format!("n/{n}").parse().unwrap(), ..ask(Mode::Exclusive) };
        let lease = granted(&mut redis, &one).await;
        if n % 2 == 0 {
            redis.release(&lease, &ending(&lease)).await.unwrap();
        }
    }
    server.does(&["SET", "dlock:foreign", "their-uuid"]).await;
    server.does(&["HSET", "dlock:no-lock", "a", "b"]).await;
    let (mut names, mut after, mut held) = (Vec::new(), None, 0);
    loop {
        let page = redis.list(after).await.unwrap();
        held += page.locks.iter().filter(|lock| lock.state == State::Held).count();
        names.extend(page.locks.into_iter().map(|lock| lock.name));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    names.sort();
    names.dedup();
    assert_eq!((names.len(), held), (301, 151));
}
