//! `holder.OWNER` and `waiter.OWNER`: who is there, in JSON. The process that wrote a record keeps a flock on it, so
//! that a reader can tell whether it is alive without touching the lock itself, and across containers, where a pid means
//! nothing.
//!
//! A lock that is held on to without a run has a process with nothing else to do, which keeps the flock for programs
//! that know only flock(2): see [`linger`]. The record says until when, and that it is still wanted.

use std::fs::{File, TryLockError};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::sys::stat::fstat;
use serde::{Deserialize, Serialize};

use super::files::LockFiles;
use crate::backend::{Ask, DEFAULT_HISTORY};
use crate::clock::{self, Instant};
use crate::lock::{Contender, LastRun, Mode, OwnerId, Record, Token};

/// Where the record is among a claim's descriptors.
pub const RECORD: usize = 1;

/// No record of ours is longer.
const LONGEST: usize = 64 * 1024;
/// As long as any other id of a boot, so that a record can be changed in its place.
const NO_BOOT: &str = "00000000-0000-0000-0000-000000000000";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Holder,
    Waiter,
}

/// What a contender stores beside its identity.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Details {
    pub mode: Mode,
    /// Zero for a waiter.
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
    until_boot_ns: Fixed,
    until_ms: Fixed,
    /// What it was last renewed for, if it was.
    #[serde(default)]
    ttl_ms: Option<Fixed>,
}

/// A number that is always written with as many digits, so that a record can be changed in its place.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
struct Fixed(u64);

impl From<Fixed> for String {
    fn from(number: Fixed) -> String {
        format!("{:020}", number.0)
    }
}

impl TryFrom<String> for Fixed {
    type Error = std::num::ParseIntError;

    fn try_from(digits: String) -> Result<Fixed, Self::Error> {
        digits.parse().map(Fixed)
    }
}

/// What a reader makes of a record.
#[derive(Clone, Debug)]
pub struct Seen {
    pub record: Record<Details>,
    /// The process that wrote it is alive.
    pub alive: bool,
    path: PathBuf,
}

impl Record<Details> {
    pub fn new(ask: &Ask, inode: u64, token: Token, slot: Option<u32>) -> Record<Details> {
        let (since, ttl_ms) = (millis(clock::wall()), millis_of(ask.ttl));
        let details = Details { mode: ask.mode, token, slot, since, ttl_ms, inode, hold: None, ended: false };
        Record { who: ask.who.clone(), details }
    }

    pub fn write(&self, files: &LockFiles, kind: Kind) -> Result<Arc<OwnedFd>> {
        if kind == Kind::Waiter {
            files.make_waiting()?;
        }
        let file = files.replace(&path(files, kind, &self.who.owner), self.to_json().as_bytes())?;
        Ok(Arc::new(file.into()))
    }

    pub fn remove(&self, files: &LockFiles, kind: Kind) {
        let _ = files.remove(&path(files, kind, &self.who.owner));
    }

    /// Keeps the lock taken until then, even if dlock dies. Written in place: the file that the guardian keeps locked
    /// has to stay the record.
    pub fn hold(&mut self, file: &impl AsFd, until: Instant, ttl: Duration) -> Result<()> {
        let until_ms = Fixed(millis(clock::wall() + until.remaining()));
        let ttl_ms = Some(Fixed(millis_of(ttl)));
        let (boot, until_boot_ns) = match until.for_every_namespace() {
            Some(nanos) => (boot_id(), Fixed(nanos)),
            None => (NO_BOOT, Fixed(0)),
        };
        self.details.hold = Some(Hold { boot: boot.to_owned(), until_boot_ns, until_ms, ttl_ms });
        let json = self.to_json();
        let written = nix::sys::uio::pwrite(file, json.as_bytes(), 0).context("cannot write the holder's record")?;
        ensure!(written == json.len(), "the holder's record was cut off");
        Ok(())
    }

