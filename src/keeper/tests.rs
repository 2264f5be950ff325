//! The keeper against a backend that fails in every way, on a clock that does not have to be waited for.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::eventfd::EventFd;
use tokio::sync::mpsc::UnboundedSender;

use super::*;
use crate::backend::scripted::{Act, Call, Scripted};
use crate::clock::{self, Instant};
use crate::lock::{Identity, LastRun, Mode, Outcome, Token};

const TTL: Duration = Duration::from_secs(30);

struct Stage {
    duty: Duty,
    orders: UnboundedSender<Order>,
    news: Receiver<News>,
    /// When each deadline was pushed, and to which first-signal instant.
    pushed: Arc<Mutex<Vec<(Instant, Instant)>>>,
    calls: Arc<Mutex<Vec<Call>>>,
}

fn stage(script: &[Act]) -> Stage {
    let backend = Scripted::new(TTL, script);
    let calls = Arc::clone(&backend.calls);
    let (orders, ordered) = unbounded_channel();
    let (tell, news) = channel();
    let pushed: Arc<Mutex<Vec<(Instant, Instant)>>> = Arc::default();
    let push = Arc::clone(&pushed);
    let terms = Terms::new(TTL, None).unwrap();
    let ask = Ask {
        name: "test".parse().unwrap(),
        who: Identity::of_this_process("true").unwrap(),
        mode: Mode::Exclusive,
        ttl: TTL,
        queue: true,
        once: None,
    };
    let patience = Patience { connect: Duration::from_secs(5), attempt: terms.attempt() };
    let duty = Duty {
        backend: Box::new(backend),
        charge: Charge { ask, ancestors: Vec::new(), terms, patience },
        ordered,
        tell: Teller { news: tell, bell: Arc::new(EventFd::new().unwrap()) },
        push: Box::new(move |next| push.lock().unwrap().push((clock::now(), next.signal_at))),
    };
    Stage { duty, orders, news, pushed, calls }
}

fn ending() -> Ending {
    let last_run = LastRun {
        fencing_token: Token(1),
        host: String::new(),
        user: String::new(),
        command: String::new(),
        started_at: clock::wall(),
        ended_at: None,
        outcome: Outcome::Exited,
        exit_code: Some(0),
        once: None,
        reason: None,
    };
    Ending { last_run: Some(last_run), hold_until: None }
}

impl Duty {
    async fn whole(&mut self) {
        if let Some(lease) = self.begin().await {
            self.go_on(lease).await;
        }
    }
}

impl Stage {
    /// Lets the keeper work for so long, then orders a release and waits for its end.
    async fn hold_for(&mut self, span: Duration) {
        let orders = self.orders.clone();
        let release = async move {
            tokio::time::sleep(span).await;
            orders.send(Order::Release(Box::new(ending()))).unwrap();
        };
        tokio::join!(self.duty.whole(), release);
    }

