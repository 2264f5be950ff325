//! Looking at locks and at the directory they are in, and taking locks away.

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Result as IoResult};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use nix::libc;
use nix::sys::statfs::{FsType, statfs};

use super::NAME;
use super::folder::{self, Folder, LockFiles, TAKEN, WAITING, refusal, taken};
use super::record::{self, Details, HOLDER, LAST_RUN, ONCE, Seen, WAITER, is_kept};
use crate::backend::{
    DEFAULT_HISTORY, FOREIGN_HOLDER, Finding, Forget, Forgotten, KEPT_FOR_THE_LATE, Page, Reheld, Revoke, Revoked,
};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, Mode, OwnerId, Record, State};
use crate::openat::Names;

pub fn inspect(files: &LockFiles, name: &LockName, locks: &HeldFlocks) -> Result<LockState> {
    let mut state = match files.look()? {
        Some(side) => on_record(&side, name, files.lock_inode())?,
        None => LockState::free(name.clone(), NAME),
    };
    if state.holders.is_empty()
        && let Some(foreign) = locks.holder_of(&files.lock_path())
    {
        (state.state, state.holders) = (State::Held, vec![foreign]);
    }
    Ok(state)
}

fn on_record(side: &Folder, name: &LockName, inode: u64) -> Result<LockState> {
    let (present, gone): (Vec<_>, Vec<_>) = record::all(side, HOLDER, inode)?.into_iter().partition(Seen::counts);
    let mut history = side.history();
    for vanished in gone.iter().filter_map(Seen::lost_run) {
        if !history.has(&vanished) {
            history.add(vanished, usize::MAX);
        }
    }
    let mut waiters = match side.find(WAITING)? {
        Some(waiting) => record::all(&waiting, WAITER, inode)?,
        None => Vec::new(),
    };
    // For a moment, a new holder is still on record as a waiter.
    waiters.retain(|seen| seen.alive && !present.iter().any(|holder| holder.owner() == seen.owner()));
    let as_holder = |seen: Seen| {
        let revoked = side.look_into(&folder::revoke(seen.owner())).is_ok();
        Contender { revoked, ..seen.into_contender() }
    };
    let holders = present.into_iter().map(as_holder).collect();
    let waiters = waiters.into_iter().map(Seen::into_contender).collect();
    Ok(LockState::of(name.clone(), NAME, holders, waiters, history))
}

/// The next of the locks in a directory.
pub fn list(folder: &Folder, names: &mut Names) -> Result<Page> {
    const AT_ONCE: usize = 256;
    let name_of = |name: OsString| LockName::decode(name.to_str()?.strip_suffix(".lock")?);
    let mut found: Vec<LockName> = Vec::new();
    let mut read = 0;
    for name in names.take(AT_ONCE) {
        read += 1;
        found.extend(name_of(name.context("cannot list the lock directory")?));
    }
    found.sort();
    let locks = HeldFlocks::read();
    let look = |name| inspect(&LockFiles::new(folder.clone(), name), name, &locks);
    Ok(Page {
        locks: found.iter().map(look).collect::<Result<_>>()?,
        next: (read == AT_ONCE).then(|| "more".to_owned()),
    })
}

