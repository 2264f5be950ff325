//! What is kept of runs: `last-run` with the runs before it, and `once` with the keys of successful runs, one per line. A
//! line counts when it has its end, and not before: a disk that gets full in the middle of a key leaves a part of it,
//! which may be a key of its own.

use std::fs::File;
use std::io::{ErrorKind, Result as IoResult, Write, read_to_string};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Error, Result};
use nix::fcntl::OFlag;

use super::directory::refusal;
use super::files::Folder;
use crate::backend::{Forgotten, Unrecorded};
use crate::exit::Fault;
use crate::lock::{History, LastRun};

/// No key has such a character, so no line with it is a key.
const SPOILT: &str = "\0\n";
const LAST_RUN: &str = "last-run";
const ONCE: &str = "once";

/// Records how a run ended.
pub fn record_run(side: &Result<Option<Folder>>, run: &LastRun, keep: usize) -> Result<()> {
    let what_ended = |error: &Error| unrecorded("how the run ended", "status shows an older one", error);
    let Some(side) = side.as_ref().map_err(what_ended)? else { return Ok(()) };
    let once = match &run.once {
        Some(key) if run.succeeded() => side
            .record_once(key)
            .map_err(|error| unrecorded(&format!("--once {key}"), "a run with it will not be skipped", &error)),
        _ => Ok(()),
    };
    once.and(side.remember(run.clone(), keep).map_err(|error| what_ended(&error)))
}

/// Of `NAME.d`.
impl Folder {
    /// Makes a run the last one, unless it is on record already. Overwrites the file in place, in one piece: to put a new
    /// file there makes ext4 write to the disk at once. If somebody reads it just then, a new file takes its place, and
    /// the reader keeps the old one.
    pub fn remember(&self, run: LastRun, keep: usize) -> Result<()> {
        /// Padded with spaces, it never becomes shorter.
        const GRAIN: usize = 512;
        const LONGEST: u64 = 1 << 20;
        let is_short = |file: &File| file.metadata().is_ok_and(|meta| meta.len() <= LONGEST);
        let own = self.reach_into(LAST_RUN).ok().filter(|file| is_short(file) && file.try_lock().is_ok());
        let own = own.and_then(|file| Some((read_to_string(&file).ok()?, file)));
        let mut history = own.as_ref().map_or_else(|| self.history(), |(before, _)| History::from_json(before));
        if history.has(&run) {
            return Ok(());
        }
        history.add(run, keep);
        let mut json = history.to_json().unwrap_or_default().into_bytes();
        let length = own.as_ref().map_or(0, |(before, _)| before.len()).max(json.len());
        json.resize(length.next_multiple_of(GRAIN), b' ');
        match own {
            Some((_, file)) if file.write_all_at(&json, 0).is_ok() => Ok(()),
            _ => self.replace(LAST_RUN, &json).map(drop),
        }
    }

    pub fn history(&self) -> History {
        let Ok(file) = self.look_into(LAST_RUN) else { return History::default() };
        // One that is being written will be complete in a moment; but its writer may have been stopped.
        soon(10, || file.try_lock_shared().is_ok());
        read_to_string(file).map_or_else(|_| History::default(), |json| History::from_json(&json))
    }

    /// Forgets all runs, and all keys of `--once`.
    pub fn forget_runs(&self) -> Forgotten {
        let removed = [LAST_RUN, ONCE].map(|file| self.remove(file).is_ok());
        if removed.contains(&true) { Forgotten::Done } else { Forgotten::Nothing }
    }

    /// Forgets one key of `--once`. A run that succeeds at the same moment waits for the file, and then records its own.
    pub fn forget_once(&self, key: &str) -> Result<Forgotten> {
        let forget = || -> IoResult<Forgotten> {
            let file = self.reach_into(ONCE)?;
            file.lock()?;
            let keys = self.read(ONCE)?;
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
            forgotten => forgotten.map_err(|error| refusal(error, "cannot write", &self.path(ONCE))),
        }
    }

    fn record_once(&self, key: &str) -> Result<()> {
        let record = || {
            let mut file = self.open_to_write(ONCE, OFlag::O_APPEND)?;
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
        record().map_err(|error| refusal(error, "cannot write", &self.path(ONCE)))
    }

    pub fn is_recorded(&self, once: &str) -> Result<bool> {
        match self.read(ONCE) {
            Ok(keys) => Ok(keys.split_inclusive('\n').any(|line| line.strip_suffix('\n') == Some(once))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(refusal(error, "cannot read", &self.path(ONCE))),
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

fn unrecorded(what: &str, so: &str, error: &Error) -> Error {
    let why = error.root_cause();
    Error::new(Unrecorded(format!("{what} is not on record, so {so}: {why}"))).context(Fault::Refused)
}
