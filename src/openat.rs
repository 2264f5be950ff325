//! Opening files in places where other users may write: by a descriptor a level, never through a symlink that somebody
//! else could have placed.
//!
//! Whom we trust: root, and the user we run as. A path that was typed or configured may contain symlinks that one of
//! them owns (`/var/lib/dlock` on another disk, a config file among somebody's dotfiles). A symlink of any other owner
//! is refused. That is enough in sticky and in group-writable directories too: nobody can make a symlink that belongs to
//! somebody else. Below a [`Dir`], which is such a path once it has been resolved, no symlink is followed at all.
//!
//! A file has to be a regular one: opening a pipe or a device could wait for ever. One that is changed in its place must
//! have no second name, see [`sole_name`]. One openat(2) with O_NOFOLLOW for each level works on every kernel;
//! openat2(2) would need Linux 5.6.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, readlinkat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};

/// As many as the kernel follows.
const MOST_LINKS: u32 = 40;

/// A directory that is open. Files below it are named by paths relative to it.
#[derive(Clone, Debug)]
pub struct Dir {
    fd: Arc<OwnedFd>,
    /// For messages, and to ask whether it still leads here.
    path: PathBuf,
}

/// A name in a directory, whether or not anything is there. It is no symlink, unless it became one just now.
#[derive(Debug)]
pub struct Place {
    pub dir: Dir,
    pub name: PathBuf,
}

/// Finds out what a path means, following the symlinks that we trust.
pub fn resolve(path: &Path) -> Result<Place> {
    let (fd, mut real, name) = walk(path, Last::IsNamed)?;
    let (fd, name) = match (name, real.file_name()) {
        (Some(name), _) => (fd, name),
        (None, None) => (fd, ".".into()),
        // A path such as `.` or `a/..` does not say the name of the directory it leads to.
        (None, Some(name)) => {
            let name = name.to_owned();
            real.pop();
            (enter(&fd, OsStr::new(".."))?, name)
        }
    };
    Ok(Place { dir: Dir { fd: Arc::new(fd), path: real }, name: name.into() })
}

/// What is to become of the last component of a path.
#[derive(PartialEq)]
enum Last {
    IsEntered,
    IsNamed,
}

/// Goes down a path: to a directory, its real path, and the last component if it was to be named and there is one.
fn walk(path: &Path, last: Last) -> Result<(OwnedFd, PathBuf, Option<OsString>)> {
    let mut real = if path.is_absolute() { PathBuf::from("/") } else { std::env::current_dir()? };
    let mut fd = enter(AT_FDCWD, OsStr::new(if path.is_absolute() { "/" } else { "." }))?;
    let mut left: Vec<OsString> = Vec::new();
    push(&mut left, path.strip_prefix("/").unwrap_or(path));
    let mut links = 0;
    while let Some(name) = left.pop() {
        match name.as_bytes() {
            b"." => continue,
            b"/" => (fd, real) = (enter(&fd, &name)?, PathBuf::from("/")),
            b".." => {
                fd = enter(&fd, &name)?;
                real.pop();
            }
            _ => {
                let target = if left.is_empty() && last == Last::IsNamed {
                    link_target(&fd, &real, &name)?
                } else {
                    match enter(&fd, &name) {
                        Ok(inner) => {
                            fd = inner;
                            real.push(&name);
                            continue;
                        }
                        Err(error) => Some(link_target(&fd, &real, &name)?.ok_or(error)?),
                    }
                };
                let Some(target) = target else { return Ok((fd, real, Some(name))) };
                links += 1;
                if links > MOST_LINKS {
                    return Err(Errno::ELOOP.into());
                }
                push(&mut left, &target);
            }
        }
    }
    Ok((fd, real, None))
}

