//! Waiting without polling: for the lock in the kernel's own queue, for a slot through inotify(7).

use std::collections::BTreeMap;
use std::fs::File;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::sys::inotify::AddWatchFlags;
use tokio::sync::oneshot;

use super::files::{Folder, LockFiles, WAITING};
use super::record::{self, Details, WAITER};
use super::take::inode;
use super::watch::Watch;
use crate::backend::Ask;
use crate::lock::{Mode, Record, Token};

#[derive(Default)]
pub struct Waiting {
    /// Tells `status` that we wait, for as long as we do.
    record: Option<(Folder, Record<Details>, Arc<File>)>,
    blocked: Option<Blocked>,
    /// The lock file, if a blocked call has locked it.
    locked: Option<File>,
    /// Our turn to watch the slots: one waiter does, the others wait for its place.
    turn: Option<File>,
    /// Slot files stay open while we wait: closing them would wake all who watch, ourselves included.
    pub slots: BTreeMap<u32, File>,
    watch: Option<Watch>,
}

/// A thread in flock(2). It cannot be stopped; a lock that it gets too late is released again.
struct Blocked {
    result: oneshot::Receiver<File>,
    /// The inode of the lock file, if that is what it waits for and not our turn.
    lock: Option<u64>,
}

impl Waiting {
    /// Registers us and begins to wait, unless we wait already.
    pub fn begin(&mut self, files: &LockFiles, ask: &Ask) -> Result<()> {
        let file = files.folder.open(&files.lock)?;
        let inode = inode(&file)?;
        let side = files.side()?;
        if self.record.as_ref().is_none_or(|(_, record, _)| record.details.inode != inode) {
            let record = Record::new(ask, inode, Token(0), None);
            record::boot_id();
            let waiting = side.make(WAITING)?;
            let file = record.write(&waiting, WAITER)?;
            self.record = Some((waiting, record, file));
        }
        let slots_are_full = matches!(ask.mode, Mode::Slots(_)) && file.try_lock_shared().is_ok();
        if slots_are_full {
            drop(file);
            return self.watch_slots(&side);
        }
        if self.blocked.as_ref().is_none_or(|blocked| blocked.lock != Some(inode)) {
            self.blocked = Some(Blocked::spawn(file, ask.mode, Some(inode))?);
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

    fn watch_slots(&mut self, side: &Folder) -> Result<()> {
        if self.turn.is_some() {
            if self.watch.is_none() {
                // A holder's end closes its slot's file, whichever way it ends.
                let closed = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_CLOSE_NOWRITE;
                self.watch = Some(Watch::new(&[(side.path(""), closed)]));
            }
        } else if self.blocked.is_none() {
            self.blocked = Some(Blocked::spawn(side.open("turn")?, Mode::Exclusive, None)?);
        }
        Ok(())
    }

    /// A lock file that was locked for us while we waited.
    pub fn take_locked(&mut self) -> Option<File> {
        if let Some(blocked) = &mut self.blocked
            && let Ok(file) = blocked.result.try_recv()
        {
            self.has_locked(file);
        }
        self.locked.take()
    }

    fn has_locked(&mut self, file: File) {
        match self.blocked.take().and_then(|blocked| blocked.lock) {
            Some(_) => self.locked = Some(file),
            None => self.turn = Some(file),
        }
    }

    pub async fn for_release(&mut self) -> Result<()> {
        if let Some(blocked) = &mut self.blocked {
            let file = (&mut blocked.result).await.context("the waiting thread ended")?;
            self.has_locked(file);
            return Ok(());
        }
        match &mut self.watch {
            // Every reader of the records, ourselves included, closes those.
            Some(watch) => watch.next(|name| name.is_none_or(|name| name.starts_with("slot."))).await,
            None => std::future::pending().await,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some((waiting, record, _)) = &self.record {
            record.remove(waiting, WAITER);
        }
    }
}

impl Blocked {
    fn spawn(file: File, mode: Mode, lock: Option<u64>) -> Result<Blocked> {
        let (give, result) = oneshot::channel();
        let wait = move || {
            let locked = if mode == Mode::Exclusive { file.lock() } else { file.lock_shared() };
            if locked.is_ok() {
                let _ = give.send(file);
            }
        };
        std::thread::Builder::new().name("flock".into()).spawn(wait).context("cannot start a thread to wait")?;
        Ok(Blocked { result, lock })
    }
}
