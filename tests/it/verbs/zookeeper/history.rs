//! What a lock keeps of its runs.

use dlock::backend::zookeeper::ZooKeeper;
use dlock::backend::zookeeper::wire::{self, Request};
use dlock::backend::{Ask, Attempt, Backend, Ending, Forget, Forgotten, Lease, Released, Revoke, Revoked};
use dlock::lock::{LastRun, LockName, Mode, Outcome, Token};

use super::{ZooKeeperBed, ask, ending, granted, open, open_under};

async fn runs(client: &mut ZooKeeper, name: &LockName) -> Vec<LastRun> {
    let state = client.inspect(name).await.unwrap();
    state.last_run.into_iter().chain(state.earlier).collect()
}

async fn tokens(client: &mut ZooKeeper, name: &LockName) -> Vec<Token> {
    runs(client, name).await.iter().map(|run| run.fencing_token).collect()
}

async fn notes(client: &mut ZooKeeper, name: &LockName) -> usize {
    client.visit().await.unwrap();
    let notes = client.ensemble.children(&format!("/verbs-meta/~noted/{name}")).await.unwrap().len();
    client.end_visit().await;
    notes
}

async fn run(client: &mut ZooKeeper, ask: &Ask, keep: usize) -> Lease {
    let lease = granted(client, ask).await;
    assert_eq!(client.release(&lease, &Ending { keep, ..ending(&lease) }).await.unwrap(), Released::Done);
    lease
}

/// As the server does when nobody renews it.
async fn end_session(of: &ZooKeeper, server: &ZooKeeperBed) {
    let mut other = open(server);
    other.ensemble.session = of.ensemble.session.clone();
    other.ensemble.close().await.unwrap();
}

#[tokio::test]
async fn the_last_runs_are_kept_newest_first_and_no_more_than_wanted() {
    let server = ZooKeeperBed::shared();
    let (mut client, mut other) = (open_under(&server, "kept"), open_under(&server, "kept"));
    let job = ask("kept", Mode::Exclusive);
    let first = run(&mut client, &job, 20).await;
    // As an older dlock leaves it, while another one holds the lock.
    let lease = granted(&mut client, &job).await;
    let old = ending(&first).last_run.unwrap().to_json();
    other.visit().await.unwrap();
    other.ensemble.call_one(Request::set_data("/kept-meta/kept", old.as_bytes(), -1)).await.unwrap().unwrap();
    assert_eq!(client.release(&lease, &ending(&lease)).await.unwrap(), Released::Done);
    let mut expected = vec![lease.token, first.token];
    for _ in 0..3 {
        assert_eq!(tokens(&mut client, &job.name).await, expected);
        expected.insert(0, run(&mut client, &job, 20).await.token);
    }
    expected.insert(0, run(&mut client, &job, 2).await.token);
    assert_eq!(tokens(&mut client, &job.name).await, expected[..2]);
}

#[tokio::test]
async fn a_run_that_ends_meanwhile_is_not_overwritten() {
    let server = ZooKeeperBed::shared();
    let (mut a, mut b) = (open(&server), open(&server));
    for mode in [Mode::Shared, Mode::Slots(2)] {
        let (first, second) = (ask("meanwhile", mode), ask("meanwhile", mode));
        let (one, other) = (granted(&mut a, &first).await, granted(&mut b, &second).await);
        assert_eq!(a.release(&one, &ending(&one)).await.unwrap(), Released::Done);
        assert_eq!(b.release(&other, &ending(&other)).await.unwrap(), Released::Done);
        assert_eq!(tokens(&mut a, &first.name).await[..2], [other.token, one.token]);
        assert_eq!(a.release(&one, &ending(&one)).await.unwrap(), Released::Done, "it is still recognised");
    }
    assert_eq!(tokens(&mut a, &"meanwhile".parse().unwrap()).await.len(), 4);
}

