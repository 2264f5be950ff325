//! How far the command has come, and what the deadlines ask for at each stage. No clock, no process: `watch` has those.

use super::pace::Pace;
use crate::clock::Instant;
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

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
