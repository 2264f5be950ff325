//! Taking the lock: which files are locked in which mode, and what has to be true before it counts.

use std::fs::{File, TryLockError};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::directory::refusal;
use super::files::{Folder, LockFiles, WAITING, leads_to, slot};
use super::record::{self, HOLDER, Seen};
use super::status::HeldFlocks;
use super::token;
use super::{Claim, FileBackend};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{Grant, Mode, Record};

/// How often a waiter makes sure that it waits for the right file, and that no record has gone stale.
const RECHECK: Duration = Duration::from_secs(1);

impl FileBackend {
    pub(super) async fn take(&mut self, ask: &Ask) -> Result<Attempt> {
        let from = clock::now();
        let (files, lock) = self.lock_file(ask)?;
        let Some(lock) = lock else { return self.busy(ask, &files) };
        let (side, inode) = (files.side()?, inode(&lock)?);
        // An exclusive holder is alone; others have to agree with those who came at the same time.
        let _mutex = match ask.mode {
            Mode::Exclusive => None,
            Mode::Shared | Mode::Slots(_) => Some(lock_soon(&side).await?),
        };
        let holders = record::all(&side, HOLDER, inode)?;
        // Those who came while we waited have compared their number of slots with ours.
        let newcomer = !self.waiting.has_begun();
        if let Some(other) = other_slots(Some(&side).filter(|_| newcomer), &holders, ask, inode) {
            self.waiting.is_over();
            return Ok(other);
        }
        let (present, gone): (Vec<_>, Vec<_>) = holders.into_iter().partition(Seen::counts);
        for seen in gone {
            seen.remove(&side)?;
        }
        if let Some(key) = &ask.once
            && side.is_recorded(key)?
        {
            self.waiting.is_over();
            return Ok(Attempt::AlreadyRan);
        }
        if let Some(until) = held_on(&present, ask.mode) {
            drop(lock);
            let holder = present.into_iter().next().map(|seen| seen.into_contender().into_holder());
            return Ok(Attempt::Busy(Busy { holder, ahead: None, ask_again: until.min(clock::now() + RECHECK) }));
        }
        let mut slot = None;
        if let Mode::Slots(n) = ask.mode {
            slot = self.free_slot(&side, n, &present)?;
            if slot.is_none() {
                drop(lock);
                return self.busy(ask, &files);
            }
        }
        // For everybody to see: the token first, on the disk, then the record.
        let token = token::next(&side)?;
        let record = Record::new(ask, inode, token, slot.as_ref().map(|(n, _)| *n));
        let record_file = record.write(&side, HOLDER)?;
        let slot = slot.map(|(n, file)| (n, Arc::new(file)));
        self.interference = None;
        let claim = self.claim.insert(Claim { files, lock: Arc::new(lock), slot, record, record_file });
        let (slot, grant) = (claim.record.details.slot, Grant { from, ttl: ask.ttl, slack: Duration::ZERO });
        Ok(Attempt::Granted(Lease { descriptors: claim.descriptors(), ..ask.lease(token, slot, grant) }))
    }

    /// The files of the lock, and the one to be locked if it is; others have it now if not.
    fn lock_file(&mut self, ask: &Ask) -> Result<(LockFiles, Option<File>)> {
        const TRIES: u32 = 100;
        for _ in 0..TRIES {
            let files = self.directory.files(&ask.name)?;
            let file = match self.waiting.take_locked() {
                Some(file) => file,
                None => {
                    let file = files.folder.open(&files.lock)?;
                    let tried = if ask.mode == Mode::Exclusive { file.try_lock() } else { file.try_lock_shared() };
                    match tried {
                        Ok(()) => file,
                        Err(TryLockError::WouldBlock) => return Ok((files, None)),
                        Err(TryLockError::Error(error)) => {
                            return Err(refusal(error, "cannot lock", &files.lock_path()));
                        }
                    }
                }
            };
            // If the file was deleted or replaced while we waited, we have locked something that nobody else looks at.
            if leads_to(&files.lock_path(), &file)? {
                return Ok((files, Some(file)));
            }
        }
        bail!("the lock file of {} is replaced all the time", ask.name)
    }

    fn free_slot(&mut self, side: &Folder, n: u32, present: &[Seen]) -> Result<Option<(u32, File)>> {
        let is_free = |k: &u32| present.iter().all(|seen| seen.record.details.slot != Some(*k));
        for k in (0..n).filter(is_free) {
            let path = side.path(&slot(k));
            let file = match self.waiting.slots.remove(&k) {
                Some(file) if leads_to(&path, &file)? => file,
                _ => side.open(&slot(k))?,
            };
            match file.try_lock() {
                Ok(()) if leads_to(&path, &file)? => return Ok(Some((k, file))),
                Ok(()) | Err(TryLockError::WouldBlock) => drop(self.waiting.slots.insert(k, file)),
                Err(TryLockError::Error(error)) => return Err(refusal(error, "cannot lock", &path)),
            }
        }
        Ok(None)
    }

    /// Notes that we wait, and begins to.
    fn busy(&mut self, ask: &Ask, files: &LockFiles) -> Result<Attempt> {
        let (side, inode) = (files.look()?, files.lock_inode());
        let holders = side.as_ref().map_or_else(|| Ok(Vec::new()), |side| record::all(side, HOLDER, inode))?;
        if let Some(other) = other_slots(side.as_ref(), &holders, ask, inode) {
            self.waiting.is_over();
            return Ok(other);
        }
        if ask.queue {
            self.waiting.begin(files, ask)?;
        }
        let holder = holders.into_iter().find(Seen::counts).map(|seen| seen.into_contender().into_holder());
        let holder = holder.or_else(|| HeldFlocks::read().holder_of(&files.lock_path()));
        Ok(Attempt::Busy(Busy { holder, ahead: None, ask_again: clock::now() + RECHECK }))
    }
}

pub fn inode(file: &File) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata().context("fstat")?.ino())
}

/// A contender with another number of slots: all must name the same. One of them is enough, since each has compared its
/// number when it came. Waiters are looked for below `side`, if any matter.
fn other_slots(side: Option<&Folder>, holders: &[Seen], ask: &Ask, inode: u64) -> Option<Attempt> {
    let waiter = || record::any_waiter(&side?.find(WAITING).ok()??, inode);
    let other = holders.iter().find(|seen| seen.counts()).cloned().or_else(waiter)?.into_contender();
    (other.mode.slots() != ask.mode.slots()).then(|| ask.differs_from(other))
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
async fn lock_soon(side: &Folder) -> Result<File> {
    let file = side.open("mutex")?;
    while file.try_lock().is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(file)
}
