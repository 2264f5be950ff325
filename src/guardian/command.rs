//! The command's process, from fork to exec, and the cgroup it is born into. Everything that can be made ready before the
//! grant is, so that next to no time passes between the grant and the command.

use std::collections::HashSet;
use std::ffi::{CStr, CString, OsString};
use std::fs::{DirBuilder, File};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::libc;
use nix::sys::prctl;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, killpg, sigaction, sigprocmask};
use nix::sys::stat::Mode;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use nix::unistd::{ForkResult, Pid, execvpe, fork, geteuid, getpgid, getpid, getppid, pipe2, setpgid};

use super::stage::Scheduling;
use super::tree::{Tree, read_pids};
use crate::clock::{self, Instant};

/// What is needed to run the command as if dlock were not there.
#[derive(Clone, Debug)]
pub struct Plan {
    pub argv: Vec<OsString>,
    /// The signal mask dlock was started with.
    pub mask: SigSet,
    /// The process group to run in; `None`: one of its own. On a terminal whose foreground group we are
    /// in, the command joins that group: Ctrl-C, Ctrl-Z and `fg` then reach it exactly as if it had been
    /// typed without dlock, and a pipeline it is part of keeps the terminal too.
    pub group: Option<Pid>,
    /// Whether dlock was started with SIGCHLD ignored, which it cannot afford itself.
    pub ignores_children: bool,
}

/// What is to be run, and what runs.
#[derive(Debug)]
pub struct Command {
    plan: Plan,
    argv: Vec<CString>,
    environment: Vec<CString>,
    /// How dlock was scheduled, if the guardian is not.
    pub scheduling: Option<Scheduling>,
    /// Closed by execve(2), or told why that failed.
    exec_result: Option<File>,
    exec_failed: Option<OwnedFd>,
    pid: Option<Pid>,
    /// Its first process was reaped: the kernel may give that process id, which is also the group's, to another process.
    reaped: bool,
}

impl Command {
    /// Called before the guardian is forked, so that the guardian finds argv and environment ready in its memory.
    pub fn new(plan: Plan) -> Result<Command> {
        let argv = plan.argv.iter().map(|word| CString::new(word.as_bytes())).collect::<Result<_, _>>();
        let whole = |(key, value): (OsString, OsString)| [key.as_bytes(), b"=", value.as_bytes(), b"\0"].concat();
        let environment =
            std::env::vars_os().map(whole).filter_map(|line| CString::from_vec_with_nul(line).ok()).collect();
        let argv = argv.context("an argument with a NUL in it")?;
        let (result, failed) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).context("pipe")?;
        let (exec_result, exec_failed) = (Some(File::from(result)), Some(failed));
        let scheduling = None;
        Ok(Command { plan, argv, environment, scheduling, exec_result, exec_failed, pid: None, reaped: false })
    }

    /// Starts the command. Whether it could be executed is heard by [`exec_result`](Self::exec_result): a program on a
    /// dead disk must not hold us up. An error: there is not even a process.
    pub fn start(&mut self, variables: Vec<String>, leaf: &mut Option<Leaf>) -> Result<(), Errno> {
        put(&mut self.environment, variables);
        let guardian = getpid();
        let failed = self.exec_failed.take();
        let forked = leaf.as_ref().and_then(|leaf| leaf.fork().ok());
        if forked.is_none() {
            *leaf = None;
        }
        // SAFETY: there is one thread, so the child is a complete process.
        match forked.map_or_else(|| unsafe { fork() }, Ok)? {
            ForkResult::Parent { child } => {
                // In both processes, so that no signal to the group comes too early.
                let _ = setpgid(child, self.plan.group.unwrap_or(child));
                self.pid = Some(child);
                Ok(())
            }
            ForkResult::Child => {
                let errno = self.exec(guardian);
                if let Some(failed) = failed {
                    let _ = File::from(failed).write_all(&(errno as i32).to_ne_bytes());
                }
                // SAFETY: ends this process without running what dlock had registered.
                unsafe { libc::_exit(127) }
            }
        }
    }

    /// Runs in the child. Returns only if exec failed.
    fn exec(&self, guardian: Pid) -> Errno {
        let _ = setpgid(getpid(), self.plan.group.unwrap_or(getpid()));
        // Belt and braces: the guardian's walk through the tree is what counts.
        let _ = prctl::set_pdeathsig(Signal::SIGKILL);
        if getppid() != guardian {
            return Errno::ESRCH;
        }
        if let Some(scheduling) = &self.scheduling {
            scheduling.apply();
        }
        // Rust ignores SIGPIPE for itself; a command that is piped into head(1) must not.
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: setting a default disposition installs no handler.
        let _ = unsafe { sigaction(Signal::SIGPIPE, &default) };
        if self.plan.ignores_children {
            let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
            // SAFETY: the same.
            let _ = unsafe { sigaction(Signal::SIGCHLD, &ignore) };
        }
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.plan.mask), None);
        match execvpe(&self.argv[0], &self.argv, &self.environment) {
            Err(errno) => errno,
            Ok(never) => match never {},
        }
    }

    /// Whether the command was executed, once that is known, or the errno of why not; heard once.
    pub fn exec_result(&mut self) -> Option<Result<(), i32>> {
        let mut errno = [0; 4];
        match self.exec_result.as_ref()?.read(&mut errno) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            read => {
                self.exec_result = None;
                let failed = read.is_ok_and(|length| length == errno.len());
                Some(if failed { Err(i32::from_ne_bytes(errno)) } else { Ok(()) })
            }
        }
    }

    pub fn is(&self, pid: Pid) -> bool {
        self.pid == Some(pid) && !self.reaped
    }

    pub fn note_reaped(&mut self) {
        self.reaped = true;
    }

    /// The process group that is the command's alone, while its first process keeps others from getting that number.
    fn own_group(&self) -> Option<Pid> {
        self.pid.filter(|_| self.plan.group.is_none() && !self.reaped)
    }

    /// Passes a signal on to the command's process group, or to our part of a group that others are or may be in.
    pub fn signal(&self, signal: i32, tree: &Tree, until: Instant) {
        let (Ok(signal), Some(pid)) = (Signal::try_from(signal), self.pid) else { return };
        let group = self.plan.group.unwrap_or(pid);
        match self.own_group() {
            Some(group) => drop(killpg(group, signal)),
            None => tree.signal_selected(signal, until, |pid| getpgid(Some(pid)) == Ok(group)),
        }
    }

    /// To every process below us, once; and then SIGCONT, since a stopped process would not see it.
    pub fn signal_everything(&self, signal: Signal, tree: &Tree, until: Instant) {
        tree.signal_all(&[signal, Signal::SIGCONT], self.own_group(), until);
    }

    /// One system call for all members, before the walk over the tree.
    pub fn kill_own_group(&self) {
        if let Some(group) = self.own_group() {
            let _ = killpg(group, Signal::SIGKILL);
        }
    }
}

