//! What only shows from inside: answers that got lost, leases taken over, sessions that ended. Against a
//! real server; everything a user can see is tested through the binary.

mod deleted;
mod history;
mod holding;
mod listing;
mod lost_data;

use std::time::Duration;

use dlock::backend::zookeeper::ZooKeeper;
use dlock::backend::{Address, Ask, Attempt, Backend, Ending, Reheld, Released, Renewal, Revoke, Revoked};
use dlock::clock;
use dlock::lock::{Identity, Mode, State};

use super::{PATIENCE, busy, ending, granted, told};
use crate::support::ZooKeeperBed;

fn open(server: &ZooKeeperBed) -> ZooKeeper {
    open_under(server, "verbs")
}

fn open_under(server: &ZooKeeperBed, prefix: &str) -> ZooKeeper {
    let address = format!("zookeeper://127.0.0.1:{}?prefix={prefix}", server.port);
    ZooKeeper::open(&Address::parse(&address).unwrap(), PATIENCE).unwrap()
}

fn ask(name: &str, mode: Mode) -> Ask {
    Ask { ttl: Duration::from_secs(20), ..super::ask(name, mode) }
}

#[tokio::test]
async fn a_release_wakes_the_next_and_its_token_is_greater() {
    let server = ZooKeeperBed::shared();
    let (mut first, mut second) = (open(&server), open(&server));
    let (mine, yours) = (ask("order", Mode::Exclusive), ask("order", Mode::Exclusive));
    let held = granted(&mut first, &mine).await;
    let waiting = busy(&mut second, &yours).await;
    assert_eq!(waiting.ahead, Some(0));
    let came = first.inspect(&mine.name).await.unwrap().waiters[0].waiting_since.unwrap();
    assert_eq!(waiting.holder.unwrap().owner.as_deref(), Some(mine.who.owner.as_str()));
    assert_eq!(first.release(&held, &ending(&held)).await.unwrap(), Released::Done);
    told(&mut second).await;
    let next = granted(&mut second, &yours).await;
    assert!(next.token > held.token);
    second.note_start(&next).await.unwrap();
    let state = tokio::select! {
        biased;
        _ = second.changed() => panic!("it has written to its own place, which is nothing to hear of"),
        state = first.inspect(&mine.name) => state.unwrap(),
    };
    assert_eq!(state.last_run, ending(&held).last_run);
    let holder = state.holder(&yours.who.owner).unwrap();
    assert_eq!(holder.fencing_token, Some(next.token));
    assert!(holder.acquired_at.unwrap() > came, "it did not hold the lock while it waited");
    second.withdraw(&yours).await.unwrap();
    assert_eq!(second.inspect(&mine.name).await.unwrap().state, State::Free);
}

#[tokio::test]
async fn a_place_whose_creation_was_not_answered_is_found_again() {
    let server = ZooKeeperBed::shared();
    let mut client = open(&server);
    let ask = ask("unanswered", Mode::Exclusive);
    let lease = granted(&mut client, &ask).await;
    client.place = None;
    assert_eq!(granted(&mut client, &ask).await.token, lease.token);
    // The same, but in a session that is not ours any more: the place is given up for a new one.
    client.place = None;
    client.ensemble.session = None;
    client.ensemble.attach(ask.ttl).await.unwrap();
    assert!(granted(&mut client, &ask).await.token > lease.token);
    let state = client.inspect(&ask.name).await.unwrap();
    assert_eq!((state.holders.len(), state.waiters.len()), (1, 0));
}

#[tokio::test]
async fn a_renewal_counts_from_itself_and_sees_the_end_of_the_session() {
    let server = ZooKeeperBed::shared();
    let mut client = open(&server);
    let ask = ask("renewed", Mode::Exclusive);
    let lease = granted(&mut client, &ask).await;
    assert_eq!(lease.grant.ttl, ask.ttl);
    let before = clock::now();
    let Renewal::Held(grant) = client.renew(&lease).await.unwrap() else { panic!("not held") };
    assert!(grant.from >= before);
    // Somebody else ends the session, as the server does when it expires.
    let mut other = open(&server);
    other.ensemble.session = client.ensemble.session.clone();
    other.ensemble.close().await.unwrap();
    told(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::Lost(_)));
}

