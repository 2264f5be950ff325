//! How the guardian parts from where dlock was started: into a session of its own, away from all that is open there, and
//! with a greater claim on the processor.

use std::fs::File;
use std::os::fd::RawFd;

use anyhow::Result;
use nix::libc;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::unistd::{
    ForkResult, Pid, chdir, close, dup2_stderr, dup2_stdin, dup2_stdout, fork, getpgid, getppid, setpgid, setsid,
};

/// The processor is shared out among sessions, where the kernel knows autogroups: those of a command must not leave us
/// without any. With a terminal it stays as it is: job control cares about sessions.
pub fn begin_session() {
    if File::open("/dev/tty").is_err() {
        // Whoever leads a group cannot begin a session, so back into dlock's.
        let _ = getpgid(Some(getppid())).and_then(|group| setpgid(Pid::from_raw(0), group));
        let _ = setsid();
    }
}

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

/// How far the guardian could raise itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    RealTime,
    /// Before every ordinary process, but not before real-time ones, and within a quota of its cgroup.
    Nice,
    /// One among all others.
    Ordinary,
}

/// How a process is scheduled.
#[derive(Clone, Copy, Debug)]
pub struct Scheduling(libc::sched_attr);

const REAL_TIME_PRIORITY: u32 = 99;
const HIGHEST_NICE: i32 = -20;
/// Children begin as ordinary processes.
const RESET_ON_FORK: u64 = 1;
/// A short slice of the processor comes sooner than a long one. Kernels before 6.12 do not know it and ignore it.
const SHORT_SLICE_NANOS: u64 = 100_000;

/// Raises the calling thread as far as it may: the guardian needs the processor at one instant, the end of a lease, and
/// that may be just when its command, or somebody else, uses all of it. Says how it was scheduled before, if that was changed.
pub fn raise_priority() -> (Priority, Option<Scheduling>) {
    let Some(before) = Scheduling::present() else { return (Priority::Ordinary, None) };
    let real_time = Scheduling::new(libc::SCHED_FIFO, 0, REAL_TIME_PRIORITY, 0);
    let nice = Scheduling::new(libc::SCHED_OTHER, HIGHEST_NICE, 0, SHORT_SLICE_NANOS);
    let short_slice = Scheduling::new(libc::SCHED_OTHER, before.0.sched_nice, 0, SHORT_SLICE_NANOS);
    // The kernel kills a real-time process that uses up such a limit.
    let limited = getrlimit(Resource::RLIMIT_RTTIME).is_ok_and(|(_, hard)| hard != RLIM_INFINITY);
    for (priority, scheduling) in [(Priority::RealTime, real_time), (Priority::Nice, nice)] {
        if !(limited && priority == Priority::RealTime) && scheduling.apply() {
            return (priority, Some(before));
        }
    }
    let ordinary = before.0.sched_policy == libc::SCHED_OTHER.unsigned_abs();
    (Priority::Ordinary, Some(before).filter(|_| ordinary && short_slice.apply()))
}

/// How far a guardian of this process could raise itself. Tried by a thread that ends at once.
pub fn possible_priority() -> Priority {
    std::thread::spawn(|| raise_priority().0).join().unwrap_or(Priority::Ordinary)
}

impl Scheduling {
    fn new(policy: i32, nice: i32, priority: u32, slice_nanos: u64) -> Scheduling {
        Scheduling(libc::sched_attr {
            size: size_of::<libc::sched_attr>() as u32,
            sched_policy: policy.unsigned_abs(),
            sched_flags: RESET_ON_FORK,
            sched_nice: nice,
            sched_priority: priority,
            sched_runtime: slice_nanos,
            sched_deadline: 0,
            sched_period: 0,
        })
    }

    fn present() -> Option<Scheduling> {
        let mut found = Scheduling::new(0, 0, 0, 0);
        let size = found.0.size;
        // SAFETY: writes no more than the size it is told, into a structure of that size.
        let answer = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut found.0, size, 0) };
        (answer == 0).then_some(found)
    }

    /// For the calling thread.
    pub fn apply(&self) -> bool {
        // SAFETY: reads the structure, whose size it says.
        unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const self.0, 0) == 0 }
    }
}
