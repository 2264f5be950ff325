//! When the guardian acts: how far the command has come, and what the deadlines ask for at each stage; how long it would
//! need to kill everything, as it sees by itself while there is still time; the timers that wake it, and its claim on the
//! processor.
//!
//! It measures how late it wakes up, how many processes there are, and how long one walk over them takes. SIGKILL has to
//! come so much before the lease ends.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::libc;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::Timer;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use serde::{Deserialize, Serialize};

use super::command::Leaf;
use super::tree::Tree;
use crate::clock::{self, Instant};
use crate::lock::Deadlines;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// There is no word to start yet.
    Waiting,
    Running,
    /// The first signal is out; SIGKILL follows at this instant, or earlier if the lease ends.
    Ending(Instant),
    /// Nothing of it is left, or what is left is left on purpose.
    Over,
}

/// What has to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Wait,
    /// No renewal came in time. One that comes through now is too late: the command knows that it has to go.
    Signal {
        kill_at: Instant,
    },
    Kill,
    /// dlock did not release in time: it is stopped, or stuck.
    LetGo,
}

impl Stage {
    /// The next instant at which there is something to do.
    pub fn due_at(self, deadlines: Deadlines, pace: Pace) -> Instant {
        let due = deadlines.with_margin(pace.margin());
        match self {
            Stage::Waiting => Instant::NEVER,
            Stage::Running => due.signal_at,
            Stage::Ending(at) => at.min(due.kill_at),
            // There is nothing left that would take time to kill.
            Stage::Over => deadlines.kill_at,
        }
    }

    pub fn step(self, deadlines: Deadlines, pace: Pace, now: Instant) -> Step {
        let kill_at = deadlines.with_margin(pace.margin()).kill_at;
        match self {
            _ if now < self.due_at(deadlines, pace) => Step::Wait,
            Stage::Waiting => Step::Wait,
            Stage::Running if now < kill_at => Step::Signal { kill_at },
            Stage::Running | Stage::Ending(_) => Step::Kill,
            Stage::Over => Step::LetGo,
        }
    }

    /// After an order to end by then. A second one can only bring the end nearer.
    pub fn ending_by(self, kill_at: Instant) -> Stage {
        match self {
            Stage::Running => Stage::Ending(kill_at),
            Stage::Ending(earlier) => Stage::Ending(earlier.min(kill_at)),
            Stage::Waiting | Stage::Over => self,
        }
    }
}

/// What was measured worst, lately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pace {
    pub lateness: Duration,
    pub walk: Duration,
    pub processes: usize,
}

/// Killing takes one walk, and a second one for what was born meanwhile. The rest is for a machine that is busier, or a
/// tree that is larger, at the end of the lease than when it was measured.
const SAFETY: u32 = 4;

impl Pace {
    /// A new measurement. A worse one counts at once, a better one little by little: a starved process is on time now and
    /// then.
    pub fn measured(self, lateness: Duration, walk: Duration, processes: usize) -> Pace {
        let worse = |now: Duration, before: Duration| now.max(before.mul_f64(0.75));
        Pace { lateness: worse(lateness, self.lateness), walk: worse(walk, self.walk), processes }
    }

    /// How long before the end of the lease SIGKILL has to come.
    pub fn margin(self) -> Duration {
        (self.lateness + self.walk) * SAFETY
    }
}

/// The pace of a command that runs, measured at every renewal and, when none comes, at half of the time that is left.
#[derive(Debug)]
pub struct Measuring {
    pub pace: Pace,
    /// When to measure again.
    pub due_at: Instant,
    /// The margin that dlock knows of.
    told_margin: Duration,
}

impl Measuring {
    pub fn new() -> Measuring {
        Measuring { pace: Pace::default(), due_at: Instant::NEVER, told_margin: Duration::ZERO }
    }

