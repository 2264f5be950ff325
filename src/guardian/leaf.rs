//! A cgroup (version 2) of the command's own, where one can be made without asking anybody: in a subtree that was
//! delegated to this user, or by root where no manager such as systemd owns the tree. Everything in it is killed in one
//! step, however many processes there are, and nothing can be born meanwhile.
//!
//! It is a help and no proof: root's processes can leave it. The walk over the tree follows in any case.

use std::collections::HashSet;
use std::ffi::CStr;
use std::fs::{DirBuilder, File};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};
use nix::unistd::{ForkResult, Pid, geteuid, getpid};

use super::tree::read_pids;
use crate::clock;

const INTO_CGROUP: u64 = 0x2_0000_0000;

/// As clone3(2) has it; the libc crate does not.
#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

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
        let how = CloneArgs {
            flags: INTO_CGROUP,
            exit_signal: libc::SIGCHLD as u64,
            cgroup: self.directory.as_raw_fd() as u64,
            ..CloneArgs::default()
        };
        // SAFETY: without CLONE_VM the child has its own copy of everything, and there is one thread.
        let answer = unsafe { libc::syscall(libc::SYS_clone3, &raw const how, size_of::<CloneArgs>()) };
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
    let Some(path) = directory.to_str().and_then(|path| std::ffi::CString::new(path).ok()) else { return false };
    let attribute = |name: &CStr| {
        let mut value = [0u8; 4];
        // SAFETY: writes no more than there is room for.
        let length = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
        length == 1 && value[0] == b'1'
    };
    attribute(c"trusted.delegate") || attribute(c"user.delegate")
}