/// Puts the lock's variables, each `KEY=VALUE`, over what was inherited. An empty value takes a variable away.
fn put(environment: &mut Vec<CString>, variables: Vec<String>) {
    for variable in variables {
        let Some((key, value)) = variable.split_once('=') else { continue };
        let is_it =
            |one: &CString| one.as_bytes().strip_prefix(key.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
        environment.retain(|inherited| !is_it(inherited));
        if !value.is_empty() {
            environment.extend(CString::new(variable));
        }
    }
}

/// A cgroup (version 2) of the command's own, where one can be made without asking anybody: in a subtree that was
/// delegated to this user, or by root where no manager such as systemd owns the tree. Everything in it is killed in one
/// step, however many processes there are, and nothing can be born meanwhile.
///
/// It is a help and no proof: root's processes can leave it. The walk over the tree follows in any case.
#[derive(Debug)]
pub struct Leaf {
    directory: OwnedFd,
    kill: File,
}

impl Leaf {
    /// Where one can be made, if anywhere. dlock has to know the place, since it may have to kill and remove what its
    /// guardian has made.
    pub fn place() -> Option<PathBuf> {
        let base = own_cgroup()?;
        if geteuid().is_root() && Path::new("/run/systemd/system").exists() && !is_delegated(&base) {
            return None;
        }
        // Somebody in another pid namespace may have the same process id.
        Some(base.join(format!("dlock.{}.{}", getpid(), clock::now().as_nanos())))
    }

    pub fn make(place: &Path) -> Option<Leaf> {
        DirBuilder::new().mode(0o755).create(place).ok()?;
        let open = || -> std::io::Result<Leaf> {
            let directory = File::open(place)?.into();
            Ok(Leaf { directory, kill: kill_file(place)? })
        };
        let made = open().ok();
        if made.is_none() {
            Leaf::remove(place);
        }
        made
    }

    /// Whether all of these are in here. A process can be moved to another cgroup by whoever may.
    pub fn has_all(&self, processes: &[Pid]) -> bool {
        let list = openat(&self.directory, "cgroup.procs", OFlag::O_RDONLY | OFlag::O_CLOEXEC, Mode::empty());
        let members = list.and_then(|list| read_pids(&File::from(list))).unwrap_or_default();
        let members: HashSet<Pid> = members.into_iter().collect();
        processes.iter().all(|pid| members.contains(pid))
    }

    /// As fork(2), with the child in here from its birth.
    pub fn fork(&self) -> nix::Result<ForkResult> {
        const INTO_CGROUP: u64 = 0x2_0000_0000;
        // SAFETY: zeros are what every field means by "nothing".
        let mut how: libc::clone_args = unsafe { std::mem::zeroed() };
        how.flags = INTO_CGROUP;
        how.exit_signal = libc::SIGCHLD as u64;
        how.cgroup = self.directory.as_raw_fd() as u64;
        // SAFETY: without CLONE_VM the child has its own copy of everything, and there is one thread.
        let answer = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of_val(&how)) };
        match Errno::result(answer)? {
            0 => Ok(ForkResult::Child),
            pid => Ok(ForkResult::Parent { child: Pid::from_raw(pid as i32) }),
        }
    }

    /// SIGKILL for everything in here, now.
    pub fn kill(&self) {
        let _ = (&self.kill).write_all(b"1");
    }

    /// The same, by somebody who only knows the place.
    pub fn kill_at(place: &Path) {
        let _ = kill_file(place).and_then(|mut kill| kill.write_all(b"1"));
    }

    /// When all is over. What is not empty stays.
    pub fn remove(place: &Path) {
        let _ = std::fs::remove_dir(place);
    }
}

