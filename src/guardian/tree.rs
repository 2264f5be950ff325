//! Every process below one process, the root of the tree: found through /proc, signalled, and ended until the kernel
//! says that there is none.
//!
//! A process does not leave the tree: whoever made itself the subreaper inherits every orphan, also those that called
//! setsid(2) and forked twice. (The one exception is out of reach: a process that enters another pid namespace, as with
//! `nsenter -p`, and daemonises there becomes a child of that namespace's init.)
//!
//! A walk can miss a process that is being born, so ending is repeated until waitpid(2) answers ECHILD. That answer is
//! the proof of death. What a walk cannot read it does not take for "no children".
//!
//! All that is needed at the end is opened at the beginning: /proc may be unmounted, and the limit of open files may be
//! lowered meanwhile. The root's own list of children needs no new descriptor, and is enough by itself: when a process
//! dies, its children come to the root, and so into this list. Going down further only saves time.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::libc;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::stat::{Mode, fstatat};
use nix::unistd::{Pid, getpgid, getpid};

use crate::clock::{self, Instant};
use crate::exit::Fault;

/// One walk over the tree.
#[derive(Debug, Default)]
pub struct Sweep {
    pub found: usize,
    /// Found for the first time.
    pub fresh: usize,
    /// May not be signalled by us.
    pub refused: Vec<Pid>,
}

impl Sweep {
    /// Says how many of these are new. The process group that one leads dies with it: in one step, so that nothing is
    /// born into it meanwhile.
    fn kill(&mut self, pids: &[Pid], known: &mut HashSet<Pid>) -> usize {
        let mut fresh = 0;
        for &pid in pids {
            let _ = killpg(pid, Signal::SIGKILL);
            if kill(pid, Signal::SIGKILL) == Err(Errno::EPERM) {
                self.refused.push(pid);
            }
            fresh += usize::from(known.insert(pid));
        }
        self.fresh += fresh;
        fresh
    }
}

#[derive(Debug)]
pub struct Tree {
    proc: Proc,
    top: File,
    /// Children of the root that are none of the command's: a job that was started before `exec dlock`.
    spared: HashSet<Pid>,
}

impl Tree {
    pub fn below(root: Pid, proc: &Proc) -> Result<Tree> {
        let top = proc.children_list(root).map_err(|_| not_shown())?;
        Ok(Tree { proc: proc.clone(), top, spared: HashSet::new() })
    }

    pub fn below_us(proc: &Proc) -> Result<Tree> {
        Tree::below(getpid(), proc)
    }

    /// Leaves those alone that are there now.
    pub fn sparing_present(mut self) -> Result<Tree> {
        self.spared = self.top()?.into_iter().collect();
        Ok(self)
    }

    fn top(&self) -> nix::Result<Vec<Pid>> {
        let mut pids = read_pids(&self.top)?;
        pids.retain(|pid| !self.spared.contains(pid));
        Ok(pids)
    }

    /// All processes below the root that can be found, dead ones that nobody has reaped included.
    pub fn descendants(&self) -> Vec<Pid> {
        self.descendants_while(|| true)
    }

    fn descendants_while(&self, there_is_time: impl Fn() -> bool) -> Vec<Pid> {
        let mut found = self.top().unwrap_or_default();
        let mut looked_at = 0;
        while let Some(&parent) = found.get(looked_at).filter(|_| there_is_time()) {
            found.extend(self.proc.children(parent).unwrap_or_default());
            looked_at += 1;
        }
        found
    }

    /// Sends a signal to every descendant that `which` selects. All are found before the first is signalled: one that
    /// dies of it would hide its children from the search. Stops at `until`, when something else is more urgent.
    pub fn signal_selected(&self, signal: Signal, until: Instant, which: impl Fn(Pid) -> bool) {
        for pid in self.descendants_while(|| !until.has_passed()).into_iter().filter(|pid| which(*pid)) {
            let _ = kill(pid, signal);
        }
    }

    /// Sends these signals, one after the other, to every descendant, and first to `group`, whose members get them in one
    /// step. Stops at `until`.
    pub fn signal_all(&self, signals: &[Signal], group: Option<Pid>, until: Instant) {
        let elsewhere = |pid: &Pid| group.is_none_or(|group| getpgid(Some(*pid)) != Ok(group));
        let others: Vec<Pid> = self.descendants_while(|| !until.has_passed()).into_iter().filter(elsewhere).collect();
        for signal in signals {
            let _ = group.map(|group| killpg(group, *signal));
            for pid in others.iter().take_while(|_| !until.has_passed()) {
                let _ = kill(*pid, *signal);
            }
        }
    }

