//! Tokens after etcd's revisions went back.

use dlock::backend::{Ask, Backend, Lease, Released, etcd};
use dlock::exit::Fault;
use dlock::lock::{Mode, State, Token};
use etcd_client::{Txn, TxnOp};

use super::{ask, ending, granted, open};
use crate::support::etcd::Etcd;

async fn put(etcd: &mut etcd::Etcd, key: String, value: String) {
    etcd.members.transact(Txn::new().and_then([TxnOp::put(key, value, None)])).await.unwrap();
}

#[tokio::test]
async fn a_token_that_is_not_greater_than_one_on_record_is_not_handed_out() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    for (n, mode) in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)].into_iter().enumerate() {
        let first = Ask { mode, ..ask(&format!("job-{n}")) };
        let lease = granted(&mut a, &first).await;
        let last_run = ending(&Lease { token: Token(1_000_000), ..lease.clone() }).last_run.unwrap().to_json();
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
        for (key, value) in
            [(a.keys.released(&first.name), "1000000".to_owned()), (a.keys.last_run(&first.name), last_run)]
        {
            put(&mut a, key.clone(), value).await;
            let error = b.try_acquire(&first).await.expect_err("a token that went back");
            let text = format!("{error:#}");
            assert!(Fault::of(&error) == Fault::StaleToken && text.contains("1000000"), "{text}");
            let state = b.inspect(&first.name).await.unwrap();
            assert_eq!((state.state, state.waiters.len()), (State::Free, 0), "its place is given back");
            let nothing = a.members.transact(Txn::new().and_then([TxnOp::delete(key, None)])).await;
            assert!(nothing.is_ok());
        }
        granted(&mut b, &first).await;
    }
}

#[tokio::test]
async fn one_of_many_holders_may_ask_late_for_a_token_that_is_lower_than_one_on_record() {
    let server = Etcd::new();
    let (mut a, mut b, mut c) = (open(&server, 0), open(&server, 0), open(&server, 0));
    for mode in [Mode::Shared, Mode::Slots(2)] {
        let holder = Ask { mode: if mode == Mode::Shared { Mode::Exclusive } else { mode }, ..ask("job") };
        let lease = granted(&mut a, &holder).await;
        let (late, early) = (Ask { mode, ..ask("job") }, Ask { mode, ..ask("job") });
        b.enter(&late).await.unwrap();
        if mode != Mode::Shared {
            granted(&mut b, &late).await;
        }
        c.enter(&early).await.unwrap();
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
        let early = granted(&mut c, &early).await;
        assert_eq!(c.release(&early, &ending(&early)).await.unwrap(), Released::Done);
        let late = granted(&mut b, &late).await;
        assert!(late.token < early.token);
        assert_eq!(b.release(&late, &ending(&late)).await.unwrap(), Released::Done);
    }
}
