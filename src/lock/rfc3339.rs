//! Dates as RFC 3339 in UTC, to the millisecond. A stored record may claim any date; one that has no such form is shown
//! as the last that has.

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