    /// What it was taken or last renewed for.
    pub fn ttl(&self) -> Duration {
        let renewed = self.details.hold.as_ref().and_then(|hold| hold.ttl_ms.as_ref());
        Duration::from_millis(renewed.map_or(self.details.ttl_ms, |ttl_ms| ttl_ms.0))
    }

    pub fn read_from(file: &impl AsFd) -> Option<Record<Details>> {
        let size = fstat(file.as_fd()).ok()?.st_size;
        let mut json = vec![0; usize::try_from(size).ok()?.min(LONGEST)];
        let length = nix::sys::uio::pread(file, &mut json, 0).ok()?;
        Record::from_json(&json[..length])
    }

    /// The record of an owner, open for reading.
    pub fn find(files: &LockFiles, owner: &OwnerId) -> Option<(Record<Details>, File)> {
        let file = files.look_into(&path(files, Kind::Holder, owner)).ok()?;
        let record = Record::read_from(&file).filter(|record| record.who.owner == *owner)?;
        (record.details.inode == files.lock_inode()).then_some((record, file))
    }

    /// How long the lock stays taken although its holder has gone.
    pub fn held_on_for(&self) -> Option<Duration> {
        let hold = self.details.hold.as_ref()?;
        let this_boot = hold.boot == boot_id();
        let left = match Instant::from_every_namespace(hold.until_boot_ns.0).filter(|_| this_boot) {
            Some(until) => until.remaining(),
            None => Duration::from_millis(hold.until_ms.0.saturating_sub(millis(clock::wall()))),
        };
        Some(left).filter(|left| !left.is_zero())
    }
}

impl Seen {
    /// Whether it keeps others out: alive, or held on to.
    pub fn counts(&self) -> bool {
        self.alive || self.record.held_on_for().is_some()
    }

    /// Deletes the record of a holder that is gone. What it says becomes the last run, if nobody recorded its end.
    pub fn remove(&self, files: &LockFiles) -> Result<()> {
        if let Some(lost) = self.lost_run() {
            files.remember(lost, DEFAULT_HISTORY)?;
        }
        // Nobody will read the mark that an operator left for it.
        if !self.alive {
            let _ = files.remove(&files.revoke(&self.record.who.owner));
        }
        let _ = files.remove(&self.path);
        Ok(())
    }

    /// The run whose end nobody recorded, if this is all that is left of one.
    pub fn lost_run(&self) -> Option<LastRun> {
        let unrecorded = self.record.details.hold.is_none() && !self.alive;
        unrecorded.then(|| LastRun::vanished(&self.clone().into_holder().into_holder()))
    }

    pub fn owner(&self) -> &OwnerId {
        &self.record.who.owner
    }

    pub fn into_holder(self) -> Contender {
        let (ttl, expires_in) = (Some(self.record.ttl()), self.record.held_on_for());
        let Record { who, details } = self.record;
        Contender {
            who: Some(who),
            token: Some(details.token),
            slot: details.slot,
            acquired_at: Some(since_epoch(details.since)),
            ttl,
            expires_in,
            ..Contender::unknown(details.mode)
        }
    }

    pub fn into_waiter(self) -> Contender {
        let Record { who, details } = self.record;
        let waiting_since = Some(since_epoch(details.since));
        Contender { who: Some(who), waiting_since, ..Contender::unknown(details.mode) }
    }
}

/// Everybody of a kind whose record is about the present lock file, oldest first.
pub fn oldest_first(files: &LockFiles, kind: Kind) -> Result<Vec<Seen>> {
    let mut all: Vec<Seen> = each(files, kind)?.collect();
    all.sort_by_key(|one| one.record.details.since);
    Ok(all)
}