/// The last component comes first.
fn push(left: &mut Vec<OsString>, path: &Path) {
    left.extend(path.components().rev().map(|component: Component<'_>| component.as_os_str().to_owned()));
}

/// Opens a file for reading that was named by a path.
pub fn open(path: &Path) -> Result<File> {
    // What our caller has opened for us, as a shell does for `<(command)`, may be a pipe.
    if path == Path::new("/dev/stdin") || path.parent() == Some(Path::new("/dev/fd")) {
        return File::open(path);
    }
    let place = resolve(path)?;
    place.dir.open_file(&place.name, OFlag::O_RDONLY, 0)
}

/// The text of a file that was named by a path.
pub fn read_to_string(path: &Path) -> Result<String> {
    std::io::read_to_string(open(path)?)
}

impl Place {
    pub fn path(&self) -> PathBuf {
        self.dir.path.join(&self.name)
    }
}

impl Dir {
    /// Keeps the path as it was given: what it leads to may change.
    pub fn open(path: &Path) -> Result<Dir> {
        let (fd, ..) = walk(path, Last::IsEntered)?;
        Ok(Dir { fd: Arc::new(fd), path: path.to_owned() })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn stat(&self) -> Result<FileStat> {
        Ok(fstat(&self.fd)?)
    }

    /// Opens a regular file, without waiting for anybody.
    pub fn open_file(&self, below: &Path, flags: OFlag, mode: u32) -> Result<File> {
        let (dir, name) = self.descend(below)?;
        open_regular(&dir, name, flags, mode)
    }

    /// Puts a new file in the place of what is there, in one step. It is written beside it first, as `fresh`.
    pub fn replace(
        &self,
        below: &Path,
        fresh: &OsStr,
        mode: u32,
        write: impl FnOnce(&mut File) -> Result<()>,
    ) -> Result<File> {
        let (dir, name) = self.descend(below)?;
        let mut file = open_regular(&dir, fresh, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL, mode)?;
        let written = write(&mut file).and_then(|()| Ok(renameat(&dir, fresh, &dir, name)?));
        if written.is_err() {
            let _ = unlinkat(&dir, fresh, UnlinkatFlags::NoRemoveDir);
        }
        written.map(|()| file)
    }

    pub fn remove(&self, below: &Path) -> Result<()> {
        let (dir, name) = self.descend(below)?;
        Ok(unlinkat(dir, name, UnlinkatFlags::NoRemoveDir)?)
    }

    pub fn make_dir(&self, below: &Path, mode: u32) -> Result<()> {
        let (dir, name) = self.descend(below)?;
        Ok(mkdirat(dir, name, Mode::from_bits_truncate(mode))?)
    }

    /// A directory, open for what an O_PATH descriptor is not enough for: to list it, to change its mode, to sync it.
    pub fn open_dir(&self, below: &Path) -> Result<File> {
        let (dir, name) = self.descend(below)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat(&dir, name, flags, Mode::empty()).map(File::from).map_err(|error| not_entered(&dir, name, error))
    }

    /// The names in a directory below, or in this one (`.`).
    pub fn list(&self, below: &Path) -> Result<Names> {
        let entries = nix::dir::Dir::from_fd(self.open_dir(below)?.into())?;
        Ok(Names(entries.into_iter()))
    }

    /// What is there, be it a symlink itself.
    pub fn stat_of(&self, below: &Path) -> Result<FileStat> {
        let (dir, name) = self.descend(below)?;
        Ok(fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW)?)
    }

    /// Goes down to the directory of a file; returns it with the file's name there.
    fn descend<'a>(&self, below: &'a Path) -> Result<(Arc<OwnedFd>, &'a OsStr)> {
        let mut names = below.components().map(Component::as_os_str);
        let last = names.next_back().unwrap_or(OsStr::new("."));
        let mut dir = Arc::clone(&self.fd);
        for name in names {
            dir = Arc::new(enter(&dir, name)?);
        }
        Ok((dir, last))
    }
}

/// The names in a directory, without `.` and `..`.
pub struct Names(nix::dir::OwningIter);

impl Iterator for Names {
    type Item = Result<OsString>;

    fn next(&mut self) -> Option<Result<OsString>> {
        loop {
            match self.0.next()? {
                Ok(entry) => match entry.file_name().to_bytes() {
                    b"." | b".." => {}
                    name => return Some(Ok(OsStr::from_bytes(name).to_owned())),
                },
                Err(error) => return Some(Err(error.into())),
            }
        }
    }
}

/// Refuses a file with a second name: whoever can write to a directory may have given a file of ours, that he could not
/// change himself, a name there.
pub fn sole_name(file: File) -> Result<File> {
    match file.metadata()?.nlink() {
        0 | 1 => Ok(file),
        _ => Err(refused("it is a hard link, which could lead anywhere: remove it")),
    }
}

fn open_regular(dir: &OwnedFd, name: &OsStr, flags: OFlag, mode: u32) -> Result<File> {
    const SAFELY: OFlag = OFlag::O_NOFOLLOW.union(OFlag::O_NONBLOCK).union(OFlag::O_NOCTTY).union(OFlag::O_CLOEXEC);
    let file = File::from(openat(dir, name, flags | SAFELY, Mode::from_bits_truncate(mode)).map_err(no_link)?);
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(Error::new(ErrorKind::InvalidInput, "it is no regular file: remove it")),
    }
}

/// A directory, not what a symlink leads to.
fn enter(dir: impl AsFd, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(&dir, name, flags, Mode::empty()).map_err(|error| not_entered(&dir, name, error))
}

/// The kernel calls a symlink "not a directory" here.
fn not_entered(dir: impl AsFd, name: &OsStr, error: Errno) -> Error {
    let is_link = || fstatat(dir, name, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok_and(|stat| kind(&stat) == SFlag::S_IFLNK);
    no_link(if error == Errno::ENOTDIR && is_link() { Errno::ELOOP } else { error })
}

/// Where a symlink leads, if this is one.
fn link_target(dir: &OwnedFd, path: &Path, name: &OsStr) -> Result<Option<PathBuf>> {
    // One descriptor for both questions: the name may mean another link in a moment.
    let link = match openat(dir, name, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty()) {
        Err(Errno::ENOENT) => return Ok(None),
        link => link?,
    };
    let stat = fstat(&link)?;
    if kind(&stat) != SFlag::S_IFLNK {
        return Ok(None);
    }
    if stat.st_uid != 0 && stat.st_uid != geteuid().as_raw() {
        let (shown, owner) = (path.join(name), stat.st_uid);
        return Err(refused(format!("{} is a symbolic link of user {owner}, who could turn it", shown.display())));
    }
    Ok(Some(readlinkat(&link, "")?.into()))
}

fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

/// "Too many levels of symbolic links" is what the kernel says of one that must not be followed.
fn no_link(error: Errno) -> Error {
    if error == Errno::ELOOP { refused("it is a symbolic link: remove it") } else { error.into() }
}

fn refused(why: impl Into<String>) -> Error {
    Error::new(ErrorKind::PermissionDenied, why.into())
}
