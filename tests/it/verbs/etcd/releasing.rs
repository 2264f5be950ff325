//! What stays after a release.

use std::time::Duration;

use dlock::backend::etcd::lease_id;
use dlock::backend::{Ask, Backend, Ending, Released};
use dlock::clock;
use dlock::lock::Mode;

use super::{ask, busy, ending, granted, open};
use crate::support::etcd::Etcd;

#[tokio::test]
async fn a_release_ends_a_long_lease_and_leaves_a_short_one_without_a_key() {
    let server = Etcd::new();
    let mut a = open(&server, 0);
    let (short, long, longer) = (Duration::from_secs(60), Duration::from_secs(61), Duration::from_secs(600));
    for (name, ttl, hold, left) in [("l", long, None, 0), ("m", long, Some(longer), 1), ("n", short, None, 2)] {
        let lease = granted(&mut a, &Ask { ttl, ..ask(name) }).await;
        let end = Ending { hold_until: hold.map(|hold| clock::now() + hold), ..ending(&lease) };
        assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done);
        let leases = a.members.call(async |mut client| client.leases().await).await.unwrap().leases().len();
        assert_eq!(leases, left, "{name}");
        let held = a.inspect(&lease.name).await.unwrap().holders;
        let rest = held.first().map(|holder| holder.expires_in.unwrap());
        assert_eq!(rest.is_some_and(|rest| rest > long), hold.is_some(), "{name}: {held:?}");
    }
}

#[tokio::test]
async fn a_holder_that_leaves_its_slot_behind_shows_its_token_on() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let first = Ask { mode: Mode::Slots(2), ..ask("n") };
    let lease = granted(&mut a, &first).await;
    let until = clock::now() + Duration::from_secs(60);
    let end = Ending { hold_until: Some(until), ..ending(&lease) };
    assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done);
    assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done, "an unanswered release is found again");
    let state = b.inspect(&first.name).await.unwrap();
    assert_eq!(state.holders[0].fencing_token, Some(lease.token));
    assert!(state.holders[0].expires_in.unwrap() > Duration::from_secs(30), "longer than the lease it had");
    assert_eq!(granted(&mut b, &Ask { mode: Mode::Slots(2), ..ask("n") }).await.slot, Some(1));
}

#[tokio::test]
async fn a_note_that_comes_late_does_not_shorten_what_is_left_behind() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let (first, second) = (ask("job"), ask("job"));
    let lease = granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    let lease = granted(&mut b, &second).await;
    // The note is under way while the lock is released, and its lease still there when it arrives.
    let hold_until = Some(clock::now() + Duration::from_secs(600));
    assert_eq!(b.release(&lease, &Ending { hold_until, ..ending(&lease) }).await.unwrap(), Released::Done);
    let id = lease_id(&second.name, second.who.owner.as_str());
    assert!(b.members.keep_alive(id).await.unwrap().is_some());
    b.note_start(&lease).await.unwrap();
    let held = a.inspect(&first.name).await.unwrap().holders.remove(0);
    assert!(held.expires_in.unwrap() > Duration::from_secs(60), "{held:?}");
}
