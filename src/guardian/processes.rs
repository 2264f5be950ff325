//! Where the kernel tells of processes: /proc, waitpid(2), and a cgroup.

use std::collections::HashSet;
use std::ffi::{CStr, CString};
use std::fs::{DirBuilder, File};
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::libc;
use nix::sys::stat::{Mode, fstatat};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use nix::unistd::{ForkResult, Pid, geteuid, getpid};

use crate::clock;
use crate::exit::Fault;

/// What waitpid(2) says about our children.
pub enum Children {
    /// This one has ended, or stopped, with this wait status.
    Changed(Pid, i32),
    /// There are some, and there is nothing new about them.
    Quiet,
    None,
}

/// Inherit orphaned descendants instead of leaving them to init.
pub fn adopt_orphans() -> nix::Result<()> {
    nix::sys::prctl::set_child_subreaper(true)
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
            let proc = Proc(Arc::new(root));
            if shows_us { proc.children_list(getpid()).map(|_| proc) } else { Err(Errno::ENOENT) }
        };
        open().map_err(|_| {
            Fault::Internal.because(
                "/proc does not show the processes of this pid namespace, so dlock could not find and end those of a \
                 command; mount it: mount -t proc proc /proc (as unshare --mount-proc does)",
            )
        })
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

/// A cgroup (version 2) of the command's own, where one can be made without asking anybody: in a subtree that was
/// delegated to this user, or by root where no manager such as systemd owns the tree. Everything in it is killed in one
/// step, however many processes there are, and nothing can be born meanwhile.
///
/// It is a help and no proof: root's processes can leave it. The walk over the tree follows in any case.
#[derive(Debug)]
pub struct Leaf {
    path: PathBuf,
    directory: OwnedFd,
    members: File,
    kill: File,
}

impl Leaf {
    pub fn make() -> Option<Leaf> {
        let base = own_cgroup()?;
        if geteuid().is_root() && Path::new("/run/systemd/system").exists() && !is_delegated(&base) {
            return None;
        }
        // Somebody in another pid namespace may have the same process id.
        let path = base.join(format!("dlock.{}.{}", getpid(), clock::now().as_nanos()));
        DirBuilder::new().mode(0o755).create(&path).ok()?;
        let open = || -> std::io::Result<(OwnedFd, File, File)> {
            let directory = File::open(&path)?.into();
            let members = File::open(path.join("cgroup.procs"))?;
            // Kernels before 5.14 have none.
            let kill = File::options().write(true).open(path.join("cgroup.kill"))?;
            Ok((directory, members, kill))
        };
        match open() {
            Ok((directory, members, kill)) => Some(Leaf { path, directory, members, kill }),
            Err(_) => {
                let _ = std::fs::remove_dir(&path);
                None
            }
        }
    }

    /// Whether all of these are in here. A process can be moved to another cgroup by whoever may.
    pub fn has_all(&self, processes: &[Pid]) -> bool {
        let members: HashSet<Pid> = read_pids(&self.members).unwrap_or_default().into_iter().collect();
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

    /// When all is over. What is not empty stays.
    pub fn remove(&self) {
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// Where we are in the tree of version 2, if it is mounted where everybody has it.
fn own_cgroup() -> Option<PathBuf> {
    let mounts = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
    let mount = mounts
        .into_iter()
        .find(|path| statfs(*path).is_ok_and(|file_system| file_system.filesystem_type() == CGROUP2_SUPER_MAGIC))?;
    let cgroups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
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
