//! Taking the lock: which files are locked in which mode, and what has to be true before it counts.

use std::fs::{File, TryLockError};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::directory::refusal;
use super::files::LockFiles;
use super::foreign;
use super::record::{self, Kind, Seen};
use super::token;
use super::{Claim, FileBackend};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{Grant, Mode, Record, messages};
use crate::report::describe;

/// How often a waiter makes sure that it waits for the right file, and that no record has gone stale.
const RECHECK: Duration = Duration::from_secs(1);

impl FileBackend {
    pub(super) async fn take(&mut self, ask: &Ask) -> Result<Attempt> {
        let from = clock::now();
        let (files, lock) = self.lock_file(ask)?;
        let Some(lock) = lock else { return self.busy(ask, &files) };
        // An exclusive holder is alone; others have to agree with those who came at the same time.
        let _mutex = match ask.mode {
            Mode::Exclusive => None,
            Mode::Shared | Mode::Slots(_) => Some(lock_soon(&files).await?),
        };
        let holders: Vec<_> = record::each(&files, Kind::Holder)?.collect();
        // Those who came while we waited have compared their number of slots with ours.
        let waiters = if self.waiting.has_begun() { None } else { Some(&files) };
        if let Some(why) = other_slots(waiters, &holders, ask) {
            self.waiting.is_over();
            return Ok(Attempt::OtherSlots(why));
        }
        let (present, gone): (Vec<_>, Vec<_>) = holders.into_iter().partition(Seen::counts);
        for seen in gone {
            seen.remove(&files)?;
        }
        if let Some(key) = &ask.once
            && files.is_recorded(key)?
        {
            self.waiting.is_over();
            return Ok(Attempt::AlreadyRan);
        }
        if let Some(until) = held_on(&present, ask.mode) {
            drop(lock);
            let holder = present.into_iter().next().map(|seen| seen.into_holder().into_holder());
            return Ok(Attempt::Busy(Busy { holder, ahead: None, ask_again: until.min(clock::now() + RECHECK) }));
        }
        let mut slot = None;
        if let Mode::Slots(n) = ask.mode {
            slot = self.free_slot(&files, n, &present)?;
            if slot.is_none() {
                drop(lock);
                return self.busy(ask, &files);
            }
        }
        let claim = self.claim.insert(claim(files, ask, lock, slot)?);
        Ok(Attempt::Granted(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: claim.record.details.token,
            slot: claim.record.details.slot,
            grant: Grant { from, ttl: ask.ttl, slack: Duration::ZERO },
            descriptors: claim.descriptors(),
        }))
    }

    /// The files of the lock, and the one to be locked if it is; others have it now if not.
    fn lock_file(&mut self, ask: &Ask) -> Result<(LockFiles, Option<File>)> {
        const TRIES: u32 = 100;
        for _ in 0..TRIES {
            let files = self.directory.open()?.files(&ask.name);
            let file = match self.waiting.take_locked(ask.mode) {
                Some(file) => file,
                None => {
                    let file = files.open(&files.lock)?;
                    let tried = if ask.mode == Mode::Exclusive { file.try_lock() } else { file.try_lock_shared() };
                    match tried {
                        Ok(()) => file,
                        Err(TryLockError::WouldBlock) => return Ok((files, None)),
                        Err(TryLockError::Error(error)) => {
                            return Err(refusal(error, "cannot lock", &files.path(&files.lock)));
                        }
                    }
                }
            };
            // If the file was deleted or replaced while we waited, we have locked something that nobody else looks at.
            if files.leads_to(&files.lock, &file)? {
                return Ok((files, Some(file)));
            }
        }
        bail!("the lock file of {} is replaced all the time", ask.name)
    }

    fn free_slot(&mut self, files: &LockFiles, n: u32, present: &[Seen]) -> Result<Option<(u32, File)>> {
        for k in 0..n {
            if present.iter().any(|seen| seen.record.details.slot == Some(k)) {
                continue;
            }
            let file = self.waiting.slot_file(files, k)?;
            match file.try_lock() {
                Ok(()) if files.leads_to(&files.slot(k), &file)? => return Ok(Some((k, file))),
                Ok(()) | Err(TryLockError::WouldBlock) => self.waiting.keep_slot_file(k, file),
                Err(TryLockError::Error(error)) => {
                    return Err(refusal(error, "cannot lock", &files.path(&files.slot(k))));
                }
            }
        }
        Ok(None)
    }

    /// Notes that we wait, and begins to.
    fn busy(&mut self, ask: &Ask, files: &LockFiles) -> Result<Attempt> {
        let holders: Vec<_> = record::each(files, Kind::Holder)?.collect();
        if let Some(why) = other_slots(Some(files), &holders, ask) {
            self.waiting.is_over();
            return Ok(Attempt::OtherSlots(why));
        }
        if ask.queue {
            self.waiting.begin(files, ask)?;
        }
        let holder = holders.into_iter().find(Seen::counts).map(|seen| seen.into_holder().into_holder());
        let holder = holder.or_else(|| foreign::Locks::read().holder_of(&files.path(&files.lock)));
        Ok(Attempt::Busy(Busy { holder, ahead: None, ask_again: clock::now() + RECHECK }))
    }
}

/// Makes the lock ours for everybody to see: the token first, on the disk, then the record.
fn claim(files: LockFiles, ask: &Ask, lock: File, slot: Option<(u32, File)>) -> Result<Claim> {
    let token = token::next(&files)?;
    let record = Record::new(ask, inode(&lock)?, token, slot.as_ref().map(|(n, _)| *n));
    let record_file = record.write(&files, Kind::Holder)?;
    let shared = |file: File| Arc::new(OwnedFd::from(file));
    Ok(Claim { files, lock: shared(lock), slot: slot.map(|(n, file)| (n, shared(file))), record, record_file })
}

pub fn inode(file: &File) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata().context("fstat")?.ino())
}

/// A contender with another number of slots: all must name the same. One of them is enough, since each has compared its
/// number when it came.
fn other_slots(waiters: Option<&LockFiles>, holders: &[Seen], ask: &Ask) -> Option<String> {
    let holder = holders.iter().find(|seen| seen.counts()).map(|seen| seen.record.clone());
    let other = holder.or_else(|| record::any_waiter(waiters?))?;
    let theirs = other.details.mode;
    (theirs.slots() != ask.mode.slots()).then(|| messages::other_slots(describe(&other.who.into()), theirs, ask.mode))
}

/// Until when a holder that has gone keeps this mode out.
fn held_on(present: &[Seen], mode: Mode) -> Option<Instant> {
    let against = |seen: &&Seen| match mode {
        Mode::Exclusive => true,
        Mode::Shared => seen.record.details.mode != Mode::Shared,
        // A slot that is held on to is simply not free.
        Mode::Slots(_) => false,
    };
    let spans = present.iter().filter(against).filter_map(|seen| seen.record.held_on_for());
    spans.max().map(|span| clock::now() + span)
}

/// For the moment in which shared holders agree. A process that has this lock waits for nothing else.
async fn lock_soon(files: &LockFiles) -> Result<File> {
    let file = files.open(&files.mutex())?;
    while file.try_lock().is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(file)
}
