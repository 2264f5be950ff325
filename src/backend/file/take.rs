//! Taking the lock: which files are locked in which mode, and what has to be true before it counts.

use std::fs::{File, TryLockError};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::directory::refusal;
use super::foreign;
use super::paths::{Paths, same_file};
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
        self.directory.check()?;
        let paths = self.directory.paths(&ask.name);
        let Some(lock) = self.lock_file(&paths, ask.mode)? else {
            return self.busy(ask, &paths);
        };
        // An exclusive holder is alone; others have to agree with those who came at the same time.
        let _mutex = match ask.mode {
            Mode::Exclusive => None,
            Mode::Shared | Mode::Slots(_) => Some(lock_soon(&paths).await?),
        };
        let holders: Vec<_> = record::each(&paths, Kind::Holder).collect();
        // Those who came while we waited have asked us for our terms.
        let waiters = if self.waiting.has_begun() { None } else { Some(&paths) };
        if let Some(why) = other_terms(waiters, &holders, ask) {
            return Ok(Taken::OtherTerms(why));
        }
        let (present, gone): (Vec<_>, Vec<_>) = holders.into_iter().partition(Seen::counts);
        for seen in gone {
            seen.bury(&paths)?;
        }
        if let Some(key) = &ask.once
            && paths.is_recorded(key)?
        {
            return Ok(Taken::AlreadyRan);
        }
        if let Some(until) = held_on(&present, ask.mode) {
            drop(lock);
            let ask_again = until.min(clock::now() + RECHECK);
            return Ok(Taken::Busy { holder: present.into_iter().next().map(Seen::into_holder), ask_again });
        }
        let slot = match ask.mode {
            Mode::Slots(n) => match self.free_slot(&paths, n, &present)? {
                Some(slot) => Some(slot),
                None => {
                    drop(lock);
                    return self.busy(ask, &paths);
                }
            },
            Mode::Exclusive | Mode::Shared => None,
        };
        Ok(Taken::Ours(Box::new(claim(paths, ask, lock, slot)?)))
    }

    /// The lock file, locked; `None` if that is for others to have now.
    fn lock_file(&mut self, paths: &Paths, mode: Mode) -> Result<Option<File>> {
        const TRIES: u32 = 100;
        for _ in 0..TRIES {
            let file = match self.waiting.take_locked(mode) {
                Some(file) => file,
                None => {
                    let file = paths.open(&paths.lock)?;
                    let tried = if mode == Mode::Exclusive { file.try_lock() } else { file.try_lock_shared() };
                    match tried {
                        Ok(()) => file,
                        Err(TryLockError::WouldBlock) => return Ok(None),
                        Err(TryLockError::Error(error)) => {
                            return Err(refusal(error, "cannot lock", &paths.lock));
                        }
                    }
                }
            };
            // Whoever deletes or replaces the file while we wait for it leaves us with a lock on nothing.
            if same_file(&file, &paths.lock)? {
                return Ok(Some(file));
            }
        }
        bail!("{} is replaced all the time", paths.lock.display())
    }

    fn free_slot(&mut self, paths: &Paths, n: u32, present: &[Seen]) -> Result<Option<(u32, File)>> {
        for k in 0..n {
            if present.iter().any(|seen| seen.record.slot == Some(k)) {
                continue;
            }
            let file = self.waiting.slot_file(paths, k)?;
            match file.try_lock() {
                Ok(()) if same_file(&file, &paths.slot(k))? => return Ok(Some((k, file))),
                Ok(()) | Err(TryLockError::WouldBlock) => self.waiting.keep_slot_file(k, file),
                Err(TryLockError::Error(error)) => return Err(refusal(error, "cannot lock", &paths.slot(k))),
            }
        }
        Ok(None)
    }

    /// Notes that we wait, and begins to.
    fn busy(&mut self, ask: &Ask, paths: &Paths) -> Result<Taken> {
        let holders: Vec<_> = record::each(paths, Kind::Holder).collect();
        if let Some(why) = other_terms(Some(paths), &holders, ask) {
            return Ok(Taken::OtherTerms(why));
        }
        if ask.queue {
            self.waiting.begin(paths, ask)?;
        }
        let seen = holders.into_iter().find(Seen::counts);
        let holder = seen.map(Seen::into_holder).or_else(|| foreign::Locks::read().holder_of(&paths.lock));
        Ok(Taken::Busy { holder, ask_again: clock::now() + RECHECK })
    }
}

/// Makes the lock ours for everybody to see: the token first, on the disk, then the record.
fn claim(paths: Paths, ask: &Ask, lock: File, slot: Option<(u32, File)>) -> Result<Claim> {
    let token = token::next(&paths)?;
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
    let record_file = record.write(&paths, Kind::Holder)?;
    let shared = |file: File| Arc::new(OwnedFd::from(file));
    Ok(Claim { paths, lock: shared(lock), slot: slot.map(|(n, file)| (n, shared(file))), record, record_file })
}

pub fn inode(file: &File) -> Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(file.metadata().context("fstat")?.ino())
}

/// Somebody who is here on other terms: all contenders must name the same number of slots. To ask one of them will do,
/// since each has seen to that when it came.
fn other_terms(waiters: Option<&Paths>, holders: &[Seen], ask: &Ask) -> Option<String> {
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
async fn lock_soon(paths: &Paths) -> Result<File> {
    let file = paths.open(&paths.mutex())?;
    while file.try_lock().is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(file)
}
