//! Taking the lock: which files are locked in which mode, what has to be true before it counts, and the token it gets.
//!
//! `NAME.d/token` has the last token, a mark that no token has passed, and the boot in which the last one was written. The
//! mark is on the disk before any token below it is handed out. The last token need not be: as long as the machine is up
//! the kernel knows it, and after a reboot counting goes on behind the mark. So the disk is waited for once in [`AHEAD`],
//! not once in every run. The date makes tokens grow even if the counter is deleted.

use std::fs::{File, TryLockError};
use std::os::unix::fs::FileExt;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Result, bail};
use nix::fcntl::OFlag;

use super::folder::{Folder, LockFiles, Lockable, WAITING, refusal, slot};
use super::record::{self, HOLDER, Seen, boot_id};
use super::status::HeldFlocks;
use super::wait::Waiting;
use super::{Claim, FileBackend};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{Grant, Mode, Record, Token};

/// How often a waiter makes sure that it waits for the right file, and that no record has gone stale.
const RECHECK: Duration = Duration::from_secs(1);
/// How far the mark is set ahead: tokens are microseconds since the epoch, if nothing is in the way.
const AHEAD: Duration = Duration::from_secs(3600);
/// A number beyond this is none of ours, and would leave too little room for greater ones.
const GREATEST: u64 = i64::MAX as u64 / 2;

