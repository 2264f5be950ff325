//! Looking at locks, and taking them away.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;

use super::NAME;
use super::directory::refusal;
use super::files::{self, Folder, LockFiles, WAITING, taken};
use super::record::{self, Details, HOLDER, Seen, WAITER, is_kept};
use crate::backend::{DEFAULT_HISTORY, Forget, Forgotten, Page, Reheld, Revoke, Revoked};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, Mode, OwnerId, Record, State, messages};
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
        let revoked = side.look_into(&files::revoke(seen.owner())).is_ok();
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
            side.replace(&files::revoke(owner), reason.as_bytes())?;
            if details.hold.is_some() {
                cut_short(&side, from, reason)?;
            }
            Ok(Revoked::Marked)
        }
        // To replace the file would take the lock from all who share it. This one is told, and is no holder from now on.
        Revoke::Now { reason } if details.mode == Mode::Shared && holders.len() > 1 => {
            // The operator may free the others next; then this one finds the file replaced instead of the mark.
            let _ = side.note_taken(owner, reason);
            if details.hold.is_none() {
                side.replace(&files::revoke(owner), reason.as_bytes())?;
            }
            seen.remove(&side)?;
            Ok(Revoked::Freed)
        }
        Revoke::Now { reason } => {
            let told = side.note_taken(owner, reason);
            let recorded = if details.ended { Ok(()) } else { cut_short(&side, from, reason) };
            match (details.mode, details.slot) {
                (Mode::Slots(_), Some(slot)) => side.renew(&files::slot(slot))?,
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
        return side.forget_once(key);
    }
    let state = inspect(files, name, &HeldFlocks::read())?;
    if !state.holders.is_empty() || !state.waiters.is_empty() {
        return Ok(Forgotten::InUse);
    }
    for gone in record::all(&side, HOLDER, files.lock_inode())? {
        gone.remove(&side)?;
    }
    Ok(side.forget_runs())
}

/// Called before the lock is free: the next run may end at once, and its record must be the later one.
fn cut_short(side: &Folder, from: &Holder, reason: &str) -> Result<()> {
    side.remember(LastRun::cut_short(from, reason), DEFAULT_HISTORY)
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
            Ok(Revoked::Impossible(format!("{}{end}", messages::FOREIGN_HOLDER)))
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
    if let Ok(reason) = side.read(&files::revoke(owner)) {
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
    let _ = side.remove(&files::revoke(&record.who.owner));
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
