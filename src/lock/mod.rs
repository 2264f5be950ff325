//! The domain: what a lock is, who may hold it and until when. Pure values and rules; no I/O, no clock
//! but the instants handed in.

mod contender;
mod history;
mod identity;
pub mod messages;
mod mode;
mod name;
mod pattern;
pub mod queue;
pub mod rfc3339;
pub mod runs;
mod state;
mod timing;
mod vanished;

pub use contender::{Contender, Record};
pub use history::{History, LastRun, Outcome, Revocation};
pub use identity::{Identity, LONGEST_NOTE, OwnerId};
pub use mode::Mode;
pub use name::LockName;
pub use pattern::Selector;
pub use queue::Contends;
pub use runs::Runs;
pub use state::{Holder, LockState, NodeState, State, Waiter};
pub use timing::{Deadlines, Grant, LeaseTiming, rounded};
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
