//! The files of one lock: what is where, and how it is opened and written. All of them are reached from the descriptor of
//! the lock directory (see `openat`), since everybody who shares that directory can put anything in their place.
//!
//! In a directory that a group shares, the group can write to what its members have to change in its place: the files
//! that are only locked (over NFS an exclusive flock(2) needs a file that is open for writing, and so does
//! `flock 9` in a shell with `9>DIR/NAME.lock`), `token` and `once`. What one user says (`holder.`, `waiter.`, `revoke.`,
//! `taken.`, `last-run`) the others can only read, and replace as a whole. Others than the group get nothing: whoever
//! may read a lock file may lock it.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::OFlag;
use nix::libc;
use nix::unistd::geteuid;

use super::directory::refusal;
use crate::backend::KEPT_FOR_THE_LATE;
use crate::clock;
use crate::lock::{LockName, OwnerId};
use crate::openat::{Dir, Names, sole_name};

/// What the names of [`LockFiles::taken`] begin with.
const TAKEN: &str = "taken.";
/// For a file that every member of the group changes in its place.
const SHARED: u32 = 0o660;
/// For what one of them says.
const OWN: u32 = 0o640;

/// What belongs to one lock. Paths are relative to the lock directory.
#[derive(Clone, Debug)]
pub struct LockFiles {
    dir: Dir,
    pub lock: PathBuf,
    pub side: PathBuf,
    /// With whom everything here is shared, as the directory is.
    group: Option<u32>,
}

impl LockFiles {
    pub fn new(dir: Dir, group: Option<u32>, name: &LockName) -> LockFiles {
        let stem = name.encoded();
        LockFiles { dir, lock: format!("{stem}.lock").into(), side: format!("{stem}.d").into(), group }
    }

    /// For messages, and for what the kernel knows by its path only.
    pub fn path(&self, file: &Path) -> PathBuf {
        self.dir.path().join(file)
    }

    /// Opens a file that is only locked, and makes what is missing for that.
    pub fn open(&self, file: &Path) -> Result<File> {
        self.make(file, OFlag::O_RDWR).map_err(|error| refusal(error, "cannot open", &self.path(file)))
    }

    /// Opens a file for a change in its place, and makes what is missing for that.
    pub fn open_to_write(&self, file: &Path, flags: OFlag) -> IoResult<File> {
        self.make(file, OFlag::O_RDWR | flags).and_then(sole_name)
    }

    /// Opens a file that may be missing.
    pub fn look_into(&self, file: &Path) -> IoResult<File> {
        self.dir.open_file(file, OFlag::O_RDONLY, 0)
    }

    /// Opens a file that may be missing, for a change in its place.
    pub fn reach_into(&self, file: &Path) -> IoResult<File> {
        self.dir.open_file(file, OFlag::O_RDWR, 0).and_then(sole_name)
    }

    /// What a file says; bytes that are not UTF-8 are replaced.
    pub fn read(&self, file: &Path) -> IoResult<String> {
        let mut bytes = Vec::new();
        self.look_into(file)?.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn exists(&self, file: &Path) -> bool {
        self.dir.stat_of(file).is_ok()
    }

    pub fn remove(&self, file: &Path) -> IoResult<()> {
        self.dir.remove(file)
    }

    /// The names in a directory; one that is missing is empty.
    pub fn list(&self, directory: &Path) -> Result<Option<Names>> {
        match self.dir.list(directory) {
            Ok(names) => Ok(Some(names)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refusal(error, "cannot list", &self.path(directory))),
        }
    }

    /// Zero if there is no lock file.
    pub fn lock_inode(&self) -> u64 {
        self.dir.stat_of(&self.lock).map_or(0, |stat| stat.st_ino)
    }

    /// Whether the path of a file still leads to what a descriptor has open. Asked by the whole path, as others use it:
    /// the directory may have been moved away with the file.
    pub fn leads_to(&self, file: &Path, open: &impl AsFd) -> Result<bool> {
        let path = self.path(file);
        let open = nix::sys::stat::fstat(open).with_context(|| format!("fstat {}", open.as_fd().as_raw_fd()))?;
        match std::fs::symlink_metadata(&path) {
            Ok(named) => Ok((named.dev(), named.ino()) == (open.st_dev, open.st_ino)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    /// Writes a file so that others see all of it or the one before.
    pub fn replace(&self, file: &Path, content: &[u8]) -> Result<File> {
        let write = |file: &mut File| {
            self.share(file, OWN)?;
            // By this lock others can tell whether the writer of the file is alive.
            file.lock()?;
            file.write_all(content)
        };
        self.put(file, write).map_err(|error| refusal(error, "cannot write", &self.path(file)))
    }

    /// Puts a new file in the place of one whose lock cannot be broken. A dlock that holds the old one notices at once;
    /// newcomers lock the new one.
    pub fn renew(&self, file: &Path) -> Result<()> {
        let put = self.put(file, |fresh| self.share(fresh, SHARED));
        put.map(drop).map_err(|error| refusal(error, "cannot replace", &self.path(file)))
    }

    fn put(&self, file: &Path, write: impl Fn(&mut File) -> IoResult<()>) -> IoResult<File> {
        let random = getrandom::u64().map_err(Error::other)?;
        let fresh = OsString::from(format!("tmp.{random:016x}"));
        match self.dir.replace(file, &fresh, 0o600, &write) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_directory(&self.side)?;
                self.dir.replace(file, &fresh, 0o600, write)
            }
            put => put,
        }
    }

    /// Opens a file, and makes `NAME.d` first if it is missing.
    fn make(&self, file: &Path, flags: OFlag) -> IoResult<File> {
        match self.open_or_create(file, flags) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.make_directory(&self.side)?;
                self.open_or_create(file, flags)
            }
            opened => opened,
        }
    }

