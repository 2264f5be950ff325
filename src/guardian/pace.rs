//! The guardian's timers, and how long it needs to kill everything, as it sees by itself while there is still time: how
//! late it wakes up, how many processes there are, how long one walk over them takes. SIGKILL has to come so much before
//! the lease ends.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::{SigEvent, SigevNotify, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timer::Timer;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use serde::{Deserialize, Serialize};

use super::processes::Leaf;
use super::tree::Tree;
use crate::clock::{self, Instant};
use crate::lock::Deadlines;

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

/// Has the kernel kill this process then, unless what is returned is dropped before.
pub fn die_at(instant: Instant) -> Result<Timer> {
    let mut timer = timer_that_sends(Signal::SIGKILL)?;
    timer.set(once_at(instant), TimerSetTimeFlags::TFD_TIMER_ABSTIME).context("timer_settime")?;
    Ok(timer)
}

fn timer_that_sends(signal: Signal) -> Result<Timer> {
    let send = SigevNotify::SigevSignal { signal, si_value: 0 };
    Timer::new(nix::time::ClockId::CLOCK_BOOTTIME, SigEvent::new(send)).context("timer_create")
}

/// An instant of zero would disarm a timer instead of firing it.
fn once_at(instant: Instant) -> Expiration {
    Expiration::OneShot(TimeSpec::from_duration(Duration::from_nanos(instant.as_nanos().max(1))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn millis(n: u64) -> Duration {
        Duration::from_millis(n)
    }

    #[test]
    fn a_worse_measurement_counts_at_once_and_a_better_one_little_by_little() {
        let slow = Pace::default().measured(millis(100), millis(300), 2_000);
        assert_eq!(slow.margin(), millis(1_600));
        let better = slow.measured(millis(0), millis(0), 1);
        assert_eq!(better.margin(), millis(1_200));
        assert_eq!(better.measured(millis(500), millis(500), 9).margin(), millis(4_000));
    }
}
