//! The guardian process: start, enforce, reap. One thread, one poll loop, a kernel timer on
//! CLOCK_BOOTTIME. It has no idea of locks: it has two instants, which dlock can only push later, and
//! the duty that no process of the command outlives the second one, or dlock.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigEvent, SigSet, SigevNotify, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::time::TimeSpec;
use nix::sys::timer::Timer;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::{Pid, getsid, setpgid};

use super::Manners;
use super::apart;
use super::command::{Command, Plan};
use super::tree::{self, Children};
use super::wire::{Link, Order, Report};
use crate::clock::{self, Instant};
use crate::config::Leftovers;
use crate::mutant::{self, Mutant};
use crate::report::Event;

/// How far the command has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    /// There is no word to start yet.
    Waiting,
    Running,
    /// The first signal is out; SIGKILL follows at this instant, or earlier if the lease ends.
    Ending(Instant),
    /// Nothing of it is left, or what is left is left on purpose.
    Over,
}

struct Watch {
    link: Link,
    manners: Manners,
    timer: TimerFd,
    children: SignalFd,
    command: Command,
    stage: Stage,
    /// First signal and SIGKILL, as far as dlock has pushed them.
    term: Instant,
    kill: Instant,
    /// The command's own process has ended, or never was; its wait status, if it had one.
    ended: bool,
    status: Option<i32>,
    /// There may be more dead than were collected.
    unreaped: bool,
    leftovers: usize,
    /// Where dlock and the command are, and others may be.
    session: Option<Pid>,
    /// Keep the lock held for as long as this process lives, whatever becomes of dlock.
    descriptors: Vec<OwnedFd>,
}

/// Runs as the guardian until it is not needed any more. There is nobody to return an error to: what goes
/// wrong here ends the command, and dlock sees the link close.
pub fn watch(link: Link, plan: &Plan, manners: Manners) {
    // Out of reach of whatever is sent to dlock's process group, a SIGKILL above all.
    let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
    // `pkill -9 dlock` must not take away the one that cleans up after it.
    let _ = nix::sys::prctl::set_name(c"guardian");
    // Somebody may have stopped us: without dlock, we are needed.
    let _ = nix::sys::prctl::set_pdeathsig(Signal::SIGCONT);
    if let Ok(mut watch) = Watch::begin(link, plan, manners) {
        if watch.guard().is_err() {
            tree::end_all(watch.session, |_, _| ());
        }
        watch.let_go();
    }
}

