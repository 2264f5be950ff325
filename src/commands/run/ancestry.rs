//! Which locks the runs around this one hold, so that a lock is never waited for by its own holder.
//!
//! Variables say so, and variables travel: over ssh, into containers, to jobs that are started later. So they are only
//! hints. Whether an owner still holds the lock, the backend knows; whether its run is really around us, the table of
//! processes.

use std::fs::read_to_string;

use nix::unistd::{Pid, getpid};

use crate::config::Leftovers;
use crate::lock::{LockName, OwnerId};

/// `name=owner` of every run we are inside of, outermost first.
pub const VARIABLE: &str = "DLOCK_HELD";
/// `owner=process` for each of these owners.
pub const PROCESSES: &str = "DLOCK_HELD_BY";

/// The owners under which runs around us took a lock of this name. The variables may be stale, or speak
/// of another backend: only if one of these owners is found holding the lock are we nested.
pub fn owners_of(name: &LockName) -> Vec<OwnerId> {
    let pair = std::env::var("DLOCK_NAME").ok().zip(std::env::var("DLOCK_OWNER").ok());
    let pair = pair.map(|(name, owner)| format!("{name}={owner}")).unwrap_or_default();
    let held = std::env::var(VARIABLE).unwrap_or_default();
    let entries = held.split(' ').chain([pair.as_str()]).filter_map(|entry| entry.split_once('='));
    entries.filter(|(held, _)| *held == name.as_str()).filter_map(|(_, owner)| owner.parse().ok()).collect()
}

/// Whether the run that took a lock of this name as this owner is around us, as far as variables tell.
pub fn is_inside(name: &LockName, owner: &OwnerId) -> bool {
    std::env::var(VARIABLE).is_ok_and(|held| held.split(' ').any(|entry| entry == format!("{name}={owner}")))
}

/// Whether the dlock that runs as this owner is an ancestor of this process: then its guardian ends us with the rest of
/// its command.
pub fn is_ancestor(owner: &str) -> bool {
    let processes = std::env::var(PROCESSES).unwrap_or_default();
    let process = processes.split(' ').filter_map(|entry| entry.split_once('=')).find(|(known, _)| *known == owner);
    let Some((_, process)) = process else { return false };
    let parents =
        std::iter::successors(Some(getpid()), |pid| Some(Stat::of(*pid)?.parent).filter(|pid| pid.as_raw() > 0));
    parents.skip(1).any(|parent| identity(parent).as_deref() == Some(process))
}

/// The variables' values for a command that runs under one lock more. A run that leaves processes behind names no process:
/// it would not end an inner run before it releases the lock.
pub fn with(name: &LockName, owner: &OwnerId, leftovers: Leftovers) -> [(String, String); 2] {
    let add = |variable: &str, entry: String| {
        let inherited = std::env::var(variable).unwrap_or_default();
        (variable.to_owned(), format!("{inherited} {entry}").trim_start().to_owned())
    };
    let process = identity(getpid()).filter(|_| leftovers != Leftovers::Leave);
    let process = process.map_or_else(String::new, |process| format!("{owner}={process}"));
    [add(VARIABLE, format!("{name}={owner}")), add(PROCESSES, process)]
}

/// A process of this boot: its id may be used again, but not with the same start, in ticks since the boot.
fn identity(pid: Pid) -> Option<String> {
    Some(format!("{pid}.{}", Stat::of(pid)?.born))
}

struct Stat {
    parent: Pid,
    born: u64,
}

impl Stat {
    fn of(pid: Pid) -> Option<Stat> {
        let stat = read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // `pid (name) state ppid …`: the name may hold anything; the start is the 22nd field.
        let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
        Some(Stat { parent: Pid::from_raw(fields.nth(1)?.parse().ok()?), born: fields.nth(17)?.parse().ok()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_its_start_too() {
        let ours = Stat::of(getpid()).unwrap();
        assert_eq!(identity(getpid()), Some(format!("{}.{}", getpid(), ours.born)));
        let parent = Stat::of(ours.parent).unwrap();
        assert!(parent.born > 0 && parent.born <= ours.born, "a parent is older: {} {}", parent.born, ours.born);
    }
}
