//! The queue of a lock: who contends, in which order and mode, as the names of its children alone tell it; and what a
//! contender's node stores. Pure.
//!
//! A name is `_c_<uuid>[-hold-N][-shared|-slots-N]-lock-<seq>` as Curator spells it, or
//! `<uuid>[…]__lock__<seq>` as kazoo does. What only we know stands between uuid and `lock`, where both
//! look past it, so that reading the queue is one request however long it is.

use std::collections::HashSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::wire::{self, Answer, Refusal, Stat};
use crate::clock;
use crate::lock::queue::may_hold;
use crate::lock::{Contender, Contends, Identity, Mode, OwnerId, Record, Token};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spelling {
    Curator,
    Kazoo,
}

impl Spelling {
    /// What all names of an owner begin with. The uuid follows from the owner, so that a place taken by a
    /// request without an answer is found again.
    pub fn stem(self, owner: &OwnerId) -> String {
        let hex = format!("{:032x}", fnv128(owner.as_str().as_bytes()));
        match self {
            Spelling::Curator => {
                format!("_c_{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
            }
            Spelling::Kazoo => hex,
        }
    }

    /// A contender's name, up to where the server appends the sequence number.
    pub fn prefix(self, owner: &OwnerId, mode: Mode) -> String {
        let stem = self.stem(owner);
        let mode = match mode {
            Mode::Exclusive => String::new(),
            Mode::Shared => "-shared".to_owned(),
            Mode::Slots(n) => format!("-slots-{n}"),
        };
        match self {
            Spelling::Curator => format!("{stem}{mode}-lock-"),
            Spelling::Kazoo => format!("{stem}{mode}__lock__"),
        }
    }
}

#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    pub sequence: u64,
    pub mode: Mode,
    /// Set for a hold, which has no session and keeps the lock until its time is over. Counts the holds of this place.
    pub hold: Option<u32>,
    /// What its node says, if that was read and could be.
    pub stat: Option<Stat>,
    /// `None` for a program other than dlock.
    pub record: Option<Record<Details>>,
}

impl Entry {
    /// Whatever ends in a sequence number contends, since to Curator it does.
    fn parse(name: &str) -> Option<Entry> {
        let head = sign_of(name);
        let sequence = name[head.len()..].parse().ok()?;
        let ours = head
            .strip_prefix("_c_")
            .and_then(|rest| rest.strip_suffix("-lock-")?.get(36..))
            .or_else(|| head.strip_suffix("__lock__")?.get(32..));
        let foreign = || match head.ends_with("__rlock__") || head.ends_with("__READ__") {
            true => Mode::Shared,
            false => Mode::Exclusive,
        };
        let (hold, mode) = match ours.map(split_hold) {
            Some((hold, "-shared")) => (hold, Mode::Shared),
            Some((hold, tags)) => {
                let slots = tags.strip_prefix("-slots-").and_then(|n| n.parse().ok()).filter(|&n| n >= 2);
                (hold, slots.map_or(Mode::Exclusive, Mode::Slots))
            }
            None => (None, foreign()),
        };
        Some(Entry { name: name.to_owned(), sequence, mode, hold, stat: None, record: None })
    }

    /// Adds what its node says. False if the node is gone.
    pub fn read(&mut self, answer: &Answer) -> Result<bool> {
        if let Ok(answer) = answer {
            let (data, stat) = wire::read_data(answer)?;
            (self.stat, self.record) = (Some(stat), Record::read(&data));
        }
        Ok(*answer != Err(Refusal::NO_NODE))
    }

    pub fn held_on(&self) -> Option<Hold> {
        self.record.as_ref().and_then(|record| record.details.hold)
    }

    /// How much of a hold is left at this time of the servers' clocks; `None` if it is no hold, or cannot be read.
    pub fn left(&self, now: SystemTime) -> Option<Duration> {
        let lasted = now.duration_since(server_date(self.stat?.ctime)).unwrap_or_default();
        Some(self.held_on()?.lasts().saturating_sub(lasted))
    }

    /// Whether it is not a hold whose time is over, by our own clock: good enough to be shown.
    pub fn is_present(&self) -> bool {
        self.left(clock::wall()).is_none_or(|left| !left.is_zero())
    }

