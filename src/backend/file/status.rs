//! Looking at locks, and taking them away.

use std::ffi::OsString;
use std::fs::File;
use std::time::Duration;

use anyhow::{Context, Result};

use super::NAME;
use super::directory::{OpenDirectory, refusal};
use super::files::LockFiles;
use super::foreign::Locks;
use super::record::{self, Details, Kind, Seen, is_kept};
use crate::backend::{DEFAULT_HISTORY, Forget, Forgotten, Page, Reheld, Revoke, Revoked};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, Mode, OwnerId, Record, State, messages};
use crate::openat::Names;

pub fn inspect(files: &LockFiles, name: &LockName, locks: &Locks) -> Result<LockState> {
    let (present, gone): (Vec<_>, Vec<_>) =
        record::oldest_first(files, Kind::Holder)?.into_iter().partition(Seen::counts);
    let mut history = files.history();
    for vanished in gone.iter().filter_map(Seen::lost_run) {
        if !history.has(&vanished) {
            history.add(vanished, usize::MAX);
        }
    }
    // For a moment, a new holder is still on record as a waiter.
    let inside: Vec<OwnerId> = present.iter().map(|seen| seen.owner().clone()).collect();
    let mut waiters = record::oldest_first(files, Kind::Waiter)?;
    waiters.retain(|seen| seen.alive && !inside.contains(seen.owner()));
    let as_holder = |seen: Seen| {
        let revoked = files.exists(&files.revoke(seen.owner()));
        Contender { revoked, ..seen.into_holder() }
    };
    let holders = present.into_iter().map(as_holder).collect();
    let waiters = waiters.into_iter().map(Seen::into_waiter).collect();
    let mut state = LockState::of(name.clone(), NAME, holders, waiters, history);
    if state.holders.is_empty()
        && let Some(foreign) = locks.holder_of(&files.path(&files.lock))
    {
        (state.state, state.holders) = (State::Held, vec![foreign]);
    }
    Ok(state)
}

/// The next of the locks in a directory.
pub fn list(directory: &OpenDirectory, names: &mut Names) -> Result<Page> {
    const AT_ONCE: usize = 256;
    let name_of = |name: OsString| LockName::decode(name.to_str()?.strip_suffix(".lock")?);
    let mut found: Vec<LockName> = Vec::new();
    let mut read = 0;
    for name in names.take(AT_ONCE) {
        read += 1;
        found.extend(name_of(name.context("cannot list the lock directory")?));
    }
    found.sort();
    let locks = Locks::read();
    let locks = found.iter().map(|name| inspect(&directory.files(name), name, &locks)).collect::<Result<_>>()?;
    Ok(Page { locks, next: (read == AT_ONCE).then(|| "more".to_owned()) })
}

pub async fn revoke(files: &LockFiles, from: &Holder, how: &Revoke) -> Result<Revoked> {
    let mut holders = record::oldest_first(files, Kind::Holder)?;
    holders.retain(Seen::counts);
    let Some(seen) = holders.iter().find(|seen| Some(seen.owner().as_str()) == from.owner.as_deref()) else {
        return revoke_foreign(files, from, how);
    };
    let (owner, details) = (seen.owner(), &seen.record.details);
    match how {
        Revoke::Safely { .. } if !seen.alive => {
            Ok(Revoked::Impossible("its command has ended, it is only kept by --hold-at-least: use --now".into()))
        }
        Revoke::Safely { .. } if details.ended => {
            if let Some((record, file)) = Record::find(files, owner) {
                end_hold(files, &record, &file).await;
            }
            Ok(Revoked::Marked)
        }
        Revoke::Safely { reason } => {
            files.replace(&files.revoke(owner), reason.as_bytes())?;
            if details.hold.is_some() {
                cut_short(files, from, reason)?;
            }
            Ok(Revoked::Marked)
        }
        // To replace the file would take the lock from all who share it. This one is told, and is no holder from now on.
        Revoke::Now { reason } if details.mode == Mode::Shared && holders.len() > 1 => {
            // The operator may free the others next; then this one finds the file replaced instead of the mark.
            let _ = files.note_taken(owner, reason);
            if details.hold.is_none() {
                files.replace(&files.revoke(owner), reason.as_bytes())?;
            }
            seen.remove(files)?;
            Ok(Revoked::Freed)
        }
        Revoke::Now { reason } => {
            let file = match (details.mode, details.slot) {
                (Mode::Slots(_), Some(slot)) => files.slot(slot),
                _ => files.lock.clone(),
            };
            let told = files.note_taken(owner, reason);
            let recorded = if details.ended { Ok(()) } else { cut_short(files, from, reason) };
            files.renew(&file)?;
            seen.remove(files)?;
            told.and(recorded).map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

/// The token stays where it is.
pub fn forget(files: &LockFiles, name: &LockName, what: &Forget) -> Result<Forgotten> {
    if let Forget::Once(key) = what {
        return files.forget_once(key);
    }
    let state = inspect(files, name, &Locks::read())?;
    if !state.holders.is_empty() || !state.waiters.is_empty() {
        return Ok(Forgotten::InUse);
    }
    for gone in record::oldest_first(files, Kind::Holder)? {
        gone.remove(files)?;
    }
    Ok(files.forget_runs())
}

/// Called before the lock is free: the next run may end at once, and its record must be the later one.
fn cut_short(files: &LockFiles, from: &Holder, reason: &str) -> Result<()> {
    files.remember(LastRun::cut_short(from, reason), DEFAULT_HISTORY)
}

fn not_on_record(error: anyhow::Error) -> anyhow::Error {
    let fault = Fault::of(&error);
    error.context("it is free now, but the reason is not on record").context(fault)
}

fn revoke_foreign(files: &LockFiles, from: &Holder, how: &Revoke) -> Result<Revoked> {
    match how {
        _ if from.owner.is_some() => Ok(Revoked::NotHeld),
        Revoke::Safely { .. } => {
            let end = from.pid.map_or_else(String::new, |pid| format!("; or end process {pid}"));
            Ok(Revoked::Impossible(format!("{}{end}", messages::FOREIGN_HOLDER)))
        }
        Revoke::Now { reason } => {
            let recorded = cut_short(files, from, reason);
            files.renew(&files.lock)?;
            recorded.map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

pub async fn rehold(files: &LockFiles, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
    let Some((mut record, file)) = Record::find(files, owner) else {
        let why = files.read(&files.taken(owner));
        return Ok(why.map_or(Reheld::NotOurs, Reheld::ForceReleased));
    };
    if record.details.hold.is_none() {
        return Ok(if is_kept(&file) { Reheld::Running } else { Reheld::NotOurs });
    }
    if record.held_on_for().is_none() {
        return Ok(Reheld::NotOurs);
    }
    if ttl.is_zero() {
        end_hold(files, &record, &file).await;
        return Ok(Reheld::Done);
    }
    if let Ok(reason) = files.read(&files.revoke(owner)) {
        return Ok(Reheld::Revoked(reason));
    }
    let path = record::path(files, Kind::Holder, owner);
    let file = files.reach_into(&path).map_err(|error| refusal(error, "cannot renew", &files.path(&path)))?;
    record.hold(&file, clock::now() + ttl, ttl)?;
    Ok(Reheld::Done)
}

/// Deletes the record that keeps the lock held on to. The process that keeps it sees that, and releases the lock.
async fn end_hold(files: &LockFiles, record: &Record<Details>, file: &File) {
    record.remove(files, Kind::Holder);
    let _ = files.remove(&files.revoke(&record.who.owner));
    while is_kept(file) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