impl FileBackend {
    pub(super) async fn take(&mut self, ask: &Ask) -> Result<Attempt> {
        let from = clock::now();
        let (files, lock) = self.lock_file(ask)?;
        let Some(lock) = lock else { return self.busy(ask, &files) };
        let side = files.side()?;
        // An exclusive holder is alone; others have to agree with those who came at the same time.
        let _mutex = match ask.mode {
            Mode::Exclusive => None,
            Mode::Shared | Mode::Slots(_) => Some(lock_soon(&side).await?),
        };
        let holders = record::all(&side, HOLDER, lock.inode)?;
        // Those who came while we waited have compared their number of slots with ours.
        let newcomer = self.waiting.is_none();
        if let Some(other) = other_slots(Some(&side).filter(|_| newcomer), &holders, ask, lock.inode) {
            self.waiting = None;
            return Ok(other);
        }
        let (present, gone): (Vec<_>, Vec<_>) = holders.into_iter().partition(Seen::counts);
        for seen in gone {
            seen.remove(&side)?;
        }
        if let Some(key) = &ask.once
            && side.is_recorded(key)?
        {
            self.waiting = None;
            return Ok(Attempt::AlreadyRan);
        }
        if let Some(until) = held_on(&present, ask.mode) {
            drop(lock);
            let holder = present.into_iter().next().map(Seen::into_contender);
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
        let token = next_token(&side)?;
        let record = Record::new(ask, lock.inode, token, slot.as_ref().map(|(n, _)| *n));
        let record_file = record.write(&side, HOLDER)?;
        self.interference = None;
        let claim = self.claim.insert(Claim { files, lock, slot, record, record_file });
        let (slot, grant) = (claim.record.details.slot, Grant { from, ttl: ask.ttl, slack: Duration::ZERO });
        Ok(Attempt::Granted(Lease { descriptors: claim.descriptors(), ..ask.lease(token, slot, grant) }))
    }

    /// The files of the lock, and the one to be locked if it is; others have it now if not.
    fn lock_file(&mut self, ask: &Ask) -> Result<(LockFiles, Option<Lockable>)> {
        const TRIES: u32 = 100;
        for _ in 0..TRIES {
            let files = self.directory.files(&ask.name)?;
            let lock = match self.waiting.as_mut().and_then(Waiting::take_locked) {
                Some(locked) => locked,
                None => {
                    let lock = files.folder.open(&files.lock)?;
                    let exclusive = ask.mode == Mode::Exclusive;
                    match if exclusive { lock.file.try_lock() } else { lock.file.try_lock_shared() } {
                        Ok(()) => lock,
                        Err(TryLockError::WouldBlock) => return Ok((files, None)),
                        Err(TryLockError::Error(error)) => {
                            return Err(refusal(error, "cannot lock", &files.lock_path()));
                        }
                    }
                }
            };
            // If the file was deleted or replaced while we waited, we have locked something that nobody else looks at.
            if lock.is_at(&files.lock_path())? {
                return Ok((files, Some(lock)));
            }
        }
        bail!("the lock file of {} is replaced all the time", ask.name)
    }

    fn free_slot(&mut self, side: &Folder, n: u32, present: &[Seen]) -> Result<Option<(u32, Lockable)>> {
        let is_free = |k: &u32| present.iter().all(|seen| seen.record.details.slot != Some(*k));
        for k in (0..n).filter(is_free) {
            let path = side.path(&slot(k));
            let kept = self.waiting.as_mut().and_then(|waiting| waiting.slots.remove(&k));
            let lock = match kept {
                Some(kept) if kept.is_at(&path)? => kept,
                _ => side.open(&slot(k))?,
            };
            match (lock.file.try_lock(), &mut self.waiting) {
                (Ok(()), _) if lock.is_at(&path)? => return Ok(Some((k, lock))),
                (Err(TryLockError::Error(error)), _) => return Err(refusal(error, "cannot lock", &path)),
                (_, Some(waiting)) => drop(waiting.slots.insert(k, lock)),
                (_, None) => {}
            }
        }
        Ok(None)
    }

    /// Notes that we wait, and begins to.
    fn busy(&mut self, ask: &Ask, files: &LockFiles) -> Result<Attempt> {
        let (side, inode) = (files.look()?, files.lock_inode());
        let holders = side.as_ref().map_or_else(|| Ok(Vec::new()), |side| record::all(side, HOLDER, inode))?;
        if let Some(other) = other_slots(side.as_ref(), &holders, ask, inode) {
            self.waiting = None;
            return Ok(other);
        }
        if ask.queue {
            self.waiting = Some(Waiting::begin(self.waiting.take(), files, ask)?);
        }
        let holder = holders.into_iter().find(Seen::counts).map(Seen::into_contender);
        let holder = holder.or_else(|| HeldFlocks::read().holder_of(&files.lock_path()));
        Ok(Attempt::Busy(Busy { holder, ahead: None, ask_again: clock::now() + RECHECK }))
    }
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
async fn lock_soon(side: &Folder) -> Result<Lockable> {
    let mutex = side.open("mutex")?;
    while mutex.file.try_lock().is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(mutex)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counter {
    last: u64,
    mark: u64,
    boot: String,
}

/// Counts on, durably.
fn next_token(side: &Folder) -> Result<Token> {
    const TOKEN: &str = "token";
    let date = clock::wall().duration_since(UNIX_EPOCH).map_or(0, micros);
    let count = || advance(&side.open_to_write(TOKEN, OFlag::empty())?, date, boot_id());
    count().map_err(|error| refusal(error, "cannot record the fencing token in", &side.path(TOKEN)))
}

pub fn advance(file: &File, date: u64, boot: &str) -> std::io::Result<Token> {
    let mut text = [0; 128];
    let length = file.read_at(&mut text, 0)?;
    let (counter, must_be_kept) = Counter::read(&String::from_utf8_lossy(&text[..length])).next(date, boot);
    // Always as long as before, so that it is written in one piece.
    file.write_all_at(counter.to_string().as_bytes(), 0)?;
    if must_be_kept {
        file.sync_data()?;
    }
    Ok(Token(counter.last))
}

impl Counter {
    /// What makes no sense counts as nothing: the date is ahead of it.
    fn read(text: &str) -> Counter {
        let mut words = text.split_ascii_whitespace();
        let mut number = || words.next().and_then(|word| word.parse().ok()).filter(|n| *n <= GREATEST).unwrap_or(0);
        let (last, mark) = (number(), number());
        Counter { last, mark, boot: words.next().unwrap_or_default().to_owned() }
    }

    /// The counter after one more token, and whether the disk has to have it first.
    fn next(self, date: u64, boot: &str) -> (Counter, bool) {
        let known = if self.boot == boot && !boot.is_empty() { self.last } else { self.last.max(self.mark) };
        let last = known.saturating_add(1).max(date);
        let beyond = last > self.mark;
        let mark = if beyond { last.saturating_add(micros(AHEAD)) } else { self.mark };
        (Counter { last, mark, boot: boot.to_owned() }, beyond || self.boot != boot)
    }
}

impl std::fmt::Display for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{:020} {:020} {}", self.last, self.mark, self.boot)
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(last: u64, mark: u64, boot: &str) -> Counter {
        Counter { last, mark, boot: boot.to_owned() }
    }

    #[test]
    fn the_disk_has_a_mark_that_no_token_has_passed() {
        let mut on_disk = counter(0, 0, "");
        let mut now = counter(0, 0, "");
        for date in (0..20).map(|n| n * micros(AHEAD) / 7) {
            let (next, must_be_kept) = now.next(date, "this");
            if must_be_kept {
                on_disk = counter(next.last, next.mark, &next.boot);
            }
            assert!(next.last <= on_disk.mark, "{next:?} {on_disk:?}");
            now = next;
        }
    }

    #[test]
    fn after_a_reboot_tokens_go_on_behind_the_mark_whatever_the_date() {
        let (first, _) = counter(0, 0, "").next(1_000_000, "this");
        let lost = counter(first.last, first.mark, "this");
        let (second, _) = first.next(2_000_000, "this");
        // The second never reached the disk, and the clock has been set back.
        let (third, must_be_kept) = lost.next(0, "that");
        assert!(third.last > second.last && must_be_kept);
    }

    #[test]
    fn within_a_boot_tokens_grow_by_one_when_the_clock_does_not_move() {
        let (first, _) = counter(0, 0, "").next(1_000_000, "this");
        let (second, must_be_kept) = Counter::read(&first.to_string()).next(1_000_000, "this");
        assert_eq!((first.last, second.last, must_be_kept), (1_000_000, 1_000_001, false));
    }

    #[test]
    fn garbage_and_the_short_form_are_understood() {
        assert_eq!(Counter::read("\u{fffd}x -3"), Counter::default());
        assert_eq!(Counter::read("00000000000000000042\n"), counter(42, 0, ""));
        assert_eq!(Counter::read(&format!("{} {}", i64::MAX, u64::MAX)), Counter::default());
    }
}
