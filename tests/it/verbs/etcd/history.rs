//! What a lock keeps of its runs.

use std::time::Duration;

use dlock::backend::{Ask, Attempt, Backend, Ending, Forget, Forgotten, Lease, Released, Revoke, Revoked, etcd};
use dlock::clock;
use dlock::lock::{LastRun, LockName, Mode, Outcome, Token};
use etcd_client::{GetOptions, Txn, TxnOp};

use super::{ask, busy, delete_lease, ending, granted, open};
use crate::support::etcd::Etcd;

async fn runs(etcd: &mut etcd::Etcd, name: &LockName) -> Vec<LastRun> {
    let state = etcd.inspect(name).await.unwrap();
    state.last_run.into_iter().chain(state.earlier).collect()
}

async fn tokens(etcd: &mut etcd::Etcd, name: &LockName) -> Vec<Token> {
    runs(etcd, name).await.iter().map(|run| run.fencing_token).collect()
}

async fn notes(etcd: &mut etcd::Etcd, name: &LockName) -> i64 {
    let count = GetOptions::new().with_prefix().with_count_only();
    let look = Txn::new().and_then([TxnOp::get(etcd.keys.all_noted(name), Some(count))]);
    let answer = etcd.members.transact(look).await.unwrap();
    match answer.op_responses().remove(0) {
        etcd_client::TxnOpResponse::Get(range) => range.count(),
        other => panic!("{other:?}"),
    }
}

async fn run(etcd: &mut etcd::Etcd, ask: &Ask, keep: usize) -> Lease {
    let lease = granted(etcd, ask).await;
    assert_eq!(etcd.release(&lease, &Ending { keep, ..ending(&lease) }).await.unwrap(), Released::Done);
    lease
}

#[tokio::test]
async fn the_last_runs_are_kept_newest_first_and_no_more_than_wanted() {
    let server = Etcd::new();
    let mut a = open(&server, 0);
    let job = ask("n");
    // As an older dlock left it.
    let lease = granted(&mut a, &job).await;
    let old = ending(&lease).last_run.unwrap().to_json();
    let put = TxnOp::put(a.keys.last_run(&job.name), old, None);
    a.members.transact(Txn::new().and_then([put])).await.unwrap();
    a.withdraw(&job).await.unwrap();
    let mut expected = vec![lease.token];
    for _ in 0..3 {
        expected.insert(0, run(&mut a, &job, 20).await.token);
        assert_eq!(tokens(&mut a, &job.name).await, expected);
    }
    expected.insert(0, run(&mut a, &job, 2).await.token);
    assert_eq!(tokens(&mut a, &job.name).await, expected[..2]);
}

#[tokio::test]
async fn a_run_that_ends_meanwhile_is_not_overwritten() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    for mode in [Mode::Shared, Mode::Slots(2)] {
        let (first, second) = (Ask { mode, ..ask("n") }, Ask { mode, ..ask("n") });
        let (one, other) = (granted(&mut a, &first).await, granted(&mut b, &second).await);
        assert_eq!(a.release(&one, &ending(&one)).await.unwrap(), Released::Done);
        assert_eq!(b.release(&other, &ending(&other)).await.unwrap(), Released::Done);
        assert_eq!(tokens(&mut a, &first.name).await[..2], [other.token, one.token]);
        assert_eq!(a.release(&one, &ending(&one)).await.unwrap(), Released::Done, "it is still recognised");
    }
    assert_eq!(tokens(&mut a, &ask("n").name).await.len(), 4);
}

#[tokio::test]
async fn a_run_that_vanished_is_shown_and_the_next_release_keeps_it() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    for mode in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)] {
        let name = format!("n-{}-{}", mode.slots(), mode == Mode::Shared);
        let (first, second) = (Ask { mode, ..ask(&name) }, Ask { mode, ..ask(&name) });
        let name = &first.name;
        let earlier = run(&mut a, &first, 20).await;
        let lease = granted(&mut a, &first).await;
        a.note_start(&lease).await.unwrap();
        a.note_start(&lease).await.unwrap();
        assert_eq!(tokens(&mut b, name).await, [earlier.token], "it runs");
        delete_lease(&mut b, &first).await;
        let seen = runs(&mut b, name).await;
        assert_eq!((seen[0].outcome, seen[0].fencing_token), (Outcome::Vanished, lease.token));
        assert_eq!((&seen[0].command[..], seen[0].pid), ("make all", Some(std::process::id())));
        assert_eq!(seen.len(), 2);

        let next = granted(&mut b, &second).await;
        b.note_start(&next).await.unwrap();
        assert_eq!(b.release(&next, &ending(&next)).await.unwrap(), Released::Done);
        let kept = runs(&mut b, name).await;
        assert_eq!(kept[0].fencing_token, next.token);
        assert_eq!(kept[1..], seen[..]);
        assert_eq!(notes(&mut b, name).await, 0);
        assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::NotOurs);
    }
}

