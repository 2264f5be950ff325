//! The witness: a command that does nothing but say that it lives. Every process of it appends the time
//! on CLOCK_BOOTTIME, in nanoseconds, to `LOG/RUN.TOKEN.PID.START`, every millisecond. RUN is the process id and
//! the first instant of its first process, so that two runs are two whatever token they were given. What else of
//! other runs still exists when a run begins, also if it is stopped and cannot beat, goes to `LOG/RUN.survivors`.
//!
//! `witness LOG [WORD…]`, where a word is one of
//! `ignore-term`, `daemons=N` (N processes more, each in a session of its own and orphaned),
//! `for=MILLIS` (then exit 0), `exit=CODE`, `stop` (stop itself after the first beat),
//! `fork-loop` (keep forking short-lived processes that beat, too), `chains=N` (N sessions, in each of which every
//! process forks the next and ends, without a pause, for 20 s), `arena=DIR` (other runs are those that
//! write below DIR, not only those that write to LOG).
#![allow(unsafe_code, clippy::unwrap_used, clippy::exit)]

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{SigHandler, Signal, raise, signal};
use nix::sys::sysinfo::sysinfo;
use nix::time::{ClockId, clock_gettime};
use nix::unistd::{ForkResult, fork, getpid, setsid};

fn main() {
    let mut args = std::env::args().skip(1);
    let log = PathBuf::from(args.next().unwrap_or_else(|| "/dev/null".into()));
    let words: Vec<String> = args.collect();
    let has = |word: &str| words.iter().any(|one| one == word);
    let text = |key: &str| words.iter().find_map(|word| word.strip_prefix(key));
    let number = |key: &str| text(key).and_then(|text| text.parse::<u64>().ok());

    if has("ignore-term") {
        // SAFETY: SIG_IGN is no handler.
        unsafe { signal(Signal::SIGTERM, SigHandler::SigIgn) }.unwrap();
    }
    let run = Run::begin(log);
    let mut heart = run.heart();
    heart.beat();
    run.tell_survivors(text("arena=").map(Path::new));
    for _ in 0..number("daemons=").unwrap_or(0) {
        daemon(&run);
    }
    let most = sysinfo().unwrap().process_count().saturating_add(MOST_MORE);
    for _ in 0..number("chains=").unwrap_or(0) {
        chain(&run, most);
    }
    let end = number("for=").map(|millis| now() + millis * 1_000_000);
    if has("stop") {
        raise(Signal::SIGSTOP).unwrap();
    }
    while end.is_none_or(|end| now() < end) {
        if has("fork-loop") {
            fork_and_go_on(&run);
            heart = run.heart();
        }
        heart.beat();
        std::thread::sleep(Duration::from_millis(1));
    }
    std::process::exit(number("exit=").unwrap_or(0).try_into().unwrap());
}

/// Chains make so many processes at the most, the dead included.
const MOST_MORE: u16 = 2000;

fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap();
    u64::try_from(time.tv_sec()).unwrap() * 1_000_000_000 + u64::try_from(time.tv_nsec()).unwrap()
}

/// What all processes of one run have in common.
struct Run {
    log: PathBuf,
    id: String,
    token: String,
}

impl Run {
    fn begin(log: PathBuf) -> Run {
        let token = std::env::var("DLOCK_FENCING_TOKEN").unwrap_or_else(|_| "0".into());
        Run { log, id: format!("{}-{}", getpid(), now()), token }
    }

    /// This process's own.
    fn heart(&self) -> Heart {
        let path = self.log.join(format!("{}.{}.{}.{}", self.id, self.token, getpid(), now()));
        Heart(File::options().append(true).create(true).open(path).unwrap())
    }

    /// At the beginning, when this process is its run's only one: every other witness is another run's.
    fn tell_survivors(&self, arena: Option<&Path>) {
        let found = others(arena.unwrap_or(&self.log));
        if !found.is_empty() {
            std::fs::write(self.log.join(format!("{}.survivors", self.id)), found.join("\n")).unwrap();
        }
    }
}

/// Every other process of this program that writes below a directory, awake or not, as `PID STATE`. A zombie is
/// none: it has no program any more. Nor is one with SIGKILL pending: it runs no more of its program.
fn others(arena: &Path) -> Vec<String> {
    let this = std::fs::read_link("/proc/self/exe").unwrap();
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_other = |pid: &i32| {
        std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == this)
            && *pid != getpid().as_raw()
            && std::fs::read_to_string(format!("/proc/{pid}/cmdline"))
                .is_ok_and(|words| words.split('\0').nth(1).is_some_and(|log| Path::new(log).starts_with(arena)))
    };
    let state = |pid: i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let state = stat.rsplit_once(')')?.1.split_whitespace().next()?.to_owned();
        (!matches!(state.as_str(), "Z" | "X") && !is_being_killed(pid)).then(|| format!("{pid} {state}"))
    };
    pids.filter(is_other).filter_map(state).collect()
}

fn is_being_killed(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = |line: &str| {
        let mask = line.strip_prefix("ShdPnd:").or_else(|| line.strip_prefix("SigPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    };
    status.lines().filter_map(pending).any(|mask| mask & (1 << (nix::libc::SIGKILL - 1)) != 0)
}

struct Heart(File);

impl Heart {
    fn beat(&mut self) {
        self.0.write_all(format!("{}\n", now()).as_bytes()).unwrap();
    }

    fn beat_for_ever(&mut self) -> ! {
        loop {
            self.beat();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The classic way out of a process tree: fork, a session of its own, fork again.
fn daemon(run: &Run) {
    // SAFETY: this program has one thread.
    if let ForkResult::Child = unsafe { fork() }.unwrap() {
        setsid().unwrap();
        // SAFETY: as above.
        if let ForkResult::Child = unsafe { fork() }.unwrap() {
            run.heart().beat_for_ever();
        }
        std::process::exit(0);
    }
}

/// Somebody else at every look, in a session of its own. As long as there are so many processes on the machine, zombies
/// that nobody has buried yet among them, it makes no more.
fn chain(run: &Run, most: u16) {
    const LONGEST: u64 = 20_000_000_000;
    const BEAT: u64 = 500_000;
    // SAFETY: as above.
    if let ForkResult::Parent { .. } = unsafe { fork() }.unwrap() {
        return;
    }
    setsid().unwrap();
    let (mut heart, end, mut beaten) = (run.heart(), now() + LONGEST, 0);
    while now() < end {
        if now() >= beaten + BEAT {
            heart.beat();
            beaten = now();
        }
        if sysinfo().unwrap().process_count() >= most {
            std::thread::yield_now();
        // SAFETY: as above. A fork that fails is tried again.
        } else if let Ok(ForkResult::Parent { .. }) = unsafe { fork() } {
            break;
        }
    }
    // SAFETY: ends the process, and nothing else.
    unsafe { nix::libc::_exit(0) }
}

/// The child lives on in the parent's place, so that a killer that looks twice finds somebody else.
fn fork_and_go_on(run: &Run) {
    // SAFETY: as above.
    if let ForkResult::Parent { .. } = unsafe { fork() }.unwrap() {
        let mut heart = run.heart();
        heart.beat();
        // The first process stays, for dlock would take its end for the command's.
        if std::env::var_os("WITNESS_CHILD").is_some() {
            std::process::exit(0);
        }
        heart.beat_for_ever();
    }
    // SAFETY: as above.
    unsafe { std::env::set_var("WITNESS_CHILD", "1") };
}
