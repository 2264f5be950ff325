//! The guardian's claim on the processor. It needs the processor at one instant, the end of a lease, and that may be just
//! when its command, or somebody else, uses all of it.

use std::fmt;

use nix::libc;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// How far the guardian could raise itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    RealTime,
    /// Before every ordinary process, but not before real-time ones, and within a quota of its cgroup.
    Nice,
    /// One among all others.
    Ordinary,
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Priority::RealTime => "real-time",
            Priority::Nice => "nice -20",
            Priority::Ordinary => "ordinary",
        })
    }
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

/// Raises the calling thread as far as it may. Says how it was scheduled before, if that was changed.
pub fn raise() -> (Priority, Option<Scheduling>) {
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
pub fn possible() -> Priority {
    std::thread::spawn(|| raise().0).join().unwrap_or(Priority::Ordinary)
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
