//! The keeper against a backend that fails in every way, on a clock that does not have to be waited for.

mod scripted;

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use tokio::sync::mpsc::UnboundedSender;

use super::*;
use crate::lock::{Holder, Identity, LastRun, Mode};
use scripted::{Act, Call, Scripted};

const TTL: Duration = Duration::from_secs(30);

struct Stage {
    keeper: KeeperLoop,
    orders: UnboundedSender<Order>,
    events: Receiver<KeeperEvent>,
    /// When each deadline was pushed, and to which first-signal instant.
    pushed: Arc<Mutex<Vec<(Instant, Instant)>>>,
    calls: Arc<Mutex<Vec<Call>>>,
}

fn stage(script: &[Act]) -> Stage {
    stage_of(Scripted::new(TTL, script))
}

fn stage_of(backend: Scripted) -> Stage {
    let calls = Arc::clone(&backend.calls);
    let (orders, ordered) = unbounded_channel();
    let (tell, events) = channel();
    let pushed: Arc<Mutex<Vec<(Instant, Instant)>>> = Arc::default();
    let push = Arc::clone(&pushed);
    let timing = LeaseTiming::new(TTL, None).unwrap();
    let ask = Ask {
        name: "test".parse().unwrap(),
        who: Identity::of_this_process("true").unwrap(),
        mode: Mode::Exclusive,
        ttl: TTL,
        queue: true,
        once: None,
    };
    let patience = Patience { connect: Duration::from_secs(5), attempt: timing.attempt() };
    let keeper = KeeperLoop {
        backend: Box::new(backend),
        config: KeeperConfig { ask, ancestors: Vec::new(), timing, patience },
        ordered,
        teller: Teller { events: tell, wake: Arc::new(EventFd::new().unwrap()) },
        push: Box::new(move |next| push.lock().unwrap().push((clock::now(), next.signal_at))),
    };
    Stage { keeper, orders, events, pushed, calls }
}

fn ending() -> Ending {
    let last_run = LastRun::cut_short(&Holder::default(), "");
    Ending { last_run: Some(last_run), keep: 20, hold_until: None }
}

impl Stage {
    /// Lets the keeper work for so long, then orders a release and waits for its end.
    async fn hold_for(&mut self, span: Duration) {
        let orders = self.orders.clone();
        let release = async move {
            tokio::time::sleep(span).await;
            orders.send(Order::Release(Box::new(ending()))).unwrap();
        };
        tokio::join!(self.keeper.run(), release);
    }

    fn heard(&self, pattern: fn(&KeeperEvent) -> bool) -> usize {
        self.events.try_iter().filter(pattern).count()
    }

    /// Until when the last pushed deadline lets the command run.
    fn allowed_until(&self) -> Instant {
        self.pushed.lock().unwrap().last().unwrap().1
    }
}

#[tokio::test(start_paused = true)]
async fn renews_every_third_of_the_ttl_and_counts_from_before_the_request() {
    let mut stage = stage(&[]);
    let began = clock::now();
    stage.hold_for(Duration::from_secs(61)).await;
    let pushed = stage.pushed.lock().unwrap().clone();
    assert_eq!(pushed.len(), 6);
    for (n, (at, allowed)) in pushed.iter().enumerate() {
        let due = began + TTL / 3 * (n as u32 + 1);
        assert!(at.since(due) < Duration::from_millis(50), "renewal {n} came {:?} late", at.since(due));
        assert!(*allowed < due + TTL, "the deadline lies before the lease's end");
    }
    assert_eq!(stage.calls.lock().unwrap().last(), Some(&Call::Release));
}

