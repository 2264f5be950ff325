//! Every process below this one: found through /proc, signalled, and ended until the kernel says that
//! there is none.
//!
//! A process cannot leave the tree: whoever made itself the subreaper inherits every orphan, also those
//! that called setsid(2) and forked twice. A walk can still miss one that is being born, so ending is
//! repeated until waitpid(2) answers ECHILD. That answer is the proof of death.

use std::time::Duration;

use nix::errno::Errno;
use nix::libc;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgid, getpid, getsid};

use crate::mutant::{self, Mutant};

/// What the kernel has to say about our children.
pub enum Children {
    /// This one has ended, or stopped, with this wait status.
    Changed(Pid, i32),
    /// There are some, and there is nothing new about them.
    Quiet,
    None,
}

/// Inherit orphaned descendants instead of leaving them to init.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// Whether /proc shows our own processes: not if it is missing, or that of another pid namespace.
pub fn can_be_seen() -> bool {
    let myself = std::fs::read_link("/proc/self").ok();
    myself.is_some_and(|link| link.as_os_str() == getpid().to_string().as_str())
        && std::fs::File::open("/proc/thread-self/children").is_ok()
}

/// Asks for the next news of a child. nix's own function would do, if it did not take a death of a real-time signal
/// for an error, and the child for reaped all the same.
pub fn next_news(flags: i32) -> Children {
    loop {
        let mut status = 0;
        // SAFETY: writes a status where there is room for one.
        let answer = unsafe { libc::waitpid(-1, &raw mut status, flags | libc::WNOHANG) };
        match answer {
            0 => return Children::Quiet,
            pid if pid > 0 => return Children::Changed(Pid::from_raw(pid), status),
            _ => match Errno::last() {
                Errno::ECHILD => return Children::None,
                Errno::EINTR => {}
                _ => return Children::Quiet,
            },
        }
    }
}

/// All descendants of this process, dead ones that nobody has reaped included.
pub fn descendants() -> Vec<Pid> {
    let mut found = children(getpid());
    let mut looked_at = 0;
    while let Some(&parent) = found.get(looked_at) {
        found.extend(children(parent));
        looked_at += 1;
    }
    found
}

/// Sends a signal to every descendant that `which` selects. All are found before the first is told: one that dies of it
/// would hide its children from the search.
pub fn signal_all(signal: Signal, which: impl Fn(Pid) -> bool) {
    for pid in descendants().into_iter().filter(|pid| which(*pid)) {
        let _ = kill(pid, signal);
    }
}

/// How many descendants live, not counting those that only wait to be reaped.
pub fn living() -> usize {
    descendants().into_iter().filter(|pid| !is_zombie(*pid)).count()
}

/// Ends every descendant and returns only when there is none. Others than descendants are only in the session `shared`.
/// `reaped` sees each direct child's status.
pub fn end_all(shared: Option<Pid>, mut reaped: impl FnMut(Pid, i32)) {
    const SHORTEST: Duration = Duration::from_micros(200);
    if mutant::is(Mutant::NoSigkill) {
        return;
    }
    let mut pause = SHORTEST;
    loop {
        // No more dead are collected than there were before the living are looked for again: whoever forks as fast as it
        // dies must not keep us busy with its dead.
        let found = kill_all(shared);
        let mut quiet = false;
        for _ in 0..=found {
            match next_news(0) {
                Children::Changed(pid, status) => reaped(pid, status),
                Children::None => return,
                Children::Quiet => {
                    quiet = true;
                    break;
                }
            }
            pause = SHORTEST;
        }
        if quiet {
            std::thread::sleep(pause);
            // A process that cannot be killed (setuid, or in the depths of a dead disk) is waited for.
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

/// One round of it; says how many it found. The youngest of a family come first, since the others may be dead already.
/// Each is killed as soon as it is found, before it can go on forking, and its process group with it, where nobody else
/// can be in that: a group dies in one step, and what it is giving birth to is not born.
fn kill_all(shared: Option<Pid>) -> usize {
    let (mut families, mut found) = (vec![getpid()], 0);
    while let Some(parent) = families.pop() {
        let offspring = children(parent);
        for &child in offspring.iter().rev() {
            let apart = getsid(Some(child)).is_ok_and(|session| Some(session) != shared);
            match getpgid(Some(child)) {
                Ok(group) if group.as_raw() > 1 && (apart || group == child) => drop(killpg(group, Signal::SIGKILL)),
                _ => drop(kill(child, Signal::SIGKILL)),
            }
        }
        found += offspring.len();
        families.extend(offspring);
    }
    found
}

fn children(parent: Pid) -> Vec<Pid> {
    let mut found = Vec::new();
    let Ok(threads) = std::fs::read_dir(format!("/proc/{parent}/task")) else { return found };
    for thread in threads.flatten() {
        let list = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        found.extend(list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw));
    }
    found
}

fn is_zombie(pid: Pid) -> bool {
    // `pid (name) S …`, where the name may hold anything, parentheses included.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X']))
}