    /// How many descendants live, not counting those that only wait to be reaped.
    pub fn living(&self) -> usize {
        self.descendants().into_iter().filter(|pid| !self.proc.is_zombie(*pid)).count()
    }

    /// What one walk takes now, and whom it finds. Ends when it has taken `too_long`.
    pub fn measure(&self, too_long: impl Fn(Duration) -> bool) -> (Duration, Vec<Pid>) {
        let began = clock::now();
        let found = self.descendants_while(|| !too_long(began.elapsed()));
        (began.elapsed(), found)
    }

    /// One round of SIGKILL. First the root's children, again and again while there are new ones, since that costs next
    /// to nothing: daemons are among them, and the children of whoever dies become so. Then whoever is further down, and
    /// has to be searched for. Each process is killed as soon as it is found, before it can go on forking.
    pub fn kill_all(&self, known: &mut HashSet<Pid>) -> Sweep {
        const AGAIN: usize = 16;
        let mut sweep = Sweep::default();
        let mut top = Vec::new();
        for _ in 0..AGAIN {
            top = self.top().unwrap_or_default();
            if sweep.kill(&top, known) == 0 {
                break;
            }
        }
        sweep.found = top.len();
        let mut families: Vec<Pid> = top;
        while let Some(parent) = families.pop() {
            let family = self.proc.children(parent).unwrap_or_default();
            sweep.kill(&family, known);
            sweep.found += family.len();
            families.extend(family);
        }
        sweep
    }

    /// Ends every descendant, which are all ours to reap, and returns only when there is none. `reaped` sees each direct
    /// child's status; `refused` hears of processes that we may not signal, which are waited for.
    pub fn end_all(&mut self, mut reaped: impl FnMut(Pid, i32), mut refused: impl FnMut(&[(String, i32)])) {
        const SHORTEST: Duration = Duration::from_micros(200);
        // The dead count against the user's limit of processes for as long as they are not reaped, so a fork bomb comes
        // to a halt. Without such a limit they must not pile up for ever.
        const ROUNDS: usize = 8;
        let mut known = HashSet::new();
        let mut told = HashSet::new();
        let mut pause = SHORTEST;
        loop {
            let mut sweep = self.kill_all(&mut known);
            for _ in 1..ROUNDS {
                if sweep.fresh == 0 {
                    break;
                }
                sweep = self.kill_all(&mut known);
            }
            sweep.refused.retain(|pid| told.insert(*pid));
            if !sweep.refused.is_empty() {
                let named: Vec<_> = sweep.refused.iter().map(|pid| (self.proc.name(*pid), pid.as_raw())).collect();
                refused(&named);
            }
            // No more dead are collected than there were found, before the living are looked for again.
            let mut quiet = false;
            for _ in 0..=sweep.found {
                match next_news(0) {
                    Children::Changed(pid, status) => {
                        known.remove(&pid);
                        self.spared.remove(&pid);
                        reaped(pid, status);
                    }
                    Children::None => return,
                    Children::Quiet => {
                        quiet = true;
                        break;
                    }
                }
                pause = SHORTEST;
            }
            if quiet && !self.spared.is_empty() && self.top().is_ok_and(|left| left.is_empty()) {
                return;
            }
            if quiet {
                std::thread::sleep(pause);
                // A process that cannot be killed (setuid, or in the depths of a dead disk) is waited for.
                pause = (pause * 2).min(Duration::from_millis(20));
            }
        }
    }
}

/// What waitpid(2) says about our children.
pub enum Children {
    /// This one has ended, or stopped, with this wait status.
    Changed(Pid, i32),
    /// There are some, and there is nothing new about them.
    Quiet,
    None,
}

/// Asks for the next news of a child. nix's own function takes a death by a real-time signal for an error, although the
/// child is reaped.
pub fn next_news(flags: i32) -> Children {
    loop {
        let mut status = 0;
        // SAFETY: writes a status where there is room for one.
        let answer = unsafe { libc::waitpid(-1, &raw mut status, flags | libc::WNOHANG) };
        match answer {
            0 => return Children::Quiet,
            pid if pid > 0 => return Children::Changed(Pid::from_raw(pid), status),
            _ => match Errno::last() {
                Errno::ECHILD => return Children::None,
                Errno::EINTR => {}
                _ => return Children::Quiet,
            },
        }
    }
}

