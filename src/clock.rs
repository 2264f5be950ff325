//! The only place that reads a clock.
//!
//! Deadlines live on CLOCK_BOOTTIME, which goes on while the machine sleeps; std's and tokio's clocks
//! do not. The wall clock is for showing dates, never for deciding anything about a lease.

use std::ops::{Add, Sub};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// A point in time on CLOCK_BOOTTIME, comparable between all processes of this boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Instant(Duration);

impl Instant {
    /// Later than any deadline a run can have.
    pub const NEVER: Instant = Instant(Duration::from_secs(u32::MAX as u64));

    pub fn from_nanos(nanos: u64) -> Instant {
        Instant(Duration::from_nanos(nanos))
    }

    pub fn as_nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }

    /// How long until this instant; zero once it has passed.
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(now().0)
    }

    pub fn has_passed(self) -> bool {
        now() >= self
    }

    /// How long ago this instant was; zero while it is still to come.
    pub fn elapsed(self) -> Duration {
        now().0.saturating_sub(self.0)
    }

    pub fn since(self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;
    fn add(self, span: Duration) -> Instant {
        Instant(self.0.saturating_add(span))
    }
}

impl Sub<Duration> for Instant {
    type Output = Instant;
    fn sub(self, span: Duration) -> Instant {
        Instant(self.0.saturating_sub(span))
    }
}

#[cfg(not(test))]
pub fn now() -> Instant {
    use nix::time::{ClockId, clock_gettime};
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("every Linux since 2.6.39 has CLOCK_BOOTTIME");
    Instant(Duration::from(time))
}

/// Follows tokio's clock, which a test can pause, so that a test of an hour takes no time.
#[cfg(test)]
#[allow(clippy::disallowed_methods)]
pub fn now() -> Instant {
    use std::sync::OnceLock;
    static ORIGIN: OnceLock<tokio::time::Instant> = OnceLock::new();
    let origin = *ORIGIN.get_or_init(tokio::time::Instant::now);
    Instant(Duration::from_secs(3600) + tokio::time::Instant::now().saturating_duration_since(origin))
}

/// The date, for people.
#[allow(clippy::disallowed_methods)]
pub fn wall() -> SystemTime {
    SystemTime::now()
}

/// Sleeps on tokio's clock, which stops while the machine does: whoever wakes looks at [`now`] again.
pub async fn sleep_until(instant: Instant) {
    tokio::time::sleep(instant.remaining()).await;
}
