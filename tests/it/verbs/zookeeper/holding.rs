//! The first moments of a holder, and the record that it leaves.

use dlock::backend::zookeeper::ZooKeeper;
use dlock::backend::zookeeper::wire::{self, Kind, Request};
use dlock::backend::{Backend, Released, Renewal, Revoke, Revoked};
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