    /// Learns how much time killing would take now. That must not itself take more time than there is. Whether dlock has
    /// to be told.
    pub fn measure(&mut self, lateness: Duration, deadlines: Deadlines, tree: &Tree, leaf: Option<&Leaf>) -> bool {
        const SOONEST: Duration = Duration::from_millis(50);
        self.due_at = Instant::NEVER;
        let signal_at = |pace: Pace| deadlines.with_margin(pace.margin()).signal_at;
        let before = self.pace;
        if signal_at(before).has_passed() {
            return false;
        }
        let (walk, found) = tree.measure(|walk| signal_at(before.measured(lateness, walk, 0)).has_passed());
        // What is killed in one step needs no walk before it is dead.
        let in_one_step = leaf.is_some_and(|leaf| leaf.has_all(&found));
        self.pace = before.measured(lateness, if in_one_step { Duration::ZERO } else { walk }, found.len());
        let half = signal_at(self.pace).remaining() / 2;
        if half > SOONEST {
            self.due_at = clock::now() + half;
        }
        let (margin, told) = (self.pace.margin(), self.told_margin);
        let usual = deadlines.end.since(deadlines.kill_at);
        let is_news = margin.max(told) > usual && margin.abs_diff(told) > told.max(usual) / 4;
        if is_news {
            self.told_margin = margin;
        }
        is_news
    }
}

/// Wakes the guardian.
#[derive(Debug)]
pub struct Alarm {
    timer: TimerFd,
    /// What the timer is set to.
    armed: Instant,
    /// Sends us SIGCONT when a deadline is due: somebody may have stopped us, and dlock as well.
    wake: Timer,
    wakes_at: Instant,
}

