//! The directory of the locks: where it is by default, whether it can be trusted, what the doctor says about it, and what
//! a system call that failed on our files means to the operator.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use nix::libc;
use nix::sys::statfs::{FsType, statfs};
use nix::unistd::geteuid;

use super::files::{Folder, LockFiles};
use super::status::HeldFlocks;
use crate::backend::{Address, Finding};
use crate::exit::Fault;
use crate::lock::LockName;
use crate::openat::Dir;

/// Root's, by default.
const OF_ROOT: &str = "/var/lib/dlock";

/// The directory that the locks are in, by its path.
pub struct Directory {
    path: PathBuf,
    /// The default directory is made on first use; one that was named must be there.
    ours_to_make: bool,
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

/// Root's lock of this name, if it is held and what a user means by default is another one: the user may not know.
pub fn held_by_root(address: &Address, name: &LockName) -> Option<PathBuf> {
    let is_own = address.scheme() == "file" && default_directory().is_ok_and(|own| own == Path::new(address.path()));
    let lock = Path::new(OF_ROOT).join(format!("{}.lock", name.encoded()));
    let held = || lock.exists() && HeldFlocks::read().holder_of(&lock).is_some();
    (is_own && !geteuid().is_root() && held()).then_some(lock)
}

/// Kinds of file systems by their magic number, and what their locks are worth.
const KINDS: [(i64, &str, Locks); 12] = [
    (0xef53, "ext4", Locks::Good),
    (0x5846_5342, "xfs", Locks::Good),
    (0x9123_683e, "btrfs", Locks::Good),
    (0x2fc1_2fc1, "zfs", Locks::Good),
    (0x794c_7630, "overlayfs", Locks::Good),
    (0xf2f5_2010, "f2fs", Locks::Good),
    (0x0102_1994, "tmpfs", Locks::Forgetful),
    (0x6969, "nfs", Locks::Remote),
    (0xff53_4d42u32 as i64, "cifs", Locks::Remote),
    (0xfe53_4d42u32 as i64, "smb2", Locks::Remote),
    (0x6573_5546, "fuse", Locks::Remote),
    (0x0102_1997, "9p", Locks::Remote),
];

#[derive(Clone, Copy)]
enum Locks {
    Good,
    /// Gone after a reboot, the fencing counter too.
    Forgetful,
    /// Whether a lock is seen by other hosts, and outlives a server, is the file server's affair.
    Remote,
}

pub fn examine(directory: &Path) -> Result<Vec<Finding>> {
    let stat = statfs(directory).with_context(|| format!("statfs {}", directory.display()))?;
    let meta = std::fs::metadata(directory).with_context(|| directory.display().to_string())?;
    Ok(vec![file_system(stat.filesystem_type()), permissions(meta.mode())])
}

fn file_system(kind: FsType) -> Finding {
    const CHECK: &str = "file-system";
    let known = KINDS.iter().find(|(magic, ..)| *magic == kind.0);
    match known {
        Some((_, name, Locks::Good)) => Finding::fine(CHECK, format!("the lock directory is on {name}")),
        Some((_, name, Locks::Forgetful)) => Finding::weak(
            CHECK,
            format!("the lock directory is on {name}"),
            "after a reboot the last run, the --once keys and the fencing counter are forgotten; tokens still grow, by the date",
            "use a directory on a disk, such as /var/lib/dlock",
        ),
        Some((_, name, Locks::Remote)) => Finding::weak(
            CHECK,
            format!("the lock directory is on {name}"),
            "flock(2) on a network file system may not exclude other hosts, and may be forgotten when the server restarts",
            "use a local directory, and one of the other backends for locks between hosts",
        ),
        None => Finding::weak(
            CHECK,
            format!("the lock directory is on a file system of the unknown kind {:#x}", kind.0),
            "whether its locks exclude everybody is not known",
            "use a directory on a local disk",
        ),
    }
}

fn permissions(mode: u32) -> Finding {
    const CHECK: &str = "file-permissions";
    if mode & 0o020 != 0 {
        return Finding::weak(
            CHECK,
            "the lock directory can be written by its group",
            "whoever is in that group can delete a lock file, and so take every lock away",
            "fine if that is meant; else chmod g-w it",
        );
    }
    Finding::fine(CHECK, "only its owner can write to the lock directory")
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
