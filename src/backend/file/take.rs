//! Taking the lock: which files are locked in which mode, and what has to be true before it counts.

use std::fs::{File, TryLockError};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::directory::refusal;
use super::files::LockFiles;
use super::foreign;
use super::record::{self, Kind, Record, Seen};
use super::token;
use super::{Claim, FileBackend};
use crate::backend::Ask;
use crate::clock::{self, Instant};
use crate::lock::{Holder, Mode};

pub(super) enum Taken {
    Ours(Box<Claim>),
    Busy { holder: Option<Holder>, ask_again: Instant },
    OtherTerms(String),
    AlreadyRan,
}

/// How often a waiter makes sure that it waits for the right file, and that no record has gone stale.
const RECHECK: Duration = Duration::from_secs(1);

impl FileBackend {
    pub(super) async fn take(&mut self, ask: &Ask) -> Result<Taken> {
        let (files, lock) = self.lock_file(ask)?;
        let Some(lock) = lock else {
            return self.busy(ask, &files);
        };
        // An exclusive holder is alone; others have to agree with those who came at the same time.
        let _mutex = match ask.mode {
            Mode::Exclusive => None,
            Mode::Shared | Mode::Slots(_) => Some(lock_soon(&files).await?),
        };
        let holders: Vec<_> = record::each(&files, Kind::Holder)?.collect();
        // Those who came while we waited have asked us for our terms.
        let waiters = if self.waiting.has_begun() { None } else { Some(&files) };
        if let Some(why) = other_terms(waiters, &holders, ask) {
            return Ok(Taken::OtherTerms(why));
        }
        let (present, gone): (Vec<_>, Vec<_>) = holders.into_iter().partition(Seen::counts);
        for seen in gone {
            seen.bury(&files)?;
        }
        if let Some(key) = &ask.once
            && files.is_recorded(key)?
        {
            return Ok(Taken::AlreadyRan);
        }
        if let Some(until) = held_on(&present, ask.mode) {
            drop(lock);
            let ask_again = until.min(clock::now() + RECHECK);
            return Ok(Taken::Busy { holder: present.into_iter().next().map(Seen::into_holder), ask_again });
        }
        let slot = match ask.mode {
            Mode::Slots(n) => match self.free_slot(&files, n, &present)? {
                Some(slot) => Some(slot),
                None => {
                    drop(lock);
                    return self.busy(ask, &files);
                }
            },
            Mode::Exclusive | Mode::Shared => None,
        };
        Ok(Taken::Ours(Box::new(claim(files, ask, lock, slot)?)))
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
            // Whoever deletes or replaces the file while we wait for it leaves us with a lock on nothing.
            if files.leads_to(&files.lock, &file)? {
                return Ok((files, Some(file)));
            }
        }
        bail!("the lock file of {} is replaced all the time", ask.name)
    }

    fn free_slot(&mut self, files: &LockFiles, n: u32, present: &[Seen]) -> Result<Option<(u32, File)>> {
        for k in 0..n {
            if present.iter().any(|seen| seen.record.slot == Some(k)) {
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
    fn busy(&mut self, ask: &Ask, files: &LockFiles) -> Result<Taken> {
        let holders: Vec<_> = record::each(files, Kind::Holder)?.collect();
        if let Some(why) = other_terms(Some(files), &holders, ask) {
            return Ok(Taken::OtherTerms(why));
        }
        if ask.queue {
            self.waiting.begin(files, ask)?;
        }
        let seen = holders.into_iter().find(Seen::counts);
        let holder = seen.map(Seen::into_holder).or_else(|| foreign::Locks::read().holder_of(&files.path(&files.lock)));
        Ok(Taken::Busy { holder, ask_again: clock::now() + RECHECK })
    }
}

/// Makes the lock ours for everybody to see: the token first, on the disk, then the record.
fn claim(files: LockFiles, ask: &Ask, lock: File, slot: Option<(u32, File)>) -> Result<Claim> {
    let token = token::next(&files)?;
    let record = Record {
        who: ask.who.clone(),
        mode: ask.mode,
        token,
        slot: slot.as_ref().map(|(n, _)| *n),
        since: record::millis(clock::wall()),
        ttl_ms: u64::try_from(ask.ttl.as_millis()).unwrap_or(u64::MAX),
        inode: inode(&lock)?,
        hold: None,
        ended: false,
    };
    let record_file = record.write(&files, Kind::Holder)?;
    let shared = |file: File| Arc::new(OwnedFd::from(file));
    Ok(Claim { files, lock: shared(lock), slot: slot.map(|(n, file)| (n, shared(file))), record, record_file })
}

pub fn inode(file: &File) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata().context("fstat")?.ino())
}

/// Somebody who is here on other terms: all contenders must name the same number of slots. To ask one of them will do,
/// since each has seen to that when it came.
fn other_terms(waiters: Option<&LockFiles>, holders: &[Seen], ask: &Ask) -> Option<String> {
    let holder = holders.iter().find(|seen| seen.counts()).map(|seen| seen.record.clone());
    let other =
        holder.or_else(|| record::any_waiter(waiters?)).filter(|other| other.mode.slots() != ask.mode.slots())?;
    let (theirs, ours) = (other.mode.slots(), ask.mode.slots());
    let who = crate::report::describe(&other.who.clone().into());
    Some(format!("{who} uses it with --slots {theirs}, not {ours}: all contenders must name the same number"))
}

/// Until when somebody who has gone keeps the lock from this mode.
fn held_on(present: &[Seen], mode: Mode) -> Option<Instant> {
    let against = |seen: &&Seen| match mode {
        Mode::Exclusive => true,
        Mode::Shared => seen.record.mode != Mode::Shared,
        // A slot that is held on to is simply not free.
        Mode::Slots(_) => false,
    };
    let spans = present.iter().filter(against).filter_map(|seen| seen.record.held_on_for());
    spans.max().map(|span| clock::now() + span)
}

/// For the moment that an agreement among shared holders takes; whoever has it never waits for anything.
async fn lock_soon(files: &LockFiles) -> Result<File> {
    let file = files.open(&files.mutex())?;
    while file.try_lock().is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(file)
}