/// Kernels before 5.14 have none.
fn kill_file(place: &Path) -> std::io::Result<File> {
    File::options().write(true).open(place.join("cgroup.kill"))
}

/// Where we are in the tree of version 2, if it is mounted where everybody has it.
fn own_cgroup() -> Option<PathBuf> {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let mount = mounts
        .into_iter()
        .find(|path| statfs(*path).is_ok_and(|file_system| file_system.filesystem_type() == CGROUP2_SUPER_MAGIC))?;
    // Room for all of it, so that the kernel is asked once.
    let mut cgroups = String::with_capacity(4096);
    File::open("/proc/self/cgroup").and_then(|mut list| list.read_to_string(&mut cgroups)).ok()?;
    let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
    Some(Path::new(mount).join(path.trim_start_matches('/')))
}

/// systemd says so by an extended attribute.
fn is_delegated(directory: &Path) -> bool {
    let Some(path) = directory.to_str().and_then(|path| CString::new(path).ok()) else { return false };
    let attribute = |name: &CStr| {
        let mut value = [0u8; 4];
        // SAFETY: writes no more than there is room for.
        let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        length == 1 && value[0] == b'1'
    };
    attribute(c"trusted.delegate") || attribute(c"user.delegate")
}

#[cfg(test)]
mod tests {
    use nix::sys::wait::{WaitStatus, waitpid};

    use super::super::tests::alone;
    use super::*;

    fn environment_with(inherited: &[&[u8]], variables: &[&str]) -> Vec<CString> {
        let mut environment = inherited.iter().map(|variable| CString::new(*variable).unwrap()).collect();
        put(&mut environment, variables.iter().map(ToString::to_string).collect());
        environment.sort();
        environment
    }

    #[test]
    fn variables_of_the_lock_are_put_over_what_was_inherited() {
        let inherited: [&[u8]; 6] = [b"A=old", b"AB=stays", b"B=old", b"C=old", b"C=twice", b"F=\xff\xfe"];
        let environment = environment_with(&inherited, &["A=new", "B=", "C=x=y", "D=added", "E="]);
        let expected: [&[u8]; 5] = [b"A=new", b"AB=stays", b"C=x=y", b"D=added", b"F=\xff\xfe"];
        assert_eq!(environment.iter().map(|variable| variable.as_bytes()).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_value_that_no_environment_can_hold_is_left_out() {
        assert_eq!(environment_with(&[b"A=old"], &["A=a\0b", "B=good"]), [c"B=good".to_owned()]);
    }

    /// Starts it and waits: why it could not be executed, and how it ended.
    fn started(argv: &[&str]) -> (Result<(), i32>, WaitStatus) {
        let argv = argv.iter().map(OsString::from).collect();
        let plan = Plan { argv, mask: SigSet::empty(), group: None, ignores_children: false };
        let mut command = Command::new(plan).unwrap();
        command.start(vec!["TOKEN=7".to_owned()], &mut None).unwrap();
        let pid = command.pid.unwrap();
        assert!(command.is(pid));
        assert_eq!(command.own_group(), Some(pid));
        let status = waitpid(pid, None).unwrap();
        command.note_reaped();
        assert!(!command.is(pid), "its number may be somebody else's now");
        assert_eq!(command.own_group(), None);
        let result = command.exec_result().unwrap();
        assert_eq!(command.exec_result(), None, "it is heard once");
        (result, status)
    }

    #[test]
    fn it_is_heard_whether_a_command_could_be_executed() {
        alone("command::tests::it_is_heard_whether_a_command_could_be_executed", || {
            let (result, status) = started(&["sh", "-c", "test \"$TOKEN\" = 7 && exit 3"]);
            assert_eq!((result, matches!(status, WaitStatus::Exited(_, 3))), (Ok(()), true), "{status:?}");
            assert_eq!(started(&["/no/such/program"]).0, Err(libc::ENOENT));
            assert_eq!(started(&["/"]).0, Err(libc::EACCES));
        });
    }
}
