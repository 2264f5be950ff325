//! `holder.OWNER` and `waiter.OWNER`: who is there, in JSON. Whoever wrote a record keeps a flock on it,
//! so that a reader can tell the living from the dead without touching the lock itself, and across
//! containers, where a pid means nothing.

use std::fs::{File, TryLockError};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::files::LockFiles;
use crate::clock::{self, Instant};
use crate::lock::{Holder, Identity, LastRun, Mode, Outcome, OwnerId, Token, Waiter};

/// No record of ours is longer.
const LONGEST: usize = 64 * 1024;
/// As long as any other id of a boot, so that a record can be changed in its place.
const NO_BOOT: &str = "00000000-0000-0000-0000-000000000000";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Holder,
    Waiter,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    #[serde(flatten)]
    pub who: Identity,
    pub mode: Mode,
    /// Zero for a waiter.
    pub token: Token,
    pub slot: Option<u32>,
    /// When it began to hold, or to wait: milliseconds since the epoch.
    pub since: u64,
    pub ttl_ms: u64,
    /// The lock file it means: a record of a file that was replaced speaks of nothing.
    pub inode: u64,
    pub hold: Option<Hold>,
    /// Its command has ended, and nobody needs what is held on to. Of what `dlock acquire` took that is never known.
    #[serde(default)]
    pub ended: bool,
}

/// Until when a lock stays taken although nobody runs under it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hold {
    /// On the machine's CLOCK_BOOTTIME, which counts while this boot lasts; the date is for after a reboot, and for
    /// whoever cannot tell that clock from the one of its time namespace.
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
#[derive(Debug)]
pub struct Seen {
    pub record: Record,
    /// Somebody lives who wrote it.
    pub alive: bool,
    path: PathBuf,
}

impl Record {
    pub fn write(&self, files: &LockFiles, kind: Kind) -> Result<Arc<OwnedFd>> {
        let json = serde_json::to_vec(self)?;
        if kind == Kind::Waiter {
            files.make_waiting()?;
        }
        let file = files.replace(&path(files, kind, &self.who.owner), &json)?;
        Ok(Arc::new(file.into()))
    }

    pub fn remove(&self, files: &LockFiles, kind: Kind) {
        let _ = files.remove(&path(files, kind, &self.who.owner));
    }

    /// Keeps the lock taken until then, whoever of us lives. In its place: the file that the guardian keeps
    /// locked has to stay the record.
    pub fn hold(&mut self, file: &impl AsFd, until: Instant, ttl: Duration) -> Result<()> {
        let until_ms = Fixed(millis(clock::wall() + until.remaining()));
        let ttl_ms = Some(Fixed(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)));
        let (boot, until_boot_ns) = match until.for_every_namespace() {
            Some(nanos) => (boot_id(), Fixed(nanos)),
            None => (NO_BOOT, Fixed(0)),
        };
        self.hold = Some(Hold { boot: boot.to_owned(), until_boot_ns, until_ms, ttl_ms });
        let json = serde_json::to_vec(self)?;
        let written = nix::sys::uio::pwrite(file, &json, 0).context("cannot write the holder's record")?;
        ensure!(written == json.len(), "the holder's record was cut off");
        Ok(())
    }

    /// What it was taken or last renewed for.
    pub fn ttl(&self) -> Duration {
        let renewed = self.hold.as_ref().and_then(|hold| hold.ttl_ms.as_ref());
        Duration::from_millis(renewed.map_or(self.ttl_ms, |ttl_ms| ttl_ms.0))
    }

    pub fn read_from(file: &impl AsFd) -> Option<Record> {
        let size = nix::sys::stat::fstat(file.as_fd()).ok()?.st_size;
        let mut json = vec![0; usize::try_from(size).ok()?.min(LONGEST)];
        let length = nix::sys::uio::pread(file, &mut json, 0).ok()?;
        let record: Record = serde_json::from_slice(&json[..length]).ok()?;
        let who = Identity::from_json(&record.who.to_json())?;
        Some(Record { who, ..record })
    }

    /// The record of an owner, open for reading.
    pub fn find(files: &LockFiles, owner: &OwnerId) -> Option<(Record, File)> {
        let file = files.look_into(&path(files, Kind::Holder, owner)).ok()?;
        let record = Record::read_from(&file).filter(|record| record.who.owner == *owner)?;
        (record.inode == files.lock_inode()).then_some((record, file))
    }

    /// How long nobody else may have it although its holder has gone.
    pub fn held_on_for(&self) -> Option<Duration> {
        let hold = self.hold.as_ref()?;
        let this_boot = hold.boot == boot_id();
        let left = match Instant::from_every_namespace(hold.until_boot_ns.0).filter(|_| this_boot) {
            Some(until) => until.remaining(),
            None => Duration::from_millis(hold.until_ms.0.saturating_sub(millis(clock::wall()))),
        };
        Some(left).filter(|left| !left.is_zero())
    }

    /// What is known of a run whose dlock and guardian are gone without a word.
    fn as_lost_run(&self) -> LastRun {
        LastRun {
            fencing_token: self.token,
            host: self.who.host.clone(),
            user: self.who.user.clone(),
            command: self.who.command.clone(),
            started_at: since_epoch(self.since),
            ended_at: None,
            outcome: Outcome::Lost,
            exit_code: None,
            once: None,
            reason: None,
        }
    }
}

