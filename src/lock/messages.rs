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

/// Tokens come from a counter of the server's, and that counter went back.
pub fn counter_went_back(newest: Token, recorded: Token, cause: &str, advice: impl Display) -> String {
    format!(
        "its fencing token would be {newest}, but an earlier run had {recorded}: {cause}. Nothing was started. {advice}"
    )
}

/// The token on record that a new one would have to be greater than, but is not. No dlock makes one that does not fit
/// an i64: such a record is nonsense, and refuses nobody.
pub fn newer_on_record(newest: Token, recorded: impl IntoIterator<Item = Token>) -> Option<Token> {
    let possible = recorded.into_iter().filter(|token| i64::try_from(token.0).is_ok());
    possible.max().filter(|recorded| *recorded >= newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_to_be_greater_than_all_that_can_be_true() {
        assert_eq!(newer_on_record(Token(7), [Token(5), Token(6), Token(u64::MAX)]), None);
        assert_eq!(newer_on_record(Token(7), [Token(8), Token(9), Token(2)]), Some(Token(9)));
        assert_eq!(newer_on_record(Token(7), [Token(7)]), Some(Token(7)));
        assert_eq!(newer_on_record(Token(7), []), None);
    }
}
