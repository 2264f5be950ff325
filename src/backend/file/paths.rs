//! What is where for one lock, and how its files are opened and written.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;

use super::directory::refusal;
use crate::backend::KEPT_FOR_THE_LATE;
use crate::lock::{LastRun, OwnerId};

/// Never through a link, and never waiting for whoever is at the other end of a pipe.
const SAFELY: i32 = libc::O_NOFOLLOW | libc::O_NOCTTY | libc::O_NONBLOCK;

/// What the names of [`Paths::taken`] begin with.
const TAKEN: &str = "taken.";

/// What belongs to one lock.
#[derive(Clone, Debug)]
pub struct Paths {
    pub lock: PathBuf,
    pub side: PathBuf,
    /// With whom everything here is shared, as the directory is. Others get nothing: whoever may read a lock file may
    /// lock it.
    pub group: Option<u32>,
}

impl Paths {
    /// Opens a file of this lock, and makes what is missing for that.
    pub fn open(&self, path: &Path) -> Result<File> {
        self.make(path, File::options().read(true).write(true)).map_err(|error| refusal(error, "cannot open", path))
    }

    /// Writes a file so that others see all of it or the one before.
    pub fn replace(&self, path: &Path, content: &[u8]) -> Result<File> {
        let random = getrandom::u64().context("the kernel gave no random bytes")?;
        let temporary = self.side.join(format!("tmp.{random:016x}"));
        let write = || -> IoResult<File> {
            let mut file = self.make(&temporary, File::options().read(true).write(true).truncate(true))?;
            // Others tell by this lock whether whoever wrote the file is still there.
            file.lock()?;
            file.write_all(content)?;
            std::fs::rename(&temporary, path)?;
            Ok(file)
        };
        write().map_err(|error| {
            let _ = std::fs::remove_file(&temporary);
            refusal(error, "cannot write", path)
        })
    }

    /// Puts a fresh file in the place of one whose lock cannot be broken. Whoever holds the old one, and is a dlock,
    /// notices at once; newcomers lock the new one.
    pub fn renew(&self, path: &Path) -> Result<()> {
        let fresh = path.with_extension(format!("new.{}", std::process::id()));
        let replace = || self.make(&fresh, File::options().write(true)).and_then(|_| std::fs::rename(&fresh, path));
        replace().map_err(|error| {
            let _ = std::fs::remove_file(&fresh);
            refusal(error, "cannot replace", path)
        })
    }

    /// Writes over the last run in its place, in one piece: to put a new file there makes ext4 write to the disk at
    /// once. Whoever reads it meanwhile keeps the old one, and the new one takes its place.
    pub fn write_last_run(&self, run: &LastRun) -> Result<()> {
        /// Spaces behind it keep most of them equally long.
        const GRAIN: usize = 512;
        let path = self.last_run();
        let mut json = run.to_json().into_bytes();
        json.resize(json.len().next_multiple_of(GRAIN), b' ');
        let in_place = || -> std::io::Result<bool> {
            let file = File::options().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(&path)?;
            Ok(file.metadata()?.len() == json.len() as u64 && file.try_lock().is_ok() && {
                file.write_all_at(&json, 0)?;
                true
            })
        };
        if !in_place().unwrap_or(false) {
            self.replace(&path, &json)?;
        }
        Ok(())
    }

    pub fn read_last_run(&self) -> Option<LastRun> {
        let mut file = look_into(&self.last_run()).ok()?;
        // One that is being written will be whole in a moment; but whoever writes it may have been stopped.
        let is_whole = || file.try_lock_shared().is_ok();
        let _ = (0..10).any(|_| {
            is_whole() || {
                std::thread::sleep(Duration::from_millis(1));
                false
            }
        });
        let mut json = String::new();
        file.read_to_string(&mut json).ok()?;
        LastRun::from_json(&json)
    }

