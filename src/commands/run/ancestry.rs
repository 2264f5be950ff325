//! Which locks the runs around this one hold, so that a lock is never waited for by its own holder.

use crate::lock::{LockName, OwnerId};

/// `name=owner` of every run we are inside of, outermost first.
pub const VARIABLE: &str = "DLOCK_HELD";

/// The owners under which runs around us took a lock of this name. The variables may be stale, or speak
/// of another backend: only if one of these owners is found holding the lock are we nested.
pub fn owners_of(name: &LockName) -> Vec<OwnerId> {
    let pair = std::env::var("DLOCK_NAME").ok().zip(std::env::var("DLOCK_OWNER").ok());
    let pair = pair.map(|(name, owner)| format!("{name}={owner}")).unwrap_or_default();
    let held = std::env::var(VARIABLE).unwrap_or_default();
    let entries = held.split(' ').chain([pair.as_str()]).filter_map(|entry| entry.split_once('='));
    entries.filter(|(held, _)| *held == name.as_str()).filter_map(|(_, owner)| owner.parse().ok()).collect()
}

/// Whether the run that took a lock of this name as this owner is around us.
pub fn is_inside(name: &LockName, owner: &OwnerId) -> bool {
    std::env::var(VARIABLE).is_ok_and(|held| held.split(' ').any(|entry| entry == format!("{name}={owner}")))
}

/// The variable's value for a command that runs under one lock more.
pub fn with(name: &LockName, owner: &OwnerId) -> String {
    let held = std::env::var(VARIABLE).unwrap_or_default();
    format!("{held} {name}={owner}").trim_start().to_owned()
}
