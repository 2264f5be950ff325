//! What servers forget, and what they number anew.

use super::*;

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
    let server = Server::shared();
    let [mut holder, mut next, mut last] = [server.client(), server.client(), server.client()];
    let [first, second, third] =
        [(); 3].map(|()| Ask { ttl: Duration::from_secs(5), ..ask("lost-data", Mode::Exclusive) });
    granted(holder.try_acquire(&first).await.unwrap());
    busy(next.try_acquire(&second).await.unwrap());
    assert_eq!(busy(last.try_acquire(&third).await.unwrap()).ahead, Some(2));
    // As a server without its data would: it knows none of these sessions.
    let mut ending = server.client();
    for client in [&holder, &next, &last] {
        ending.ensemble.session = client.ensemble.session.clone();
        ending.ensemble.close().await.unwrap();
    }
    let gone = clock::now();
    assert_eq!(busy(answered(&mut last, &third).await).ahead, Some(0));
    assert_eq!(busy(answered(&mut next, &second).await).ahead, Some(1));
    while let Attempt::Busy(waiting) = answered(&mut last, &third).await {
        clock::sleep_until(waiting.ask_again).await;
    }
    assert!(gone.elapsed() >= first.ttl);
}

#[tokio::test]
async fn a_holder_whose_session_ends_is_not_waited_for_any_longer() {
    let server = Server::shared();
    let [mut holder, mut next] = [server.client(), server.client()];
    let [first, second] = [(); 2].map(|()| ask("ended", Mode::Exclusive));
    granted(holder.try_acquire(&first).await.unwrap());
    busy(next.try_acquire(&second).await.unwrap());
    holder.ensemble.close().await.unwrap();
    hinted(&mut next).await;
    granted(next.try_acquire(&second).await.unwrap());
}

#[tokio::test]
async fn a_token_that_is_not_greater_than_one_on_record_is_not_handed_out() {
    let server = Server::shared();
    let (mut client, mut other) = (server.client_under("went-back"), server.client_under("went-back"));
    for (n, mode) in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)].into_iter().enumerate() {
        let ask = ask(&format!("job-{n}"), mode);
        let lease = granted(client.try_acquire(&ask).await.unwrap());
        assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
        let high = Lease { token: Token(lease.token.0 + 1_000_000), ..lease };
        let record = ending(&high).last_run.unwrap().to_json();
        other.visit().await.unwrap();
        let meta = other.meta_path(&ask.name);
        let write = |text: &str| Request::set_data(&meta, text.as_bytes(), wire::ANY_VERSION);
        other.ensemble.call_one(write(&record)).await.unwrap().unwrap();
        let error = client.try_acquire(&ask).await.expect_err("a token that went back");
        let text = format!("{error:#}");
        assert!(Fault::of(&error) == Fault::StaleToken && text.contains(&high.token.to_string()), "{text}");
        let state = other.inspect(&ask.name).await.unwrap();
        assert_eq!((state.state, state.waiters.len()), (State::Free, 0), "its place is given back");
        other.visit().await.unwrap();
        other.ensemble.call_one(write("")).await.unwrap().unwrap();
        granted(client.try_acquire(&ask).await.unwrap());
        client.withdraw(&ask).await.unwrap();
    }
}
