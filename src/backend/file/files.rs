//! The files of one lock: what is where, and how it is opened and written. All of them are reached from the descriptor of
//! the directory they are in (see `openat`), since everybody who shares that directory can put anything in their place.
//!
//! In a directory that a group shares, the group can write to what its members have to change in its place: the files
//! that are only locked (over NFS an exclusive flock(2) needs a file that is open for writing, and so does
//! `flock 9` in a shell with `9>DIR/NAME.lock`), `token` and `once`. What one user says (`holder.`, `waiter.`, `revoke.`,
//! `taken.`, `last-run`) the others can only read, and replace as a whole. Others than the group get nothing: whoever
//! may read a lock file may lock it.

use std::fs::{File, Permissions};
use std::io::{Error, ErrorKind, Read, Result as IoResult, Write};
use std::os::fd::{AsFd, AsRawFd};
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

/// Where in `NAME.d` the records of waiters are, apart, so that taking the lock does not read them all.
pub const WAITING: &str = "waiting";
/// What the names of [`taken`] begin with.
const TAKEN: &str = "taken.";
/// For a file that every member of the group changes in its place.
const SHARED: u32 = 0o660;
/// For what one of them says.
const OWN: u32 = 0o640;

/// A directory that is open: that of all locks, `NAME.d` of one of them, or [`WAITING`] in that.
#[derive(Clone, Debug)]
pub struct Folder {
    dir: Dir,
    /// With whom everything here is shared, as the lock directory is.
    group: Option<u32>,
}

/// What belongs to one lock.
#[derive(Clone, Debug)]
pub struct LockFiles {
    /// That of all locks.
    pub folder: Folder,
    /// The name of the file to lock.
    pub lock: String,
    side: String,
}

impl LockFiles {
    pub fn new(folder: Folder, name: &LockName) -> LockFiles {
        let stem = name.encoded();
        LockFiles { folder, lock: format!("{stem}.lock"), side: format!("{stem}.d") }
    }

    pub fn lock_path(&self) -> PathBuf {
        self.folder.path(&self.lock)
    }

    pub fn side_path(&self) -> PathBuf {
        self.folder.path(&self.side)
    }

    pub fn slot_path(&self, n: u32) -> PathBuf {
        self.side_path().join(slot(n))
    }

    /// Zero if there is no lock file.
    pub fn lock_inode(&self) -> u64 {
        self.folder.dir.stat_of(&self.lock).map_or(0, |stat| stat.st_ino)
    }

    /// `NAME.d`, made if it is missing.
    pub fn side(&self) -> Result<Folder> {
        self.folder.make(&self.side)
    }

    /// `NAME.d`, if anything is on record.
    pub fn look(&self) -> Result<Option<Folder>> {
        self.folder.find(&self.side)
    }
}

impl Folder {
    pub fn new(dir: Dir, group: Option<u32>) -> Folder {
        Folder { dir, group }
    }

    /// For messages, and for what the kernel knows by its path only.
    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    /// A directory in this one, if it is there.
    pub fn find(&self, name: &str) -> Result<Option<Folder>> {
        match self.dir.enter(name) {
            Ok(dir) => Ok(Some(Folder { dir, group: self.group })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refusal(error, "cannot open", &self.path(name))),
        }
    }