    pub fn contender(&self) -> Contender {
        let (mode, waiting_since) = (self.mode, self.stat.map(|stat| server_date(stat.ctime)));
        let own_token = self.stat.map(|stat| token(stat.czxid));
        let Some(Record { who, details }) = self.record.clone() else {
            return Contender { mode, fencing_token: own_token, waiting_since, ..Contender::default() };
        };
        Contender {
            mode,
            fencing_token: details.hold.map(|hold| hold.token).or(details.slot.map(|slot| slot.token)).or(own_token),
            slot: details.slot.map(|slot| slot.number),
            waiting_since,
            acquired_at: details.acquired_at().or(waiting_since),
            ttl: Some(details.ttl()),
            expires_in: self.left(clock::wall()),
            revoked: details.revoked.is_some(),
            ..who.into()
        }
    }
}

pub fn token(czxid: i64) -> Token {
    Token(u64::try_from(czxid).unwrap_or(0))
}

/// Reads `-hold-N` off what stands behind the uuid.
fn split_hold(tags: &str) -> (Option<u32>, &str) {
    let Some(rest) = tags.strip_prefix("-hold-") else { return (None, tags) };
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    (Some(rest[..end].parse().unwrap_or(0)), &rest[end..])
}

/// The name under which a place of ours goes on to keep others out, without a session: the same sequence
/// number, so the same place in the queue. If it is a hold already, the next one, so that nobody who means
/// the old one meets the new.
pub fn held_name(name: &str) -> String {
    let (stem, rest) = name.split_at(if name.starts_with("_c_") { "_c_".len() + 36 } else { 32 });
    let (hold, rest) = split_hold(rest);
    format!("{stem}-hold-{}{rest}", hold.map_or(1, |n| n.wrapping_add(1)))
}

/// The name of the sign of life beside a place: that of the place, before the server numbered it.
pub fn sign_of(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit())
}

/// All contenders, in the order in which they are served.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    pub entries: Vec<Entry>,
}

impl Queue {
    pub fn new(children: &[String]) -> Queue {
        let mut entries: Vec<Entry> = children.iter().filter_map(|name| Entry::parse(name)).collect();
        entries.sort_by(|a, b| (a.sequence, &a.name).cmp(&(b.sequence, &b.name)));
        Queue { entries }
    }

    pub fn position(&self, name: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name == name)
    }

    /// The living place of an owner, by what its names begin with.
    pub fn place_of(&self, stem: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.name.starts_with(stem) && entry.hold.is_none())
    }

    pub fn ahead(&self, position: usize) -> &[Entry] {
        &self.entries[..position]
    }

    pub fn holds(&self, position: usize) -> bool {
        may_hold(self.entries[position].mode, self.ahead(position))
    }

    /// The signs of contenders that were alive before the queue was read, have no place in it any more, and may be
    /// running a command that must not run beside one of this mode. Slots have nodes of their own to tell them apart.
    pub fn alive_without_place(&self, signs: &[String], mode: Mode) -> Vec<String> {
        let placed: HashSet<&str> = self.entries.iter().map(|entry| sign_of(&entry.name)).collect();
        let theirs = |sign: &str| Entry::parse(&format!("{sign}0")).map(|entry| entry.mode);
        let beside = |sign: &str| mode != Mode::Exclusive && theirs(sign) == Some(mode);
        signs.iter().filter(|sign| !placed.contains(sign.as_str()) && !beside(sign)).cloned().collect()
    }
}

impl Contends for Entry {
    fn mode(&self) -> Mode {
        self.mode
    }
}

/// FNV-1a with 128 bits: the owner is unique already, this only gives it the form of a uuid.
fn fnv128(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
}

/// What a contender's node stores beside its [`Identity`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Details {
    ttl_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acquired_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Slot>,
    /// Why an operator wants the lock back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hold: Option<Hold>,
}

/// Keeps others out although the session has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// For how long after the node was created.
    pub lasts_ms: u64,
    /// Of the grant.
    pub token: Token,
    /// Somebody may be at work under it, as after `dlock acquire`.
    pub in_use: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slot {
    pub number: u32,
    /// The czxid of the slot's own node, which grows with every holder of the slot.
    pub token: Token,
}

const LONGEST_REASON: usize = 500;

impl Hold {
    pub fn lasts(&self) -> Duration {
        Duration::from_millis(self.lasts_ms)
    }
}

impl Details {
    /// Of the session or, once that has ended, of the hold.
    pub fn ttl(&self) -> Duration {
        self.hold.map_or(Duration::from_millis(self.ttl_ms), |hold| hold.lasts())
    }

    pub fn acquired_at(&self) -> Option<SystemTime> {
        Some(server_date(i64::try_from(self.acquired_ms?).ok()?))
    }

    /// It holds the lock, from now on unless it did before.
    pub fn acquire_now(&mut self) {
        let since = clock::wall().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.acquired_ms.get_or_insert(since.as_millis() as u64);
    }
}

