//! Every process below this one: found through /proc, signalled, and ended until the kernel says that
//! there is none.
//!
//! A process cannot leave the tree: whoever made itself the subreaper inherits every orphan, also those
//! that called setsid(2) and forked twice. A walk can still miss one that is being born, so ending is
//! repeated until waitpid(2) answers ECHILD. That answer is the proof of death.

use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpid};

use crate::mutant::{self, Mutant};

/// Inherit orphaned descendants instead of leaving them to init.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
}

/// Sends a signal to every living descendant of this process that `which` selects; says how many it reached.
pub fn signal_all(signal: impl Into<Option<Signal>> + Copy, which: impl Fn(Pid) -> bool) -> usize {
    let mut reached = 0;
    let mut found = vec![getpid()];
    while let Some(parent) = found.pop() {
        for child in children(parent) {
            if which(child) && kill(child, signal).is_ok() {
                reached += 1;
            }
            found.push(child);
        }
    }
    reached
}

/// How many descendants live, not counting those that only wait to be reaped.
pub fn living() -> usize {
    signal_all(None, |pid| !is_zombie(pid))
}

/// Ends every descendant and returns only when there is none. `reaped` sees each direct child's status.
pub fn end_all(mut reaped: impl FnMut(WaitStatus)) {
    let mut pause = Duration::from_micros(200);
    if mutant::is(Mutant::NoSigkill) {
        return;
    }
    loop {
        signal_all(Signal::SIGKILL, |_| true);
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => break,
                Ok(status) => reaped(status),
                Err(Errno::EINTR) => {}
                Err(_) => return,
            }
        }
        std::thread::sleep(pause);
        // A process that cannot be killed (setuid, or in the depths of a dead disk) is waited for.
        pause = (pause * 2).min(Duration::from_millis(20));
    }
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