impl Watch {
    fn begin(link: Link, plan: &Plan, manners: Manners) -> Result<Watch> {
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None)?;
        tree::adopt_orphans()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let children = SignalFd::with_flags(&SigSet::from(Signal::SIGCHLD), flags)?;
        let timer = TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC)?;
        let command = Command::new(plan)?;
        Ok(Watch {
            link,
            manners,
            timer,
            children,
            command,
            stage: Stage::Waiting,
            term: Instant::NEVER,
            kill: Instant::NEVER,
            ended: false,
            status: None,
            unreaped: false,
            leftovers: 0,
            session: getsid(None).ok(),
            descriptors: Vec::new(),
        })
    }

    fn guard(&mut self) -> Result<()> {
        loop {
            self.arm()?;
            let spoken_to = self.sleep()?;
            while let Ok(Some(_)) = self.children.read_signal() {}
            if spoken_to {
                match self.link.receive()? {
                    Some((Order::Linger { until }, descriptors)) => {
                        self.descriptors = descriptors;
                        return self.linger(Instant::from_nanos(until));
                    }
                    Some((order, descriptors)) => self.obey(order, descriptors)?,
                    None => {
                        self.dlock_is_gone();
                        return Ok(());
                    }
                }
            }
            // First: a command that forks without end must not keep us from it.
            self.enforce();
            self.reap();
        }
    }

    /// Waits for dlock, for a child, or for the timer. Whether it was dlock.
    fn sleep(&self) -> Result<bool> {
        let [link, timer, children] = [self.link.as_fd(), self.timer.as_fd(), self.children.as_fd()];
        let mut fds = [link, timer, children].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let most = if self.unreaped { PollTimeout::ZERO } else { PollTimeout::NONE };
        match poll(&mut fds, most) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        Ok(fds[0].any().unwrap_or(false))
    }

    /// Sets the timer to the next instant at which there is something to do; setting it also clears an
    /// expiry that was acted on.
    fn arm(&self) -> Result<()> {
        let next = match self.stage {
            Stage::Waiting => Instant::NEVER,
            Stage::Running => self.term,
            Stage::Ending(at) => at.min(self.kill),
            Stage::Over => self.kill,
        };
        self.timer.set(once_at(next), TimerSetTimeFlags::TFD_TIMER_ABSTIME).context("timerfd_settime")
    }

    fn obey(&mut self, order: Order, descriptors: Vec<OwnedFd>) -> Result<()> {
        match order {
            Order::Start { variables, term, kill } => {
                self.descriptors = descriptors;
                (self.term, self.kill) = (Instant::from_nanos(term), Instant::from_nanos(kill));
                if self.term.has_passed() {
                    self.stage = Stage::Over;
                    self.report(&Report::TooLate);
                } else {
                    self.stage = Stage::Running;
                    // An exec that hangs keeps us from our duty. At the deadline we die of it, and the child of that.
                    let _ends_us = die_at(self.kill)?;
                    let started = self.command.start(&variables);
                    if let Err(errno) = started {
                        // Without a process there is no end of one to wait for.
                        self.ended = !self.command.has_process();
                        self.report(&Report::NotStarted { errno: errno as i32 });
                    }
                    apart::begin_session();
                    // When memory runs out, let it be the command's, which has not inherited this: only root may say so.
                    let _ = std::fs::write("/proc/self/oom_score_adj", "-999");
                }
            }
            Order::Extend { term, kill } => {
                self.term = self.term.max(Instant::from_nanos(term));
                self.kill = self.kill.max(Instant::from_nanos(kill));
            }
            Order::Signal(signal) => self.command.signal(signal),
            // Without a moment to heed it, a first signal could only do half of what it is for.
            Order::End { grace: 0 } if matches!(self.stage, Stage::Running | Stage::Ending(_)) => self.end_everything(),
            Order::End { grace } => self.first_signal(clock::now() + Duration::from_nanos(grace)),
            Order::Linger { .. } => {}
        }
        Ok(())
    }

    /// Collects the dead, some at a time, and sees whether it is over.
    fn reap(&mut self) {
        const AT_ONCE: usize = 64;
        self.unreaped = true;
        let mut all_dead = false;
        for _ in 0..AT_ONCE {
            match tree::next_news(libc::WUNTRACED) {
                Children::Changed(pid, status) => self.note(pid, status),
                Children::Quiet => self.unreaped = false,
                Children::None => (self.unreaped, all_dead) = (false, true),
            }
            if !self.unreaped {
                break;
            }
        }
        if !self.ended || self.stage == Stage::Over {
            return;
        }
        match self.manners.leftovers {
            _ if all_dead => self.over(),
            // Told to go, the others have as much time for it as the command itself had.
            _ if self.stage != Stage::Running => {}
            Leftovers::Kill => {
                self.leftovers = tree::living();
                self.end_everything();
            }
            Leftovers::Leave => self.over(),
            Leftovers::Wait => {}
        }
    }

    fn note(&mut self, pid: Pid, status: i32) {
        match self.command.is(pid) {
            true if libc::WIFSTOPPED(status) => self.report(&Report::Stopped),
            true => (self.ended, self.status) = (true, Some(status)),
            false => {}
        }
    }

    /// Acts on instants that have passed.
    fn enforce(&mut self) {
        if mutant::is(Mutant::NoGuardian) {
            return;
        }
        match self.stage {
            Stage::Running if self.kill.has_passed() => {
                self.report(&Report::Expired);
                self.end_everything();
            }
            Stage::Running if self.term.has_passed() => {
                self.report(&Report::Expired);
                // A renewal that comes through now is too late: the command knows that it has to go.
                self.first_signal(self.kill);
            }
            Stage::Ending(at) if at.min(self.kill).has_passed() => self.end_everything(),
            _ => {}
        }
        if self.stage == Stage::Over && self.kill.has_passed() {
            // dlock did not release in time: it is stopped, or stuck.
            self.let_go();
            self.kill = Instant::NEVER;
        }
    }

    /// To every process, not only the command's group: a shell that dies of it must not leave the real
    /// job behind. A second call can only bring the end nearer.
    fn first_signal(&mut self, kill_at: Instant) {
        match self.stage {
            Stage::Ending(earlier) => self.stage = Stage::Ending(earlier.min(kill_at)),
            Stage::Running => {
                self.stage = Stage::Ending(kill_at);
                if let Ok(signal) = Signal::try_from(self.manners.signal) {
                    self.command.signal_everything(signal);
                }
                // A stopped process would not see it.
                tree::signal_all(Signal::SIGCONT, |_| true);
            }
            Stage::Waiting | Stage::Over => {}
        }
    }

    fn end_everything(&mut self) {
        self.command.signal(Signal::SIGKILL as i32);
        let mut ended = None;
        tree::end_all(self.session, |pid, status| {
            ended = Some((pid, status)).filter(|_| self.command.is(pid)).or(ended)
        });
        if let Some((pid, status)) = ended {
            self.note(pid, status);
        }
        self.over();
    }

    fn over(&mut self) {
        self.stage = Stage::Over;
        self.report(&Report::Empty { status: self.status, leftovers: self.leftovers });
    }

    /// First the duty, then the word about it.
    fn dlock_is_gone(&mut self) {
        let orphaned = matches!(self.stage, Stage::Running | Stage::Ending(_));
        if self.stage != Stage::Over {
            self.end_everything();
        }
        self.let_go();
        if orphaned {
            self.manners.voice.tell(&self.manners.name, &Event::Orphaned);
        }
    }

    /// dlock may be gone; then nobody needs to know.
    fn report(&self, report: &Report) {
        let _ = self.link.send(report, &[]);
    }

    /// Holds on to the lock after dlock has gone.
    fn linger(&mut self, until: Instant) -> Result<()> {
        let own = [self.link.as_fd(), self.timer.as_fd(), self.children.as_fd()].map(|fd| fd.as_raw_fd());
        let kept: Vec<_> = self.descriptors.iter().map(AsRawFd::as_raw_fd).chain(own).collect();
        apart::leave(&kept)?;
        (self.manners.linger)(&self.descriptors, until);
        Ok(())
    }

    /// Unlocks explicitly: a stopped dlock still has the same descriptors open.
    fn let_go(&mut self) {
        for descriptor in self.descriptors.drain(..) {
            let _ = File::from(descriptor).unlock();
        }
    }
}

/// Has the kernel kill this process then, unless what is returned is dropped before.
pub fn die_at(instant: Instant) -> Result<Timer> {
    let kill = SigevNotify::SigevSignal { signal: Signal::SIGKILL, si_value: 0 };
    let mut timer = Timer::new(nix::time::ClockId::CLOCK_BOOTTIME, SigEvent::new(kill)).context("timer_create")?;
    timer.set(once_at(instant), TimerSetTimeFlags::TFD_TIMER_ABSTIME).context("timer_settime")?;
    Ok(timer)
}

/// An instant of zero would disarm a timer instead of firing it.
fn once_at(instant: Instant) -> Expiration {
    Expiration::OneShot(TimeSpec::from_duration(Duration::from_nanos(instant.as_nanos().max(1))))
}
