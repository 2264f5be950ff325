//! The first moments of a holder, and the record that it leaves.

use std::time::Duration;

use dlock::backend::zookeeper::ZooKeeper;
use dlock::backend::zookeeper::wire::{self, Kind, Request};
use dlock::backend::{Backend, Ending, Reheld, Released, Renewal, Revoke, Revoked};
use dlock::clock;
use dlock::lock::Mode;

use super::{ZooKeeperBed, ask, ending, granted, open, open_under, told};

async fn is_done(client: &mut ZooKeeper, request: Request) -> bool {
    client.ensemble.call_one(request).await.unwrap().is_ok()
}

#[tokio::test]
async fn a_run_leaves_its_record_whether_or_not_there_was_one_when_it_was_granted() {
    let server = ZooKeeperBed::shared();
    // Nobody has used this prefix: what the records lie in is missing too.
    let (mut client, mut other) = (open_under(&server, "recorded"), open_under(&server, "recorded"));
    let first = ask("job", Mode::Exclusive);
    let record = "/recorded-meta/job";
    other.visit().await.unwrap();
    let make = || Request::create(record, b"", wire::ANYONE, Kind::Persistent);
    let take_away = || Request::delete(record, wire::ANY_VERSION);
    let cases = [(None, None), (None, Some(take_away())), (Some(take_away()), Some(make())), (Some(take_away()), None)];
    for (before, meanwhile) in cases {
        if let Some(before) = before {
            assert!(is_done(&mut other, before).await);
        }
        let lease = granted(&mut client, &first).await;
        if let Some(meanwhile) = meanwhile {
            assert!(is_done(&mut other, meanwhile).await);
        }
        let ending = ending(&lease);
        assert_eq!(client.release(&lease, &ending).await.unwrap(), Released::Done);
        assert_eq!(other.state_of(&first.name).await.unwrap().last_run, ending.last_run);
    }
}

#[tokio::test]
async fn a_new_holder_hears_of_changes_after_its_first_moments_and_of_nothing_else() {
    let server = ZooKeeperBed::shared();
    let (mut client, mut operator) = (open(&server), open(&server));
    let ask = ask("settled", Mode::Exclusive);
    let lease = granted(&mut client, &ask).await;
    client.note_start(&lease).await.unwrap();
    let looks = async {
        for _ in 0..10 {
            operator.inspect(&ask.name).await.unwrap();
        }
        operator.inspect(&ask.name).await.unwrap().holders[0].clone()
    };
    let holder = tokio::select! {
        biased;
        _ = client.changed() => panic!("nothing has changed"),
        holder = looks => holder,
    };
    let safely = Revoke::Safely { reason: "maintenance".into() };
    assert_eq!(operator.revoke(&ask.name, &holder, &safely).await.unwrap(), Revoked::Marked);
    told(&mut client).await;
    assert!(matches!(client.renew(&lease).await.unwrap(), Renewal::Revoked(_)));
}

#[tokio::test]
async fn why_a_lock_was_freed_at_once_is_told_where_older_dlocks_look_for_it() {
    let server = ZooKeeperBed::shared();
    let (mut client, mut operator) = (open(&server), open(&server));
    let (ask, taken) = (ask("told", Mode::Exclusive), "/verbs-meta/told/taken");
    let (name, owner) = (&ask.name, &ask.who.owner);
    for reason in ["stuck", "no need to wait"] {
        // What is held on to after a run leaves no other trace of an operator.
        let lease = granted(&mut client, &ask).await;
        let held = Ending { hold_until: Some(clock::now() + Duration::from_secs(3600)), ..ending(&lease) };
        assert_eq!(client.release(&lease, &held).await.unwrap(), Released::Done);
        let holder = operator.inspect(name).await.unwrap().holders[0].clone();
        let now = Revoke::Now { reason: reason.into() };
        assert_eq!(operator.revoke(name, &holder, &now).await.unwrap(), Revoked::Freed);
        assert_eq!(
            client.rehold(name, owner, Duration::from_secs(9)).await.unwrap(),
            Reheld::ForceReleased(reason.into())
        );
    }
    operator.visit().await.unwrap();
    let node = operator.ensemble.call_one(Request::get_data(taken)).await.unwrap().unwrap();
    let expected =
        format!(r#"[{{"owner":"{owner}","reason":"stuck"}},{{"owner":"{owner}","reason":"no need to wait"}}]"#);
    assert_eq!(String::from_utf8(wire::read_data(&node).unwrap().0).unwrap(), expected);
}

#[tokio::test]
async fn two_operators_at_once_tell_both_holders_why() {
    let server = ZooKeeperBed::shared();
    let [mut a, mut b, mut one, mut other] = [(); 4].map(|()| open(&server));
    for round in 0..10 {
        let asks = [(); 2].map(|()| ask(&format!("told-both-{round}"), Mode::Shared));
        let name = &asks[0].name;
        let leases = [granted(&mut a, &asks[0]).await, granted(&mut b, &asks[1]).await];
        let state = one.inspect(name).await.unwrap();
        let [first, second] = asks.each_ref().map(|ask| state.holder(&ask.who.owner).unwrap());
        let [for_a, for_b] = ["for a", "for b"].map(|reason| Revoke::Now { reason: reason.into() });
        let revoked = tokio::join!(one.revoke(name, first, &for_a), other.revoke(name, second, &for_b));
        assert_eq!((revoked.0.unwrap(), revoked.1.unwrap()), (Revoked::Freed, Revoked::Freed));
        for (client, lease, why) in [(&mut a, &leases[0], "for a"), (&mut b, &leases[1], "for b")] {
            assert!(matches!(client.renew(lease).await.unwrap(), Renewal::ForceReleased(reason) if reason == why));
            assert_eq!(client.release(lease, &ending(lease)).await.unwrap(), Released::ForceReleased(why.into()));
        }
    }
}