    fn heard(&self, pattern: fn(&News) -> bool) -> usize {
        self.news.try_iter().filter(pattern).count()
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
    let terms = Terms::new(TTL, None).unwrap();
    let asked = at - Duration::from_millis(1500);
    let expected = terms.deadlines(crate::lock::Term { from: asked, ttl: TTL, slack: Duration::ZERO }).signal_at;
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
    assert_eq!(stage.heard(|news| matches!(news, News::Trouble(_) | News::Recovered)), 2);
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
    assert_eq!(stage.heard(|news| matches!(news, News::Lost(_))), 1);
    assert!(stage.pushed.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_was_taken_away_is_as_lost_as_any_other_and_says_why() {
    let mut stage = stage(&[Act::Good, Act::Take, Act::Take]);
    stage.hold_for(Duration::from_secs(60)).await;
    let heard: Vec<_> = stage.news.try_iter().collect();
    assert!(
        matches!(&heard[..], [News::Granted(..), News::Taken(why), News::Released(Ok(Released::Taken(again)))]
            if why == "because" && again == why),
        "{heard:?}"
    );
    assert!(stage.pushed.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_revoked_lease_is_not_renewed_any_more() {
    let mut stage = stage(&[Act::Good, Act::Revoke]);
    stage.hold_for(Duration::from_secs(60)).await;
    assert_eq!(stage.heard(|news| matches!(news, News::Revoked(_))), 1);
    assert!(stage.pushed.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_first_contact_fails_within_the_connect_timeout_and_takes_back_what_it_may_have_got() {
    let mut stage = stage(&[Act::Hang, Act::Hang]);
    let began = clock::now();
    stage.duty.whole().await;
    assert!(began.elapsed() < Duration::from_millis(5500), "{:?}", began.elapsed());
    assert_eq!(*stage.calls.lock().unwrap(), [Call::Acquire, Call::Withdraw]);
    let failed = stage.news.try_iter().find_map(|news| match news {
        News::Failed(error) => Some(crate::exit::Fault::of(&error)),
        _ => None,
    });
    assert_eq!(failed, Some(crate::exit::Fault::Unreachable));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_outlasts_an_outage_but_not_a_refusal() {
    let mut stage = stage(&[Act::Busy, Act::Unreachable, Act::Hang, Act::Busy, Act::Refuse]);
    stage.duty.whole().await;
    let heard: Vec<_> = stage.news.try_iter().collect();
    assert!(
        matches!(heard[..], [News::Busy(_), News::Trouble(_), News::Recovered, News::Busy(_), News::Failed(_)]),
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
    tokio::join!(stage.duty.whole(), give_up);
    assert_eq!(*stage.calls.lock().unwrap(), [Call::Acquire, Call::Withdraw]);
    assert_eq!(stage.heard(|news| matches!(news, News::Withdrawn)), 1);
}

/// What the keeper says of a release that meets this.
async fn released_after(script: &[Act]) -> Released {
    let mut stage = stage(&[&[Act::Good], script].concat());
    stage.hold_for(Duration::from_secs(1)).await;
    let answer = stage.news.try_iter().find_map(|news| match news {
        News::Released(released) => Some(released),
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
    stage.duty.charge.patience.attempt = TTL;
    stage.duty.whole().await;
    assert_eq!(stage.calls.lock().unwrap()[2..], [Call::Acquire, Call::Renew, Call::Withdraw]);
    let failed =
        |news| matches!(news, News::Failed(error) if crate::exit::Fault::of(&error) == crate::exit::Fault::NotOurs);
    assert!(stage.news.try_iter().any(failed));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_is_tried_again_until_the_lease_has_run_out() {
    let mut stage = stage(&[&[Act::Good][..], &[Act::Unreachable; 2], &[Act::Good]].concat());
    stage.hold_for(Duration::from_secs(1)).await;
    assert_eq!(stage.calls.lock().unwrap().iter().filter(|call| **call == Call::Release).count(), 3);
    assert_eq!(stage.heard(|news| matches!(news, News::Released(Ok(Released::Done)))), 1);
}

#[tokio::test(start_paused = true)]
async fn a_grant_that_was_long_on_its_way_is_renewed_before_anything_starts() {
    let mut stage = stage(&[Act::Late(Duration::from_millis(4900))]);
    stage.duty.charge.terms = Terms::new(Duration::from_secs(12), None).unwrap();
    stage.hold_for(Duration::from_secs(6)).await;
    assert_eq!(stage.calls.lock().unwrap()[..2], [Call::Acquire, Call::Renew]);
}

#[test]
fn a_keeper_whose_thread_is_blocked_leaves_the_main_thread_free() {
    let charge = stage(&[]).duty.charge;
    let span = Duration::from_millis(300);
    let backend = Scripted::new(TTL, &[Act::Brief(span), Act::Block(span)]);
    let calls = Arc::clone(&backend.calls);
    let mut keeper = Keeper::begin(charge, || Ok(Box::new(backend)), |_| ()).unwrap();
    keeper.wait(&[], None).unwrap();
    assert!(matches!(keeper.news(), Some(News::Granted(..))));
    keeper.go_on_alone();
    while calls.lock().unwrap().last() != Some(&Call::Renew) {
        std::thread::yield_now();
    }
    assert!(keeper.news().is_none(), "asking does not wait for the blocked thread");
    while !keeper.has_news() {
        keeper.wait(&[], None).unwrap();
    }
    assert!(matches!(keeper.news(), Some(News::Renewed(_))));
}

#[test]
fn on_the_main_thread_a_keeper_works_while_that_waits_for_something_else() {
    let charge = stage(&[]).duty.charge;
    let backend = Scripted::new(TTL, &[Act::Late(Duration::from_millis(20))]);
    let mut keeper = Keeper::begin(charge, || Ok(Box::new(backend)), |_| ()).unwrap();
    let signal = EventFd::new().unwrap();
    signal.write(1).unwrap();
    assert_eq!(keeper.wait(&[signal.as_fd()], None).unwrap(), [true]);
    assert!(keeper.news().is_none());
    signal.read().unwrap();
    let due = clock::now() + Duration::from_millis(1);
    assert_eq!(keeper.wait(&[signal.as_fd()], Some(due)).unwrap(), [false]);
    assert!(keeper.news().is_none() && due.has_passed());
    // One that has closed is ready for ever, but not asked for ever.
    let (guardian, _) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(keeper.wait(&[signal.as_fd(), guardian.as_fd()], None).unwrap(), [false, true]);
    while !keeper.has_news() {
        assert_eq!(keeper.wait(&[signal.as_fd()], None).unwrap(), [false]);
    }
    assert!(matches!(keeper.news(), Some(News::Granted(..))));
}

#[test]
fn what_is_over_soon_is_never_asked_for_in_between() {
    let charge = stage(&[]).duty.charge;
    let backend = Scripted::new(TTL, &[]);
    let calls = Arc::clone(&backend.calls);
    let mut keeper = Keeper::begin(charge, || Ok(Box::new(backend)), |_| ()).unwrap();
    keeper.wait(&[], None).unwrap();
    assert!(matches!(keeper.news(), Some(News::Granted(..))));
    keeper.wait(&[], Some(clock::now() + Duration::from_millis(5))).unwrap();
    keeper.release(ending());
    assert_eq!(calls.lock().unwrap()[..], [Call::Acquire, Call::Release]);
    assert!(matches!(keeper.news(), Some(News::Released(Ok(Released::Done)))));
}
