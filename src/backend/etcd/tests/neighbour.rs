//! Who comes after whom, when those in between come and go.

use super::*;
use crate::lock::Token;

#[tokio::test]
async fn a_neighbour_that_gave_up_leaves_us_behind_the_holder() {
    let server = Server::start(1);
    let (mut a, mut b, mut c) = (server.open().await, server.open().await, server.open().await);
    let [first, second, third] = [ask("job"), ask("job"), ask("job")];
    let lease = granted(&mut a, &first).await;
    assert_eq!(busy(&mut b, &second).await.ahead, Some(1));
    assert_eq!(busy(&mut c, &third).await.ahead, Some(2));
    // Somebody let go, whose token says nothing about our neighbour.
    let other = a.say_released(&first.name, Token(u64::MAX >> 1));
    a.transact(Txn::new().and_then([other])).await.unwrap();
    b.withdraw(&second).await.unwrap();
    woken(&mut c).await;
    assert_eq!(busy(&mut c, &third).await.ahead, Some(1));
    assert_eq!(a.release(&lease, &ending(&lease, None)).await.unwrap(), Released::Done);
    woken(&mut c).await;
    assert!(granted(&mut c, &third).await.token > lease.token);
}

#[tokio::test]
async fn a_neighbour_that_let_go_and_left_its_key_is_waited_for() {
    let server = Server::start(1);
    let (mut a, mut b) = (server.open().await, server.open().await);
    let (first, second) = (ask("job"), ask("job"));
    let lease = granted(&mut a, &first).await;
    assert_eq!(busy(&mut b, &second).await.ahead, Some(1));
    let hold_until = Some(crate::clock::now() + Duration::from_secs(600));
    let kept = Ending { hold_until, ..ending(&lease, None) };
    assert_eq!(a.release(&lease, &kept).await.unwrap(), Released::Done);
    assert_eq!(busy(&mut b, &second).await.ahead, Some(1));
    assert_eq!(a.rehold(&first.name, &first.who.owner, Duration::ZERO).await.unwrap(), Reheld::Done);
    woken(&mut b).await;
    assert!(granted(&mut b, &second).await.token > lease.token);
}

#[tokio::test]
async fn our_turn_does_not_come_when_our_own_key_is_gone() {
    let server = Server::start(1);
    let (mut a, mut b) = (server.open().await, server.open().await);
    let (first, second) = (ask("job"), ask("job"));
    let lease = granted(&mut a, &first).await;
    busy(&mut b, &second).await;
    delete_lease(&mut a, &second).await;
    let third = ask("job");
    let mut c = server.open().await;
    busy(&mut c, &third).await;
    assert_eq!(a.release(&lease, &ending(&lease, None)).await.unwrap(), Released::Done);
    // It has to take a new place, behind the other.
    assert_eq!(busy(&mut b, &second).await.ahead, Some(1));
    granted(&mut c, &third).await;
}
