//! What several backends have to tell people, in the same words.

use std::fmt::Display;

use super::Mode;

pub const FOREIGN_HOLDER: &str =
    "its holder is not dlock and would not notice that it is asked to stop; --now takes the lock away at once";

/// Somebody uses the lock with another number of slots.
pub fn other_slots(who: impl Display, theirs: Mode, ours: Mode) -> String {
    let (theirs, ours) = (theirs.slots(), ours.slots());
    format!("{who} uses it with --slots {theirs}, not {ours}: all contenders must name the same number")
}

/// The record of a contender of ours is not ours any more.
pub fn overwritten(what: impl Display) -> String {
    format!("{what} has been overwritten: force-release --now takes it away")
}
