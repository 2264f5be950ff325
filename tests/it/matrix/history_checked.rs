//! Histories that fit one lock, unknown results among them, and histories that do not: the checker has to tell them
//! apart.

use std::time::Duration;

use super::history::RunEvent::{self, *};
use super::history::{Contender, Lease, contradictions};
use crate::support::Run;

const LEASE: Lease = Lease { ttl: Duration::from_nanos(1000), patience: Duration::from_nanos(700) };

fn contender(name: &str, span: (u64, u64), code: i32, told: &[(u64, RunEvent)]) -> Contender {
    let (invoked, returned) = span;
    Contender { name: name.into(), invoked, returned, code, told: told.to_vec(), runs: Vec::new() }
}

impl Contender {
    fn ran(mut self, token: u64, first: u64, last: u64) -> Contender {
        self.runs.push(Run { id: format!("{}-{first}", self.name), token, first, last, processes: 1 });
        self
    }
}

/// A whole, good run of a contender that came at `invoked` and was alone from `first` to `last`.
fn good(name: &str, invoked: u64, token: u64, first: u64, last: u64) -> Contender {
    let told = [(first - 1, Acquired(token)), (last + 2, Released)];
    contender(name, (invoked, last + 3), 0, &told).ran(token, first, last)
}

#[track_caller]
fn lawful(history: &[Contender]) {
    assert_eq!(contradictions(history, LEASE), Vec::<String>::new());
}

#[track_caller]
fn unlawful(history: &[Contender], why: &str) {
    let found = contradictions(history, LEASE);
    assert!(found.iter().any(|one| one.contains(why)), "should say {why:?}: {found:?}");
}

#[test]
fn an_event_is_read_with_its_token() {
    let line = r#"{"event":"acquired","level":"info","message":"acquired with token 42 after 3ms","name":"a"}"#;
    assert_eq!(RunEvent::parse(line), Acquired(42));
    assert_eq!(RunEvent::parse(r#"{"event":"release-failed","message":"…"}"#), ReleaseFailed);
    assert_eq!(RunEvent::parse("Segmentation fault"), Other);
}

#[test]
fn one_after_the_other_is_lawful() {
    lawful(&[good("b", 5, 2, 120, 200), good("a", 0, 1, 10, 100), good("c", 300, 7, 310, 320)]);
}

#[test]
fn whoever_was_told_late_may_have_been_granted_early() {
    // b's command beats before a's release is confirmed, but not before a's command is dead.
    lawful(&[
        good("a", 0, 1, 10, 100),
        contender("b", (0, 300), 0, &[(101, Acquired(2)), (290, Released)]).ran(2, 101, 280),
    ]);
}

#[test]
fn what_nobody_knows_may_have_happened_or_not() {
    let killed_while_waiting = contender("x", (0, 50), 137, &[]);
    let killed_while_holding = contender("y", (0, 60), 137, &[(5, Acquired(1))]).ran(1, 6, 55);
    let release_unknown = contender("z", (0, 400), 0, &[(200, Acquired(2)), (390, ReleaseFailed)]).ran(2, 201, 300);
    let next = good("n", 100, 3, 320, 330);
    lawful(&[killed_while_waiting.clone(), killed_while_holding, release_unknown, next]);
    // A grant that nobody was told of explains a refusal, until its lease is over.
    let refused = |at: u64| contender("r", (at, at + 10), 75, &[(at + 5, Busy)]);
    lawful(&[killed_while_waiting.clone(), refused(1000)]);
    unlawful(&[killed_while_waiting, refused(1100)], "nobody else was there");
}

#[test]
fn an_unknown_renewal_may_be_followed_by_a_known_one() {
    let told = |what: &[(u64, RunEvent)]| contender("a", (0, 5000), 79, what).ran(1, 10, 2500);
    lawful(&[told(&[(9, Acquired(1)), (1000, Trouble), (1100, Recovered), (2000, Trouble), (2400, Expired)])]);
    let silent = told(&[(9, Acquired(1)), (1000, Trouble), (2400, Expired)]);
    unlawful(&[silent], "after the last renewal's lease");
}

#[test]
fn two_holders_at_once_are_found() {
    unlawful(&[good("a", 0, 1, 10, 100), good("b", 0, 2, 90, 200)], "before a was done with it");
    // Also if the first was never confirmed to have released anything.
    let killed = contender("a", (0, 100), 137, &[(5, Acquired(1))]).ran(1, 6, 99);
    unlawful(&[killed, good("b", 0, 2, 90, 200)], "before a was done with it");
    // Or if the second was only told, and its command never came to beat.
    let told = contender("b", (0, 120), 137, &[(50, Acquired(2))]);
    unlawful(&[good("a", 0, 1, 10, 100), told], "before a was done with it");
}

#[test]
fn tokens_that_do_not_grow_with_the_grants_are_found() {
    unlawful(&[good("a", 0, 2, 10, 100), good("b", 105, 1, 120, 200)], "before b was done with it");
    unlawful(&[good("a", 0, 2, 10, 100), good("b", 105, 2, 120, 200)], "which a had");
}

#[test]
fn a_release_before_the_command_is_dead_is_found() {
    let early = contender("a", (0, 120), 0, &[(9, Acquired(1)), (80, Released)]).ran(1, 10, 100);
    unlawful(&[early], "released before");
}

#[test]
fn a_story_that_contradicts_itself_is_found() {
    let ran = |code: i32, told: &[(u64, RunEvent)]| contender("a", (0, 2000), code, told).ran(1, 10, 100);
    unlawful(&[ran(0, &[])], "without a grant");
    unlawful(&[ran(0, &[(9, Acquired(3)), (110, Released)])], "another token");
    unlawful(&[ran(0, &[(9, Acquired(1))])], "never released");
    unlawful(&[ran(0, &[(9, Acquired(1)), (90, Lost), (110, Released)])], "success, and the lock was lost");
    unlawful(&[ran(75, &[(9, Acquired(1)), (20, Busy)])], "granted all the same");
    unlawful(&[ran(79, &[(9, Acquired(1))])], "nobody said so");
    unlawful(&[ran(79, &[(9, Acquired(1)), (90, Expired)])], "sooner than any lease");
    unlawful(&[ran(137, &[(9, Acquired(1))]).ran(1, 110, 120)], "more than once");
    unlawful(&[contender("a", (0, 20), 0, &[])], "never ran");
    unlawful(&[contender("a", (0, 20), 75, &[])], "nobody said busy");
    unlawful(&[contender("a", (0, 2000), 79, &[(1000, Lost)])], "never granted");
}

#[test]
fn a_refusal_needs_somebody_in_the_way() {
    let refused = contender("r", (500, 510), 75, &[(505, Busy)]);
    unlawful(std::slice::from_ref(&refused), "nobody else was there");
    unlawful(&[good("a", 0, 1, 10, 100), refused.clone()], "nobody else was there");
    lawful(&[good("a", 0, 1, 10, 600), refused]);
}
