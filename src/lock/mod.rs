//! The domain: what a lock is, who may hold it and until when. Pure values and rules; no I/O, no clock
//! but the instants handed in.

mod contender;
mod identity;
pub mod messages;
mod mode;
mod name;
pub mod queue;
mod state;
mod terms;
mod vanished;

pub use contender::{Contender, Record};
pub use identity::{Identity, OwnerId};
pub use mode::Mode;
pub use name::LockName;
pub use queue::Contends;
pub use state::{Holder, LastRun, LockState, NodeState, Outcome, State, Waiter};
pub use terms::{Deadlines, Term, Terms};
pub use vanished::SeenHolders;

/// A fencing token: greater at every later exclusive grant of the same lock, and a positive i64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(pub u64);

impl std::fmt::Display for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
