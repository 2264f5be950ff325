//! What is kept of runs: `last-run` with the runs before it, and `once` with the keys of successful runs, one per line. A line counts when it has
//! its end, and not before: a disk that gets full in the middle of a key leaves a part of it, which may be a key of its
//! own.

use std::fs::File;
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::Result;
use nix::fcntl::OFlag;

use super::directory::refusal;
use super::files::LockFiles;
use crate::backend::{Forgotten, Unrecorded};
use crate::exit::Fault;
use crate::lock::{History, LastRun};

/// No key has such a character, so no line with it is a key.
const SPOILT: &str = "\0\n";

impl LockFiles {
    pub fn record_run(&self, run: &LastRun, keep: usize) -> Result<()> {
        let once = match &run.once {
            Some(key) if run.succeeded() => self
                .record_once(key)
                .map_err(|error| unrecorded(&format!("--once {key}"), "a run with it will not be skipped", &error)),
            _ => Ok(()),
        };
        let what_ended = |error| unrecorded("how the run ended", "status shows an older one", &error);
        once.and(self.remember(run.clone(), keep).map_err(what_ended))
    }

    /// Makes a run the last one, unless it is on record already. Overwrites the file in place, in one piece: to put a new
    /// file there makes ext4 write to the disk at once. If somebody reads it just then, a new file takes its place, and
    /// the reader keeps the old one.
    pub fn remember(&self, run: LastRun, keep: usize) -> Result<()> {
        /// Padded with spaces, it never becomes shorter.
        const GRAIN: usize = 512;
        const LONGEST: usize = 1 << 20;
        let path = self.last_run();
        let mut history = self.history();
        if history.has(&run) {
            return Ok(());
        }
        history.add(run, keep);
        let mut json = history.to_json().unwrap_or_default().into_bytes();
        json.resize(json.len().next_multiple_of(GRAIN), b' ');
        let mut in_place = || -> IoResult<bool> {
            let file = self.reach_into(&path)?;
            let length = usize::try_from(file.metadata()?.len()).map_err(Error::other)?;
            Ok(length <= LONGEST && file.try_lock().is_ok() && {
                json.resize(json.len().max(length), b' ');
                file.write_all_at(&json, 0)?;
                true
            })
        };
        if !in_place().unwrap_or(false) {
            self.replace(&path, &json)?;
        }
        Ok(())
    }

    pub fn history(&self) -> History {
        self.read_history().map_or_else(History::default, |json| History::from_json(&json))
    }

    fn read_history(&self) -> Option<String> {
        let mut file = self.look_into(&self.last_run()).ok()?;
        // One that is being written will be complete in a moment; but its writer may have been stopped.
        soon(10, || file.try_lock_shared().is_ok());
        let mut json = String::new();
        file.read_to_string(&mut json).ok()?;
        Some(json)
    }

    /// Forgets all runs, and all keys of `--once`.
    pub fn forget_runs(&self) -> Forgotten {
        let removed = [self.last_run(), self.once()].map(|path| self.remove(&path).is_ok());
        if removed.contains(&true) { Forgotten::Done } else { Forgotten::Nothing }
    }

    /// Forgets one key of `--once`. A run that succeeds at the same moment waits for the file, and then records its own.
    pub fn forget_once(&self, key: &str) -> Result<Forgotten> {
        let path = self.once();
        let forget = || -> IoResult<Forgotten> {
            let file = self.reach_into(&path)?;
            file.lock()?;
            let keys = self.read(&path)?;
            let others: String = keys.split_inclusive('\n').filter(|line| line.trim_end_matches('\n') != key).collect();
            if others.len() == keys.len() {
                return Ok(Forgotten::Nothing);
            }
            file.set_len(0)?;
            file.write_all_at(others.as_bytes(), 0)?;
            file.sync_data()?;
            Ok(Forgotten::Done)
        };
        match forget() {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Forgotten::Nothing),
            forgotten => forgotten.map_err(|error| refusal(error, "cannot write", &self.path(&path))),
        }
    }

    fn record_once(&self, key: &str) -> Result<()> {
        let path = self.once();
        let record = || {
            let mut file = self.open_to_write(&path, OFlag::O_APPEND)?;
            // Holders of a shared lock may end at the same time. Each needs the file for a moment; but one may have been
            // stopped, and then the key matters more.
            let alone = soon(100, || file.try_lock().is_ok());
            let before = file.metadata()?.len();
            let end_of_line = if ends_whole(&file, before)? { "" } else { SPOILT };
            let written = file.write_all(format!("{end_of_line}{key}\n").as_bytes());
            if written.is_err() && alone {
                // If this fails too, the part of a line counts for nothing.
                let _ = file.set_len(before);
            }
            written.and_then(|()| file.sync_data())
        };
        record().map_err(|error| refusal(error, "cannot write", &self.path(&path)))
    }

    pub fn is_recorded(&self, once: &str) -> Result<bool> {
        let path = self.once();
        match self.read(&path) {
            Ok(keys) => Ok(keys.split_inclusive('\n').any(|line| line.strip_suffix('\n') == Some(once))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(refusal(error, "cannot read", &self.path(&path))),
        }
    }
}

/// Tries so often, with a millisecond between two tries.
fn soon(tries: u32, mut done: impl FnMut() -> bool) -> bool {
    (0..tries).any(|_| {
        done() || {
            std::thread::sleep(Duration::from_millis(1));
            false
        }
    })
}

fn ends_whole(file: &File, length: u64) -> IoResult<bool> {
    let Some(last) = length.checked_sub(1) else { return Ok(true) };
    let mut end = [0];
    file.read_exact_at(&mut end, last)?;
    Ok(end == *b"\n")
}

fn unrecorded(what: &str, so: &str, error: &anyhow::Error) -> anyhow::Error {
    let why = error.root_cause();
    anyhow::Error::new(Unrecorded(format!("{what} is not on record, so {so}: {why}"))).context(Fault::Refused)
}
