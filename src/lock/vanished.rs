//! Holders that a waiter saw and that then vanished: an operator deleted them, or the server lost its data or ended a
//! lease too early. Their commands may still run, and their dlocks may not know yet.
//!
//! The server would grant the lock at once. A waiter that saw such a holder waits until its lease must have ended: its
//! full ttl from the moment at which it is missed, since it may have renewed up to then. A newcomer has seen nothing.

use std::time::Duration;

use super::Token;
use crate::clock::Instant;

/// The holders that one waiter saw and still has to reckon with.
#[derive(Debug, Default)]
pub struct SeenHolders(Vec<SeenHolder>);

#[derive(Debug)]
struct SeenHolder {
    /// Its key or node in the queue.
    key: String,
    token: Token,
    ttl: Duration,
    /// Its lease does not end before this; `None` if the server was not asked.
    lasts_until: Option<Instant>,
    /// It is missing, and may run its command until then.
    may_run_until: Option<Instant>,
}

impl SeenHolders {
    /// Takes note of a holder as it is now.
    pub fn see(&mut self, key: &str, token: Token, ttl: Duration, lasts_until: Option<Instant>) {
        self.0.retain(|seen| seen.key != key);
        self.0.push(SeenHolder { key: key.to_owned(), token, ttl, lasts_until, may_run_until: None });
    }

    /// Until when any holder that is missing from the queue may still run its command. `released` is the latest token
    /// that was released: whoever held the lock after a holder has waited for it already.
    pub fn may_run_until(
        &mut self,
        now: Instant,
        is_present: impl Fn(&str) -> bool,
        released: Option<Token>,
    ) -> Option<Instant> {
        self.0.retain_mut(|seen| {
            if released.is_some_and(|released| released >= seen.token) {
                return false;
            }
            if is_present(&seen.key) {
                return true;
            }
            // A lease that had ended by itself was not renewed any more.
            let expired = seen.may_run_until.is_none() && seen.lasts_until.is_some_and(|end| end <= now);
            !expired && *seen.may_run_until.get_or_insert(now + seen.ttl) > now
        });
        self.0.iter().filter_map(|seen| seen.may_run_until).max()
    }

    /// Forgets those that are gone without having been missed before: they vanished in good order.
    pub fn forget_gone(&mut self, is_present: impl Fn(&str) -> bool) {
        self.0.retain(|seen| seen.may_run_until.is_some() || is_present(&seen.key));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(9);

    fn at(seconds: u64) -> Instant {
        Instant::from_nanos(0) + Duration::from_secs(seconds)
    }

    fn seen(holders: &[(u64, Option<Instant>)]) -> SeenHolders {
        let mut all = SeenHolders::default();
        holders.iter().for_each(|(token, lasts_until)| all.see(&token.to_string(), Token(*token), TTL, *lasts_until));
        all
    }

    #[test]
    fn one_that_vanished_is_waited_out_for_its_full_ttl_from_when_it_is_missed() {
        for lasts_until in [None, Some(at(12))] {
            let mut seen = seen(&[(5, lasts_until)]);
            assert_eq!(seen.may_run_until(at(4), |key| key == "5", None), None);
            assert_eq!(seen.may_run_until(at(10), |_| false, None), Some(at(19)));
            seen.see("8", Token(8), TTL, None);
            assert_eq!(seen.may_run_until(at(18), |key| key == "8", Some(Token(4))), Some(at(19)));
            assert_eq!(seen.may_run_until(at(19), |key| key == "8", None), None);
        }
    }

    #[test]
    fn one_that_released_or_whose_lease_ended_is_not_waited_for() {
        assert_eq!(seen(&[(5, Some(at(10)))]).may_run_until(at(10), |_| false, None), None);
        for released in [5, 6] {
            assert_eq!(seen(&[(5, None)]).may_run_until(at(1), |_| false, Some(Token(released))), None);
        }
    }

    #[test]
    fn what_vanished_in_good_order_is_forgotten_and_what_did_not_is_not() {
        let mut seen = seen(&[(5, None), (6, None)]);
        assert_eq!(seen.may_run_until(at(10), |key| key == "6", None), Some(at(19)));
        seen.forget_gone(|key| key == "6");
        assert_eq!(seen.may_run_until(at(11), |key| key == "6", None), Some(at(19)));
        assert_eq!(seen.may_run_until(at(12), |_| false, None), Some(at(21)), "it was still there");
        let mut seen = self::seen(&[(5, None), (6, None)]);
        assert_eq!(seen.may_run_until(at(10), |key| key == "6", None), Some(at(19)));
        seen.forget_gone(|_| false);
        assert_eq!(seen.may_run_until(at(11), |_| false, None), Some(at(19)));
    }
}
