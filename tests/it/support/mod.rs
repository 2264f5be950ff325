//! What every test uses: dlock as a process, a bed to test it on, servers, a proxy, and the witness.

mod clock;
mod daemon;
pub mod database;
mod dlock;
mod doctor;
pub mod etcd;
pub mod file;
mod home;
pub mod mysql;
mod netns;
mod place;
mod pooler;
pub mod postgres;
mod proxy;
pub mod redis;
mod terminal;
mod witness;
pub mod zookeeper;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

pub use clock::Clock;
pub use daemon::{Daemon, free_port};
pub use dlock::{Dlock, Ended, Running};
pub use doctor::{Told, examined};
pub use file::{FileBed, may_mount};
pub use home::server_home;
pub use mysql::Mysql;
pub use netns::{Network, address, cannot_make_networks};
pub use place::{Expect, Ground, Leader, Place, Server, Started, Urls};
pub use pooler::Pooler;
pub use postgres::Postgres;
pub use proxy::{Proxy, Tear};
pub use redis::{Redis, Redlock, Sentinel};
pub use terminal::Terminal;
pub use witness::{Log, Run, overlaps, tokens_grow};
pub use zookeeper::{ZooKeeperBed, ZooKeeperEnsemble, kazoo, kazoo_at, zookeeper_server};

/// Every backend that the tests break, as reports list them.
pub static PLACES: [&Place; 15] = [
    &file::FILE,
    &redis::REDIS,
    &redis::REDLOCK_3,
    &redis::REDLOCK_5,
    &etcd::ETCD,
    &etcd::ETCD_3,
    &zookeeper::ZOOKEEPER,
    &zookeeper::ZOOKEEPER_3,
    &postgres::POSTGRES,
    &mysql::MYSQL,
    &redis::SENTINEL,
    &redis::REPLICATED,
    &postgres::POSTGRES_PAIR,
    &mysql::MYSQL_PAIR,
    &mysql::GALERA,
];

/// A backend to test on. Many tests share its server, so each uses names of its own.
pub trait Bed {
    /// What `--backend` gets.
    fn url(&self) -> String;

    fn abilities(&self) -> Abilities {
        Abilities::default()
    }

    /// Whether the server would notice if the dlock that runs a command under this lock vanished now. Where a lease leaves
    /// no trace, the run is noted once it has lasted a moment.
    fn would_miss(&self, _name: &str) -> bool {
        true
    }

    /// Overwrites with this text every record of a lock that only describes it: its holder, its last run, and whatever
    /// somebody else may have written there. The holder is this owner.
    fn scrawl(&self, _name: &str, _owner: &str, _text: &str) {
        unreachable!("no test scrawls here");
    }

    /// Overwrites the counter of a lock's tokens, where that is a text.
    fn scrawl_token(&self, _name: &str, _text: &str) {}

    /// dlock, pointed at this backend, with patience for a server on a machine that is busy with other tests.
    fn dlock(&self) -> Dlock {
        Dlock::new().env("DLOCK_BACKEND", self.url()).env("DLOCK_CONNECT_TIMEOUT", "30s")
    }
}

/// A lock as `dlock status` shows it.
#[track_caller]
pub fn status(bed: &dyn Bed, name: &str) -> Value {
    let json = bed.dlock().args(["status", "--json", name]).ended().expect(0).stdout;
    serde_json::from_str::<Value>(&json).unwrap()[0].clone()
}

#[track_caller]
pub fn await_waiters(bed: &dyn Bed, name: &str, count: usize) {
    until(&format!("{count} waiter(s)"), || status(bed, name)["waiters"].as_array().unwrap().len() == count);
}

/// Hand-overs wake one waiter each, not all of them: a figure of the server that grows with every wake-up grows no more
/// where the queue is long.
pub fn assert_hand_overs_wake_one(bed: &dyn Bed, figure: impl Fn() -> u64) {
    const HAND_OVERS: u64 = 4;
    const MANY: u64 = 24;
    let cost = |waiters| {
        let (name, log) = (unique("hand-over"), Log::new());
        let start = || bed.dlock().run(&name).args(log.witness(&[])).spawn();
        let mut holder = start();
        log.await_runs(1, 1);
        let mut queue = std::collections::VecDeque::new();
        for n in 1..=waiters {
            queue.push_back(start());
            await_waiters(bed, &name, n as usize);
        }
        let before = figure();
        for n in 1..=HAND_OVERS {
            holder.signal(nix::sys::signal::Signal::SIGTERM);
            log.await_runs(n as usize + 1, 1);
            holder = queue.pop_front().unwrap();
        }
        // ZooKeeper wakes first and counts afterwards.
        until("the wake-ups to be counted", || figure() - before >= HAND_OVERS);
        figure() - before
    };
    let (few, many) = (cost(HAND_OVERS), cost(MANY));
    // A busy machine adds a little. Were all woken, the first hand-over alone would add more.
    assert!(many < few + MANY / 2, "{few} for {HAND_OVERS} waiters, {many} for {MANY}");
}

/// What a backend promises beyond exclusion.
#[derive(Clone, Copy, Debug)]
pub struct Abilities {
    pub shared_and_slots: bool,
    /// Waiters are served first come, first served.
    pub in_order: bool,
}

impl Default for Abilities {
    fn default() -> Abilities {
        Abilities { shared_and_slots: true, in_order: true }
    }
}

/// Waits for evidence. The limit only turns a hang into a failure; no test depends on how fast it comes.
#[track_caller]
pub fn until(what: &str, mut seen: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(180);
    while !seen() {
        assert!(Instant::now() < limit, "waited three minutes in vain for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What came of something that has a limit of its own, of a few seconds. A busy machine adds to it, but not half a minute.
#[track_caller]
pub fn in_time<T>(what: impl FnOnce() -> T) -> T {
    let begun = Instant::now();
    let outcome = what();
    assert!(begun.elapsed() < Duration::from_secs(30), "it took {:?}", begun.elapsed());
    outcome
}

/// Plays something for a table, in which one that fails is a line like the others: an `Err` says how it did.
pub fn to_the_end<T>(what: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(what)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
    })
}

/// A name nobody else uses, also when tests of earlier runs left something on a server; and none is the
/// beginning of another, for processes are found by them.
pub fn unique(stem: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("{stem}-{}-{:06}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Whether a process exists and is more than a zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// All living processes that have this text in their environment or command line: how a test finds what a
/// command has left behind, however it got away.
pub fn living_with(mark: &str) -> Vec<u32> {
    let pids =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has = |path: String| {
        std::fs::read(path).is_ok_and(|bytes| bytes.windows(mark.len()).any(|part| part == mark.as_bytes()))
    };
    pids.filter(|&pid| is_alive(pid))
        .filter(|pid| has(format!("/proc/{pid}/environ")) || has(format!("/proc/{pid}/cmdline")))
        .collect()
}

pub fn children_of(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

pub fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

pub fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(ToOwned::to_owned).collect()
}

/// Where cargo builds, and `tests/run` puts what the tests need.
pub fn target(path: &str) -> PathBuf {
    let chosen = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    Path::new(env!("CARGO_MANIFEST_DIR")).join(chosen).join(path)
}