#[tokio::test]
async fn a_session_that_was_not_renewed_for_long_is_not_claimed_again() {
    let server = ZooKeeperBed::shared();
    let mut client = open(&server);
    let ask = ask("forgotten", Mode::Exclusive);
    let lease = granted(&mut client, &ask).await;
    // As if the server had been away for long, and had kept the session all the same.
    client.ensemble.session.as_mut().unwrap().proven = clock::now() - 3 * ask.ttl;
    let again = granted(&mut client, &ask).await;
    assert!(again.token > lease.token);
    client.ensemble.session.as_mut().unwrap().proven = clock::now() - 3 * ask.ttl;
    assert!(matches!(client.renew(&again).await.unwrap(), Renewal::Lost(_)));
}

#[tokio::test]
async fn a_revoke_is_seen_at_once_and_a_deletion_too() {
    let server = ZooKeeperBed::shared();
    let (mut client, mut operator) = (open(&server), open(&server));
    let ask = ask("revoked", Mode::Exclusive);
    let lease = granted(&mut client, &ask).await;
    let holder = operator.inspect(&ask.name).await.unwrap().holders[0].clone();
    let safely = Revoke::Safely { reason: "maintenance".into() };
    assert_eq!(operator.revoke(&ask.name, &holder, &safely).await.unwrap(), Revoked::Marked);
    // A new holder looks for changes when its command has run for a moment.
    client.note_start(&lease).await.unwrap();
    told(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::Revoked(reason) if reason == "maintenance"));
    assert_eq!(operator.inspect(&ask.name).await.unwrap().state, State::Revoked);
    assert_eq!(
        operator.revoke(&ask.name, &holder, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
        Revoked::Freed
    );
    told(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::ForceReleased(why) if why == "stuck"));
    assert_eq!(
        operator.revoke(&ask.name, &holder, &Revoke::Now { reason: "stuck".into() }).await.unwrap(),
        Revoked::NotHeld
    );
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::ForceReleased("stuck".into()));
}

#[tokio::test]
async fn a_release_whose_answer_was_lost_is_recognised() {
    let server = ZooKeeperBed::shared();
    let mut client = open(&server);
    let ask = ask("released", Mode::Exclusive);
    let lease = granted(&mut client, &ask).await;
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
}

#[tokio::test]
async fn another_process_of_the_owner_can_move_the_end_of_a_hold() {
    let server = ZooKeeperBed::shared();
    let (mut first, mut second) = (open(&server), open(&server));
    let ask = ask("handed-on", Mode::Slots(2));
    let (name, owner, hour) = (&ask.name, &ask.who.owner, Duration::from_secs(3600));
    let lease = granted(&mut first, &ask).await;
    assert_eq!(second.rehold(name, owner, hour).await.unwrap(), Reheld::Running);
    let kept = Ending { last_run: None, keep: 20, hold_until: Some(clock::now() + hour) };
    assert_eq!(first.release(&lease, &kept).await.unwrap(), Released::Done);
    assert_eq!(first.release(&lease, &kept).await.unwrap(), Released::Done);
    assert_eq!(second.rehold(name, owner, 2 * hour).await.unwrap(), Reheld::Done);
    let holder = second.inspect(name).await.unwrap().holders[0].clone();
    assert_eq!((holder.fencing_token, holder.slot), (Some(lease.token), lease.slot));
    assert!(holder.expires_in.unwrap() > hour);
    // Its slot is still taken.
    let other = granted(&mut first, &Ask { who: Identity::of_this_process("").unwrap(), ..ask.clone() }).await;
    assert_ne!(other.slot, lease.slot);
    let safely = Revoke::Safely { reason: "maintenance".into() };
    assert_eq!(second.revoke(name, &holder, &safely).await.unwrap(), Revoked::Marked);
    assert_eq!(second.rehold(name, owner, hour).await.unwrap(), Reheld::Revoked("maintenance".into()));
    assert_eq!(second.rehold(name, owner, Duration::ZERO).await.unwrap(), Reheld::Done);
    assert_eq!(second.rehold(name, owner, Duration::ZERO).await.unwrap(), Reheld::NotOurs);
    second.visit().await.unwrap();
    assert_eq!(
        second.ensemble.children("/verbs-meta/handed-on").await.unwrap(),
        [format!("slot-{}", other.slot.unwrap())]
    );
}