    /// Opens a file, and makes `NAME.d` if it needs that: whoever comes first has to.
    pub(super) fn make(&self, path: &Path, options: &mut OpenOptions) -> IoResult<File> {
        let options = options.create(true).mode(0o600).custom_flags(SAFELY);
        let opened = match self.open_shared(path, options) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_directory(&self.side)?;
                self.open_shared(path, options)
            }
            opened => opened,
        };
        opened.and_then(regular)
    }

    /// Opens a file so that the group can do so too, if there is one. Only what is new is given to it: what was there
    /// may have been put there for us to give away.
    fn open_shared(&self, path: &Path, options: &OpenOptions) -> IoResult<File> {
        let Some(group) = self.group else { return options.open(path) };
        match patiently(|| options.clone().create_new(true).open(path)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => patiently(|| options.open(path)),
            made => made.and_then(|file| share(file, group, 0o660)),
        }
    }

    fn make_directory(&self, path: &Path) -> IoResult<()> {
        let made = DirBuilder::new().mode(0o700).create(path);
        match (made, self.group) {
            (Err(error), _) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            (Ok(()), Some(group)) => {
                let flags = SAFELY | libc::O_DIRECTORY;
                let directory = File::options().read(true).custom_flags(flags).open(path)?;
                share(directory, group, 0o2770).map(drop)
            }
            (made, _) => made,
        }
    }

    /// Where those who wait are on record: whoever takes the lock need not pass by all of them.
    pub fn waiting(&self) -> PathBuf {
        self.side.join("waiting")
    }

    pub fn make_waiting(&self) -> Result<()> {
        let path = self.waiting();
        let make = || match self.make_directory(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_directory(&self.side)?;
                self.make_directory(&path)
            }
            made => made,
        };
        make().map_err(|error| refusal(error, "cannot make", &path))
    }

    pub fn token(&self) -> PathBuf {
        self.side.join("token")
    }

    pub fn mutex(&self) -> PathBuf {
        self.side.join("mutex")
    }

    pub fn turn(&self) -> PathBuf {
        self.side.join("turn")
    }

    pub fn last_run(&self) -> PathBuf {
        self.side.join("last-run")
    }

    pub fn once(&self) -> PathBuf {
        self.side.join("once")
    }

    pub fn slot(&self, n: u32) -> PathBuf {
        self.side.join(format!("slot.{n}"))
    }

    pub fn revoke(&self, owner: &OwnerId) -> PathBuf {
        self.side.join(format!("revoke.{owner}"))
    }

    /// Why an operator has freed the lock on the spot that was this owner's.
    pub fn taken(&self, owner: &OwnerId) -> PathBuf {
        self.side.join(format!("{TAKEN}{owner}"))
    }

    /// Leaves a holder word of why, before it can find its lock gone; and takes away what nobody came for.
    pub fn note_taken(&self, owner: &OwnerId, reason: &str) -> Result<()> {
        let is_old = |entry: &std::fs::DirEntry| {
            let age = entry.metadata().and_then(|meta| meta.modified()).map(|modified| modified.elapsed());
            matches!(age, Ok(Ok(age)) if age > KEPT_FOR_THE_LATE)
        };
        let entries = std::fs::read_dir(&self.side).into_iter().flatten().flatten();
        for old in entries.filter(|one| one.file_name().as_bytes().starts_with(TAKEN.as_bytes())).filter(is_old) {
            let _ = std::fs::remove_file(old.path());
        }
        self.replace(&self.taken(owner), reason.as_bytes()).map(drop)
    }
}

/// Lets the group have what we have made, whatever our umask and our own group.
fn share(made: File, group: u32, mode: u32) -> IoResult<File> {
    if made.metadata()?.gid() != group {
        // An access control list may have let us in who are not of that group.
        let _ = fchown(&made, None, Some(group));
    }
    made.set_permissions(Permissions::from_mode(mode))?;
    Ok(made)
}

/// Whoever has just made a file, or the directory, may not have come to sharing it yet.
fn patiently(open: impl Fn() -> IoResult<File>) -> IoResult<File> {
    const TRIES: u32 = 20;
    let refused = |opened: &IoResult<File>| matches!(opened, Err(error) if error.kind() == ErrorKind::PermissionDenied);
    let mut opened = open();
    for _ in 0..TRIES {
        if refused(&opened) {
            std::thread::sleep(Duration::from_millis(5));
            opened = open();
        }
    }
    opened
}

/// What a file of ours says, be it ever so garbled.
pub fn read(path: &Path) -> IoResult<String> {
    let mut bytes = Vec::new();
    look_into(path)?.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Opens a file that may be missing, or be anything.
pub fn look_into(path: &Path) -> IoResult<File> {
    File::options().read(true).custom_flags(SAFELY).open(path).and_then(regular)
}

/// The same for a change in its place.
pub fn reach_into(path: &Path) -> IoResult<File> {
    File::options().read(true).write(true).custom_flags(SAFELY).open(path).and_then(regular)
}

/// A pipe or a device in a file's place could keep us waiting for ever.
fn regular(file: File) -> IoResult<File> {
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Error::new(ErrorKind::InvalidInput, "it is no regular file: remove it")),
    }
}

/// Whether a path still leads to the file that a descriptor has open.
pub fn same_file(file: &impl AsFd, path: &Path) -> Result<bool> {
    let open = nix::sys::stat::fstat(file.as_fd()).with_context(|| format!("fstat {}", file.as_fd().as_raw_fd()))?;
    match std::fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (open.st_dev, open.st_ino)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}
