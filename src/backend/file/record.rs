//! What is stored in `NAME.d` of those who hold the lock or wait for it, and of the runs under it.
//!
//! `holder.OWNER` and `waiter.OWNER` say who is there, in JSON. The process that wrote a record keeps a flock on it, so
//! that a reader can tell whether it is alive without touching the lock itself, and across containers, where a pid means
//! nothing. A lock that is held on to without a run has a process with nothing else to do, which keeps the flock for
//! programs that know only flock(2): see `wait::linger`. The record says until when, and that it is still wanted.
//!
//! `last-run` has the last run with the runs before it, `once` the keys of successful runs, one per line. A line counts
//! when it has its end, and not before: a disk that gets full in the middle of a key leaves a part of it, which may be a
//! key of its own.

use std::fs::{File, TryLockError};
use std::io::{ErrorKind, Result as IoResult, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Error, Result, ensure};
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use super::folder::{Folder, content, refusal, revoke};
use crate::backend::{Ask, DEFAULT_HISTORY, Unrecorded};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::{Contender, LastRun, Mode, OwnerId, Record, StoredHistory, Token};

/// Where the record is among a claim's descriptors.
pub const RECORD: usize = 1;

/// No record of ours is longer.
const LONGEST: usize = 64 * 1024;
/// As long as any other id of a boot, so that a record can be changed in its place.
const NO_BOOT: &str = "00000000-0000-0000-0000-000000000000";

/// In the place of a token.
pub const WAITS: Token = Token(0);
/// What the names of the records begin with: in `NAME.d`, and in `waiting` below it.
pub const HOLDER: &str = "holder.";
pub const WAITER: &str = "waiter.";

/// No key has such a character, so no line with it is a key.
const SPOILT: &str = "\0\n";
pub const LAST_RUN: &str = "last-run";
pub const ONCE: &str = "once";

/// What a contender stores beside its identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Details {
    pub mode: Mode,
    /// [`WAITS`] for a waiter.
    pub token: Token,
    pub slot: Option<u32>,
    /// When it began to hold, or to wait: milliseconds since the epoch.
    pub since: u64,
    pub ttl_ms: u64,
    /// Of the lock file that it is about. The record of a file that was replaced means nothing.
    pub inode: u64,
    pub hold: Option<Hold>,
    /// Its command has ended, and nobody needs what is held on to. After `dlock acquire` that is never known.
    #[serde(default)]
    pub ended: bool,
}

/// Until when a lock stays taken although nobody runs under it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hold {
    /// On the machine's CLOCK_BOOTTIME, which counts while this boot lasts; the date is for after a reboot, and for
    /// readers that cannot tell that clock from the one of their time namespace.
    boot: String,
    until_boot_ns: String,
    until_ms: String,
    /// What it was last renewed for, if it was.
    #[serde(default)]
    ttl_ms: Option<String>,
}

/// A number with always as many digits, so that a record can be changed in its place.
fn fixed(number: u64) -> String {
    format!("{number:020}")
}

/// What a reader makes of a record.
#[derive(Clone, Debug)]
pub struct Seen {
    pub record: Record<Details>,
    /// The process that wrote it is alive.
    pub alive: bool,
    file: String,
}

impl Record<Details> {
    pub fn new(ask: &Ask, inode: u64, token: Token, slot: Option<u32>) -> Record<Details> {
        let (since, ttl_ms) = (in_millis(clock::wall()), clock::millis(ask.ttl));
        let details = Details { mode: ask.mode, token, slot, since, ttl_ms, inode, hold: None, ended: false };
        Record { who: ask.who.clone(), details }
    }

    pub fn write(&self, folder: &Folder, prefix: &str) -> Result<Arc<File>> {
        folder.replace(&file_of(prefix, &self.who.owner), self.to_json().as_bytes()).map(Arc::new)
    }

    pub fn remove(&self, folder: &Folder, prefix: &str) {
        let _ = folder.remove(&file_of(prefix, &self.who.owner));
    }

    /// Keeps the lock taken until then, even if dlock dies. Written in place: the file that the guardian keeps locked
    /// has to stay the record.
    pub fn hold(&mut self, file: &impl AsFd, until: Instant, ttl: Duration) -> Result<()> {
        let (boot, until_boot_ns) = match until.for_every_namespace() {
            Some(nanos) => (boot_id(), nanos),
            None => (NO_BOOT, 0),
        };
        self.details.hold = Some(Hold {
            boot: boot.to_owned(),
            until_boot_ns: fixed(until_boot_ns),
            until_ms: fixed(in_millis(clock::wall() + until.remaining())),
            ttl_ms: Some(fixed(clock::millis(ttl))),
        });
        let json = self.to_json();
        let written = nix::sys::uio::pwrite(file, json.as_bytes(), 0).context("cannot write the holder's record")?;
        ensure!(written == json.len(), "the holder's record was cut off");
        Ok(())
    }

