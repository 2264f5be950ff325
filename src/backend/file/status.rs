//! Looking at locks, and taking them away.

use std::fs::{File, ReadDir};
use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result};

use super::NAME;
use super::directory::{Directory, refusal};
use super::foreign::Locks;
use super::paths::{self, Paths};
use super::record::{Kind, Record, Records, Seen, is_kept};
use crate::backend::{Page, Reheld, Revoke, Revoked};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Holder, LastRun, LockName, LockState, Mode, OwnerId, State};

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
            Err(error) => return Err(refusal(error, "cannot list", directory.path())),
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

pub async fn revoke(paths: &Paths, from: &Holder, how: &Revoke) -> Result<Revoked> {
    let holders: Vec<_> = Records::read(paths).holders.into_iter().filter(Seen::counts).collect();
    let owner_of = |seen: &Seen| seen.record.who.owner.clone();
    let Some(seen) = holders.iter().find(|seen| Some(owner_of(seen).as_str()) == from.owner.as_deref()) else {
        return revoke_foreign(paths, from, how);
    };
    let (owner, record) = (owner_of(seen), &seen.record);
    match how {
        Revoke::Safely { .. } if !seen.alive => {
            Ok(Revoked::Impossible("its command has ended, it is only kept by --hold-at-least: use --now".into()))
        }
        Revoke::Safely { .. } if record.ended => {
            if let Some((record, file)) = Record::find(paths, &owner) {
                end_hold(paths, &record, &file).await;
            }
            Ok(Revoked::Marked)
        }
        Revoke::Safely { reason } => {
            paths.replace(&paths.revoke(&owner), reason.as_bytes())?;
            Ok(Revoked::Marked)
        }
        // A fresh file would be everybody's loss. This one is told, and is no holder from now on.
        Revoke::Now { reason } if record.mode == Mode::Shared && holders.len() > 1 => {
            // The others may be next, and then it finds the file gone instead of the mark.
            let _ = paths.note_taken(&owner, reason);
            if record.hold.is_none() {
                paths.replace(&paths.revoke(&owner), reason.as_bytes())?;
            }
            seen.bury(paths)?;
            Ok(Revoked::Freed)
        }
        Revoke::Now { reason } => {
            let file = match (record.mode, record.slot) {
                (Mode::Slots(_), Some(slot)) => paths.slot(slot),
                _ => paths.lock.clone(),
            };
            let told = paths.note_taken(&owner, reason);
            let recorded = if record.hold.is_none() { cut_short(paths, from, reason) } else { Ok(()) };
            paths.renew(&file)?;
            seen.bury(paths)?;
            told.and(recorded).map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

/// Before the lock is free: whoever gets it then may have ended its run in no time.
fn cut_short(paths: &Paths, from: &Holder, reason: &str) -> Result<()> {
    paths.write_last_run(&LastRun::cut_short(from, reason))
}

fn not_on_record(error: anyhow::Error) -> anyhow::Error {
    let fault = Fault::of(&error);
    error.context("it is free now, but the reason is not on record").context(fault)
}

fn revoke_foreign(paths: &Paths, from: &Holder, how: &Revoke) -> Result<Revoked> {
    match how {
        _ if from.owner.is_some() => Ok(Revoked::NotHeld),
        Revoke::Safely { .. } => {
            let pid = from.pid.map_or_else(|| "its process".to_owned(), |pid| format!("process {pid}"));
            Ok(Revoked::Impossible(format!(
                "a program other than dlock holds it and cannot be told: end {pid}, or use --now"
            )))
        }
        Revoke::Now { reason } => {
            let recorded = cut_short(paths, from, reason);
            paths.renew(&paths.lock)?;
            recorded.map_err(not_on_record)?;
            Ok(Revoked::Freed)
        }
    }
}

pub async fn rehold(paths: &Paths, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
    let Some((mut record, file)) = Record::find(paths, owner) else {
        let why = paths::read(&paths.taken(owner));
        return Ok(why.map_or(Reheld::NotOurs, Reheld::Taken));
    };
    if record.hold.is_none() {
        return Ok(if is_kept(&file) { Reheld::Running } else { Reheld::NotOurs });
    }
    if record.held_on_for().is_none() {
        return Ok(Reheld::NotOurs);
    }
    if ttl.is_zero() {
        end_hold(paths, &record, &file).await;
        return Ok(Reheld::Done);
    }
    if let Ok(reason) = paths::read(&paths.revoke(owner)) {
        return Ok(Reheld::Revoked(reason));
    }
    record.hold(&file, clock::now() + ttl, ttl)?;
    Ok(Reheld::Done)
}

/// Takes away what keeps the lock held on to. Whoever keeps it sees that, and lets go.
async fn end_hold(paths: &Paths, record: &Record, file: &File) {
    record.remove(paths, Kind::Holder);
    let _ = std::fs::remove_file(paths.revoke(&record.who.owner));
    while is_kept(file) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
