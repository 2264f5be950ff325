//! The queue of a lock, as the names of its children alone tell it: who contends, in which order and
//! mode, who holds, and whose going a waiter has to wait for. Pure.
//!
//! A name is `_c_<uuid>[-hold-N][-shared|-slots-N]-lock-<seq>` as Curator spells it, or
//! `<uuid>[…]__lock__<seq>` as kazoo does. What only we know stands between uuid and `lock`, where both
//! look past it, so that reading the queue is one request however long it is.

use std::collections::HashSet;

use crate::lock::{Mode, OwnerId, may_hold};

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contender {
    pub name: String,
    pub sequence: u64,
    pub mode: Mode,
    /// Nobody's session: it keeps the lock until its time is over. How many it has been.
    pub hold: Option<u32>,
}

impl Contender {
    /// Whatever ends in a sequence number contends, since to Curator it does.
    fn parse(name: &str) -> Option<Contender> {
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
        Some(Contender { name: name.to_owned(), sequence, mode, hold })
    }
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

/// What the sign of life beside a place is called: as the place is, before the server numbered it.
pub fn sign_of(name: &str) -> &str {
    name.trim_end_matches(|c: char| c.is_ascii_digit())
}

/// All contenders, in the order in which they are served.
#[derive(Clone, Debug, Default)]
pub struct Queue(Vec<Contender>);

impl Queue {
    pub fn new(children: &[String]) -> Queue {
        let mut all: Vec<Contender> = children.iter().filter_map(|name| Contender::parse(name)).collect();
        all.sort_by(|a, b| (a.sequence, &a.name).cmp(&(b.sequence, &b.name)));
        Queue(all)
    }

    pub fn contenders(&self) -> &[Contender] {
        &self.0
    }

    pub fn position(&self, name: &str) -> Option<usize> {
        self.0.iter().position(|contender| contender.name == name)
    }

    /// The place of an owner, by what its names begin with: a living one, or one that is held on to.
    pub fn place_of(&self, stem: &str, hold: bool) -> Option<&Contender> {
        self.0.iter().find(|contender| contender.name.starts_with(stem) && contender.hold.is_some() == hold)
    }

    pub fn remove(&mut self, name: &str) {
        self.0.retain(|contender| contender.name != name);
    }

    pub fn ahead(&self, position: usize) -> &[Contender] {
        &self.0[..position]
    }

    /// Other programs know of no slots and take their turn alone.
    pub fn holds(&self, position: usize) -> bool {
        let ahead: Vec<Mode> = self.ahead(position).iter().map(|contender| contender.mode).collect();
        self.differing(position).is_none() && may_hold(self.0[position].mode, &ahead)
    }

    /// The last one before this position that counts the slots differently.
    fn differing(&self, position: usize) -> Option<usize> {
        self.ahead(position).iter().rposition(|before| before.mode.slots() != self.0[position].mode.slots())
    }

    /// Of those who gave a sign of life before the queue was read, whoever has no place in it any more and may be
    /// running what a contender of this mode must not run beside. Slots are told apart by their own nodes.
    pub fn struck(&self, signs: &[String], mode: Mode) -> Vec<String> {
        let placed: HashSet<&str> = self.0.iter().map(|contender| sign_of(&contender.name)).collect();
        let theirs = |sign: &str| Contender::parse(&format!("{sign}0")).map(|contender| contender.mode);
        let beside = |sign: &str| mode != Mode::Exclusive && theirs(sign) == Some(mode);
        let struck = signs.iter().filter(|sign| !placed.contains(sign.as_str()) && !beside(sign));
        struck.cloned().collect()
    }