#[tokio::test(start_paused = true)]
async fn what_is_granted_for_less_is_renewed_early_and_then_for_the_full_time() {
    let mut stage = stage(&[Act::Brief(TTL / 3)]);
    let began = clock::now();
    stage.hold_for(Duration::from_secs(40)).await;
    let pushed = stage.pushed.lock().unwrap().clone();
    for (n, (at, allowed)) in pushed.iter().enumerate() {
        let due = began + TTL / 9 + TTL / 3 * n as u32;
        assert!(at.since(due) < Duration::from_millis(50), "renewal {n} came {:?} late", at.since(due));
        assert!(*allowed > due + TTL / 3, "the next renewal comes before the first signal");
    }
    assert_eq!(pushed.len(), 4);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_counts_from_its_question() {
    // Answered after 1.5 s, within the attempt's 2 s: the lease is 1.5 s older than it looks.
    let mut stage = stage(&[Act::Good, Act::Late(Duration::from_millis(1500))]);
    stage.hold_for(Duration::from_secs(12)).await;
    let (at, allowed) = stage.pushed.lock().unwrap()[0];
    let timing = LeaseTiming::new(TTL, None).unwrap();
    let asked = at - Duration::from_millis(1500);
    let expected = timing.deadlines(crate::lock::Grant { from: asked, ttl: TTL, slack: Duration::ZERO }).signal_at;
    assert!(allowed <= expected + Duration::from_millis(1), "{allowed:?} {expected:?}");
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_renewal_pushes_nothing_and_is_asked_again() {
    let mut stage = stage(&[Act::Good, Act::Hang, Act::Unreachable, Act::Good]);
    let began = clock::now();
    stage.hold_for(Duration::from_secs(14)).await;
    let renewals = stage.calls.lock().unwrap().iter().filter(|call| **call == Call::Renew).count();
    assert_eq!(renewals, 3, "hang, refusal and success");
    let (at, _) = stage.pushed.lock().unwrap()[0];
    assert!(at >= began + TTL / 3 + Duration::from_secs(2), "only the third attempt may push");
    assert_eq!(stage.heard(|event| matches!(event, KeeperEvent::Trouble(_) | KeeperEvent::Recovered)), 2);
}

#[tokio::test(start_paused = true)]
async fn a_backend_that_hangs_for_ever_never_moves_the_deadline() {
    let mut stage = stage(&[&[Act::Good, Act::Good][..], &[Act::Hang; 50]].concat());
    stage.hold_for(Duration::from_secs(90)).await;
    assert_eq!(stage.pushed.lock().unwrap().len(), 1);
    assert!(stage.allowed_until().has_passed(), "by now the guardian has acted");
}

#[tokio::test(start_paused = true)]
async fn a_definite_loss_is_told_at_once_and_nothing_is_pushed_after_it() {
    let mut stage = stage(&[Act::Good, Act::Lose]);
    stage.hold_for(Duration::from_secs(60)).await;
    assert_eq!(stage.heard(|event| matches!(event, KeeperEvent::Lost(_))), 1);
    assert!(stage.pushed.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_was_taken_away_is_as_lost_as_any_other_and_says_why() {
    let mut stage = stage(&[Act::Good, Act::Take, Act::Take]);
    stage.hold_for(Duration::from_secs(60)).await;
    let heard: Vec<_> = stage.events.try_iter().collect();
    assert!(
        matches!(&heard[..], [KeeperEvent::Granted(..), KeeperEvent::ForceReleased(why), KeeperEvent::Released(Ok(Released::ForceReleased(again)))]
            if why == "because" && again == why),
        "{heard:?}"
    );
    assert!(stage.pushed.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_revoked_lease_is_not_renewed_any_more() {
    let mut stage = stage(&[Act::Good, Act::Revoke]);
    stage.hold_for(Duration::from_secs(60)).await;
    assert_eq!(stage.heard(|event| matches!(event, KeeperEvent::Revoked(_))), 1);
    assert!(stage.pushed.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_first_contact_fails_within_the_connect_timeout_and_takes_back_what_it_may_have_got() {
    let mut stage = stage(&[Act::Hang, Act::Hang]);
    let began = clock::now();
    stage.keeper.run().await;
    assert!(began.elapsed() < Duration::from_millis(5500), "{:?}", began.elapsed());
    assert_eq!(*stage.calls.lock().unwrap(), [Call::Acquire, Call::Withdraw]);
    let failed = stage.events.try_iter().find_map(|event| match event {
        KeeperEvent::Failed(error) => Some(crate::exit::Fault::of(&error)),
        _ => None,
    });
    assert_eq!(failed, Some(crate::exit::Fault::Unreachable));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_outlasts_an_outage_but_not_a_refusal() {
    let mut stage = stage(&[Act::Busy, Act::Unreachable, Act::Hang, Act::Busy, Act::Refuse]);
    stage.keeper.run().await;
    let heard: Vec<_> = stage.events.try_iter().collect();
    assert!(
        matches!(
            heard[..],
            [
                KeeperEvent::Busy(_),
                KeeperEvent::Trouble(_),
                KeeperEvent::Recovered,
                KeeperEvent::Busy(_),
                KeeperEvent::Failed(_)
            ]
        ),
        "{heard:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn giving_up_in_the_moment_of_the_grant_lets_go_of_it() {
    let mut stage = stage(&[]);
    let orders = stage.orders.clone();
    let give_up = async move {
        tokio::time::sleep(Duration::from_millis(1)).await;
        orders.send(Order::GiveUp).unwrap();
    };
    tokio::join!(stage.keeper.run(), give_up);
    assert_eq!(*stage.calls.lock().unwrap(), [Call::Acquire, Call::Withdraw]);
    assert_eq!(stage.heard(|event| matches!(event, KeeperEvent::Withdrawn)), 1);
}

/// What the keeper says of a release that meets this.
async fn released_after(script: &[Act]) -> Released {
    let mut stage = stage(&[&[Act::Good], script].concat());
    stage.hold_for(Duration::from_secs(1)).await;
    let answer = stage.events.try_iter().find_map(|event| match event {
        KeeperEvent::Released(released) => Some(released),
        _ => None,
    });
    answer.unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_release_whose_answer_got_lost_is_not_taken_for_a_loss() {
    assert_eq!(released_after(&[Act::Hang, Act::Lose]).await, Released::Done);
    assert_eq!(released_after(&[Act::Unreachable, Act::Lose]).await, Released::Done);
    assert_eq!(released_after(&[Act::Lose]).await, Released::NotOurs);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_is_lost_before_anything_started_is_given_back() {
    let mut stage = stage(&[Act::Busy, Act::Unreachable, Act::Late(TTL / 3), Act::Lose]);
    stage.keeper.config.patience.attempt = TTL;
    stage.keeper.run().await;
    assert_eq!(stage.calls.lock().unwrap()[2..], [Call::Acquire, Call::Renew, Call::Withdraw]);
    let failed = |event| matches!(event, KeeperEvent::Failed(error) if crate::exit::Fault::of(&error) == crate::exit::Fault::NotOurs);
    assert!(stage.events.try_iter().any(failed));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_tried_again_until_the_lease_has_run_out() {
    let mut stage = stage(&[&[Act::Good][..], &[Act::Unreachable; 2], &[Act::Good]].concat());
    stage.hold_for(Duration::from_secs(1)).await;
    assert_eq!(stage.calls.lock().unwrap().iter().filter(|call| **call == Call::Release).count(), 3);
    assert_eq!(stage.heard(|event| matches!(event, KeeperEvent::Released(Ok(Released::Done)))), 1);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_was_long_on_its_way_is_renewed_before_anything_starts() {
    let mut stage = stage(&[Act::Late(Duration::from_millis(4900))]);
    stage.keeper.config.timing = LeaseTiming::new(Duration::from_secs(12), None).unwrap();
    stage.hold_for(Duration::from_secs(6)).await;
    assert_eq!(stage.calls.lock().unwrap()[..2], [Call::Acquire, Call::Renew]);
}

/// Waits as the main thread does.
fn next(keeper: &Keeper) -> KeeperEvent {
    loop {
        if let Some(event) = keeper.next() {
            return event;
        }
        poll(&mut [PollFd::new(keeper.events(), PollFlags::POLLIN)], PollTimeout::NONE).unwrap();
        keeper.heard();
    }
}

#[test]
fn a_keeper_whose_thread_is_blocked_leaves_the_main_thread_free() {
    let config = stage(&[]).keeper.config;
    let span = Duration::from_millis(300);
    let backend = Scripted::new(TTL, &[Act::Brief(span), Act::Block(span)]);
    let calls = Arc::clone(&backend.calls);
    let keeper = Keeper::begin(config, || Ok(Box::new(backend)), |_| ()).unwrap();
    assert!(matches!(next(&keeper), KeeperEvent::Granted(..)));
    while calls.lock().unwrap().last() != Some(&Call::Renew) {
        std::thread::yield_now();
    }
    assert!(keeper.next().is_none(), "asking does not wait for the blocked thread");
    assert!(matches!(next(&keeper), KeeperEvent::Renewed(_)));
}

#[tokio::test(start_paused = true)]
async fn what_is_over_soon_is_never_asked_for_in_between() {
    let mut stage = stage(&[]);
    stage.hold_for(QUIET / 2).await;
    assert_eq!(stage.calls.lock().unwrap()[..], [Call::Acquire, Call::Release]);
    assert_eq!(stage.heard(|event| matches!(event, KeeperEvent::Released(Ok(Released::Done)))), 1);
}

#[tokio::test(start_paused = true)]
async fn the_start_of_a_run_is_noted_once_and_a_failure_is_mended_after_a_renewal() {
    let mut backend = Scripted::new(TTL, &[]);
    backend.unnoted = 1;
    let mut stage = stage_of(backend);
    stage.hold_for(3 * TTL).await;
    let calls = stage.calls.lock().unwrap();
    assert_eq!(calls[..5], [Call::Acquire, Call::NoteStart, Call::Renew, Call::NoteStart, Call::Renew]);
    assert_eq!(calls.iter().filter(|call| **call == Call::NoteStart).count(), 2);
}
