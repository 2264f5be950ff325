//! Opening files in places where other users may write: by a descriptor a level, never through a symlink that somebody
//! else could have placed.
//!
//! Whom we trust: root, and the user we run as. A path that was typed or configured may contain symlinks that one of
//! them owns (`/var/lib/dlock` on another disk, a config file among somebody's dotfiles). A symlink of any other owner
//! is refused. That is enough in sticky and in group-writable directories too: nobody can make a symlink that belongs to
//! somebody else. Below a [`Dir`], which is such a path once it has been resolved, no symlink is followed at all.
//!
//! A file has to be a regular one: opening a pipe or a device could wait for ever. One that is changed in its place must
//! have no second name, see [`sole_name`]. It takes an openat(2) with O_NOFOLLOW for each level of a path; the
//! directory of the locks is opened by one openat2(2), if no symlink is on the way and Linux is 5.6 or newer.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2, readlinkat, renameat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, unlinkat};

/// As many as the kernel follows.
const MOST_LINKS: u32 = 40;

/// What opens a directory, or a symlink itself, for everything but reading.
const AS_PLACE: OFlag = OFlag::O_PATH.union(OFlag::O_NOFOLLOW).union(OFlag::O_CLOEXEC);

/// A directory that is open. What is in it is named by single names.
#[derive(Clone, Debug)]
pub struct Dir {
    fd: Arc<OwnedFd>,
    /// For messages, and to ask whether it still leads here.
    path: PathBuf,
}

/// The names in a directory, without `.` and `..`.
pub type Names = Box<dyn Iterator<Item = Result<OsString>> + Send>;

/// A name in a directory, whether or not anything is there. It is no symlink, unless it became one just now.
#[derive(Debug)]
pub struct Place {
    pub dir: Dir,
    pub name: OsString,
}

/// Finds out what a path means, following the symlinks that we trust.
pub fn resolve(path: &Path) -> Result<Place> {
    let mut real = if path.is_absolute() { PathBuf::from("/") } else { std::env::current_dir()? };
    let mut left: Vec<OsString> = Vec::new();
    push(&mut left, path.strip_prefix("/").unwrap_or(path));
    let mut fd = enter(AT_FDCWD, OsStr::new(if path.is_absolute() { "/" } else { "." }))?;
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
                let target = if left.is_empty() {
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
                let Some(target) = target else { return Ok(Place { dir: Dir::new(fd, real), name }) };
                links += 1;
                if links > MOST_LINKS {
                    return Err(Errno::ELOOP.into());
                }
                push(&mut left, &target);
            }
        }
    }
    // A path such as `.` or `a/..` does not say the name of the directory it leads to.
    match real.file_name().map(OsStr::to_owned) {
        None => Ok(Place { dir: Dir::new(fd, real), name: ".".into() }),
        Some(name) => {
            real.pop();
            Ok(Place { dir: Dir::new(enter(&fd, OsStr::new(".."))?, real), name })
        }
    }
}

