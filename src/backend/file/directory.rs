//! The directory of the locks: where it is by default, that it can be trusted, and what to say if not.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use nix::libc;
use nix::unistd::geteuid;

use super::files::{Folder, LockFiles};
use crate::backend::Address;
use crate::exit::Fault;
use crate::lock::LockName;
use crate::openat::Dir;

/// The directory that the locks are in, by its path.
pub struct Directory {
    path: PathBuf,
    /// The default directory is made on first use; one that was named must be there.
    ours_to_make: bool,
}

/// `/var/lib/dlock` for root, else `$XDG_STATE_HOME/dlock`.
pub fn default_directory() -> Result<PathBuf> {
    if geteuid().is_root() {
        return Ok("/var/lib/dlock".into());
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
            return refuse(&format!("belongs to user {owner}, who could take our locks away: use one of your own"));
        }
        if stat.st_mode & 0o002 != 0 {
            return refuse("can be written by everybody, who could take our locks away: chmod o-w it, or use another");
        }
        Ok(Some(Folder::new(dir, (stat.st_mode & 0o020 != 0).then_some(stat.st_gid))))
    }

    fn missing(&self) -> anyhow::Error {
        let shown = self.path.display();
        Fault::Config.because(format_args!("the lock directory {shown} does not exist: mkdir -m 700 {shown}"))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// What a failed system call on our files means to the operator.
pub fn refusal(error: Error, what: &str, path: &Path) -> anyhow::Error {
    let on_disk = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EIO | libc::ESTALE));
    let fault = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::ELOOP) => Fault::Refused,
        Some(libc::EROFS | libc::ENOTDIR | libc::EISDIR | libc::ENOENT | libc::ENXIO) => Fault::Config,
        None if error.kind() == ErrorKind::InvalidInput => Fault::Config,
        None if error.kind() == ErrorKind::PermissionDenied => Fault::Refused,
        Some(libc::ENAMETOOLONG) => Fault::Usage,
        _ => Fault::Internal,
    };
    let cause = match path.parent() {
        Some(directory) if on_disk => DiskTrouble { error, directory: directory.to_owned() }.into(),
        _ => anyhow::Error::new(error),
    };
    cause.context(format!("{what} {}", path.display())).context(fault)
}

/// The disk below a lock directory fails us, which no look at a server will mend.
#[derive(Debug)]
pub struct DiskTrouble {
    error: Error,
    directory: PathBuf,
}

impl std::fmt::Display for DiskTrouble {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let advice = match self.error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => "free some space on the disk of",
            _ => "see what is wrong with the disk of",
        };
        write!(f, "{}; {advice} {}", self.error, self.directory.display())
    }
}

impl std::error::Error for DiskTrouble {}