    /// What it was taken or last renewed for.
    pub fn ttl(&self) -> Duration {
        let renewed = self.details.hold.as_ref().and_then(|hold| hold.ttl_ms.as_ref()?.parse().ok());
        Duration::from_millis(renewed.unwrap_or(self.details.ttl_ms))
    }

    pub fn read_from(file: &impl AsFd) -> Option<Record<Details>> {
        Record::from_json(&content(file, LONGEST).ok()?)
    }

    /// The record of a holder of the lock file with this inode, open for reading.
    pub fn find(folder: &Folder, owner: &OwnerId, inode: u64) -> Option<(Record<Details>, File)> {
        let file = folder.look_into(&file_of(HOLDER, owner)).ok()?;
        let record = Record::<Details>::read_from(&file)?;
        (record.who.owner == *owner && record.details.inode == inode).then_some((record, file))
    }

    /// How long the lock stays taken although its holder has gone.
    pub fn held_on_for(&self) -> Option<Duration> {
        let hold = self.details.hold.as_ref()?;
        let this_boot = hold.boot == boot_id();
        let left = match Instant::from_every_namespace(hold.until_boot_ns.parse().ok()?).filter(|_| this_boot) {
            Some(until) => until.remaining(),
            None => Duration::from_millis(hold.until_ms.parse::<u64>().ok()?.saturating_sub(in_millis(clock::wall()))),
        };
        Some(left).filter(|left| !left.is_zero())
    }
}

impl Seen {
    /// `None` if it is about another lock file, or no record.
    fn read(open: &File, file: String, inode: u64) -> Option<Seen> {
        let record = Record::<Details>::read_from(open).filter(|record| record.details.inode == inode)?;
        Some(Seen { record, alive: is_kept(open), file })
    }

    /// Whether it keeps others out: alive, or held on to.
    pub fn counts(&self) -> bool {
        self.alive || self.record.held_on_for().is_some()
    }

    /// Deletes the record of a holder that is gone. What it says becomes the last run, if nobody recorded its end.
    pub fn remove(&self, folder: &Folder) -> Result<()> {
        if let Some(lost) = self.lost_run() {
            folder.remember(lost, DEFAULT_HISTORY)?;
        }
        // Nobody will read the mark that an operator left for it.
        if !self.alive {
            let _ = folder.remove(&revoke(self.owner()));
        }
        let _ = folder.remove(&self.file);
        Ok(())
    }

    /// The run whose end nobody recorded, if this is all that is left of one.
    pub fn lost_run(&self) -> Option<LastRun> {
        let unrecorded = self.record.details.hold.is_none() && !self.alive;
        unrecorded.then(|| LastRun::vanished(&self.clone().into_contender()))
    }

    pub fn owner(&self) -> &OwnerId {
        &self.record.who.owner
    }

    pub fn into_contender(self) -> Contender {
        let (ttl, expires_in) = (Some(self.record.ttl()), self.record.held_on_for());
        let Record { who, details } = self.record;
        let since = Some(UNIX_EPOCH + Duration::from_millis(details.since));
        Contender {
            mode: details.mode,
            fencing_token: Some(details.token).filter(|token| *token != WAITS),
            slot: details.slot,
            acquired_at: since,
            waiting_since: since,
            ttl,
            expires_in,
            ..who.into()
        }
    }
}

/// Everybody on record whose record is about the lock file with this inode, oldest first.
pub fn all(folder: &Folder, prefix: &'static str, inode: u64) -> Result<Vec<Seen>> {
    let read = |file: String| Seen::read(&folder.look_into(&file).ok()?, file, inode);
    let mut all: Vec<_> = folder.list_of(prefix)?.filter_map(read).collect();
    all.sort_by_key(|seen| seen.record.details.since);
    Ok(all)
}

/// Somebody who waits for the lock file with this inode. Deletes the records of waiters that died: nobody else would.
pub fn any_waiter(waiting: &Folder, inode: u64) -> Option<Seen> {
    waiting.list_of(WAITER).ok()?.find_map(|file| {
        let open = waiting.look_into(&file).ok()?;
        if !is_kept(&open) {
            let _ = waiting.remove(&file);
            return None;
        }
        Seen::read(&open, file, inode)
    })
}

/// Whether the process that wrote this record still has it locked.
pub fn is_kept(record: &File) -> bool {
    matches!(record.try_lock_shared(), Err(TryLockError::WouldBlock))
}

pub fn file_of(prefix: &str, owner: &OwnerId) -> String {
    format!("{prefix}{owner}")
}

