//! How long the guardian needs to kill everything, as it sees by itself while there is still time: how late it wakes up,
//! how many processes there are, how long one walk over them takes. SIGKILL has to come so much before the lease ends.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What was measured worst, lately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pace {
    pub lateness: Duration,
    pub walk: Duration,
    pub processes: usize,
}

/// Killing takes one walk, and a second one for what was born meanwhile. The rest is for a machine that is busier, or a
/// tree that is larger, at the end of the lease than when it was measured.
const SAFETY: u32 = 4;

impl Pace {
    /// A new measurement. A worse one counts at once, a better one little by little: a starved process is on time now and
    /// then.
    pub fn measured(self, lateness: Duration, walk: Duration, processes: usize) -> Pace {
        let worse = |now: Duration, before: Duration| now.max(before.mul_f64(0.75));
        Pace { lateness: worse(lateness, self.lateness), walk: worse(walk, self.walk), processes }
    }

    /// How long before the end of the lease SIGKILL has to come.
    pub fn margin(self) -> Duration {
        (self.lateness + self.walk) * SAFETY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_worse_measurement_counts_at_once_and_a_better_one_little_by_little() {
        let slow = Pace::default().measured(millis(100), millis(300), 2_000);
        assert_eq!(slow.margin(), millis(1_600));
        let better = slow.measured(millis(0), millis(0), 1);
        assert_eq!(better.margin(), millis(1_200));
        assert_eq!(better.measured(millis(500), millis(500), 9).margin(), millis(4_000));
    }
}
