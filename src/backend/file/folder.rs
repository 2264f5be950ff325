//! The directory of the locks and what is in it: whether it can be trusted, what is where, how a file is opened and
//! written, and what a system call that failed means to the operator. Everything is reached from the descriptor of the
//! directory it is in (see `openat`), since everybody who shares that directory can put anything in its place.
//!
//! In a directory that a group shares, the group can write to what its members have to change in its place: the files
//! that are only locked (over NFS an exclusive flock(2) needs a file that is open for writing, and so does
//! `flock 9` in a shell with `9>DIR/NAME.lock`), `token` and `once`. What one user says (`holder.`, `waiter.`, `revoke.`,
//! `taken.`, `last-run`) the others can only read, and replace as a whole. Others than the group get nothing: whoever
//! may read a lock file may lock it.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, Metadata, Permissions};
use std::io::{Error, ErrorKind, Result as IoResult, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use nix::fcntl::OFlag;
use nix::libc;
use nix::sys::uio::pread;
use nix::unistd::geteuid;

use crate::backend::Address;
use crate::exit::Fault;
use crate::lock::{LockName, OwnerId};
use crate::openat::{Dir, Names, sole_name};

/// Root's directory, by default.
pub const OF_ROOT: &str = "/var/lib/dlock";
/// Where in `NAME.d` the records of waiters are, apart, so that taking the lock does not read them all.
pub const WAITING: &str = "waiting";
/// What the names of [`taken`] begin with.
pub const TAKEN: &str = "taken.";
/// For a file that every member of the group changes in its place.
const SHARED: u32 = 0o660;
/// For what one of them says.
const OWN: u32 = 0o640;

/// The directory that the locks are in, by its path.
pub struct Directory {
    pub path: PathBuf,
    /// The default directory is made on first use; one that was named must be there.
    ours_to_make: bool,
}

/// A directory that is open: that of all locks, `NAME.d` of one of them, or [`WAITING`] in that.
#[derive(Clone, Debug)]
pub struct Folder {
    pub dir: Dir,
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

/// A file that is open to be locked.
#[derive(Clone, Debug)]
pub struct Lockable {
    pub file: Arc<File>,
    device: u64,
    pub inode: u64,
}

/// `/var/lib/dlock` for root, else `$XDG_STATE_HOME/dlock`.
pub fn default_directory() -> Result<PathBuf> {
    if geteuid().is_root() {
        return Ok(OF_ROOT.into());
    }
    let from = |variable| std::env::var_os(variable).filter(|dir: &OsString| !dir.is_empty()).map(PathBuf::from);
    let state = from("XDG_STATE_HOME").or_else(|| from("HOME").map(|home| home.join(".local/state")));
    let state = state.filter(|path| path.is_absolute()).ok_or_else(|| {
        Fault::Config.because("neither XDG_STATE_HOME nor HOME says where locks may live: use --backend file:///DIR")
    })?;
    Ok(state.join("dlock"))
}

impl Directory {
    pub fn new(address: &Address) -> Result<Directory> {
        let path = PathBuf::from(address.path());
        if !address.hosts().is_empty() || !path.is_absolute() {
            return Err(Fault::Config.because("a directory is written with three slashes: file:///DIR"));
        }
        let ours_to_make = default_directory().is_ok_and(|default| default == path);
        Ok(Directory { path, ours_to_make })
    }

    /// Opens the directory; makes it first, if it is ours to make.
    pub fn open(&self) -> Result<Folder> {
        if let Some(found) = self.look()? {
            return Ok(found);
        }
        let mode = if geteuid().is_root() { 0o755 } else { 0o700 };
        let made = DirBuilder::new().recursive(true).mode(mode).create(&self.path);
        made.map_err(|error| refusal(error, "cannot make the lock directory", &self.path))?;
        self.look()?.ok_or_else(|| self.missing())
    }

    /// The files of a lock.
    pub fn files(&self, name: &LockName) -> Result<LockFiles> {
        Ok(LockFiles::new(self.open()?, name))
    }

    /// Opens the directory. `None` is one that will be made on first use. Nobody but root, us and the group that may
    /// write to it can put anything into it.
    pub fn look(&self) -> Result<Option<Folder>> {
        let shown = self.path.display();
        let dir = match Dir::open(&self.path) {
            Ok(dir) => dir,
            Err(error) if error.kind() == ErrorKind::NotFound && self.ours_to_make => return Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(self.missing()),
            Err(error) if error.kind() == ErrorKind::NotADirectory => {
                return Err(Fault::Config.because(format_args!("{shown} is not a directory")));
            }
            Err(error) => return Err(refusal(error, "cannot use the lock directory", &self.path)),
        };
        let refuse = |why: &str| Err(Fault::Refused.because(format_args!("the lock directory {shown} {why}")));
        let stat = dir.stat().map_err(|error| refusal(error, "cannot look at the lock directory", &self.path))?;
        let (owner, us) = (stat.st_uid, geteuid().as_raw());
        if owner != us && owner != 0 {
            return refuse(&format!(
                "belongs to user {owner}, who could delete your locks: use a directory of your own"
            ));
        }
        if stat.st_mode & 0o002 != 0 {
            return refuse("can be written by everybody, who could delete your locks: chmod o-w it, or use another");
        }
        Ok(Some(Folder { dir, group: (stat.st_mode & 0o020 != 0).then_some(stat.st_gid) }))
    }

    fn missing(&self) -> anyhow::Error {
        let shown = self.path.display();
        Fault::Config.because(format_args!("the lock directory {shown} does not exist: mkdir -m 700 {shown}"))
    }
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
    pub fn open(&self, file: &str) -> Result<Lockable> {
        let opened = self.open_or_create(file, OFlag::O_RDWR);
        let (opened, meta) = opened.map_err(|error| refusal(error, "cannot open", &self.path(file)))?;
        Ok(Lockable { file: Arc::new(opened), device: meta.dev(), inode: meta.ino() })
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
        self.dir.open_known(file, OFlag::O_RDWR, 0).and_then(sole_name)
    }

    /// What a file says; bytes that are not UTF-8 are replaced.
    pub fn read(&self, file: &str) -> IoResult<String> {
        let bytes = content(&self.look_into(file)?, usize::MAX)?;
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
    fn open_or_create(&self, file: &str, flags: OFlag) -> IoResult<(File, Metadata)> {
        let create = flags | OFlag::O_CREAT;
        if self.group.is_none() {
            return self.dir.open_known(file, create, 0o600);
        }
        let open = || patiently(|| self.dir.open_known(file, flags, 0));
        match open() {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            opened => return opened,
        }
        match patiently(|| self.dir.open_known(file, create | OFlag::O_EXCL, 0o600)) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => open(),
            made => made.and_then(|made| self.share(&made.0, SHARED).map(|()| made)),
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
}

impl Lockable {
    /// Whether a path still leads to this file. Asked by the whole path, as others use it: the directory may have been
    /// moved away with the file.
    pub fn is_at(&self, path: &Path) -> Result<bool> {
        match std::fs::symlink_metadata(path) {
            Ok(named) => Ok((named.dev(), named.ino()) == (self.device, self.inode)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }
}

/// What is in a file, up to so many bytes.
pub fn content(file: &impl AsFd, most: usize) -> IoResult<Vec<u8>> {
    const AT_ONCE: usize = 8 * 1024;
    let mut bytes = Vec::new();
    loop {
        let (start, wanted) = (bytes.len(), AT_ONCE.min(most - bytes.len()));
        bytes.resize(start + wanted, 0);
        let read = pread(file, &mut bytes[start..], i64::try_from(start).unwrap_or(i64::MAX))?;
        bytes.truncate(start + read);
        if read < wanted || bytes.len() == most {
            return Ok(bytes);
        }
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
fn patiently<T>(open: impl Fn() -> IoResult<T>) -> IoResult<T> {
    const TRIES: u32 = 20;
    for _ in 0..TRIES {
        match open() {
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => std::thread::sleep(Duration::from_millis(5)),
            opened => return opened,
        }
    }
    open()
}

/// What a failed system call on our files means to the operator.
pub fn refusal(error: Error, what: &str, path: &Path) -> anyhow::Error {
    let (fault, advice) = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => (Fault::Refused, "use a directory that this user may write to"),
        Some(libc::EROFS) => (Fault::Config, "use a directory that can be written to"),
        Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS) => {
            (Fault::Config, "this file system has no locks, like NFS without its lock service; use a local directory")
        }
        Some(libc::ENOSPC | libc::EDQUOT) => (Fault::Disk, "free some space on the disk"),
        Some(libc::EIO | libc::ESTALE) => (Fault::Disk, "see what is wrong with the disk"),
        Some(libc::ELOOP) => (Fault::Refused, ""),
        Some(libc::ENOTDIR | libc::EISDIR | libc::ENOENT | libc::ENXIO) => (Fault::Config, ""),
        Some(libc::ENAMETOOLONG) => (Fault::Usage, ""),
        None if error.kind() == ErrorKind::PermissionDenied => (Fault::Refused, ""),
        None if error.kind() == ErrorKind::InvalidInput => (Fault::Config, ""),
        _ => (Fault::Internal, ""),
    };
    let error = if advice.is_empty() { anyhow::Error::new(error) } else { anyhow!("{error}; {advice}") };
    error.context(format!("{what} {}", path.display())).context(fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_place_cannot_do_is_said_with_what_to_do() {
        for (errno, fault, says) in [
            (libc::ENOLCK, Fault::Config, "NFS without its lock service"),
            (libc::EROFS, Fault::Config, "can be written to"),
            (libc::EACCES, Fault::Refused, "may write to"),
            (libc::EDQUOT, Fault::Disk, "free some space"),
            (libc::EINVAL, Fault::Internal, "cannot lock /d/x.lock"),
        ] {
            let error = refusal(Error::from_raw_os_error(errno), "cannot lock", Path::new("/d/x.lock"));
            assert!(Fault::of(&error) == fault && format!("{error:#}").contains(says), "{error:#}");
        }
    }
}
