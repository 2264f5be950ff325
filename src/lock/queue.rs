//! Who of a queue holds the lock, whom a waiter has to watch, and who stands in its way. One rule for all backends that
//! keep an ordered queue. Another program among the contenders knows neither shares nor slots and holds the lock alone.

use super::Mode;

pub trait Contends {
    fn mode(&self) -> Mode;
}

/// Whether a contender holds the lock, with all these before it in the queue.
pub fn may_hold<C: Contends>(mode: Mode, ahead: &[C]) -> bool {
    match mode {
        Mode::Exclusive => ahead.is_empty(),
        Mode::Shared => ahead.iter().all(|before| before.mode() == Mode::Shared),
        Mode::Slots(n) => ahead.len() < n as usize && ahead.iter().all(|before| before.mode() == mode),
    }
}

/// Where in the queue the holders are.
pub fn holders<C: Contends>(queue: &[C]) -> impl Iterator<Item = usize> {
    (0..queue.len()).filter(|&at| may_hold(queue[at].mode(), &queue[..at]))
}

/// How many of a queue wait: all but the holders.
pub fn waiters<C: Contends>(queue: &[C]) -> usize {
    queue.len() - holders(queue).count()
}

/// What a waiter has to watch, so that a release wakes one waiter and not all of them.
#[derive(Debug, PartialEq, Eq)]
pub enum Watched<'a, C> {
    EndOf(&'a C),
    /// The first waiter for a slot takes that of whichever holder ends.
    EndOfAny(&'a [C]),
    /// Whoever waits for a slot behind another waiter becomes the first when that one gets its slot and says so.
    ChangeOf(&'a C),
}

/// `None` if nobody is in the way.
pub fn watched<C: Contends>(mode: Mode, ahead: &[C]) -> Option<Watched<'_, C>> {
    if let Some(other) = ahead.iter().rfind(|one| one.mode().slots() != mode.slots()) {
        return Some(Watched::EndOf(other));
    }
    match mode {
        Mode::Exclusive => ahead.last().map(Watched::EndOf),
        Mode::Shared => ahead.iter().rfind(|one| one.mode() != Mode::Shared).map(Watched::EndOf),
        Mode::Slots(n) if ahead.len() == n as usize => Some(Watched::EndOfAny(ahead)),
        Mode::Slots(n) if ahead.len() > n as usize => ahead.last().map(Watched::ChangeOf),
        Mode::Slots(_) => None,
    }
}

/// The lowest slot that nobody has.
pub fn free_slot(taken: impl IntoIterator<Item = u32>) -> u32 {
    let taken: Vec<u32> = taken.into_iter().collect();
    (0..).find(|slot| !taken.contains(slot)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::Mode::{Exclusive, Shared, Slots};
    use super::*;

    impl Contends for Mode {
        fn mode(&self) -> Mode {
            *self
        }
    }

    #[test]
    fn exclusive_waits_for_everybody_before_it() {
        assert!(may_hold::<Mode>(Exclusive, &[]));
        assert!(!may_hold(Exclusive, &[Shared]));
        assert_eq!(watched(Exclusive, &[Shared, Exclusive]), Some(Watched::EndOf(&Exclusive)));
    }

    #[test]
    fn shared_waits_for_the_last_exclusive_one_even_behind_shared_holders() {
        assert!(may_hold(Shared, &[Shared, Shared]));
        assert!(!may_hold(Shared, &[Shared, Exclusive, Shared]));
        assert_eq!(watched(Shared, &[Shared, Exclusive, Shared]), Some(Watched::EndOf(&Exclusive)));
        assert_eq!(holders(&[Shared, Shared, Exclusive, Shared]).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(waiters(&[Shared, Shared, Exclusive, Shared]), 2);
    }

    #[test]
    fn the_first_waiter_for_a_slot_watches_all_holders_and_the_others_the_one_before_them() {
        let ahead = [Slots(2); 4];
        assert!(may_hold(Slots(2), &ahead[..1]) && !may_hold(Slots(2), &ahead[..2]));
        assert_eq!(watched(Slots(2), &ahead[..1]), None);
        assert_eq!(watched(Slots(2), &ahead[..2]), Some(Watched::EndOfAny(&ahead[..2])));
        assert_eq!(watched(Slots(2), &ahead), Some(Watched::ChangeOf(&Slots(2))));
    }

    #[test]
    fn another_program_stands_alone_between_holders_of_slots() {
        let queue = [Slots(3), Exclusive, Slots(3), Slots(3)];
        assert_eq!(holders(&queue).collect::<Vec<_>>(), [0]);
        for at in [2, 3] {
            assert_eq!(watched(Slots(3), &queue[..at]), Some(Watched::EndOf(&Exclusive)));
        }
    }

    #[test]
    fn the_lowest_slot_is_taken_first() {
        assert_eq!([free_slot([]), free_slot([1]), free_slot([1, 0, 3])], [0, 0, 2]);
    }
}
