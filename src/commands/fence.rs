//! `dlock fence`: the resource's side of fencing. The highest token a resource has seen stands in
//! `RESOURCE.fence`; a command with an older one is not run.
//!
//! Check, record and command are one critical section: a flock on the mark, taken before the check and
//! inherited by the command, so that it lasts for as long as anything of the command lives, even if
//! somebody kills the first process of it. The mark is on the disk before the command begins; a crash in
//! between only means that the token has been seen.

use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};

use crate::cli::FenceArgs;
use crate::config::{Layers, values};
use crate::exit::{Exit, Fault};
use crate::lock::Token;
use crate::openat::{self, Place, sole_name};
use crate::report::{Event, Voice};

pub fn fence(args: FenceArgs, _: Layers, voice: &mut Voice) -> Result<Exit> {
    let token = token(&args)?;
    let place = mark_of(&args.resource)?;
    let path = place.path();
    let mark = place.dir.open_known(&place.name, OFlag::O_RDWR | OFlag::O_CREAT, 0o666).and_then(sole_name);
    let mut mark = mark.map_err(|error| failed(error, &path))?;
    lock(&mark, &path, &args.resource, voice).with_context(|| format!("cannot lock {}", path.display()))?;
    let seen = read(&mut mark).with_context(|| path.display().to_string()).context(Fault::Config)?;
    if token < seen {
        let resource = args.resource.display();
        return Err(Fault::NotOurs
            .because(format_args!("token {token} is older than {seen}, which {resource} has seen: not run")));
    }
    if token > seen {
        write(&mut mark, token).with_context(|| format!("cannot record the token in {}", path.display()))?;
        // A mark that is new must not be forgotten with its name.
        place.dir.open_to_read().and_then(|dir| dir.sync_all()).context("cannot sync the mark's directory")?;
    }
    fcntl(mark.as_fd(), FcntlArg::F_SETFD(FdFlag::empty())).context("fcntl")?;
    let (program, arguments) = args.argv.split_first().context("no command")?;
    let error = Command::new(program).args(arguments).exec();
    voice.tell(None, &Event::not_started(&program.to_string_lossy(), &error));
    Ok(Exit::of_exec(&error))
}

fn token(args: &FenceArgs) -> Result<Token> {
    let token = args.token.clone().or_else(|| std::env::var("DLOCK_FENCING_TOKEN").ok());
    let missing = || {
        Fault::Usage
            .because("which token? Use dlock fence inside dlock run, which sets DLOCK_FENCING_TOKEN, or pass --token N")
    };
    values::token(&token.ok_or_else(missing)?).context("--token or $DLOCK_FENCING_TOKEN").context(Fault::Usage)
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
            voice.tell(None, &Event::fence_busy(&resource, &mark_path));
        }
    });
    let locked = mark.lock();
    drop(done);
    let _ = watcher.join();
    locked
}

/// Beside the resource, so that it lives and moves with what it protects; and beside what a symlink leads to, so that no
/// older token gets by through another name. What is not there yet is named as it will be.
fn mark_of(resource: &Path) -> Result<Place> {
    let mut place = openat::resolve(resource).map_err(|error| failed(error, resource))?;
    if place.name == "." {
        let shown = resource.display();
        return Err(Fault::Usage.because(format_args!("{shown} cannot be fenced: name a file or a directory")));
    }
    place.name.push(".fence");
    Ok(place)
}

fn failed(error: std::io::Error, path: &Path) -> anyhow::Error {
    let fault = match error.kind() {
        std::io::ErrorKind::PermissionDenied => Fault::Refused,
        _ => Fault::Config,
    };
    anyhow::Error::new(error).context(format!("cannot open {}", path.display())).context(fault)
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
