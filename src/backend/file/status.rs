//! Looking at locks, and taking them away.

use std::ffi::OsString;
use std::fs::File;
use std::time::Duration;

use anyhow::{Context, Result};

use super::NAME;
use super::directory::{OpenDirectory, refusal};
use super::files::LockFiles;
use super::foreign::Locks;
use super::record::{self, Kind, Record, Records, Seen, is_kept};
use crate::backend::{Page, Reheld, Revoke, Revoked};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Holder, LastRun, LockName, LockState, Mode, OwnerId, State};
use crate::openat::Names;

pub fn inspect(files: &LockFiles, name: &LockName, locks: &Locks) -> Result<LockState> {
    let mut state = LockState::free(name.clone(), NAME);
    state.last_run = files.read_last_run();

    let records = Records::read(files)?;
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
    let revoked = present.iter().any(|seen| files.exists(&files.revoke(&seen.record.who.owner)));
    state.holders = present.into_iter().map(Seen::into_holder).collect();
    if state.holders.is_empty() {
        state.holders.extend(locks.holder_of(&files.path(&files.lock)));
    }
    state.state = match () {
        () if revoked => State::Revoked,
        () if state.holders.is_empty() => State::Free,
        () => State::Held,
    };
    state.waiters = records.waiters.into_iter().filter(waits).map(Seen::into_waiter).collect();
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
    let holders: Vec<_> = Records::read(files)?.holders.into_iter().filter(Seen::counts).collect();
    let owner_of = |seen: &Seen| seen.record.who.owner.clone();
    let Some(seen) = holders.iter().find(|seen| Some(owner_of(seen).as_str()) == from.owner.as_deref()) else {
        return revoke_foreign(files, from, how);
    };
    let (owner, record) = (owner_of(seen), &seen.record);
    match how {
        Revoke::Safely { .. } if !seen.alive => {
            Ok(Revoked::Impossible("its command has ended, it is only kept by --hold-at-least: use --now".into()))
        }
        Revoke::Safely { .. } if record.ended => {
            if let Some((record, file)) = Record::find(files, &owner) {
                end_hold(files, &record, &file).await;
            }
            Ok(Revoked::Marked)
        }
        Revoke::Safely { reason } => {
            files.replace(&files.revoke(&owner), reason.as_bytes())?;
            Ok(Revoked::Marked)
        }
        // A fresh file would be everybody's loss. This one is told, and is no holder from now on.
        Revoke::Now { reason } if record.mode == Mode::Shared && holders.len() > 1 => {
            // The others may be next, and then it finds the file gone instead of the mark.
            let _ = files.note_taken(&owner, reason);
            if record.hold.is_none() {
                files.replace(&files.revoke(&owner), reason.as_bytes())?;
            }
            seen.bury(files)?;
            Ok(Revoked::Freed)
        }
        Revoke::Now { reason } => {
            let file = match (record.mode, record.slot) {
                (Mode::Slots(_), Some(slot)) => files.slot(slot),
                _ => files.lock.clone(),
            };
            let told = files.note_taken(&owner, reason);
            let recorded = if record.hold.is_none() { cut_short(files, from, reason) } else { Ok(()) };
            files.renew(&file)?;
            seen.bury(files)?;
            told.and(recorded).map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

/// Before the lock is free: whoever gets it then may have ended its run in no time.
fn cut_short(files: &LockFiles, from: &Holder, reason: &str) -> Result<()> {
    files.write_last_run(&LastRun::cut_short(from, reason))
}

fn not_on_record(error: anyhow::Error) -> anyhow::Error {
    let fault = Fault::of(&error);
    error.context("it is free now, but the reason is not on record").context(fault)
}

fn revoke_foreign(files: &LockFiles, from: &Holder, how: &Revoke) -> Result<Revoked> {
    match how {
        _ if from.owner.is_some() => Ok(Revoked::NotHeld),
        Revoke::Safely { .. } => {
            let pid = from.pid.map_or_else(|| "its process".to_owned(), |pid| format!("process {pid}"));
            Ok(Revoked::Impossible(format!(
                "a program other than dlock holds it and cannot be told: end {pid}, or use --now"
            )))
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
        return Ok(why.map_or(Reheld::NotOurs, Reheld::Taken));
    };
    if record.hold.is_none() {
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

/// Takes away what keeps the lock held on to. Whoever keeps it sees that, and lets go.
async fn end_hold(files: &LockFiles, record: &Record, file: &File) {
    record.remove(files, Kind::Holder);
    let _ = files.remove(&files.revoke(&record.who.owner));
    while is_kept(file) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