    /// Whose going a waiter at this position has to watch for; whoever waits for several slots behind
    /// others is woken by the one before it, which changes its node when it gets its slot.
    pub fn blockers(&self, position: usize) -> &[Contender] {
        let ahead = self.ahead(position);
        let last = |at: usize| &ahead[at..=at];
        if let Some(at) = self.differing(position) {
            return last(at);
        }
        match self.0[position].mode {
            Mode::Slots(n) if position <= n as usize => ahead,
            Mode::Shared => match ahead.iter().rposition(|before| before.mode != Mode::Shared) {
                Some(at) => last(at),
                None => &[],
            },
            Mode::Exclusive | Mode::Slots(_) if position > 0 => last(position - 1),
            _ => &[],
        }
    }
}

/// FNV-1a with 128 bits: the owner is unique already, this only gives it the form of a uuid.
fn fnv128(bytes: &[u8]) -> u128 {
    const OFFSET: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    bytes.iter().fold(OFFSET, |hash, byte| (hash ^ u128::from(*byte)).wrapping_mul(PRIME))
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
                let contender = Contender::parse(&named(spelling, mode, 7)).unwrap();
                assert_eq!((contender.mode, contender.sequence, contender.hold), (mode, 7, None));
                let hold = Contender::parse(&held_name(&contender.name)).unwrap();
                assert_eq!((hold.mode, hold.sequence, hold.hold), (mode, 7, Some(1)));
                let hold = Contender::parse(&held_name(&hold.name)).unwrap();
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
        let seen: Vec<_> = queue.contenders().iter().map(|one| (one.sequence, one.mode)).collect();
        use Mode::{Exclusive, Shared};
        assert_eq!(seen, [(1, Exclusive), (2, Exclusive), (3, Exclusive), (4, Shared)]);
    }

    #[test]
    fn the_sequence_and_not_the_uuid_decides_the_order() {
        let names: Vec<String> = (0..20).rev().map(|n| named(Spelling::Curator, Mode::Exclusive, n)).collect();
        let queue = Queue::new(&names);
        assert!(queue.holds(0) && (1..20).all(|position| !queue.holds(position)));
        assert_eq!(queue.blockers(5)[0].sequence, 4);
    }

    #[test]
    fn a_shared_waiter_watches_the_last_exclusive_one_before_it() {
        use Mode::{Exclusive, Shared};
        let modes = [Shared, Exclusive, Shared, Shared];
        let names: Vec<String> =
            modes.iter().enumerate().map(|(n, mode)| named(Spelling::Curator, *mode, n as u64)).collect();
        let queue = Queue::new(&names);
        assert!(queue.holds(0) && !queue.holds(1) && !queue.holds(3));
        assert_eq!(queue.blockers(3)[0].sequence, 1);
        assert_eq!(queue.blockers(1)[0].sequence, 0);
    }

    #[test]
    fn whoever_is_alive_without_a_place_is_in_the_way_of_all_who_must_not_run_beside_it() {
        use Mode::{Exclusive, Shared, Slots};
        for spelling in [Spelling::Curator, Spelling::Kazoo] {
            for theirs in [Exclusive, Shared, Slots(2)] {
                let (place, other) = (named(spelling, theirs, 7), named(spelling, Exclusive, 8));
                let signs = [&place, &other].map(|name| sign_of(name).to_owned());
                for ours in [Exclusive, Shared, Slots(2), Slots(3)] {
                    assert!(queue(&[&place, &other]).struck(&signs, ours).is_empty());
                    let struck = queue(&[&other]).struck(&signs, ours);
                    assert_eq!(struck.is_empty(), ours == theirs && ours != Exclusive, "{ours:?} {theirs:?}");
                }
            }
        }
    }

    #[test]
    fn the_first_waiter_for_a_slot_watches_all_holders_and_the_others_their_predecessor() {
        let names: Vec<String> = (0..5).map(|n| named(Spelling::Curator, Mode::Slots(2), n)).collect();
        let queue = Queue::new(&names);
        assert!(queue.holds(1) && !queue.holds(2));
        assert_eq!(queue.blockers(2).len(), 2);
        assert_eq!(queue.blockers(4).iter().map(|one| one.sequence).collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn another_program_stands_alone_between_holders_of_slots() {
        let slots = |n| named(Spelling::Curator, Mode::Slots(3), n);
        let foreign = named(Spelling::Kazoo, Mode::Exclusive, 1);
        let queue = queue(&[&slots(0), &foreign, &slots(2), &slots(3)]);
        let holding: Vec<_> = (0..4).filter(|position| queue.holds(*position)).collect();
        assert_eq!(holding, [0]);
        assert_eq!([2, 3].map(|position| queue.blockers(position)[0].sequence), [1, 1]);
    }
}
