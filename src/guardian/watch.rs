//! The guardian process: start, enforce, reap. One thread, one poll loop, a kernel timer on
//! CLOCK_BOOTTIME. It has no idea of locks: it has deadlines, which dlock can only push later, and
//! the duty that no process of the command outlives the last one, or dlock.
//!
//! It also measures itself (see `stage`): where it is slow, SIGKILL comes so much earlier.

use std::collections::{BTreeSet, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, getpgid, getppid, setpgid, setsid};

use super::GuardianOptions;
use super::apart;
use super::command::{Command, Leaf};
use super::stage::{Alarm, Measuring, Scheduling, Stage, Step, raise_priority};
use super::tree::{Children, Proc, Tree, next_news};
use super::wire::{GuardianEvent, Link, Order};
use crate::clock::{self, Instant};
use crate::config::Leftovers;
use crate::lock::Deadlines;
use crate::report::Event;

struct Watch {
    link: Link,
    /// What dlock could not be told yet, because it is stopped.
    unsent: VecDeque<GuardianEvent>,
    options: GuardianOptions,
    alarm: Alarm,
    /// SIGCHLD, and SIGCONT.
    signals: SignalFd,
    tree: Tree,
    /// The command's own cgroup, and its place.
    leaf: Option<Leaf>,
    place: Option<PathBuf>,
    command: Command,
    stage: Stage,
    /// As far as dlock has pushed them.
    deadlines: Deadlines,
    /// When they were pushed last.
    extended: Instant,
    measuring: Measuring,
    /// It has a session of its own, and comes last when memory runs out.
    settled: bool,
    /// The command's own process has ended, or never was; its wait status, if it had one.
    ended: bool,
    status: Option<i32>,
    /// There may be more dead than were collected.
    unreaped: bool,
    leftovers: usize,
    /// Keep the lock held for as long as this process lives, whatever becomes of dlock.
    descriptors: Vec<OwnedFd>,
}

/// A command that is over by then is neither measured nor prepared for: that would take the processor from it.
const SHORT_RUN: Duration = Duration::from_millis(20);

/// What woke the guardian.
struct Woken {
    by_dlock: bool,
    /// How late it is, if the timer woke it.
    lateness: Option<Duration>,
}

/// What dlock has said.
enum Heard {
    Orders,
    Linger {
        until: Instant,
    },
    /// dlock is gone.
    End,
}

/// Runs as the guardian until it is not needed any more. There is nobody to return an error to: what goes
/// wrong here ends the command, and dlock sees the link close.
pub fn watch(link: Link, proc: &Proc, place: Option<PathBuf>, command: Command, options: GuardianOptions) {
    // Out of reach of whatever is sent to dlock's process group, a SIGKILL above all.
    let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
    // `pkill -9 dlock` must not take away the one that cleans up after it.
    let _ = prctl::set_name(c"guardian");
    // If somebody has stopped us, the death of dlock wakes us.
    let _ = prctl::set_pdeathsig(Signal::SIGCONT);
    if let Ok(mut watch) = Watch::begin(link, proc, place, command, options) {
        if watch.guard().is_err() {
            watch.tree.end_all(|_, _| (), |_| ());
        }
        watch.let_go();
    }
}

