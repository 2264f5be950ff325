//! The directory of the locks: where it is by default, that it can be trusted, and what is where in it.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use nix::unistd::geteuid;

use crate::backend::Address;
use crate::exit::Fault;
use crate::lock::{LastRun, LockName, OwnerId};
use crate::random;

pub struct Directory {
    path: PathBuf,
    /// The default directory is made on first use; one that was named must be there.
    ours_to_make: bool,
    mode: u32,
}

/// What belongs to one lock.
#[derive(Clone, Debug)]
pub struct Paths {
    pub lock: PathBuf,
    pub side: PathBuf,
    mode: u32,
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
        Ok(Directory { path, ours_to_make, mode: 0o600 })
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
            Err(error) => return Err(refusal(error, format!("cannot look at the lock directory {shown}"))),
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
        // A directory that a group may write to is shared on purpose.
        self.mode = if meta.mode() & 0o020 != 0 { 0o660 } else { 0o600 };
        Ok(())
    }

    fn make(&self) -> Result<()> {
        let mode = if geteuid().is_root() { 0o755 } else { 0o700 };
        DirBuilder::new()
            .recursive(true)
            .mode(mode)
            .create(&self.path)
            .map_err(|error| refusal(error, format!("cannot make the lock directory {}", self.path.display())))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn paths(&self, name: &LockName) -> Paths {
        let stem = name.encoded();
        Paths {
            lock: self.path.join(format!("{stem}.lock")),
            side: self.path.join(format!("{stem}.d")),
            mode: self.mode,
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
pub fn refusal(error: std::io::Error, what: String) -> anyhow::Error {
    let fault = match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::ELOOP) => Fault::Refused,
        Some(libc::EROFS | libc::ENOTDIR | libc::EISDIR | libc::ENOENT) => Fault::Config,
        Some(libc::ENAMETOOLONG) => Fault::Usage,
        Some(libc::ENOSPC | libc::EDQUOT | libc::EIO | libc::ESTALE) => Fault::Unreachable,
        _ => Fault::Internal,
    };
    anyhow::Error::new(error).context(what).context(fault)
}

impl Paths {
    /// How every file of ours is opened: never through a link, never inherited.
    pub fn options(&self) -> OpenOptions {
        let mut options = File::options();
        options.create(true).mode(self.mode).custom_flags(libc::O_NOFOLLOW | libc::O_NOCTTY);
        options
    }

    /// Opens a file of this lock, and makes what is missing for that.
    pub fn open(&self, path: &Path) -> Result<File> {
        self.in_side_directory(|| self.options().read(true).write(true).open(path))
            .map_err(|error| refusal(error, format!("cannot open {}", path.display())))
    }

    /// Writes a file so that others see all of it or the one before.
    pub fn replace(&self, path: &Path, content: &[u8]) -> Result<File> {
        let temporary = self.side.join(format!("tmp.{:016x}", u64::from_ne_bytes(random::bytes()?)));
        let write = || -> std::io::Result<File> {
            let mut file = self.options().read(true).write(true).truncate(true).open(&temporary)?;
            // Others tell by this lock whether whoever wrote the file is still there.
            file.lock()?;
            file.write_all(content)?;
            std::fs::rename(&temporary, path)?;
            Ok(file)
        };
        self.in_side_directory(write).map_err(|error| refusal(error, format!("cannot write {}", path.display())))
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
        let mut file =
            File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(self.last_run()).ok()?;
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

    /// Does something that needs `NAME.d`, which whoever comes first has to make.
    fn in_side_directory(&self, work: impl Fn() -> std::io::Result<File>) -> std::io::Result<File> {
        match work() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let mode = 0o700 | (self.mode & 0o060) | ((self.mode & 0o060) >> 1 & 0o010);
                match DirBuilder::new().mode(mode).create(&self.side) {
                    Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
                    _ => work(),
                }
            }
            done => done,
        }
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