#[tokio::test]
async fn slots_are_numbered_and_their_tokens_grow_per_slot() {
    let server = ZooKeeperBed::shared();
    let mut clients: Vec<ZooKeeper> = (0..4).map(|_| open(&server)).collect();
    let asks: Vec<Ask> = (0..4).map(|_| ask("slots", Mode::Slots(2))).collect();
    let first = granted(&mut clients[0], &asks[0]).await;
    let second = granted(&mut clients[1], &asks[1]).await;
    assert_eq!((first.slot, second.slot), (Some(0), Some(1)));
    busy(&mut clients[2], &asks[2]).await;
    busy(&mut clients[3], &asks[3]).await;
    // The first to go is not the one just before the first waiter.
    clients[0].release(&first, &ending(&first)).await.unwrap();
    told(&mut clients[2]).await;
    let third = granted(&mut clients[2], &asks[2]).await;
    assert_eq!(third.slot, Some(0));
    assert!(third.token > first.token);
    // The last waiter learns that it is now first in line, and then of its turn.
    told(&mut clients[3]).await;
    busy(&mut clients[3], &asks[3]).await;
    clients[1].release(&second, &ending(&second)).await.unwrap();
    told(&mut clients[3]).await;
    let fourth = granted(&mut clients[3], &asks[3]).await;
    assert_eq!(fourth.slot, Some(1));
    assert!(fourth.token > second.token);
    let mut other = open(&server);
    let attempt = other.try_acquire(&ask("slots", Mode::Slots(3))).await.unwrap();
    assert!(matches!(attempt, Attempt::OtherSlots(_)), "{attempt:?}");
    let attempt = other.try_acquire(&ask("slots", Mode::Exclusive)).await.unwrap();
    assert!(matches!(attempt, Attempt::OtherSlots(_)), "{attempt:?}");
}

#[tokio::test]
async fn a_hold_keeps_its_place_before_those_who_waited_and_then_ends() {
    let server = ZooKeeperBed::shared();
    let (mut first, mut second) = (open(&server), open(&server));
    let (mine, yours) = (ask("held", Mode::Exclusive), ask("held", Mode::Exclusive));
    let lease = granted(&mut first, &mine).await;
    busy(&mut second, &yours).await;
    let until = clock::now() + Duration::from_millis(1500);
    let ending = Ending { hold_until: Some(until), ..ending(&lease) };
    assert_eq!(first.release(&lease, &ending).await.unwrap(), Released::Done);
    loop {
        match second.try_acquire(&yours).await.unwrap() {
            Attempt::Granted(_) => break,
            Attempt::Busy(busy) => clock::sleep_until(busy.ask_again).await,
            other => panic!("{other:?}"),
        }
    }
    assert!(until.has_passed());
}

#[tokio::test]
async fn who_does_not_queue_leaves_no_trace() {
    let server = ZooKeeperBed::shared();
    let (mut first, mut second) = (open(&server), open(&server));
    let mine = ask("no-wait", Mode::Exclusive);
    granted(&mut first, &mine).await;
    let impatient = Ask { queue: false, ..ask("no-wait", Mode::Exclusive) };
    busy(&mut second, &impatient).await;
    let state = second.inspect(&mine.name).await.unwrap();
    assert_eq!((state.holders.len(), state.waiters.len()), (1, 0));
}

#[tokio::test]
async fn a_recorded_key_is_not_run_again_and_only_success_is_recorded() {
    let server = ZooKeeperBed::shared();
    let mut client = open(&server);
    let ask = Ask { once: Some("2026-11-16 ä/.".into()), ..ask("once", Mode::Exclusive) };
    for exit_code in [1, 0] {
        let lease = granted(&mut client, &ask).await;
        let mut ending = ending(&lease);
        let run = ending.last_run.as_mut().unwrap();
        (run.once, run.exit_code) = (ask.once.clone(), Some(exit_code));
        assert_eq!(client.release(&lease, &ending).await.unwrap(), Released::Done);
    }
    assert!(matches!(client.try_acquire(&ask).await.unwrap(), Attempt::AlreadyRan));
    assert_eq!(client.inspect(&ask.name).await.unwrap().state, State::Free);
}
