//! `dlock fence`: the resource's side of fencing. The highest token a resource has seen stands in
//! `RESOURCE.fence`; a command with an older one is not run.
//!
//! Check, record and command are one critical section: a flock on the mark, taken before the check and
//! inherited by the command, so that it lasts for as long as anything of the command lives, even if
//! somebody kills the first process of it. The mark is on the disk before the command begins; a crash in
//! between only means that the token has been seen.

use std::ffi::OsString;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::libc;

use crate::config::Fence;
use crate::exit::{Exit, Fault};
use crate::lock::Token;
use crate::report::{Event, Voice};

pub fn fence(order: &Fence, mut voice: Voice) -> Result<Exit> {
    let path = mark_of(&resolved(&order.resource))?;
    let mut mark = open(&path)?;
    lock(&mark, &path, &order.resource, &voice).with_context(|| format!("cannot lock {}", path.display()))?;
    let seen = read(&mut mark).with_context(|| path.display().to_string()).context(Fault::Config)?;
    if order.token < seen {
        let (token, resource) = (order.token, order.resource.display());
        return Err(Fault::NotOurs
            .because(format_args!("token {token} is older than {seen}, which {resource} has seen: not run")));
    }
    if order.token > seen {
        write(&mut mark, order.token).with_context(|| format!("cannot record the token in {}", path.display()))?;
        sync_directory(&path)?;
    }
    fcntl(mark.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).context("fcntl")?;
    let (program, arguments) = order.argv.split_first().context("no command")?;
    let error = Command::new(program).args(arguments).exec();
    let program = program.to_string_lossy();
    let not_found = error.kind() == std::io::ErrorKind::NotFound;
    let why = error.to_string();
    voice.say(&match not_found {
        true => Event::NotFound { program: &program },
        false => Event::CannotExecute { program: &program, why: &why },
    });
    Ok(if not_found { Exit::NOT_FOUND } else { Exit::CANNOT_EXECUTE })
}

/// Waits for other fences on the resource, and says so if that takes long or somebody watches.
fn lock(mark: &File, path: &Path, resource: &Path, voice: &Voice) -> std::io::Result<()> {
    const LONG: Duration = Duration::from_secs(1);
    match mark.try_lock() {
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(error),
        Ok(()) => return Ok(()),
    }
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let patience = if voice.is_live() { Duration::ZERO } else { LONG };
    let (mark_path, resource, mut voice) = (path.display().to_string(), resource.display().to_string(), voice.clone());
    let watcher = std::thread::spawn(move || {
        if wait.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            voice.say(&Event::FenceBusy { resource: &resource, mark: &mark_path });
        }
    });
    let locked = mark.lock();
    drop(done);
    let _ = watcher.join();
    locked
}

/// What a symbolic link leads to, so that no older token gets by through another name. What is not there yet is named
/// as it will be.
fn resolved(resource: &Path) -> PathBuf {
    const MOST_LINKS: usize = 40;
    let mut path = resource.to_owned();
    for _ in 0..MOST_LINKS {
        if let Ok(real) = path.canonicalize() {
            return real;
        }
        let parent = path.parent().unwrap_or(Path::new(""));
        let Ok(target) = path.read_link() else {
            let real = if parent.as_os_str().is_empty() { Path::new(".") } else { parent }.canonicalize();
            return real.ok().zip(path.file_name()).map_or(path.clone(), |(real, name)| real.join(name));
        };
        path = parent.join(target);
    }
    path
}

/// Beside the resource, so that it lives and moves with what it protects.
fn mark_of(resource: &Path) -> Result<PathBuf> {
    let name = resource.file_name().ok_or_else(|| {
        Fault::Usage.because(format_args!("{} is no file or directory that could be fenced", resource.display()))
    })?;
    let mut mark = OsString::from(name);
    mark.push(".fence");
    Ok(resource.with_file_name(mark))
}

fn open(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o666).custom_flags(libc::O_NOFOLLOW);
    options.open(path).map_err(|error| {
        let fault = match error.kind() {
            std::io::ErrorKind::PermissionDenied => Fault::Refused,
            _ => Fault::Config,
        };
        anyhow::Error::new(error).context(format!("cannot open {}", path.display())).context(fault)
    })
}

/// Zero for a mark that has just been made.
fn read(mark: &mut File) -> Result<Token> {
    let mut text = String::new();
    mark.take(64).read_to_string(&mut text)?;
    match text.trim() {
        "" => Ok(Token(0)),
        digits => digits.parse().map(Token).context("is not a fencing mark"),
    }
}

/// Always as long as before, so that it is written in one piece.
fn write(mark: &mut File, token: Token) -> std::io::Result<()> {
    mark.seek(SeekFrom::Start(0))?;
    mark.write_all(format!("{:020}\n", token.0).as_bytes())?;
    mark.sync_data()
}

/// A mark that is new must not be forgotten with its name.
fn sync_directory(mark: &Path) -> Result<()> {
    let directory = mark.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(directory).and_then(|directory| directory.sync_all()).context("cannot sync the mark's directory")
}