    /// Only what is new is given to the group: what was there may have been put there for us to give away.
    fn open_or_create(&self, file: &Path, flags: OFlag) -> IoResult<File> {
        let create = flags | OFlag::O_CREAT;
        if self.group.is_none() {
            return self.dir.open_file(file, create, 0o600);
        }
        let open = || patiently(|| self.dir.open_file(file, flags, 0));
        match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            opened => return opened,
        }
        match patiently(|| self.dir.open_file(file, create | OFlag::O_EXCL, 0o600)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => open(),
            made => made.and_then(|file| self.share(&file, SHARED).map(|()| file)),
        }
    }

    fn make_directory(&self, path: &Path) -> IoResult<()> {
        match self.dir.make_dir(path, 0o700) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            Ok(()) if self.group.is_some() => {
                let directory = self.dir.open_dir(path)?;
                let meta = directory.metadata()?;
                // Another one may have been put there meanwhile, for us to give away.
                match meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
                    true => self.share(&directory, 0o2770),
                    false => Err(Error::new(ErrorKind::PermissionDenied, "it is not the directory that was made")),
                }
            }
            made => made,
        }
    }

    /// Gives what we have made to the group, if there is one, whatever our umask and our own group.
    fn share(&self, made: &File, mode: u32) -> IoResult<()> {
        let Some(group) = self.group else { return Ok(()) };
        if made.metadata()?.gid() != group {
            // This may fail: an access control list can let users in who are not in that group.
            let _ = fchown(made, None, Some(group));
        }
        made.set_permissions(Permissions::from_mode(mode))
    }

    /// Where the records of waiters are, apart, so that taking the lock does not read them all.
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
        make().map_err(|error| refusal(error, "cannot make", &self.path(&path)))
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

    /// Tells a holder why, before it can find its lock gone. Deletes old notes that nobody came for.
    pub fn note_taken(&self, owner: &OwnerId, reason: &str) -> Result<()> {
        let now = clock::wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        let is_old = |path: &Path| {
            let changed = self.dir.stat_of(path).ok().and_then(|stat| u64::try_from(stat.st_mtime).ok());
            changed.is_some_and(|changed| now.saturating_sub(changed) > KEPT_FOR_THE_LATE.as_secs())
        };
        let is_note = |name: &OsStr| name.as_bytes().starts_with(TAKEN.as_bytes());
        let names = self.list(&self.side)?.into_iter().flatten().flatten().filter(|name| is_note(name));
        for old in names.map(|name| self.side.join(name)).filter(|path| is_old(path)) {
            let _ = self.remove(&old);
        }
        self.replace(&self.taken(owner), reason.as_bytes()).map(drop)
    }
}

/// A process that has just made a file or the directory may not have shared it yet.
fn patiently(open: impl Fn() -> IoResult<File>) -> IoResult<File> {
    const TRIES: u32 = 20;
    let refused = |opened: &IoResult<File>| matches!(opened, Err(error) if error.raw_os_error() == Some(libc::EACCES));
    let mut opened = open();
    for _ in 0..TRIES {
        if refused(&opened) {
            std::thread::sleep(Duration::from_millis(5));
            opened = open();
        }
    }
    opened
}
