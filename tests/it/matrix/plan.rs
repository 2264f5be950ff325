//! What happens in a random run: who comes, how each behaves, and which fault follows which. Everything is drawn
//! from the seed and a number, never from how fast the last run happened to be, so that the same seed is the same
//! plan.

use std::time::Duration;

use super::site::{Backend, covered};

pub const HOSTS: usize = 4;
/// There are always so many contenders: whoever has ended is followed by another in its place.
pub const PLACES: usize = 30;

#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
}

/// How a contender behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Behaviour {
    pub host: usize,
    pub options: &'static [&'static str],
    /// Its command's.
    pub words: Vec<String>,
}

/// A fault or a repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strike {
    WayFrozen { host: usize },
    WayCut { host: usize },
    WayHalfOpen { host: usize },
    WaysHealed,
    ServerFrozen { draw: usize },
    ServerKilled { draw: usize },
    ServersBack,
    DlockKilled { place: usize },
    DlockStopped { place: usize },
    DlockWoken { place: usize },
    GuardianKilled { place: usize },
    GuardianStopped { place: usize },
}

impl Plan {
    pub fn backend(self) -> Backend {
        let backends = covered();
        backends[self.dice(0, 0).below(backends.len())]
    }

    /// Of the contender that is the `nth` in its place.
    pub fn behaviour(self, place: usize, nth: usize) -> Behaviour {
        let mut dice = self.dice(1 + place as u64, nth as u64);
        let host = dice.below(HOSTS);
        let options = [&[][..], &[], &["--wait", "3s"], &["--no-wait"]][dice.below(4)];
        // Some are long enough for a renewal or two.
        let longest = if dice.below(5) == 0 { 2500 } else { 300 };
        let mut words = vec![format!("for={}", 1 + dice.below(longest))];
        if dice.below(2) == 0 {
            words.extend(["ignore-term".into(), "daemons=1".into()]);
        }
        Behaviour { host, options, words }
    }

    /// The nth, and how long after the one before it.
    pub fn strike(self, nth: usize) -> (Duration, Strike) {
        let mut dice = self.dice(1 + PLACES as u64, nth as u64);
        let pause = Duration::from_millis(20 + dice.below(300) as u64);
        let (host, draw, place) = (dice.below(HOSTS), dice.below(60), dice.below(PLACES));
        let strike = match dice.below(32) {
            0 => Strike::WayFrozen { host },
            1 => Strike::WayCut { host },
            2 => Strike::WayHalfOpen { host },
            3..=6 => Strike::WaysHealed,
            7 => Strike::ServerFrozen { draw },
            8 => Strike::ServerKilled { draw },
            9..=14 => Strike::ServersBack,
            15..=19 => Strike::DlockKilled { place },
            20..=22 => Strike::DlockStopped { place },
            23..=27 => Strike::DlockWoken { place },
            _ => Strike::GuardianKilled { place },
        };
        (pause, strike)
    }

    pub fn dice(self, what: u64, nth: u64) -> Dice {
        let mut dice = Dice(self.seed);
        for part in [what, nth] {
            dice = Dice(dice.next() ^ part);
        }
        dice
    }
}

/// splitmix64: any number is a good seed.
pub struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }
}

#[test]
fn the_same_seed_is_the_same_plan_and_another_is_another() {
    let all = |seed: u64| {
        let plan = Plan { seed };
        let strikes: Vec<_> = (0..100).map(|nth| plan.strike(nth)).collect();
        let contenders: Vec<_> =
            (0..PLACES).flat_map(|place| (0..3).map(move |nth| plan.behaviour(place, nth))).collect();
        (plan.backend(), strikes, contenders)
    };
    assert_eq!(all(7), all(7));
    assert_ne!(all(7).1, all(8).1);
    assert_ne!(all(7).2, all(8).2);
    // Whatever is asked for first.
    let plan = Plan { seed: 7 };
    assert_eq!((plan.strike(42), plan.behaviour(3, 1)), (all(7).1[42], all(7).2[10].clone()));
    let drawn: std::collections::BTreeSet<_> = (0..100).map(|seed| Plan { seed }.backend().name).collect();
    assert_eq!(drawn.len(), covered().len());
}
