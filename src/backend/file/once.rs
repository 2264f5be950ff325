//! `once`: the keys of successful runs, one a line. A line counts once it has its end, and not before: a disk that gets
//! full in the middle of a key leaves half of it, which may be a key of its own.

use std::fs::File;
use std::io::{ErrorKind, Result as IoResult, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::Result;
use nix::fcntl::OFlag;

use super::directory::refusal;
use super::files::LockFiles;

/// No key has such a character, so that no line with it is one.
const SPOILT: &str = "\0\n";

impl LockFiles {
    pub fn record_once(&self, key: &str) -> Result<()> {
        let path = self.once();
        let record = || {
            let mut file = self.open_to_write(&path, OFlag::O_APPEND)?;
            let alone = lock_soon(&file);
            let before = file.metadata()?.len();
            let half = if ends_whole(&file, before)? { "" } else { SPOILT };
            let written = file.write_all(format!("{half}{key}\n").as_bytes());
            if written.is_err() && alone {
                // Should this fail, too, the half of it counts for nothing.
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

/// Holders of a lock together may end at the same time. Whoever is in there has it for a moment; but it may have been
/// stopped, and then the key matters more.
fn lock_soon(file: &File) -> bool {
    (0..100).any(|_| {
        file.try_lock().is_ok() || {
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