fn not_shown() -> anyhow::Error {
    Fault::Internal.because(
        "/proc does not show the processes of this pid namespace, so dlock could not find and end those of a command; \
         mount it: mount -t proc proc /proc (as unshare --mount-proc does)",
    )
}

/// The directory /proc as it was at the start, whatever becomes of the mount.
#[derive(Clone, Debug)]
pub struct Proc(Arc<OwnedFd>);

impl Proc {
    /// Refuses a /proc that is missing, or that of another pid namespace.
    pub fn open() -> Result<Proc> {
        let open = || -> nix::Result<Proc> {
            let root =
                nix::fcntl::open("/proc", OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
            let myself = readlinkat(&root, "self")?;
            let shows_us = myself.to_str() == Some(&getpid().to_string());
            if shows_us { Ok(Proc(Arc::new(root))) } else { Err(Errno::ENOENT) }
        };
        open().map_err(|_| not_shown())
    }

    fn open_file(&self, path: &str) -> nix::Result<File> {
        let fd = openat(self.0.as_fd(), path, OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(File::from(fd))
    }

    /// The list of a process's children that its main thread has, or has inherited.
    pub fn children_list(&self, pid: Pid) -> nix::Result<File> {
        self.open_file(&format!("{pid}/task/{pid}/children"))
    }

    /// The children of a process, dead ones that nobody has reaped included. An error means: not known.
    pub fn children(&self, parent: Pid) -> nix::Result<Vec<Pid>> {
        let found = self.children_of_threads(parent);
        // It has ended meanwhile: its children have gone to the root.
        if matches!(found, Err(Errno::ENOENT | Errno::ESRCH)) { Ok(Vec::new()) } else { found }
    }

    fn children_of_threads(&self, parent: Pid) -> nix::Result<Vec<Pid>> {
        const OF_ONE_THREAD: u64 = 3;
        let tasks = format!("{parent}/task");
        if fstatat(self.0.as_fd(), tasks.as_str(), AtFlags::empty())?.st_nlink == OF_ONE_THREAD {
            return read_pids(&self.children_list(parent)?);
        }
        let mut found = Vec::new();
        let directory = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        for thread in Dir::openat(self.0.as_fd(), tasks.as_str(), directory, Mode::empty())?.iter() {
            let thread = thread?;
            let Some(thread) = thread.file_name().to_str().ok().filter(|name| !name.starts_with('.')) else { continue };
            match self.open_file(&format!("{tasks}/{thread}/children")) {
                Ok(list) => found.extend(read_pids(&list)?),
                Err(Errno::ENOENT | Errno::ESRCH) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    pub fn is_zombie(&self, pid: Pid) -> bool {
        let mut stat = String::new();
        let read = self.open_file(&format!("{pid}/stat")).map(|mut file| file.read_to_string(&mut stat));
        match read {
            // `pid (name) S …`, where the name may hold anything, parentheses included.
            Ok(_) => stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with(['Z', 'X'])),
            Err(error) => matches!(error, Errno::ENOENT | Errno::ESRCH),
        }
    }

    /// What `ps` calls it, for messages.
    pub fn name(&self, pid: Pid) -> String {
        let mut name = String::new();
        let _ = self.open_file(&format!("{pid}/comm")).map(|mut file| file.read_to_string(&mut name));
        name.trim_end().to_owned()
    }
}

/// Reads a list of the kernel from its beginning.
pub fn read_pids(mut list: &File) -> nix::Result<Vec<Pid>> {
    let mut text = String::new();
    let read = list.rewind().and_then(|()| list.read_to_string(&mut text));
    read.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
    Ok(text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).map(Pid::from_raw).collect())
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use nix::sys::prctl::set_child_subreaper;

    use super::super::tests::alone;
    use super::*;

    fn shell(script: &str) -> Child {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    fn pid(child: &Child) -> Pid {
        Pid::from_raw(child.id().cast_signed())
    }

    fn until(what: &str, mut is_so: impl FnMut() -> bool) {
        let began = clock::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(60), "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A shell, another one below it with a child, all deaf to SIGTERM, and two daemons, of which one is an orphan.
    const FAMILY: &str = "trap '' TERM HUP; sh -c 'sleep 300; :' & setsid sleep 301 & (setsid sleep 302 &); wait";

    fn is_complete(tree: &Tree) -> bool {
        let mut names: Vec<_> = tree.descendants().into_iter().map(|pid| tree.proc.name(pid)).collect();
        names.sort();
        names == ["sh", "sh", "sleep", "sleep", "sleep"]
    }

    #[test]
    fn every_process_is_found_and_ended_daemons_and_deaf_ones_included() {
        alone("tree::tests::every_process_is_found_and_ended_daemons_and_deaf_ones_included", || {
            set_child_subreaper(true).unwrap();
            let mut tree = Tree::below_us(&Proc::open().unwrap()).unwrap();
            assert!(tree.descendants().is_empty());
            let first = pid(&shell(FAMILY));
            until("the family to be complete", || is_complete(&tree));
            assert_eq!((tree.living(), tree.measure(|_| false).1.len()), (5, 5));
            let children = tree.top().unwrap();
            assert!(children.len() == 2 && children.contains(&first), "the orphan came to us");
            assert!(tree.measure(|_| true).1.len() < 5, "a walk that takes too long ends");
            let mut seen = Vec::new();
            tree.end_all(|pid, status| seen.push((pid, status)), |refused| panic!("{refused:?}"));
            assert!(matches!(next_news(0), Children::None));
            assert!(tree.descendants().is_empty());
            assert!(children.into_iter().all(|child| seen.contains(&(child, libc::SIGKILL))), "{seen:?}");
        });
    }

    #[test]
    fn who_was_there_before_is_left_alone() {
        alone("tree::tests::who_was_there_before_is_left_alone", || {
            set_child_subreaper(true).unwrap();
            let proc = Proc::open().unwrap();
            let mut before = shell("sleep 300; :");
            until("its child", || Tree::below(pid(&before), &proc).unwrap().living() == 1);
            let mut tree = Tree::below_us(&proc).unwrap().sparing_present().unwrap();
            let after = pid(&shell(FAMILY));
            until("the family to be complete", || is_complete(&tree));
            let mut seen = Vec::new();
            tree.end_all(|pid, _| seen.push(pid), |refused| panic!("{refused:?}"));
            assert!(seen.contains(&after) && !seen.contains(&pid(&before)), "{seen:?}");
            assert!(before.try_wait().unwrap().is_none());
            assert_eq!(Tree::below(pid(&before), &proc).unwrap().living(), 1);
            Tree::below_us(&proc).unwrap().end_all(|_, _| (), |_| ());
            assert!(matches!(next_news(0), Children::None));
        });
    }

    #[test]
    fn signals_reach_whom_they_are_meant_for() {
        alone("tree::tests::signals_reach_whom_they_are_meant_for", || {
            set_child_subreaper(true).unwrap();
            let mut tree = Tree::below_us(&Proc::open().unwrap()).unwrap();
            let (mut chosen, mut other) = (shell("exec sleep 300"), shell("exec sleep 301"));
            let died_of = |child: &mut Child| {
                use std::os::unix::process::ExitStatusExt;
                child.wait().unwrap().signal()
            };
            tree.signal_selected(Signal::SIGUSR1, Instant::NEVER, |found| found == pid(&chosen));
            assert_eq!(died_of(&mut chosen), Some(libc::SIGUSR1));
            assert!(other.try_wait().unwrap().is_none());
            // One that is stopped gets its signal with the SIGCONT behind it; nobody gets any once the time is up.
            kill(pid(&other), Signal::SIGSTOP).unwrap();
            tree.signal_all(&[Signal::SIGKILL], None, Instant::from_nanos(0));
            assert!(other.try_wait().unwrap().is_none());
            tree.signal_all(&[Signal::SIGTERM, Signal::SIGCONT], None, Instant::NEVER);
            assert_eq!(died_of(&mut other), Some(libc::SIGTERM));
            tree.end_all(|_, _| (), |_| ());
        });
    }

    #[test]
    fn a_dead_process_that_nobody_has_reaped_does_not_count_as_living() {
        alone("tree::tests::a_dead_process_that_nobody_has_reaped_does_not_count_as_living", || {
            let tree = Tree::below_us(&Proc::open().unwrap()).unwrap();
            let mut child = shell("exit 0");
            until("it to be dead", || tree.living() == 0);
            assert_eq!(tree.descendants(), [pid(&child)]);
            child.wait().unwrap();
            assert!(tree.descendants().is_empty());
        });
    }
}