#[tokio::test]
async fn others_that_share_the_lock_have_not_vanished() {
    let server = Etcd::new();
    let (mut a, mut b, mut c) = (open(&server, 0), open(&server, 0), open(&server, 0));
    let writer = ask("n");
    let readers = [(); 2].map(|()| Ask { mode: Mode::Shared, ..ask("n") });
    let writing = granted(&mut c, &writer).await;
    busy(&mut a, &readers[0]).await;
    busy(&mut b, &readers[1]).await;
    assert_eq!(c.release(&writing, &ending(&writing)).await.unwrap(), Released::Done);
    // The later one comes first, and the other does not look so far.
    let later = granted(&mut b, &readers[1]).await;
    b.note_start(&later).await.unwrap();
    let one = granted(&mut a, &readers[0]).await;
    assert_eq!(a.release(&one, &ending(&one)).await.unwrap(), Released::Done);
    assert_eq!(tokens(&mut a, &writer.name).await, [one.token, writing.token]);
    assert_eq!(b.release(&later, &ending(&later)).await.unwrap(), Released::Done);
    assert_eq!(tokens(&mut a, &writer.name).await, [later.token, one.token, writing.token]);
}

#[tokio::test]
async fn a_note_that_comes_late_or_for_nothing_does_not_stay() {
    let server = Etcd::new();
    let mut a = open(&server, 0);
    let (first, second) = (ask("n"), ask("m"));
    let lease = granted(&mut a, &first).await;
    let hold_until = Some(clock::now() + Duration::from_secs(600));
    assert_eq!(a.release(&lease, &Ending { hold_until, ..ending(&lease) }).await.unwrap(), Released::Done);
    a.note_start(&lease).await.unwrap();
    assert_eq!(notes(&mut a, &first.name).await, 0, "its key is there, but left behind");

    let lease = granted(&mut a, &second).await;
    a.note_start(&lease).await.unwrap();
    assert_eq!(notes(&mut a, &second.name).await, 1);
    a.withdraw(&second).await.unwrap();
    assert_eq!(notes(&mut a, &second.name).await, 0);
}

#[tokio::test]
async fn what_is_cut_short_comes_on_top_of_the_others() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let job = ask("n");
    let earlier = run(&mut a, &job, 20).await;
    let lease = granted(&mut a, &job).await;
    a.note_start(&lease).await.unwrap();
    let holder = b.inspect(&job.name).await.unwrap().holders.remove(0);
    let now = Revoke::Now { reason: "stuck".into() };
    assert_eq!(b.revoke(&job.name, &holder, &now).await.unwrap(), Revoked::Freed);
    assert_eq!(a.release(&lease, &ending(&lease)).await.unwrap(), Released::ForceReleased("stuck".into()));
    let seen = runs(&mut b, &job.name).await;
    assert_eq!((seen[0].outcome, seen[0].reason.as_deref()), (Outcome::Lost, Some("stuck")));
    assert_eq!(tokens(&mut b, &job.name).await, [lease.token, earlier.token]);
    assert_eq!(notes(&mut b, &job.name).await, 0);
}

#[tokio::test]
async fn what_is_forgotten_is_gone_but_tokens_go_on() {
    let server = Etcd::new();
    let (mut a, mut b) = (open(&server, 0), open(&server, 0));
    let job = Ask { once: Some("today".into()), ..ask("n") };
    let forget = |what| (job.name.clone(), what);
    let once = forget(Forget::Once("today".into()));
    let everything = forget(Forget::Everything);
    assert_eq!(b.forget(&everything.0, &everything.1).await.unwrap(), Forgotten::Nothing);
    assert_eq!(b.forget(&once.0, &once.1).await.unwrap(), Forgotten::Nothing);
    let mut last = Token(0);
    for what in [&once, &everything] {
        let lease = granted(&mut a, &job).await;
        assert!(lease.token > last);
        last = lease.token;
        assert_eq!(b.forget(&everything.0, &everything.1).await.unwrap(), Forgotten::InUse);
        let mut end = ending(&lease);
        end.last_run.as_mut().unwrap().once.clone_from(&job.once);
        assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done);
        assert!(matches!(a.try_acquire(&job).await.unwrap(), Attempt::AlreadyRan));
        assert_eq!(b.forget(&what.0, &what.1).await.unwrap(), Forgotten::Done);
    }
    assert!(runs(&mut b, &job.name).await.is_empty());
    let look = Txn::new().and_then([TxnOp::get(b.keys.released(&job.name), None)]);
    let answer = b.members.transact(look).await.unwrap();
    let etcd_client::TxnOpResponse::Get(released) = answer.op_responses().remove(0) else { panic!("{answer:?}") };
    assert_eq!(released.kvs()[0].value(), last.to_string().as_bytes(), "what refuses lower tokens stays");
    assert!(granted(&mut a, &job).await.token > last);
}