    /// A directory in this one, made if it is missing.
    pub fn make(&self, name: &str) -> Result<Folder> {
        if let Some(found) = self.find(name)? {
            return Ok(found);
        }
        let make = || match self.dir.make_dir(name, 0o700) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => self.dir.enter(name),
            made => {
                made?;
                let dir = self.dir.enter(name)?;
                self.share_directory(&dir).map(|()| dir)
            }
        };
        let dir = make().map_err(|error| refusal(error, "cannot make", &self.path(name)))?;
        Ok(Folder { dir, group: self.group })
    }

    /// Opens a file that is only locked, and makes it if it is missing.
    pub fn open(&self, file: &str) -> Result<File> {
        self.open_or_create(file, OFlag::O_RDWR).map_err(|error| refusal(error, "cannot open", &self.path(file)))
    }

    /// Opens a file for a change in its place, and makes it if it is missing.
    pub fn open_to_write(&self, file: &str, flags: OFlag) -> IoResult<File> {
        self.open_or_create(file, OFlag::O_RDWR | flags).and_then(sole_name)
    }

    /// Opens a file that may be missing.
    pub fn look_into(&self, file: &str) -> IoResult<File> {
        self.dir.open_file(file, OFlag::O_RDONLY, 0)
    }

    /// Opens a file that may be missing, for a change in its place.
    pub fn reach_into(&self, file: &str) -> IoResult<File> {
        self.dir.open_file(file, OFlag::O_RDWR, 0).and_then(sole_name)
    }

    /// What a file says; bytes that are not UTF-8 are replaced.
    pub fn read(&self, file: &str) -> IoResult<String> {
        let mut bytes = Vec::new();
        self.look_into(file)?.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    pub fn remove(&self, file: &str) -> IoResult<()> {
        self.dir.remove(file)
    }

    pub fn list(&self) -> Result<Names> {
        self.dir.list().map_err(|error| refusal(error, "cannot list", self.dir.path()))
    }

    /// The files whose names begin so.
    pub fn list_of(&self, prefix: &'static str) -> Result<impl Iterator<Item = String>> {
        let names = self.list()?.flatten().filter_map(|name| name.into_string().ok());
        Ok(names.filter(move |name| name.starts_with(prefix)))
    }

    /// Writes a file so that others see all of it or the one before.
    pub fn replace(&self, file: &str, content: &[u8]) -> Result<File> {
        self.put(file, |fresh| {
            self.share(fresh, OWN)?;
            // By this lock others can tell whether the writer of the file is alive.
            fresh.lock()?;
            fresh.write_all(content)
        })
    }

    /// Puts a new file in the place of one whose lock cannot be broken. A dlock that holds the old one notices at once;
    /// newcomers lock the new one.
    pub fn renew(&self, file: &str) -> Result<()> {
        self.put(file, |fresh| self.share(fresh, SHARED)).map(drop)
    }

    fn put(&self, file: &str, write: impl FnOnce(&mut File) -> IoResult<()>) -> Result<File> {
        let put = || {
            let random = getrandom::u64().map_err(Error::other)?;
            self.dir.replace(file, format!("tmp.{random:016x}"), write)
        };
        put().map_err(|error| refusal(error, "cannot write", &self.path(file)))
    }

    /// Only what is new is given to the group: what was there may have been put there for us to give away.
    fn open_or_create(&self, file: &str, flags: OFlag) -> IoResult<File> {
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

    fn share_directory(&self, made: &Dir) -> IoResult<()> {
        if self.group.is_none() {
            return Ok(());
        }
        let directory = made.open_to_read()?;
        let meta = directory.metadata()?;
        // Another one may have been put there meanwhile, for us to give away.
        match meta.uid() == geteuid().as_raw() && meta.mode() & 0o077 == 0 {
            true => self.share(&directory, 0o2770),
            false => Err(Error::new(ErrorKind::PermissionDenied, "it is not the directory that was made")),
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

    /// Tells a holder why, before it can find its lock gone. Deletes old notes that nobody came for.
    pub fn note_taken(&self, owner: &OwnerId, reason: &str) -> Result<()> {
        let now = clock::wall().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_secs();
        let is_old = |file: &String| {
            let changed = self.dir.stat_of(file).ok().and_then(|stat| u64::try_from(stat.st_mtime).ok());
            changed.is_some_and(|changed| now.saturating_sub(changed) > KEPT_FOR_THE_LATE.as_secs())
        };
        for old in self.list_of(TAKEN)?.filter(is_old) {
            let _ = self.remove(&old);
        }
        self.replace(&taken(owner), reason.as_bytes()).map(drop)
    }
}

/// Whether a path still leads to what a descriptor has open. Asked by the whole path, as others use it: the directory
/// may have been moved away with the file.
pub fn leads_to(path: &Path, open: &impl AsFd) -> Result<bool> {
    let open = nix::sys::stat::fstat(open).with_context(|| format!("fstat {}", open.as_fd().as_raw_fd()))?;
    match std::fs::symlink_metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (open.st_dev, open.st_ino)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(error) => Err(error).with_context(|| path.display().to_string()),
    }
}

pub fn slot(n: u32) -> String {
    format!("slot.{n}")
}

/// By which an operator asks this owner to stop.
pub fn revoke(owner: &OwnerId) -> String {
    format!("revoke.{owner}")
}

/// Why an operator has freed the lock on the spot that was this owner's.
pub fn taken(owner: &OwnerId) -> String {
    format!("{TAKEN}{owner}")
}

/// A process that has just made a file or the directory may not have shared it yet.
fn patiently(open: impl Fn() -> IoResult<File>) -> IoResult<File> {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        match open() {
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => std::thread::sleep(Duration::from_millis(5)),
            opened => return opened,
        }
    }
    open()
}
