//! What several backends have to tell people, in the same words.

use std::fmt::Display;

use super::{Mode, Token};

pub const FOREIGN_HOLDER: &str =
    "its holder is not dlock and would not notice that it is asked to stop; --now takes the lock away at once";

/// Somebody uses the lock with another number of slots.
pub fn other_slots(who: impl Display, theirs: Mode, ours: Mode) -> String {
    let (theirs, ours) = (theirs.slots(), ours.slots());
    format!("{who} uses it with --slots {theirs}, not {ours}: all contenders must name the same number")
}

/// The key, node or row of a holder is gone.
pub fn deleted(what: impl Display) -> String {
    format!("{what} was deleted")
}

/// The record of a contender of ours is not ours any more.
pub fn overwritten(what: impl Display) -> String {
    format!("{what} has been overwritten: force-release --now takes it away")
}

/// Why a token is refused: it comes from a counter of the server's, and that counter went back. `None` if the token is
/// greater than all on record. No dlock makes one that does not fit an i64: such a record is nonsense, and refuses nobody.
pub fn counter_went_back(
    newest: Token,
    recorded: impl IntoIterator<Item = Token>,
    cause: &str,
    advice: impl Display,
) -> Option<String> {
    let possible = recorded.into_iter().filter(|token| i64::try_from(token.0).is_ok());
    let recorded = possible.max().filter(|recorded| *recorded >= newest)?;
    Some(format!(
        "its fencing token would be {newest}, but an earlier run had {recorded}: {cause}. Nothing was started. {advice}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_to_be_greater_than_all_that_can_be_true() {
        let refused = |recorded: &[u64]| counter_went_back(Token(7), recorded.iter().copied().map(Token), "", "");
        assert_eq!(refused(&[5, 6, u64::MAX]), None);
        assert!(refused(&[8, 9, 2]).unwrap().contains("an earlier run had 9"));
        assert!(refused(&[7]).unwrap().contains("an earlier run had 7"));
        assert_eq!(refused(&[]), None);
    }
}
