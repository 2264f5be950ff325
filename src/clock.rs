//! The only place that reads a clock.
//!
//! Deadlines live on CLOCK_BOOTTIME, which goes on while the machine sleeps; std's and tokio's clocks
//! do not. The wall clock is for showing dates, never for deciding anything about a lease.

use std::ops::{Add, Sub};
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// A point in time on CLOCK_BOOTTIME, comparable between all processes of this boot in the same time namespace.
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

    /// From what [`Instant::for_every_namespace`] gave, in whichever time namespace.
    pub fn from_every_namespace(nanos: u64) -> Option<Instant> {
        Some(Instant::from_nanos(nanos.saturating_add_signed(namespace_offset()?)))
    }

    /// Nanoseconds on the machine's own CLOCK_BOOTTIME; `None` if we cannot tell how far ours is from it.
    pub fn for_every_namespace(self) -> Option<u64> {
        Some(self.as_nanos().saturating_add_signed(namespace_offset()?.checked_neg()?))
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

/// How many nanoseconds CLOCK_BOOTTIME is ahead in our time namespace (`unshare --time`).
fn namespace_offset() -> Option<i64> {
    static OFFSET: LazyLock<Option<i64>> =
        LazyLock::new(|| match std::fs::read_to_string("/proc/self/timens_offsets") {
            // The file is about our children; Linux before 6.3 keeps a program that exec'ed where it was.
            Ok(offsets) => same_namespace().then(|| boottime_offset(&offsets)).flatten(),
            // There are no time namespaces before Linux 5.6.
            Err(error) => (error.kind() == std::io::ErrorKind::NotFound).then_some(0),
        });
    *OFFSET
}

fn same_namespace() -> bool {
    let namespace = |of| std::fs::read_link(format!("/proc/self/ns/{of}")).ok();
    namespace("time").is_some_and(|ours| Some(ours) == namespace("time_for_children"))
}

/// `boottime       100000         0`, in seconds and nanoseconds.
fn boottime_offset(offsets: &str) -> Option<i64> {
    let line = offsets.lines().find_map(|line| line.strip_prefix("boottime"))?;
    let mut numbers = line.split_ascii_whitespace().map(|number| number.parse::<i64>().ok());
    numbers.next()??.checked_mul(1_000_000_000)?.checked_add(numbers.next()??)
}

/// As JSON and records have it.
pub fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
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

/// Dates as RFC 3339 in UTC, to the millisecond. A stored record may claim any date; one that has no such form is shown
/// as the last that has.
pub mod rfc3339 {
    use std::time::{Duration, SystemTime};

    use serde::de::Error;
    use serde::ser::SerializeMap;
    use serde::{Deserialize, Deserializer, Serializer};

    /// The nearest date that can be written.
    fn clamped(time: SystemTime) -> SystemTime {
        const END_OF_9999: Duration = Duration::from_millis(253_402_300_799_999);
        time.clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + END_OF_9999)
    }

    /// For programs: `2026-11-18T03:00:02.123Z`.
    pub fn date(time: SystemTime) -> String {
        humantime::format_rfc3339_millis(clamped(time)).to_string()
    }

    /// For people: `2026-11-18 03:00:02`, in UTC.
    pub fn in_words(time: SystemTime) -> String {
        humantime::format_rfc3339_seconds(clamped(time)).to_string().replace('T', " ").replace('Z', "")
    }

    /// Seconds since 1970, for programs that cannot read dates.
    pub fn seconds(time: SystemTime) -> u64 {
        clamped(time).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    /// The same to the millisecond, as metrics have it.
    pub fn timestamp(time: SystemTime) -> f64 {
        let millis = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
        millis as f64 / 1e3
    }

    /// A date and, under a key of its own, the same in seconds since 1970.
    pub fn entries<M: SerializeMap>(
        map: &mut M,
        keys: [&'static str; 2],
        time: Option<SystemTime>,
    ) -> Result<(), M::Error> {
        map.serialize_entry(keys[0], &time.map(date))?;
        map.serialize_entry(keys[1], &time.map(seconds))
    }

    pub fn serialize<S: Serializer>(time: &SystemTime, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&date(*time))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(text: D) -> Result<SystemTime, D::Error> {
        humantime::parse_rfc3339(&String::deserialize(text)?).map_err(D::Error::custom)
    }

    pub mod option {
        use super::*;

        #[derive(serde::Serialize, Deserialize)]
        struct Date(#[serde(with = "super")] SystemTime);

        pub fn serialize<S: Serializer>(time: &Option<SystemTime>, out: S) -> Result<S::Ok, S::Error> {
            serde::Serialize::serialize(&time.map(Date), out)
        }

        pub fn deserialize<'de, D: Deserializer<'de>>(text: D) -> Result<Option<SystemTime>, D::Error> {
            Ok(Option::<Date>::deserialize(text)?.map(|date| date.0))
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_offset_of_a_time_namespace_is_read_as_the_kernel_writes_it() {
        let text = "monotonic           1         2\nboottime      -86400 500000000\n";
        assert_eq!(super::boottime_offset(text), Some(-86_399_500_000_000));
        for other in ["", "boottime", "boottime 1", "boottime x 0", "boottime 9223372036854775807 0"] {
            assert_eq!(super::boottime_offset(other), None, "{other}");
        }
    }
}