impl Watch {
    fn begin(
        link: Link,
        proc: &Proc,
        place: Option<PathBuf>,
        mut command: Command,
        options: GuardianOptions,
    ) -> Result<Watch> {
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&SigSet::all()), None)?;
        prctl::set_child_subreaper(true)?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&[Signal::SIGCHLD, Signal::SIGCONT].into_iter().collect(), flags)?;
        let tree = Tree::below_us(proc)?;
        let (alarm, leaf) = (Alarm::new()?, place.as_deref().and_then(Leaf::make));
        // Last, so that the lock is acquired meanwhile.
        (_, command.scheduling) = raise_priority();
        Ok(Watch {
            link,
            unsent: VecDeque::new(),
            options,
            alarm,
            signals,
            tree,
            leaf,
            place,
            command,
            stage: Stage::Waiting,
            deadlines: Deadlines::NEVER,
            extended: clock::now(),
            measuring: Measuring::new(),
            settled: false,
            ended: false,
            status: None,
            unreaped: false,
            leftovers: 0,
            descriptors: Vec::new(),
        })
    }

    fn guard(&mut self) -> Result<()> {
        loop {
            let measure_at = if self.stage == Stage::Running { self.measuring.due_at } else { Instant::NEVER };
            self.alarm.set(self.stage.due_at(self.deadlines, self.measuring.pace), measure_at)?;
            let woken = self.sleep()?;
            let was_stopped = self.read_signals();
            let mut forwarded = BTreeSet::new();
            if woken.by_dlock {
                match self.hear_dlock(was_stopped, &mut forwarded)? {
                    Heard::Orders => {}
                    Heard::Linger { until } => return self.linger(until),
                    Heard::End => {
                        self.dlock_is_gone();
                        return Ok(());
                    }
                }
            }
            if let Some(lateness) = woken.lateness.filter(|_| !was_stopped && self.measuring.due_at.has_passed()) {
                self.measure(lateness);
            }
            // First: a command that forks without end must not keep us from it.
            self.enforce();
            // Only now: to find whom to signal may take long.
            for signal in forwarded {
                self.command.signal(signal, &self.tree, self.due().kill_at);
            }
            self.reap();
            self.flush();
        }
    }

    /// Reads all that dlock has said before anything is enforced: a later deadline may be among it, or the end. Signals
    /// are collected, each once: there may be hundreds.
    fn hear_dlock(&mut self, was_stopped: bool, forwarded: &mut BTreeSet<i32>) -> Result<Heard> {
        // More than fit into the socket at once. A flood of orders must not delay the deadlines.
        const MOST: usize = 4096;
        for _ in 0..MOST {
            match self.link.receive()? {
                Some((Order::Linger { until }, descriptors)) => {
                    self.descriptors = descriptors;
                    return Ok(Heard::Linger { until });
                }
                Some((Order::Signal(signal), _)) => drop(forwarded.insert(signal)),
                Some((order, descriptors)) => self.obey(order, descriptors, was_stopped),
                None => return Ok(Heard::End),
            }
            if !self.link.has_more() {
                break;
            }
        }
        Ok(Heard::Orders)
    }

    /// Waits for dlock, for a child, or for the timer.
    fn sleep(&self) -> Result<Woken> {
        // A command whose orphans die faster than they are reaped must not keep a real-time process busy all the time.
        const REAP_AGAIN: u8 = 1;
        let speak = if self.unsent.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
        let (listen, most) = match self.unreaped {
            true => (PollFlags::empty(), PollTimeout::from(REAP_AGAIN)),
            false => (PollFlags::POLLIN, PollTimeout::NONE),
        };
        let mut fds = [
            PollFd::new(self.link.as_fd(), speak),
            PollFd::new(self.alarm.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), listen),
        ];
        match poll(&mut fds, most) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        let by_dlock = fds[0].revents().is_some_and(|events| events.intersects(!PollFlags::POLLOUT));
        let lateness = fds[1].any().unwrap_or(false).then(|| self.alarm.lateness());
        Ok(Woken { by_dlock, lateness })
    }

    /// Whether somebody had stopped us: then we are late, but not slow. (Children are reaped in any case.)
    fn read_signals(&self) -> bool {
        let mut was_stopped = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            was_stopped |= signal.ssi_signo == Signal::SIGCONT as u32;
        }
        was_stopped
    }

    /// The deadlines for a guardian as slow as this one.
    fn due(&self) -> Deadlines {
        self.deadlines.with_margin(self.measuring.pace.margin())
    }

    fn obey(&mut self, order: Order, descriptors: Vec<OwnedFd>, was_stopped: bool) {
        match order {
            Order::Start { variables, deadlines } => {
                self.descriptors = descriptors;
                self.deadlines = deadlines;
                if self.due().signal_at.has_passed() {
                    self.stage = Stage::Over;
                    self.report(GuardianEvent::TooLate);
                } else {
                    self.stage = Stage::Running;
                    self.extended = clock::now();
                    self.measuring.due_at = self.extended + SHORT_RUN;
                    if let Err(errno) = self.command.start(variables, &mut self.leaf) {
                        // Without a process there is no end of one to wait for.
                        self.ended = true;
                        self.report(GuardianEvent::NotStarted { errno: errno as i32 });
                    }
                }
            }
            Order::Extend { deadlines, sent } => {
                self.deadlines = self.deadlines.later_of(deadlines);
                self.extended = clock::now();
                self.measure(if was_stopped { Duration::ZERO } else { sent.elapsed() });
            }
            // Nobody could heed a first signal: SIGKILL at once.
            Order::End { grace: Duration::ZERO } if matches!(self.stage, Stage::Running | Stage::Ending(_)) => {
                self.end_everything();
            }
            Order::End { grace } => self.first_signal(clock::now() + grace),
            Order::Signal(_) | Order::Linger { .. } => {}
        }
    }

    fn measure(&mut self, lateness: Duration) {
        if self.stage != Stage::Running {
            return;
        }
        if !std::mem::replace(&mut self.settled, true) {
            settle();
        }
        if self.measuring.measure(lateness, self.deadlines, &self.tree, self.leaf.as_ref()) {
            self.report(GuardianEvent::Pace(self.measuring.pace));
        }
    }

    /// Whether our own slowness ends the command: the margin that we need has taken half of the time between the last
    /// renewal and the first signal.
    fn has_outgrown_lease(&self) -> bool {
        let (all, left) = (self.deadlines.signal_at, self.due().signal_at);
        left.since(self.extended) < all.since(self.extended) / 2
    }

    /// Collects the dead, some at a time, and sees whether it is over.
    fn reap(&mut self) {
        const AT_ONCE: usize = 64;
        self.unreaped = true;
        let mut all_dead = false;
        for _ in 0..AT_ONCE {
            match next_news(libc::WUNTRACED) {
                Children::Changed(pid, status) => self.note(pid, status),
                Children::Quiet => self.unreaped = false,
                Children::None => (self.unreaped, all_dead) = (false, true),
            }
            if !self.unreaped {
                break;
            }
        }
        self.hear_of_exec();
        if !self.ended || self.stage == Stage::Over {
            return;
        }
        match self.options.leftovers {
            _ if all_dead => self.over(),
            // Once the command is being ended, its other processes get as much time as it had.
            _ if self.stage != Stage::Running => {}
            Leftovers::Kill => {
                self.leftovers = self.tree.living();
                self.end_everything();
            }
            Leftovers::Leave => self.over(),
            Leftovers::Wait => {}
        }
    }

    fn note(&mut self, pid: Pid, status: i32) {
        match self.command.is(pid) {
            true if libc::WIFSTOPPED(status) => self.report(GuardianEvent::Stopped),
            true => {
                (self.ended, self.status) = (true, Some(status));
                self.command.note_reaped();
            }
            false => {}
        }
    }

    fn hear_of_exec(&mut self) {
        if let Some(Err(errno)) = self.command.exec_result() {
            self.report(GuardianEvent::NotStarted { errno });
        }
    }

    /// Acts on instants that have passed.
    fn enforce(&mut self) {
        let step = self.stage.step(self.deadlines, self.measuring.pace, clock::now());
        if self.stage == Stage::Running && step != Step::Wait {
            let outgrown = self.has_outgrown_lease();
            self.report(if outgrown { GuardianEvent::Outgrown(self.measuring.pace) } else { GuardianEvent::Expired });
        }
        match step {
            Step::Wait => {}
            Step::Signal { kill_at } => self.first_signal(kill_at),
            Step::Kill => self.end_everything(),
            Step::LetGo => {
                self.let_go();
                self.deadlines = Deadlines::NEVER;
            }
        }
    }

    /// To every process, not only the command's group: a shell that dies of it must not leave the real
    /// job behind.
    fn first_signal(&mut self, kill_at: Instant) {
        let before = self.stage;
        self.stage = before.ending_by(kill_at);
        if let (Stage::Running, Ok(signal)) = (before, Signal::try_from(self.options.signal)) {
            self.command.signal_everything(signal, &self.tree, kill_at.min(self.due().kill_at));
        }
    }

    fn end_everything(&mut self) {
        self.command.kill_own_group();
        let _ = self.leaf.as_ref().map(Leaf::kill);
        let Watch { tree, command, link, .. } = self;
        let mut ended = None;
        tree.end_all(
            |pid, status| ended = Some((pid, status)).filter(|_| command.is(pid)).or(ended),
            |refused| {
                let _ = link.send(&GuardianEvent::Refused { processes: refused.to_vec() }, &[]);
            },
        );
        if let Some((pid, status)) = ended {
            self.note(pid, status);
        }
        self.hear_of_exec();
        self.over();
    }

    fn over(&mut self) {
        self.stage = Stage::Over;
        self.report(GuardianEvent::Empty { status: self.status, leftovers: self.leftovers });
        // Nothing is left that would have to be killed in time: what we still do must not keep others waiting.
        let _ = self.command.scheduling.as_ref().map(Scheduling::apply);
        let _ = self.place.as_deref().map(Leaf::remove);
    }

    /// Ends the command first, and tells about it then.
    fn dlock_is_gone(&mut self) {
        let orphaned = matches!(self.stage, Stage::Running | Stage::Ending(_));
        if self.stage != Stage::Over {
            self.end_everything();
        }
        self.let_go();
        let _ = self.place.as_deref().map(Leaf::remove);
        if orphaned {
            self.options.voice.tell(&self.options.name, &Event::orphaned());
        }
    }

    /// Tells dlock, now or when it listens again. What is only of interest while it is new is not kept twice.
    fn report(&mut self, event: GuardianEvent) {
        self.unsent.retain(|unsent| match event {
            GuardianEvent::Stopped => !matches!(unsent, GuardianEvent::Stopped),
            GuardianEvent::Pace(_) => !matches!(unsent, GuardianEvent::Pace(_)),
            _ => true,
        });
        self.unsent.push_back(event);
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(event) = self.unsent.front() {
            match self.link.send(event, &[]) {
                Err(Errno::EAGAIN) => return,
                // Without dlock nobody needs to know.
                Ok(()) | Err(_) => drop(self.unsent.pop_front()),
            }
        }
    }

    /// Holds on to the lock after dlock has gone.
    fn linger(&mut self, until: Instant) -> Result<()> {
        let own = [self.link.as_fd(), self.alarm.as_fd(), self.signals.as_fd()].map(|fd| fd.as_raw_fd());
        let kept: Vec<_> = self.descriptors.iter().map(AsRawFd::as_raw_fd).chain(own).collect();
        apart::leave(&kept)?;
        (self.options.linger)(&self.descriptors, until);
        Ok(())
    }

    /// Unlocks explicitly: a stopped dlock still has the same descriptors open.
    fn let_go(&mut self) {
        for descriptor in self.descriptors.drain(..) {
            let _ = File::from(descriptor).unlock();
        }
    }
}

/// Prepares for a command that lasts.
fn settle() {
    // The processor is shared out among sessions, where the kernel knows autogroups: those of a command must not leave us
    // without any. With a terminal it stays as it is: job control cares about sessions.
    if File::open("/dev/tty").is_err() {
        // The leader of a process group cannot begin a session, so we join dlock's group first.
        let _ = getpgid(Some(getppid())).and_then(|group| setpgid(Pid::from_raw(0), group));
        let _ = setsid();
    }
    // When memory runs out, the kernel should kill the command rather than us. Only root may ask for that; the command
    // has not inherited it.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-999");
}
