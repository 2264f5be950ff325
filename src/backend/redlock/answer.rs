//! What one node says to a script. Nobody else knows the words.

use std::time::Duration;

use redis::{FromRedisValue, ParsingError, Value};

use crate::backend::redis::answer::{millis, non_empty, number, shown, text, understood};
use crate::lock::Token;

/// To whoever wants to take or keep a node. What other scripts say is the same as on a single Redis.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The node is ours. If it was just taken: which token it would have to be at least.
    Ours(Option<Token>),
    /// Another has it.
    Theirs(Theirs),
    /// Nobody has it, but others are before us in the queue.
    Behind(Theirs),
    /// The node is not ours, or not any more; perhaps somebody else's.
    Gone(Option<String>),
    /// An operator has freed the node on the spot, for this reason.
    Taken(String),
    /// An operator wants the node back, for this reason.
    Revoked(String),
    /// A successful run has left its once key.
    Ran,
}

/// What keeps us from a node.
#[derive(Clone, Debug)]
pub struct Theirs {
    /// What the lock's key holds, and what the node says about that holder.
    pub owner: Option<String>,
    pub details: String,
    /// When its lease ends, if ever.
    pub left: Option<Duration>,
    pub ahead: usize,
    /// When to ask again.
    pub beat: Option<Duration>,
}

impl FromRedisValue for Answer {
    fn from_redis_value(reply: Value) -> Result<Answer, ParsingError> {
        understood(reply, |word, rest| {
            Some(match (word, rest) {
                ("ours", []) => Answer::Ours(None),
                ("ours", [token]) => Answer::Ours(Some(Token(number(token)?))),
                ("theirs", rest) => Answer::Theirs(Theirs::read(rest)?),
                ("behind", rest) => Answer::Behind(Theirs::read(rest)?),
                ("gone", rest) => Answer::Gone(rest.first().and_then(non_empty)),
                ("taken", [reason]) => Answer::Taken(shown(reason)),
                ("revoked", [reason]) => Answer::Revoked(shown(reason)),
                ("ran", []) => Answer::Ran,
                _ => return None,
            })
        })
    }
}

impl Theirs {
    fn read(reply: &[Value]) -> Option<Theirs> {
        let [owner, left, details, ahead, beat] = reply else { return None };
        let (owner, details) = (non_empty(owner), text(details)?);
        Some(Theirs { owner, details, left: millis(left), ahead: number(ahead)?, beat: millis(beat) })
    }
}
