//! How a process that outlives dlock parts from where dlock was started: into a session of its own, away from all that is
//! open there.

use std::fs::File;
use std::os::fd::RawFd;

use anyhow::Result;
use nix::libc;
use nix::unistd::{ForkResult, chdir, close, dup2_stderr, dup2_stdin, dup2_stdout, fork, setsid};

/// Goes on without dlock, out of everybody's way, with nothing open but these.
pub fn leave(kept: &[RawFd]) -> Result<()> {
    // Whoever leads a group, or a session, cannot begin one.
    // SAFETY: there is one thread; and nothing is left to be done by the parent.
    if let ForkResult::Parent { .. } = unsafe { fork() }? {
        unsafe { libc::_exit(0) };
    }
    let _ = setsid();
    let _ = chdir("/");
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let _ = dup2_stdin(&null);
    let _ = dup2_stdout(&null);
    let _ = dup2_stderr(&null);
    drop(null);
    close_others(kept);
    Ok(())
}

/// Whoever reads from a pipe that dlock was started with wants to see its end. Leaves the standard descriptors open.
pub fn close_others(kept: &[RawFd]) {
    let mut kept: Vec<u32> = kept.iter().map(|fd| fd.unsigned_abs()).collect();
    kept.sort_unstable();
    let mut first = 3;
    for fd in kept.into_iter().chain([u32::MAX]) {
        if fd > first {
            close_all(first, fd - 1);
        }
        first = fd.saturating_add(1);
    }
}

fn close_all(first: u32, last: u32) {
    const MOST_BY_HAND: u32 = 4096;
    // SAFETY: nothing uses these any more.
    if unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) } != 0 {
        // Kernels before 5.9.
        for fd in first..=last.min(MOST_BY_HAND) {
            let _ = close(fd.cast_signed());
        }
    }
}