/// Of this boot. Read once; a waiter reads it early, when there is time.
pub fn boot_id() -> &'static str {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        let read = || content(&File::open("/proc/sys/kernel/random/boot_id")?, 64);
        String::from_utf8_lossy(&read().unwrap_or_default()).trim().to_owned()
    });
    &BOOT
}

fn in_millis(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, clock::millis)
}

/// Records how a run ended.
pub fn record_run(side: &Result<Option<Folder>>, run: &LastRun, keep: usize) -> Result<()> {
    let what_ended = |error: &Error| unrecorded("how the run ended", "status shows an older one", error);
    let Some(side) = side.as_ref().map_err(what_ended)? else { return Ok(()) };
    let once = match &run.once {
        Some(key) if run.succeeded() => side
            .record_once(key)
            .map_err(|error| unrecorded(&format!("--once {key}"), "a run with it will not be skipped", &error)),
        _ => Ok(()),
    };
    once.and(side.remember(run.clone(), keep).map_err(|error| what_ended(&error)))
}

/// Of `NAME.d`.
impl Folder {
    /// Makes a run the last one, unless it is on record already. Overwrites the file in place, in one piece: to put a new
    /// file there makes ext4 write to the disk at once. If somebody reads it just then, a new file takes its place, and
    /// the reader keeps the old one.
    pub fn remember(&self, run: LastRun, keep: usize) -> Result<()> {
        /// Padded with spaces, it never becomes shorter.
        const GRAIN: usize = 512;
        const LONGEST: usize = 1 << 20;
        let own = self.reach_into(LAST_RUN).ok().filter(|file| file.try_lock().is_ok());
        let own = own.and_then(|file| Some((content(&file, LONGEST + 1).ok()?, file)));
        let own = own.filter(|(before, _)| before.len() <= LONGEST);
        let mut history = own.as_ref().map_or_else(|| self.history(), |(before, _)| parsed(before));
        if history.has(&run) {
            return Ok(());
        }
        history.add(run, keep);
        let mut json = history.to_json().unwrap_or_default().into_bytes();
        let length = own.as_ref().map_or(0, |(before, _)| before.len()).max(json.len());
        json.resize(length.next_multiple_of(GRAIN), b' ');
        match own {
            Some((_, file)) if file.write_all_at(&json, 0).is_ok() => Ok(()),
            _ => self.replace(LAST_RUN, &json).map(drop),
        }
    }

    pub fn history(&self) -> StoredHistory {
        let Ok(file) = self.look_into(LAST_RUN) else { return StoredHistory::default() };
        // One that is being written will be complete in a moment; but its writer may have been stopped.
        soon(10, || file.try_lock_shared().is_ok());
        content(&file, usize::MAX).map_or_else(|_| StoredHistory::default(), |json| parsed(&json))
    }

    fn record_once(&self, key: &str) -> Result<()> {
        let record = || {
            let mut file = self.open_to_write(ONCE, OFlag::O_APPEND)?;
            // Holders of a shared lock may end at the same time. Each needs the file for a moment; but one may have been
            // stopped, and then the key matters more.
            let alone = soon(100, || file.try_lock().is_ok());
            let before = file.metadata()?.len();
            let end_of_line = if ends_whole(&file, before)? { "" } else { SPOILT };
            let written = file.write_all(format!("{end_of_line}{key}\n").as_bytes());
            if written.is_err() && alone {
                // If this fails too, the part of a line counts for nothing.
                let _ = file.set_len(before);
            }
            written.and_then(|()| file.sync_data())
        };
        record().map_err(|error| refusal(error, "cannot write", &self.path(ONCE)))
    }

    pub fn is_recorded(&self, once: &str) -> Result<bool> {
        match self.read(ONCE) {
            Ok(keys) => Ok(keys.split_inclusive('\n').any(|line| line.strip_suffix('\n') == Some(once))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(refusal(error, "cannot read", &self.path(ONCE))),
        }
    }
}

fn parsed(json: &[u8]) -> StoredHistory {
    str::from_utf8(json).map(StoredHistory::from_json).unwrap_or_default()
}

/// Tries so often, with a millisecond between two tries.
fn soon(tries: u32, mut done: impl FnMut() -> bool) -> bool {
    (0..tries).any(|_| {
        done() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }
    })
}

fn ends_whole(file: &File, length: u64) -> IoResult<bool> {
    let Some(last) = length.checked_sub(1) else { return Ok(true) };
    let mut end = [0];
    file.read_exact_at(&mut end, last)?;
    Ok(end == *b"\n")
}

fn unrecorded(what: &str, so: &str, error: &Error) -> Error {
    let why = error.root_cause();
    Error::new(Unrecorded(format!("{what} is not on record, so {so}: {why}"))).context(Fault::Refused)
}