/// A directory in one step, if no symlink and no `..` is on the way and the kernel can do it.
fn at_once(path: &Path) -> Option<OwnedFd> {
    let is_plain = |component| matches!(component, Component::RootDir | Component::Normal(_));
    let how = OpenHow::new().flags(AS_PLACE | OFlag::O_DIRECTORY).resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    openat2(AT_FDCWD, Some(path).filter(|path| path.components().all(is_plain))?, how).ok()
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
    place.dir.open_file(place.name, OFlag::O_RDONLY, 0)
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
    fn new(fd: OwnedFd, path: PathBuf) -> Dir {
        Dir { fd: Arc::new(fd), path }
    }

    /// Keeps the path as it was given: what it leads to may change.
    pub fn open(path: &Path) -> Result<Dir> {
        if let Some(fd) = at_once(path) {
            return Ok(Dir::new(fd, path.to_owned()));
        }
        let place = resolve(path)?;
        Ok(Dir { path: path.to_owned(), ..place.dir.enter(place.name)? })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn stat(&self) -> Result<FileStat> {
        Ok(fstat(&self.fd)?)
    }

    /// A directory in this one.
    pub fn enter(&self, name: impl AsRef<OsStr>) -> Result<Dir> {
        Ok(Dir::new(enter(&self.fd, name.as_ref())?, self.path.join(name.as_ref())))
    }

    /// Opens a regular file, without waiting for anybody.
    pub fn open_file(&self, name: impl AsRef<OsStr>, flags: OFlag, mode: u32) -> Result<File> {
        self.open_known(name, flags, mode).map(|(file, _)| file)
    }

    /// Opens a regular file, and says what the kernel knows of it.
    pub fn open_known(&self, name: impl AsRef<OsStr>, flags: OFlag, mode: u32) -> Result<(File, Metadata)> {
        const SAFELY: OFlag = OFlag::O_NOFOLLOW.union(OFlag::O_NONBLOCK).union(OFlag::O_NOCTTY).union(OFlag::O_CLOEXEC);
        let opened = openat(&self.fd, name.as_ref(), flags | SAFELY, Mode::from_bits_truncate(mode));
        let file = File::from(opened.map_err(no_link)?);
        match file.metadata()? {
            meta if meta.is_file() => Ok((file, meta)),
            _ => Err(Error::new(ErrorKind::InvalidInput, "it is no regular file: remove it")),
        }
    }

    /// Puts a new file in the place of what is there, in one step. It is written beside it first, as `fresh`.
    pub fn replace(
        &self,
        name: impl AsRef<OsStr>,
        fresh: impl AsRef<OsStr>,
        write: impl FnOnce(&mut File) -> Result<()>,
    ) -> Result<File> {
        let fresh = fresh.as_ref();
        let mut file = self.open_file(fresh, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL, 0o600)?;
        let written = write(&mut file).and_then(|()| Ok(renameat(&self.fd, fresh, &self.fd, name.as_ref())?));
        if written.is_err() {
            let _ = self.remove(fresh);
        }
        written.map(|()| file)
    }

    pub fn remove(&self, name: impl AsRef<OsStr>) -> Result<()> {
        Ok(unlinkat(&self.fd, name.as_ref(), UnlinkatFlags::NoRemoveDir)?)
    }

    pub fn make_dir(&self, name: impl AsRef<OsStr>, mode: u32) -> Result<()> {
        Ok(mkdirat(&self.fd, name.as_ref(), Mode::from_bits_truncate(mode))?)
    }

    /// Open for what an O_PATH descriptor is not enough for: to list it, to change its mode, to sync it.
    pub fn open_to_read(&self) -> Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        Ok(openat(&self.fd, ".", flags, Mode::empty())?.into())
    }

    pub fn list(&self) -> Result<Names> {
        let entries = nix::dir::Dir::from_fd(self.open_to_read()?.into())?.into_iter();
        let names = entries.map(|entry| Ok(OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned()));
        Ok(Box::new(names.filter(|name| !matches!(name, Ok(name) if name == "." || name == ".."))))
    }

    /// What is there, be it a symlink itself.
    pub fn stat_of(&self, name: impl AsRef<OsStr>) -> Result<FileStat> {
        Ok(fstatat(&self.fd, name.as_ref(), AtFlags::AT_SYMLINK_NOFOLLOW)?)
    }
}

/// Refuses a file with a second name: whoever can write to a directory may have given a file of ours, that he could not
/// change himself, a name there.
pub fn sole_name((file, meta): (File, Metadata)) -> Result<File> {
    match meta.nlink() {
        0 | 1 => Ok(file),
        _ => Err(refused("it is a hard link, which could lead anywhere: remove it")),
    }
}

/// A directory, not what a symlink leads to.
fn enter(dir: impl AsFd, name: &OsStr) -> Result<OwnedFd> {
    let is_link = || fstatat(&dir, name, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok_and(|stat| kind(&stat) == SFlag::S_IFLNK);
    openat(&dir, name, AS_PLACE | OFlag::O_DIRECTORY, Mode::empty()).map_err(|error| match error {
        // The kernel calls a symlink "not a directory" here.
        Errno::ENOTDIR if is_link() => no_link(Errno::ELOOP),
        error => no_link(error),
    })
}

/// Where a symlink leads, if this is one.
fn link_target(dir: &OwnedFd, path: &Path, name: &OsStr) -> Result<Option<PathBuf>> {
    // One descriptor for both questions: the name may mean another link in a moment.
    let link = match openat(dir, name, AS_PLACE, Mode::empty()) {
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