impl Alarm {
    pub fn new() -> Result<Alarm> {
        let timer = TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC)?;
        let wake = timer_that_sends(Signal::SIGCONT)?;
        Ok(Alarm { timer, armed: Instant::NEVER, wake, wakes_at: Instant::NEVER })
    }

    /// Sets the timers to when a deadline is due, or to when there is something else to do. That also clears an expiry
    /// that was acted on.
    pub fn set(&mut self, deadline: Instant, other: Instant) -> Result<()> {
        if deadline != self.wakes_at {
            self.wakes_at = deadline;
            self.wake.set(once_at(deadline), TimerSetTimeFlags::TFD_TIMER_ABSTIME).context("timer_settime")?;
        }
        self.armed = deadline.min(other);
        self.timer.set(once_at(self.armed), TimerSetTimeFlags::TFD_TIMER_ABSTIME).context("timerfd_settime")
    }

    /// How late we are, once it has rung.
    pub fn lateness(&self) -> Duration {
        self.armed.elapsed()
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

fn timer_that_sends(signal: Signal) -> Result<Timer> {
    let send = SigevNotify::SigevSignal { signal, si_value: 0 };
    Timer::new(nix::time::ClockId::CLOCK_BOOTTIME, SigEvent::new(send)).context("timer_create")
}

/// An instant of zero would disarm a timer instead of firing it.
fn once_at(instant: Instant) -> Expiration {
    Expiration::OneShot(TimeSpec::from_duration(Duration::from_nanos(instant.as_nanos().max(1))))
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

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_worse_measurement_counts_at_once_and_a_better_one_little_by_little() {
        let slow = Pace::default().measured(ms(100), ms(300), 2_000);
        assert_eq!(slow.margin(), ms(1_600));
        let better = slow.measured(ms(0), ms(0), 1);
        assert_eq!(better.margin(), ms(1_200));
        assert_eq!(better.measured(ms(500), ms(500), 9).margin(), ms(4_000));
    }

    fn at(millis: u64) -> Instant {
        Instant::from_nanos(millis * 1_000_000)
    }

    fn deadlines() -> Deadlines {
        Deadlines { signal_at: at(1_000), kill_at: at(2_000), end: at(2_200) }
    }

    const QUICK: Pace = Pace { lateness: Duration::ZERO, walk: Duration::ZERO, processes: 1 };
    /// Needs 600 ms, 400 more than there are between SIGKILL and the end.
    const SLOW: Pace = Pace { lateness: Duration::from_millis(50), walk: Duration::from_millis(100), processes: 900 };

    #[test]
    fn each_stage_does_its_step_at_its_instant_and_not_before() {
        let in_time = Step::Signal { kill_at: at(2_000) };
        let earlier = Step::Signal { kill_at: at(1_600) };
        for (stage, pace, now, step) in [
            (Stage::Waiting, QUICK, 9_999, Step::Wait),
            (Stage::Running, QUICK, 999, Step::Wait),
            (Stage::Running, QUICK, 1_000, in_time),
            (Stage::Running, QUICK, 1_999, in_time),
            // Stopped or starved until then.
            (Stage::Running, QUICK, 2_000, Step::Kill),
            (Stage::Running, SLOW, 599, Step::Wait),
            (Stage::Running, SLOW, 600, earlier),
            (Stage::Running, SLOW, 1_599, earlier),
            (Stage::Running, SLOW, 1_600, Step::Kill),
            // Ordered to end: whatever comes first, the order's instant or the lease's.
            (Stage::Ending(at(500)), QUICK, 499, Step::Wait),
            (Stage::Ending(at(500)), QUICK, 500, Step::Kill),
            (Stage::Ending(at(9_000)), QUICK, 1_999, Step::Wait),
            (Stage::Ending(at(9_000)), QUICK, 2_000, Step::Kill),
            (Stage::Ending(at(9_000)), SLOW, 1_599, Step::Wait),
            (Stage::Ending(at(9_000)), SLOW, 1_600, Step::Kill),
            // The lock is dlock's to release for as long as there is time, however slow killing would have been.
            (Stage::Over, QUICK, 1_999, Step::Wait),
            (Stage::Over, SLOW, 1_999, Step::Wait),
            (Stage::Over, SLOW, 2_000, Step::LetGo),
        ] {
            assert_eq!(stage.step(deadlines(), pace, at(now)), step, "{stage:?} at {now} ms, {pace:?}");
        }
    }

    #[test]
    fn the_timer_is_set_to_the_very_instant_of_the_next_step() {
        let nanosecond = Duration::from_nanos(1);
        for stage in [Stage::Running, Stage::Ending(at(500)), Stage::Ending(at(9_000)), Stage::Over] {
            for pace in [QUICK, SLOW] {
                let due = stage.due_at(deadlines(), pace);
                assert_eq!(stage.step(deadlines(), pace, due - nanosecond), Step::Wait, "{stage:?}, {pace:?}");
                assert_ne!(stage.step(deadlines(), pace, due), Step::Wait, "{stage:?}, {pace:?}");
            }
        }
        assert_eq!(Stage::Waiting.due_at(deadlines(), SLOW), Instant::NEVER);
    }

    #[test]
    fn without_a_lease_of_its_own_a_command_ends_only_when_ordered() {
        for stage in [Stage::Waiting, Stage::Running, Stage::Over] {
            assert_eq!(stage.step(Deadlines::NEVER, QUICK, at(1 << 40)), Step::Wait, "{stage:?}");
        }
        assert_eq!(Stage::Running.ending_by(at(500)).step(Deadlines::NEVER, QUICK, at(500)), Step::Kill);
    }

    #[test]
    fn an_order_to_end_can_only_bring_the_end_nearer() {
        let (sooner, later) = (Stage::Ending(at(500)), Stage::Ending(at(900)));
        assert_eq!(Stage::Running.ending_by(at(900)), later);
        assert_eq!(later.ending_by(at(500)), sooner);
        assert_eq!(sooner.ending_by(at(900)), sooner);
        // What has not begun is not begun by it, and what is over stays so.
        assert_eq!(Stage::Waiting.ending_by(at(500)), Stage::Waiting);
        assert_eq!(Stage::Over.ending_by(at(500)), Stage::Over);
    }
}