impl Record<Details> {
    pub fn of_waiter(who: &Identity, ttl: Duration) -> Record<Details> {
        let details =
            Details { ttl_ms: ttl.as_millis() as u64, acquired_ms: None, slot: None, revoked: None, hold: None };
        Record { who: who.clone(), details }
    }

    pub fn read(data: &[u8]) -> Option<Record<Details>> {
        let mut record = Record::<Details>::from_json(data)?;
        let reason = record.details.revoked;
        record.details.revoked = reason.map(|reason| reason.chars().take(LONGEST_REASON).collect());
        Some(record)
    }
}

/// A server's date, for people and for comparing with other dates of servers.
pub fn server_date(millis: i64) -> SystemTime {
    let since = Duration::from_millis(u64::try_from(millis).unwrap_or(0));
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(text: &str) -> OwnerId {
        text.parse().unwrap()
    }

    fn queue(names: &[&str]) -> Queue {
        Queue::new(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    }

    fn named(spelling: Spelling, mode: Mode, sequence: u64) -> String {
        format!("{}{sequence:010}", spelling.prefix(&owner(&format!("h.{sequence}.x")), mode))
    }

    #[test]
    fn a_name_tells_its_mode_in_both_spellings() {
        for spelling in [Spelling::Curator, Spelling::Kazoo] {
            for mode in [Mode::Exclusive, Mode::Shared, Mode::Slots(12)] {
                let entry = Entry::parse(&named(spelling, mode, 7)).unwrap();
                assert_eq!((entry.mode, entry.sequence, entry.hold), (mode, 7, None));
                let hold = Entry::parse(&held_name(&entry.name)).unwrap();
                assert_eq!((hold.mode, hold.sequence, hold.hold), (mode, 7, Some(1)));
                let hold = Entry::parse(&held_name(&hold.name)).unwrap();
                assert_eq!((hold.mode, hold.sequence, hold.hold), (mode, 7, Some(2)));
            }
        }
    }

    #[test]
    fn the_spelling_is_that_of_curator_and_of_kazoo() {
        let name = named(Spelling::Curator, Mode::Exclusive, 3);
        let uuid = name.strip_prefix("_c_").and_then(|rest| rest.strip_suffix("-lock-0000000003")).unwrap();
        assert_eq!(uuid.split('-').map(str::len).collect::<Vec<_>>(), [8, 4, 4, 4, 12]);
        let name = named(Spelling::Kazoo, Mode::Exclusive, 3);
        let uuid = name.strip_suffix("__lock__0000000003").unwrap();
        assert!(uuid.len() == 32 && uuid.chars().all(|c| c.is_ascii_hexdigit()));
    }

    #[test]
    fn other_programs_contenders_count_and_are_exclusive_unless_they_say_otherwise() {
        let names = [
            "_c_8d2b3f5e-0000-4000-8000-1234567890ab-lock-0000000002",
            "0123456789abcdef0123456789abcdef__lock__0000000001",
            "lock-0000000003",
            "0123456789abcdef0123456789abcdef__rlock__0000000004",
            "leases",
        ];
        let queue = queue(&names);
        let seen: Vec<_> = queue.entries.iter().map(|one| (one.sequence, one.mode)).collect();
        use Mode::{Exclusive, Shared};
        assert_eq!(seen, [(1, Exclusive), (2, Exclusive), (3, Exclusive), (4, Shared)]);
    }

    #[test]
    fn the_sequence_and_not_the_uuid_decides_the_order() {
        let names: Vec<String> = (0..20).rev().map(|n| named(Spelling::Curator, Mode::Exclusive, n)).collect();
        let queue = Queue::new(&names);
        assert!(queue.holds(0) && (1..20).all(|position| !queue.holds(position)));
        assert_eq!(queue.entries[5].sequence, 5);
    }

    #[test]
    fn a_contender_that_is_alive_without_a_place_keeps_others_out_unless_their_modes_run_together() {
        use Mode::{Exclusive, Shared, Slots};
        for spelling in [Spelling::Curator, Spelling::Kazoo] {
            for theirs in [Exclusive, Shared, Slots(2)] {
                let (place, other) = (named(spelling, theirs, 7), named(spelling, Exclusive, 8));
                let signs = [&place, &other].map(|name| sign_of(name).to_owned());
                for ours in [Exclusive, Shared, Slots(2), Slots(3)] {
                    assert!(queue(&[&place, &other]).alive_without_place(&signs, ours).is_empty());
                    let without = queue(&[&other]).alive_without_place(&signs, ours);
                    assert_eq!(without.is_empty(), ours == theirs && ours != Exclusive, "{ours:?} {theirs:?}");
                }
            }
        }
    }
}
