//! Looking at locks, and taking them away.

use std::fs::{File, ReadDir, TryLockError};
use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result};

use super::NAME;
use super::directory::{Directory, Paths, refusal};
use super::foreign::Locks;
use super::record::{Kind, Record, Records, Seen};
use crate::backend::{Page, Reheld, Revoke, Revoked};
use crate::clock;
use crate::lock::{Holder, LockName, LockState, Mode, OwnerId, State};

pub fn inspect(paths: &Paths, name: &LockName, locks: &Locks) -> Result<LockState> {
    let mut state = LockState::free(name.clone(), NAME);
    state.last_run = paths.read_last_run();

    let records = Records::read(paths);
    let (present, gone): (Vec<_>, Vec<_>) = records.holders.into_iter().partition(Seen::counts);
    if let Some(lost) = gone.iter().find_map(Seen::lost_run) {
        state.last_run = Some(lost);
    }
    if let Some(first) = present.first() {
        state.mode = first.record.mode;
        state.slots = first.record.mode.slots();
    }
    // Whoever has just been let in is still on record as waiting, for a moment.
    let inside: Vec<_> = present.iter().map(|seen| seen.record.who.owner.clone()).collect();
    let waits = |seen: &Seen| seen.alive && !inside.contains(&seen.record.who.owner);
    let revoked = present.iter().any(|seen| paths.revoke(&seen.record.who.owner).exists());
    state.holders = present.into_iter().map(Seen::into_holder).collect();
    if state.holders.is_empty() {
        state.holders.extend(locks.holder_of(&paths.lock));
    }
    state.state = match () {
        () if revoked => State::Revoked,
        () if state.holders.is_empty() => State::Free,
        () => State::Held,
    };
    state.waiters = records.waiters.into_iter().filter(waits).map(Seen::into_waiter).collect();
    Ok(state)
}

/// The directory stays open from page to page; its order is the file system's.
pub fn list(directory: &Directory, listing: &mut Option<ReadDir>, after: Option<String>) -> Result<Page> {
    const AT_ONCE: usize = 256;
    if after.is_none() {
        *listing = match std::fs::read_dir(directory.path()) {
            Ok(entries) => Some(entries),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Page::default()),
            Err(error) => return Err(refusal(error, format!("cannot list {}", directory.path().display()))),
        };
    }
    let entries = listing.as_mut().context("a list begins at its beginning")?;
    let name_of = |entry: std::fs::DirEntry| LockName::decode(entry.file_name().to_str()?.strip_suffix(".lock")?);
    let mut names: Vec<LockName> = Vec::new();
    let mut read = 0;
    for entry in entries.by_ref().take(AT_ONCE) {
        read += 1;
        names.extend(name_of(entry.context("cannot list the lock directory")?));
    }
    names.sort();
    let locks = Locks::read();
    let locks = names.iter().map(|name| inspect(&directory.paths(name), name, &locks)).collect::<Result<_>>()?;
    Ok(Page { locks, next: (read == AT_ONCE).then(|| "more".to_owned()) })
}

pub fn revoke(paths: &Paths, from: &Holder, how: &Revoke) -> Result<Revoked> {
    let seen = Records::read(paths)
        .holders
        .into_iter()
        .find(|seen| seen.counts() && Some(seen.record.who.owner.as_str()) == from.owner.as_deref());
    match (seen, how) {
        (Some(seen), Revoke::Safely { .. }) if !seen.alive => {
            Ok(Revoked::Impossible("its command has ended, it is only kept by --hold-at-least: use --now".into()))
        }
        (Some(seen), Revoke::Safely { reason }) => {
            let owner: &OwnerId = &seen.record.who.owner;
            paths.replace(&paths.revoke(owner), reason.as_bytes())?;
            Ok(Revoked::Marked)
        }
        (Some(seen), Revoke::Now) => {
            let file = match (seen.record.mode, seen.record.slot) {
                (Mode::Slots(_), Some(slot)) => paths.slot(slot),
                _ => paths.lock.clone(),
            };
            put_aside(paths, &file)?;
            seen.bury(paths)?;
            Ok(Revoked::Freed)
        }
        (None, _) if from.owner.is_some() => Ok(Revoked::NotHeld),
        (None, Revoke::Safely { .. }) => {
            let pid = from.pid.map_or_else(|| "its process".to_owned(), |pid| format!("process {pid}"));
            Ok(Revoked::Impossible(format!(
                "a program other than dlock holds it and cannot be told: end {pid}, or use --now"
            )))
        }
        (None, Revoke::Now) => {
            put_aside(paths, &paths.lock)?;
            Ok(Revoked::Freed)
        }
    }
}

pub async fn rehold(paths: &Paths, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
    let Some((mut record, file)) = Record::find(paths, owner) else { return Ok(Reheld::NotOurs) };
    if record.hold.is_none() {
        return Ok(if is_kept(&file) { Reheld::Running } else { Reheld::NotOurs });
    }
    if record.held_on_for().is_none() {
        return Ok(Reheld::NotOurs);
    }
    if ttl.is_zero() {
        record.remove(paths, Kind::Holder);
        let _ = std::fs::remove_file(paths.revoke(owner));
        // Whoever keeps the lock for us sees that, and lets go.
        while is_kept(&file) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        return Ok(Reheld::Done);
    }
    if let Ok(reason) = std::fs::read_to_string(paths.revoke(owner)) {
        return Ok(Reheld::Revoked(reason));
    }
    record.hold(&file, clock::now() + ttl, ttl)?;
    Ok(Reheld::Done)
}

/// Whether a process still has this record locked.
fn is_kept(record: &File) -> bool {
    matches!(record.try_lock_shared(), Err(TryLockError::WouldBlock))
}

/// Puts a fresh file in the place of one whose lock cannot be broken. Whoever holds the old one, and is a
/// dlock, notices at once; newcomers lock the new one.
fn put_aside(paths: &Paths, file: &std::path::Path) -> Result<()> {
    let fresh = file.with_extension(format!("new.{}", std::process::id()));
    let replace = || {
        paths.options().write(true).open(&fresh)?;
        std::fs::rename(&fresh, file)
    };
    replace().map_err(|error| refusal(error, format!("cannot replace {}", file.display())))
}
