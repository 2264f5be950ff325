//! What the search finds, and what it must not.

use super::super::explore;
use super::{Lease, Mutant};

#[test]
fn no_order_of_events_lets_two_commands_live_at_once() {
    for drift in [1, 0, -1] {
        let states = explore(&Lease { drift, ..Lease::default() }).unwrap_or_else(|way| panic!("{way:#?}"));
        assert!(states > 100_000, "only {states} states: the model shows nothing");
    }
}

#[test]
fn every_mutant_is_found() {
    use Mutant::{DeadlineFromReply, NoGuardian, NoSigkill, ReleaseBeforeDead, RenewalIgnored};
    for mutant in [RenewalIgnored, DeadlineFromReply, NoSigkill, ReleaseBeforeDead, NoGuardian] {
        assert!(explore(&Lease { mutant: Some(mutant), ..Lease::default() }).is_err(), "{mutant:?} was not found");
    }
}

#[test]
fn deadlines_without_an_allowance_for_drift_are_found() {
    let no_allowance_for_drift = true;
    assert!(explore(&Lease { drift: 1, no_allowance_for_drift, ..Lease::default() }).is_err());
    // It is the drift that makes them wrong, and nothing else.
    assert!(explore(&Lease { drift: 0, no_allowance_for_drift, ..Lease::default() }).is_ok());
}

#[test]
fn what_the_promise_does_not_cover_is_found() {
    assert!(
        explore(&Lease { drift: 2, ..Lease::default() }).is_err(),
        "a clock that is off by more than is allowed for"
    );
    assert!(explore(&Lease { forgets: true, ..Lease::default() }).is_err(), "a server that has lost its data");
}
