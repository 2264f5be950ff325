//! Waiting without polling: for the lock in the kernel's own queue, for a slot and for the acts of an operator through
//! inotify(7).

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::inotify::AddWatchFlags;
use tokio::sync::oneshot;

use super::files::LockFiles;
use super::record::{self, Details, Kind};
use super::take::inode;
use super::watch::{FileEvent, Interference, Watch};
use crate::backend::Ask;
use crate::lock::{Mode, OwnerId, Record, Token};

/// A run that is over by then is not watched over.
const SHORT_RUN: Duration = Duration::from_millis(300);

#[derive(Default)]
pub struct Waiting {
    /// Tells `status` that we wait, for as long as we do.
    record: Option<(LockFiles, Record<Details>, Arc<OwnedFd>)>,
    blocked: Option<Blocked>,
    /// What a blocked lock call has locked.
    locked: Option<File>,
    /// Our turn to watch the slots: one waiter does, the others wait for its place.
    turn: Option<File>,
    slots: BTreeMap<u32, File>,
    watch: Option<Watch>,
    interference: Option<Interference>,
}

/// A thread in flock(2). It cannot be stopped; a lock that it gets too late is released again.
struct Blocked {
    result: oneshot::Receiver<File>,
    inode: u64,
}

impl Waiting {
    /// Registers us and begins to wait, unless we wait already.
    pub fn begin(&mut self, files: &LockFiles, ask: &Ask) -> Result<()> {
        let file = files.open(&files.lock)?;
        let inode = inode(&file)?;
        if self.record.as_ref().is_none_or(|(_, record, _)| record.details.inode != inode) {
            self.register(files, ask, inode)?;
        }
        let slots_are_full = matches!(ask.mode, Mode::Slots(_)) && file.try_lock_shared().is_ok();
        if slots_are_full {
            drop(file);
            return self.watch_slots(files);
        }
        if self.blocked.as_ref().is_none_or(|blocked| blocked.inode != inode) {
            self.blocked = Some(Blocked::spawn(file, inode, ask.mode == Mode::Exclusive)?);
        }
        Ok(())
    }

    pub fn has_begun(&self) -> bool {
        self.record.is_some()
    }

    /// The lock is ours, or will never be. Called only when the lock is in use: the clean-up need not delay the command.
    pub fn is_over(&mut self) {
        if self.record.is_some() {
            *self = Waiting::default();
        }
    }

    fn register(&mut self, files: &LockFiles, ask: &Ask, inode: u64) -> Result<()> {
        let record = Record::new(ask, inode, Token(0), None);
        record::boot_id();
        let file = record.write(files, Kind::Waiter)?;
        self.record = Some((files.clone(), record, file));
        Ok(())
    }

    fn watch_slots(&mut self, files: &LockFiles) -> Result<()> {
        if self.turn.is_some() {
            if self.watch.is_none() {
                // A holder's end closes its slot's file, whichever way it ends.
                let closed = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CLOSE_NOWRITE;
                self.watch = Some(Watch::new(&[(files.path(&files.side), closed)]));
            }
        } else if self.blocked.is_none() {
            let turn = files.open(&files.turn())?;
            let inode = inode(&turn)?;
            self.blocked = Some(Blocked::spawn(turn, inode, true)?);
        }
        Ok(())
    }

    /// A lock file that was locked for us while we waited.
    pub fn take_locked(&mut self, mode: Mode) -> Option<File> {
        if let Some(blocked) = &mut self.blocked
            && let Ok(file) = blocked.result.try_recv()
        {
            self.locked = Some(file);
            self.blocked = None;
        }
        let file = self.locked.take()?;
        if matches!(mode, Mode::Slots(_)) && self.turn.is_none() && self.is_turn(&file) {
            self.turn = Some(file);
            return None;
        }
        Some(file)
    }

    fn is_turn(&self, file: &File) -> bool {
        self.record.as_ref().is_some_and(|(files, ..)| files.leads_to(&files.turn(), file).unwrap_or(false))
    }

    /// Slot files stay open while we wait: closing them would wake all who watch, ourselves included.
    pub fn slot_file(&mut self, files: &LockFiles, n: u32) -> Result<File> {
        match self.slots.remove(&n) {
            Some(file) if files.leads_to(&files.slot(n), &file)? => Ok(file),
            _ => files.open(&files.slot(n)),
        }
    }

    pub fn keep_slot_file(&mut self, n: u32, file: File) {
        self.slots.insert(n, file);
    }

    pub async fn for_release(&mut self) -> Result<()> {
        if let Some(blocked) = &mut self.blocked {
            let file = (&mut blocked.result).await.context("the waiting thread ended")?;
            self.blocked = None;
            self.locked = Some(file);
            return Ok(());
        }
        match &mut self.watch {
            // Every reader of the records, ourselves included, closes those.
            Some(watch) => watch.next(|name| name.is_none_or(|name| name.starts_with("slot."))).await,
            None => std::future::pending().await,
        }
    }

    /// While holding: something may have happened to the lock file, or an operator has left a mark for us.
    pub async fn for_interference(
        &mut self,
        files: &LockFiles,
        owner: &OwnerId,
        slot: Option<u32>,
    ) -> Result<FileEvent> {
        let Some(interference) = &mut self.interference else {
            // Closing a watch costs the kernel many milliseconds: a short run goes without one.
            tokio::time::sleep(SHORT_RUN).await;
            self.interference = Some(Interference::watch(files, owner, slot));
            // Whatever came before the watch has to be looked for once.
            return Ok(FileEvent::Touched);
        };
        interference.next().await
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some((files, record, _)) = &self.record {
            record.remove(files, Kind::Waiter);
        }
    }
}

impl Blocked {
    fn spawn(file: File, inode: u64, exclusive: bool) -> Result<Blocked> {
        let (give, result) = oneshot::channel();
        let wait = move || {
            let locked = if exclusive { file.lock() } else { file.lock_shared() };
            if locked.is_ok() {
                let _ = give.send(file);
            }
        };
        std::thread::Builder::new().name("flock".into()).spawn(wait).context("cannot start a thread to wait")?;
        Ok(Blocked { result, inode })
    }
}