#[tokio::test]
async fn a_run_that_vanished_is_shown_and_the_next_release_keeps_it() {
    let server = ZooKeeperBed::shared();
    for mode in [Mode::Exclusive, Mode::Shared, Mode::Slots(2)] {
        let (mut a, mut b) = (open(&server), open(&server));
        let name = format!("vanished-{}", mode.slots() + u32::from(mode == Mode::Shared) * 10);
        let (first, second) = (ask(&name, mode), ask(&name, mode));
        let name = &first.name;
        let earlier = run(&mut a, &first, 20).await;
        let lease = granted(&mut a, &first).await;
        a.note_start(&lease).await.unwrap();
        a.note_start(&lease).await.unwrap();
        assert_eq!(tokens(&mut b, name).await, [earlier.token], "it runs");
        end_session(&a, &server).await;
        let seen = runs(&mut b, name).await;
        assert_eq!((seen[0].outcome, seen[0].fencing_token), (Outcome::Vanished, lease.token));
        assert_eq!((&seen[0].command[..], seen[0].pid), ("make all", Some(std::process::id())));
        assert_eq!(seen.len(), 2);

        let next = granted(&mut b, &second).await;
        b.note_start(&next).await.unwrap();
        assert_eq!(notes(&mut open(&server), name).await, 2);
        assert_eq!(b.release(&next, &ending(&next)).await.unwrap(), Released::Done);
        let kept = runs(&mut b, name).await;
        assert_eq!(kept[0].fencing_token, next.token);
        assert_eq!(kept[1..], seen[..]);
        assert_eq!(notes(&mut b, name).await, 0);
    }
}

#[tokio::test]
async fn a_note_that_comes_late_or_for_nothing_does_not_stay() {
    let server = ZooKeeperBed::shared();
    let (mut client, mut operator) = (open(&server), open(&server));
    let job = ask("noted", Mode::Exclusive);
    let lease = granted(&mut client, &job).await;
    operator.visit().await.unwrap();
    let path = client.place.as_ref().unwrap().path.clone();
    operator.ensemble.call_one(Request::delete(&path, -1)).await.unwrap().unwrap();
    client.note_start(&lease).await.unwrap();
    assert_eq!(notes(&mut operator, &job.name).await, 0, "its place is gone");
    client.withdraw(&job).await.unwrap();

    let lease = granted(&mut client, &job).await;
    client.note_start(&lease).await.unwrap();
    assert_eq!(notes(&mut operator, &job.name).await, 1);
    client.withdraw(&job).await.unwrap();
    assert_eq!(notes(&mut operator, &job.name).await, 0);
}

#[tokio::test]
async fn what_is_cut_short_comes_on_top_of_the_others() {
    let server = ZooKeeperBed::shared();
    let (mut a, mut b) = (open(&server), open(&server));
    let job = ask("cut-short", Mode::Exclusive);
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
    let server = ZooKeeperBed::shared();
    let (mut a, mut b) = (open(&server), open(&server));
    let job = Ask { once: Some("to/day".into()), ..ask("forgetful", Mode::Exclusive) };
    let (once, everything) = (Forget::Once("to/day".into()), Forget::Everything);
    assert_eq!(b.forget(&job.name, &everything).await.unwrap(), Forgotten::Nothing);
    assert_eq!(b.forget(&job.name, &once).await.unwrap(), Forgotten::Nothing);
    let mut last = Token(0);
    for what in [&once, &everything] {
        let lease = granted(&mut a, &job).await;
        assert!(lease.token > last);
        last = lease.token;
        assert_eq!(b.forget(&job.name, &everything).await.unwrap(), Forgotten::InUse);
        let mut end = ending(&lease);
        end.last_run.as_mut().unwrap().once.clone_from(&job.once);
        assert_eq!(a.release(&lease, &end).await.unwrap(), Released::Done);
        assert!(matches!(a.try_acquire(&job).await.unwrap(), Attempt::AlreadyRan));
        assert_eq!(b.forget(&job.name, what).await.unwrap(), Forgotten::Done);
    }
    assert_eq!(b.forget(&job.name, &everything).await.unwrap(), Forgotten::Nothing);
    assert!(runs(&mut b, &job.name).await.is_empty());
    b.visit().await.unwrap();
    let rest = b.ensemble.call_one(Request::get_data("/verbs-meta/forgetful")).await.unwrap().unwrap();
    let (rest, _) = wire::read_data(&rest).unwrap();
    assert_eq!(String::from_utf8(rest).unwrap(), format!("{{\"fencing_token\":{last}}}"), "lower tokens are refused");
    assert!(granted(&mut a, &job).await.token > last);
}
