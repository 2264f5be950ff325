//! The witness: a command that does nothing but say that it lives. Every process of it appends the time
//! on CLOCK_BOOTTIME, in nanoseconds, to `LOG/TOKEN.PID`, every millisecond.
//!
//! `witness LOG [WORD…]`, where a word is one of
//! `ignore-term`, `daemons=N` (N processes more, each in a session of its own and orphaned),
//! `for=MILLIS` (then exit 0), `exit=CODE`, `stop` (stop itself after the first beat),
//! `fork-loop` (keep forking short-lived processes that beat, too).
#![allow(unsafe_code, clippy::unwrap_used, clippy::exit)]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{SigHandler, Signal, raise, signal};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, fork, getpid, setsid};

fn main() {
    let mut args = std::env::args().skip(1);
    let log = PathBuf::from(args.next().unwrap_or_else(|| "/dev/null".into()));
    let words: Vec<String> = args.collect();
    let has = |word: &str| words.iter().any(|one| one == word);
    let number = |key: &str| words.iter().find_map(|word| word.strip_prefix(key)?.parse::<u64>().ok());

    if has("ignore-term") {
        // SAFETY: SIG_IGN is no handler.
        unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }.unwrap();
    }
    for _ in 0..number("daemons=").unwrap_or(0) {
        daemon(&log);
    }
    let end = number("for=").map(|millis| now() + millis * 1_000_000);
    let mut heart = Heart::new(&log);
    heart.beat();
    if has("stop") {
        raise(Signal::SIGSTOP).unwrap();
    }
    while end.is_none_or(|end| now() < end) {
        if has("fork-loop") {
            fork_and_go_on(&log);
            heart = Heart::new(&log);
        }
        heart.beat();
        std::thread::sleep(Duration::from_millis(1));
    }
    std::process::exit(number("exit=").unwrap_or(0).try_into().unwrap());
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap();
    u64::try_from(time.tv_sec()).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap()
}

struct Heart(File);

impl Heart {
    fn new(log: &Path) -> Heart {
        let token = std::env::var("DLOCK_FENCING_TOKEN").unwrap_or_else(|_| "0".into());
        let path = log.join(format!("{token}.{}", getpid()));
        Heart(File::options().append(true).create(true).open(path).unwrap())
    }

    fn beat(&mut self) {
        self.0.write_all(format!("{}\n", now()).as_bytes()).unwrap();
    }
}

/// The classic way out of a process tree: fork, a session of its own, fork again.
fn daemon(log: &Path) {
    // SAFETY: this program has one thread.
    if let ForkResult::Child = unsafe { fork() }.unwrap() {
        setsid().unwrap();
        // SAFETY: as above.
        if let ForkResult::Child = unsafe { fork() }.unwrap() {
            let mut heart = Heart::new(log);
            loop {
                heart.beat();
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        std::process::exit(0);
    }
}

/// The child lives on in the parent's place, so that a killer that looks twice finds somebody else.
fn fork_and_go_on(log: &Path) {
    // SAFETY: as above.
    if let ForkResult::Parent { .. } = unsafe { fork() }.unwrap() {
        Heart::new(log).beat();
        // The first process stays, for dlock would take its end for the command's.
        if std::env::var_os("WITNESS_CHILD").is_some() {
            std::process::exit(0);
        }
        loop {
            Heart::new(log).beat();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // SAFETY: as above.
    unsafe { std::env::set_var("WITNESS_CHILD", "1") };
}