/// Everybody of a kind whose record is about the present lock file, in no order, read one by one.
pub fn each(files: &LockFiles, kind: Kind) -> Result<impl Iterator<Item = Seen>> {
    let inode = files.lock_inode();
    let read = |path: PathBuf| {
        let file = files.look_into(&path).ok()?;
        Some(Seen { record: Record::read_from(&file)?, alive: is_kept(&file), path })
    };
    Ok(paths_of(files, kind)?.filter_map(read).filter(move |seen| seen.record.details.inode == inode))
}

/// Somebody who waits for the present lock file. Deletes the records of waiters that died: nobody else would.
pub fn any_waiter(files: &LockFiles) -> Option<Record<Details>> {
    let inode = files.lock_inode();
    paths_of(files, Kind::Waiter).ok()?.find_map(|path| {
        let file = files.look_into(&path).ok()?;
        if !is_kept(&file) {
            let _ = files.remove(&path);
            return None;
        }
        Record::read_from(&file).filter(|record: &Record<Details>| record.details.inode == inode)
    })
}

/// Whether the process that wrote this record still has it locked.
pub fn is_kept(record: &File) -> bool {
    matches!(record.try_lock_shared(), Err(TryLockError::WouldBlock))
}

fn paths_of(files: &LockFiles, kind: Kind) -> Result<impl Iterator<Item = PathBuf>> {
    let directory = directory(files, kind);
    let names = files.list(&directory)?.into_iter().flatten().flatten();
    let of_kind = names.filter(move |name| name.as_bytes().starts_with(prefix(kind).as_bytes()));
    Ok(of_kind.map(move |name| directory.join(name)))
}

fn prefix(kind: Kind) -> &'static str {
    match kind {
        Kind::Holder => "holder.",
        Kind::Waiter => "waiter.",
    }
}

pub fn path(files: &LockFiles, kind: Kind, owner: &OwnerId) -> PathBuf {
    directory(files, kind).join(format!("{}{owner}", prefix(kind)))
}

fn directory(files: &LockFiles, kind: Kind) -> PathBuf {
    match kind {
        Kind::Holder => files.side.clone(),
        Kind::Waiter => files.waiting(),
    }
}

/// Of this boot. Read once; a waiter reads it early, when there is time.
pub fn boot_id() -> &'static str {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    });
    &BOOT
}

fn millis(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, millis_of)
}

fn millis_of(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

fn since_epoch(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis)
}

/// Returns when the record, which is among the descriptors, has been deleted, or its time is over.
pub fn linger(descriptors: &[OwnedFd], mut until: Instant) {
    let Some(file) = descriptors.get(RECORD) else { return };
    let changes = watch(file);
    let mut owner = None;
    while !is_deleted(file) && !until.has_passed() {
        // If somebody has overwritten the record, the end stays what it was.
        if let Some(record) = Record::<Details>::read_from(file)
            && *owner.get_or_insert_with(|| record.who.owner.clone()) == record.who.owner
        {
            let Some(left) = record.held_on_for() else { return };
            until = clock::now() + left;
        }
        // Where nothing tells us of a change, look now and then.
        let longest = if changes.is_some() { Duration::from_secs(3600) } else { Duration::from_millis(500) };
        let millis = u16::try_from(until.remaining().min(longest).as_millis() + 1).unwrap_or(u16::MAX);
        let mut fds: Vec<_> = changes.iter().map(|changes| PollFd::new(changes.as_fd(), PollFlags::POLLIN)).collect();
        let _ = poll(&mut fds, PollTimeout::from(millis));
        if let Some(changes) = &changes {
            let _ = changes.read_events();
        }
    }
}

fn is_deleted(file: &OwnedFd) -> bool {
    fstat(file.as_fd()).is_ok_and(|stat| stat.st_nlink == 0)
}

fn watch(record: &OwnedFd) -> Option<Inotify> {
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok()?;
    let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_ATTRIB | AddWatchFlags::IN_DELETE_SELF;
    inotify.add_watch(format!("/proc/self/fd/{}", record.as_raw_fd()).as_str(), events).ok()?;
    Some(inotify)
}