pub async fn revoke(files: &LockFiles, from: &Holder, how: &Revoke) -> Result<Revoked> {
    let side = files.side()?;
    let mut holders = record::all(&side, HOLDER, files.lock_inode())?;
    holders.retain(Seen::counts);
    let Some(seen) = holders.iter().find(|seen| Some(seen.owner().as_str()) == from.owner.as_deref()) else {
        return revoke_foreign(files, &side, from, how);
    };
    let (owner, details) = (seen.owner(), &seen.record.details);
    match how {
        Revoke::Safely { .. } if !seen.alive => {
            Ok(Revoked::Impossible("its command has ended, it is only kept by --hold-at-least: use --now".into()))
        }
        Revoke::Safely { .. } if details.ended => {
            if let Some((record, file)) = Record::find(&side, owner, details.inode) {
                end_hold(&side, &record, &file).await;
            }
            Ok(Revoked::Marked)
        }
        Revoke::Safely { reason } => {
            side.replace(&folder::revoke(owner), reason.as_bytes())?;
            if details.hold.is_some() {
                cut_short(&side, from, reason)?;
            }
            Ok(Revoked::Marked)
        }
        // To replace the file would take the lock from all who share it. This one is told, and is no holder from now on.
        Revoke::Now { reason } if details.mode == Mode::Shared && holders.len() > 1 => {
            // The operator may free the others next; then this one finds the file replaced instead of the mark.
            let _ = note_taken(&side, owner, reason);
            if details.hold.is_none() {
                side.replace(&folder::revoke(owner), reason.as_bytes())?;
            }
            seen.remove(&side)?;
            Ok(Revoked::Freed)
        }
        Revoke::Now { reason } => {
            let told = note_taken(&side, owner, reason);
            let recorded = if details.ended { Ok(()) } else { cut_short(&side, from, reason) };
            match (details.mode, details.slot) {
                (Mode::Slots(_), Some(slot)) => side.renew(&folder::slot(slot))?,
                _ => files.folder.renew(&files.lock)?,
            }
            seen.remove(&side)?;
            told.and(recorded).map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

/// The token stays where it is.
pub fn forget(files: &LockFiles, name: &LockName, what: &Forget) -> Result<Forgotten> {
    let Some(side) = files.look()? else { return Ok(Forgotten::Nothing) };
    if let Forget::Once(key) = what {
        return forget_once(&side, key);
    }
    let state = inspect(files, name, &HeldFlocks::read())?;
    if !state.holders.is_empty() || !state.waiters.is_empty() {
        return Ok(Forgotten::InUse);
    }
    for gone in record::all(&side, HOLDER, files.lock_inode())? {
        gone.remove(&side)?;
    }
    let removed = [LAST_RUN, ONCE].map(|file| side.remove(file).is_ok());
    Ok(if removed.contains(&true) { Forgotten::Done } else { Forgotten::Nothing })
}

/// Forgets one key of `--once`. A run that succeeds at the same moment waits for the file, and then records its own.
fn forget_once(side: &Folder, key: &str) -> Result<Forgotten> {
    let forget = || -> IoResult<Forgotten> {
        let file = side.reach_into(ONCE)?;
        file.lock()?;
        let keys = side.read(ONCE)?;
        let others: String = keys.split_inclusive('\n').filter(|line| line.trim_end_matches('\n') != key).collect();
        if others.len() == keys.len() {
            return Ok(Forgotten::Nothing);
        }
        file.set_len(0)?;
        file.write_all_at(others.as_bytes(), 0)?;
        file.sync_data()?;
        Ok(Forgotten::Done)
    };
    match forget() {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Forgotten::Nothing),
        forgotten => forgotten.map_err(|error| refusal(error, "cannot write", &side.path(ONCE))),
    }
}

/// Called before the lock is free: the next run may end at once, and its record must be the later one.
fn cut_short(side: &Folder, from: &Holder, reason: &str) -> Result<()> {
    side.remember(LastRun::cut_short(from, reason), DEFAULT_HISTORY)
}

/// Tells a holder why, before it can find its lock gone. Deletes old notes that nobody came for.
fn note_taken(side: &Folder, owner: &OwnerId, reason: &str) -> Result<()> {
    let now = clock::wall().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let is_old = |file: &String| {
        let changed = side.dir.stat_of(file).ok().and_then(|stat| u64::try_from(stat.st_mtime).ok());
        changed.is_some_and(|changed| now.saturating_sub(changed) > KEPT_FOR_THE_LATE.as_secs())
    };
    for old in side.list_of(TAKEN)?.filter(is_old) {
        let _ = side.remove(&old);
    }
    side.replace(&taken(owner), reason.as_bytes()).map(drop)
}

fn not_on_record(error: anyhow::Error) -> anyhow::Error {
    let fault = Fault::of(&error);
    error.context("it is free now, but the reason is not on record").context(fault)
}

fn revoke_foreign(files: &LockFiles, side: &Folder, from: &Holder, how: &Revoke) -> Result<Revoked> {
    match how {
        _ if from.owner.is_some() => Ok(Revoked::NotHeld),
        Revoke::Safely { .. } => {
            let end = from.pid.map_or_else(String::new, |pid| format!("; or end process {pid}"));
            Ok(Revoked::Impossible(format!("{}{end}", FOREIGN_HOLDER)))
        }
        Revoke::Now { reason } => {
            let recorded = cut_short(side, from, reason);
            files.folder.renew(&files.lock)?;
            recorded.map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

pub async fn rehold(files: &LockFiles, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
    let Some(side) = files.look()? else { return Ok(Reheld::NotOurs) };
    let Some((mut record, file)) = Record::find(&side, owner, files.lock_inode()) else {
        let why = side.read(&taken(owner));
        return Ok(why.map_or(Reheld::NotOurs, Reheld::ForceReleased));
    };
    if record.details.hold.is_none() {
        return Ok(if is_kept(&file) { Reheld::Running } else { Reheld::NotOurs });
    }
    if record.held_on_for().is_none() {
        return Ok(Reheld::NotOurs);
    }
    if ttl.is_zero() {
        end_hold(&side, &record, &file).await;
        return Ok(Reheld::Done);
    }
    if let Ok(reason) = side.read(&folder::revoke(owner)) {
        return Ok(Reheld::Revoked(reason));
    }
    let name = record::file_of(HOLDER, owner);
    let file = side.reach_into(&name).map_err(|error| refusal(error, "cannot renew", &side.path(&name)))?;
    record.hold(&file, clock::now() + ttl, ttl)?;
    Ok(Reheld::Done)
}

/// Deletes the record that keeps the lock held on to. The process that keeps it sees that, and releases the lock.
async fn end_hold(side: &Folder, record: &Record<Details>, file: &File) {
    record.remove(side, HOLDER);
    let _ = side.remove(&folder::revoke(&record.who.owner));
    while is_kept(file) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// All flocks of this host that are held, not those waited for: what the kernel tells in /proc/locks, also about holders
/// that are not dlock. Reading it disturbs nobody, while trying the lock ourselves could make somebody else's `flock -n`
/// fail.
pub struct HeldFlocks(Vec<Entry>);

struct Entry {
    pid: i32,
    device: (u32, u32),
    inode: u64,
}

impl HeldFlocks {
    pub fn read() -> HeldFlocks {
        let text = std::fs::read_to_string("/proc/locks").unwrap_or_default();
        HeldFlocks(text.lines().filter_map(parse).collect())
    }

    pub fn holder_of(&self, path: &Path) -> Option<Holder> {
        let meta = std::fs::symlink_metadata(path).ok()?;
        let device = (libc::major(meta.dev()), libc::minor(meta.dev()));
        // Some file systems (btrfs, overlayfs) show another device here than stat(2) does.
        let is_it = |entry: &&Entry| entry.inode == meta.ino() && (entry.device == device || has_open(entry.pid, path));
        let entry = self.0.iter().find(is_it)?;
        let host = nix::unistd::gethostname().ok().map(|host| host.to_string_lossy().into_owned());
        // A lock whose taker has handed its descriptor on shows the pid of a process that may be gone.
        let pid = u32::try_from(entry.pid).ok().filter(|pid| Path::new(&format!("/proc/{pid}")).exists());
        Some(Holder { host, pid, command: pid.and_then(command_of), ..Holder::default() })
    }
}

/// `1: FLOCK  ADVISORY  WRITE 4242 08:01:131 0 EOF`; a waiter's line has `->` after the number.
fn parse(line: &str) -> Option<Entry> {
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next()? != "FLOCK" {
        return None;
    }
    let pid = words.nth(2)?.parse().ok()?;
    let mut place = words.next()?.split(':');
    let mut hex = || u32::from_str_radix(place.next()?, 16).ok();
    let device = (hex()?, hex()?);
    Some(Entry { pid, device, inode: place.next()?.parse().ok()? })
}

fn has_open(pid: i32, path: &Path) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    open.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path))
}

fn command_of(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
    Some(words.join(" ").trim_end().to_owned()).filter(|line| !line.is_empty())
}

/// Kinds of file systems by their magic number, and what their locks are worth.
const KINDS: [(i64, &str, Locks); 12] = [
    (0xef53, "ext4", Locks::Good),
    (0x5846_5342, "xfs", Locks::Good),
    (0x9123_683e, "btrfs", Locks::Good),
    (0x2fc1_2fc1, "zfs", Locks::Good),
    (0x794c_7630, "overlayfs", Locks::Good),
    (0xf2f5_2010, "f2fs", Locks::Good),
    (0x0102_1994, "tmpfs", Locks::Forgetful),
    (0x6969, "nfs", Locks::Remote),
    (0xff53_4d42u32 as i64, "cifs", Locks::Remote),
    (0xfe53_4d42u32 as i64, "smb2", Locks::Remote),
    (0x6573_5546, "fuse", Locks::Remote),
    (0x0102_1997, "9p", Locks::Remote),
];

#[derive(Clone, Copy)]
enum Locks {
    Good,
    /// Gone after a reboot, the fencing counter too.
    Forgetful,
    /// Whether a lock is seen by other hosts, and outlives a server, is the file server's affair.
    Remote,
}

pub fn examine(directory: &Path) -> Result<Vec<Finding>> {
    let stat = statfs(directory).with_context(|| format!("statfs {}", directory.display()))?;
    let meta = std::fs::metadata(directory).with_context(|| directory.display().to_string())?;
    Ok(vec![file_system(stat.filesystem_type()), permissions(meta.mode())])
}

fn file_system(kind: FsType) -> Finding {
    const CHECK: &str = "file-system";
    let Some((_, name, locks)) = KINDS.iter().find(|(magic, ..)| *magic == kind.0) else {
        let what = format!("the lock directory is on a file system of the unknown kind {:#x}", kind.0);
        let why = "whether its locks exclude everybody is not known";
        return Finding::of(CHECK, what).weak(why, "use a directory on a local disk");
    };
    let found = Finding::of(CHECK, format!("the lock directory is on {name}"));
    match locks {
        Locks::Good => found,
        Locks::Forgetful => found.weak(
            "after a reboot the last run, the --once keys and the fencing counter are forgotten; tokens still grow, by the \
             date",
            "use a directory on a disk, such as /var/lib/dlock",
        ),
        Locks::Remote => found.weak(
            "flock(2) on a network file system may not exclude other hosts, and may be forgotten when the server restarts",
            "use a local directory, and one of the other backends for locks between hosts",
        ),
    }
}

fn permissions(mode: u32) -> Finding {
    const CHECK: &str = "file-permissions";
    if mode & 0o020 != 0 {
        return Finding::of(CHECK, "the lock directory can be written by its group").weak(
            "whoever is in that group can delete a lock file, and so take every lock away",
            "fine if that is meant; else chmod g-w it",
        );
    }
    Finding::of(CHECK, "only its owner can write to the lock directory")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_held_flocks_and_nothing_else() {
        let entry = parse("5: FLOCK  ADVISORY  WRITE 717 fd:01:1048 0 EOF").unwrap();
        assert_eq!((entry.pid, entry.device, entry.inode), (717, (0xfd, 1), 1048));
        for other in
            ["5: -> FLOCK  ADVISORY  WRITE 718 fd:01:1048 0 EOF", "1: POSIX  ADVISORY  WRITE 1 08:01:1 0 EOF", ""]
        {
            assert!(parse(other).is_none(), "{other}");
        }
    }
}
