//! What servers forget, and what they number anew.

use std::time::Duration;

use dlock::backend::zookeeper::ZooKeeper;
use dlock::backend::zookeeper::wire::{self, Request};
use dlock::backend::{Ask, Attempt, Backend, Lease, Released};
use dlock::clock;
use dlock::exit::Fault;
use dlock::lock::{Mode, State, Token};

use super::{ZooKeeperBed, ask, busy, ending, granted, open, open_under, told};

/// Asks until somebody answers, as the keeper does: the server closes connections with their sessions.
async fn answered(client: &mut ZooKeeper, ask: &Ask) -> Attempt {
    loop {
        if let Ok(attempt) = client.try_acquire(ask).await {
            return attempt;
        }
    }
}

#[tokio::test]
async fn every_waiter_waits_out_a_holder_that_vanished_with_its_own_session() {
    let server = ZooKeeperBed::shared();
    let [mut holder, mut next, mut last] = [open(&server), open(&server), open(&server)];
    let [first, second, third] =
        [(); 3].map(|()| Ask { ttl: Duration::from_secs(5), ..ask("lost-data", Mode::Exclusive) });
    granted(&mut holder, &first).await;
    busy(&mut next, &second).await;
    assert_eq!(busy(&mut last, &third).await.ahead, Some(1));
    // As a server without its data would: it knows none of these sessions.
    let mut ending = open(&server);
    for client in [&holder, &next, &last] {
        ending.ensemble.session = client.ensemble.session.clone();
        ending.ensemble.close().await.unwrap();
    }
    let gone = clock::now();
    assert!(matches!(answered(&mut last, &third).await, Attempt::Busy(busy) if busy.ahead == Some(0)));
    assert!(matches!(answered(&mut next, &second).await, Attempt::Busy(busy) if busy.ahead == Some(0)));
    while let Attempt::Busy(waiting) = answered(&mut last, &third).await {
        clock::sleep_until(waiting.ask_again).await;
    }
    assert!(gone.elapsed() >= first.ttl);
}

#[tokio::test]
async fn a_holder_whose_session_ends_is_not_waited_for_any_longer() {
    let server = ZooKeeperBed::shared();
    let [mut holder, mut next] = [open(&server), open(&server)];
    let [first, second] = [(); 2].map(|()| ask("ended", Mode::Exclusive));
    granted(&mut holder, &first).await;
    busy(&mut next, &second).await;
    holder.ensemble.close().await.unwrap();
    told(&mut next).await;
    granted(&mut next, &second).await;
}

#[tokio::test]
async fn a_token_that_is_not_greater_than_one_on_record_is_not_handed_out() {
    let server = ZooKeeperBed::shared();
    let (mut client, mut other) = (open_under(&server, "went-back"), open_under(&server, "went-back"));
    for (n, mode) in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)].into_iter().enumerate() {
        let ask = ask(&format!("job-{n}"), mode);
        let lease = granted(&mut client, &ask).await;
        assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
        let high = Lease { token: Token(lease.token.0 + 1_000_000), ..lease };
        let record = ending(&high).last_run.unwrap().to_json();
        other.visit().await.unwrap();
        let meta = other.paths.history(&ask.name);
        let write = |text: &str| Request::set_data(&meta, text.as_bytes(), wire::ANY_VERSION);
        other.ensemble.call_one(write(&record)).await.unwrap().unwrap();
        let error = client.try_acquire(&ask).await.expect_err("a token that went back");
        let text = format!("{error:#}");
        assert!(Fault::of(&error) == Fault::StaleToken && text.contains(&high.token.to_string()), "{text}");
        let state = other.inspect(&ask.name).await.unwrap();
        assert_eq!((state.state, state.waiters.len()), (State::Free, 0), "its place is given back");
        other.visit().await.unwrap();
        other.ensemble.call_one(write("")).await.unwrap().unwrap();
        granted(&mut client, &ask).await;
        client.withdraw(&ask).await.unwrap();
    }
}