impl Seen {
    /// Whether it stands in the way of others: alive, or held on to.
    pub fn counts(&self) -> bool {
        self.alive || self.record.held_on_for().is_some()
    }

    /// Takes a dead holder's record away. What it says becomes the last run, if nobody got to tell.
    pub fn bury(&self, files: &LockFiles) -> Result<()> {
        if let Some(lost) = self.lost_run() {
            files.write_last_run(&lost)?;
        }
        // A mark that an operator left for it found nobody.
        if !self.alive {
            let _ = files.remove(&files.revoke(&self.record.who.owner));
        }
        let _ = files.remove(&self.path);
        Ok(())
    }

    /// The run that ended without a word, if this is all that is left of one.
    pub fn lost_run(&self) -> Option<LastRun> {
        let silent = self.record.hold.is_none() && !self.alive;
        silent.then(|| self.record.as_lost_run())
    }

    pub fn into_holder(self) -> Holder {
        let left = self.record.held_on_for();
        Holder {
            fencing_token: Some(self.record.token),
            acquired_at: Some(since_epoch(self.record.since)),
            ttl: Some(self.record.ttl()),
            expires_in: left,
            slot: self.record.slot,
            ..Holder::from(self.record.who)
        }
    }

    pub fn into_waiter(self) -> Waiter {
        Waiter { waiting_since: Some(since_epoch(self.record.since)), ..Waiter::from(self.record.who) }
    }
}

/// Everybody who speaks of the present lock file, oldest first.
#[derive(Debug, Default)]
pub struct Records {
    pub holders: Vec<Seen>,
    pub waiters: Vec<Seen>,
}

impl Records {
    pub fn read(files: &LockFiles) -> Result<Records> {
        let sorted = |kind| -> Result<Vec<Seen>> {
            let mut all: Vec<_> = each(files, kind)?.collect();
            all.sort_by_key(|one: &Seen| one.record.since);
            Ok(all)
        };
        Ok(Records { holders: sorted(Kind::Holder)?, waiters: sorted(Kind::Waiter)? })
    }
}

/// Everybody of a kind who speaks of the present lock file, in no order, read one by one.
pub fn each(files: &LockFiles, kind: Kind) -> Result<impl Iterator<Item = Seen>> {
    let inode = files.lock_inode();
    let records = paths_of(files, kind)?.filter_map(|path| read(files, path));
    Ok(records.filter(move |seen| seen.record.inode == inode))
}

/// Somebody who waits for the present lock file. Whoever is found to have died waiting is forgotten: nobody else would.
pub fn any_waiter(files: &LockFiles) -> Option<Record> {
    let inode = files.lock_inode();
    paths_of(files, Kind::Waiter).ok()?.find_map(|path| {
        let file = files.look_into(&path).ok()?;
        if !is_kept(&file) {
            let _ = files.remove(&path);
            return None;
        }
        Record::read_from(&file).filter(|record| record.inode == inode)
    })
}

/// Whether whoever wrote this record still has it locked.
pub fn is_kept(record: &File) -> bool {
    matches!(record.try_lock_shared(), Err(TryLockError::WouldBlock))
}

fn paths_of(files: &LockFiles, kind: Kind) -> Result<impl Iterator<Item = PathBuf>> {
    let directory = directory(files, kind);
    let names = files.list(&directory)?.into_iter().flatten().flatten();
    let of_kind = names.filter(move |name| name.as_bytes().starts_with(prefix(kind).as_bytes()));
    Ok(of_kind.map(move |name| directory.join(name)))
}

fn read(files: &LockFiles, path: PathBuf) -> Option<Seen> {
    let file = files.look_into(&path).ok()?;
    Some(Seen { record: Record::read_from(&file)?, alive: is_kept(&file), path })
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

/// Of this boot; read once, and by whoever waits before it matters.
pub fn boot_id() -> &'static str {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
    });
    &BOOT
}

pub fn millis(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}

fn since_epoch(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis)
}
