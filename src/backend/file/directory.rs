//! The directory of the locks: where it is by default, that it can be trusted, and what to say if not.

use std::ffi::OsString;
use std::fs::DirBuilder;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::Result;
use nix::libc;
use nix::unistd::geteuid;

use super::paths::Paths;
use crate::backend::Address;
use crate::exit::Fault;
use crate::lock::LockName;

pub struct Directory {
    path: PathBuf,
    /// The default directory is made on first use; one that was named must be there.
    ours_to_make: bool,
    /// The group that may write to it: such a directory is shared on purpose.
    group: Option<u32>,
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
        Ok(Directory { path, ours_to_make, group: None })
    }

    /// Makes sure that nobody but us and root can put anything into the directory.
    pub fn check(&mut self) -> Result<()> {
        match self.verify() {
            Err(error) if error.downcast_ref::<Missing>().is_some() && self.ours_to_make => {
                self.make()?;
                self.verify()
            }
            checked => checked,
        }
    }

    /// The same, but a directory that will be made on first use counts as empty.
    pub fn check_for_reading(&mut self) -> Result<()> {
        match self.verify() {
            Err(error) if error.downcast_ref::<Missing>().is_some() && self.ours_to_make => Ok(()),
            checked => checked,
        }
    }

    fn verify(&mut self) -> Result<()> {
        let shown = self.path.display();
        let meta = match std::fs::symlink_metadata(&self.path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let advice = format!("the lock directory {shown} does not exist: mkdir -m 700 {shown}");
                return Err(anyhow::Error::new(Missing).context(advice).context(Fault::Config));
            }
            Err(error) => return Err(refusal(error, "cannot look at the lock directory", &self.path)),
        };
        let refuse = |why: &str| Err(Fault::Refused.because(format_args!("the lock directory {shown} {why}")));
        let (owner, us) = (meta.uid(), geteuid().as_raw());
        if meta.file_type().is_symlink() {
            return refuse("is a symbolic link, which others could turn: name the directory itself");
        }
        if !meta.is_dir() {
            return Err(Fault::Config.because(format_args!("{shown} is not a directory")));
        }
        if owner != us && owner != 0 {
            return refuse(&format!("belongs to user {owner}, who could take our locks away: use one of your own"));
        }
        if meta.mode() & 0o002 != 0 {
            return refuse("can be written by everybody, who could take our locks away: chmod o-w it, or use another");
        }
        self.group = (meta.mode() & 0o020 != 0).then(|| meta.gid());
        Ok(())
    }

    fn make(&self) -> Result<()> {
        let mode = if geteuid().is_root() { 0o755 } else { 0o700 };
        DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&self.path)
            .map_err(|error| refusal(error, "cannot make the lock directory", &self.path))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn paths(&self, name: &LockName) -> Paths {
        let stem = name.encoded();
        Paths {
            lock: self.path.join(format!("{stem}.lock")),
            side: self.path.join(format!("{stem}.d")),
            group: self.group,
        }
    }
}

/// The directory is not there.
#[derive(Debug)]
struct Missing;

impl std::fmt::Display for Missing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no such directory")
    }
}

impl std::error::Error for Missing {}

/// What a failed system call on our files means to the operator.
pub fn refusal(error: Error, what: &str, path: &Path) -> anyhow::Error {
    let on_disk = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT | libc::EIO | libc::ESTALE));
    let fault = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::ELOOP) => Fault::Refused,
        Some(libc::EROFS | libc::ENOTDIR | libc::EISDIR | libc::ENOENT | libc::ENXIO) => Fault::Config,
        None if error.kind() == ErrorKind::InvalidInput => Fault::Config,
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
