//! What the doctor wants to know about a lock directory: that flock(2) means something there.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use nix::sys::statfs::{FsType, statfs};

use crate::backend::Finding;

/// Kinds of file systems by their magic number, and what their locks are worth.
const KINDS: [(i64, &str, Locks); 12] = [
    (0xef53, "ext4", Locks::Good),
    (0x5846_5342, "xfs", Locks::Good),
    (0x9123_683e, "btrfs", Locks::Good),
    (0x2fc1_2fc1, "zfs", Locks::Good),
    (0x794c_7630, "overlayfs", Locks::Good),
    (0xf2f5_2010, "f2fs", Locks::Good),
    (0x0102_1994, "tmpfs", Locks::Forgetful),
    (0x6969, "nfs", Locks::Remote),
    (0xff53_4d42u32 as i64, "cifs", Locks::Remote),
    (0xfe53_4d42u32 as i64, "smb2", Locks::Remote),
    (0x6573_5546, "fuse", Locks::Remote),
    (0x0102_1997, "9p", Locks::Remote),
];

#[derive(Clone, Copy)]
enum Locks {
    Good,
    /// Gone after a reboot, the fencing counter too.
    Forgetful,
    /// Whether a lock is seen by other hosts, and outlives a server, is the file server's affair.
    Remote,
}

pub fn examine(directory: &Path) -> Result<Vec<Finding>> {
    let stat = statfs(directory).with_context(|| format!("statfs {}", directory.display()))?;
    let meta = std::fs::metadata(directory).with_context(|| directory.display().to_string())?;
    Ok(vec![file_system(stat.filesystem_type()), permissions(meta.mode())])
}

fn file_system(kind: FsType) -> Finding {
    const CHECK: &str = "file-system";
    let known = KINDS.iter().find(|(magic, ..)| *magic == kind.0);
    match known {
        Some((_, name, Locks::Good)) => Finding::fine(CHECK, format!("the lock directory is on {name}")),
        Some((_, name, Locks::Forgetful)) => Finding::weak(
            CHECK,
            format!("the lock directory is on {name}"),
            "after a reboot the last run, the --once keys and the fencing counter are forgotten; tokens still grow, by the date",
            "use a directory on a disk, such as /var/lib/dlock",
        ),
        Some((_, name, Locks::Remote)) => Finding::weak(
            CHECK,
            format!("the lock directory is on {name}"),
            "flock(2) on a network file system may not exclude other hosts, and may be forgotten when the server restarts",
            "use a local directory, and one of the other backends for locks between hosts",
        ),
        None => Finding::weak(
            CHECK,
            format!("the lock directory is on a file system of the unknown kind {:#x}", kind.0),
            "whether its locks exclude everybody is not known",
            "use a directory on a local disk",
        ),
    }
}

fn permissions(mode: u32) -> Finding {
    const CHECK: &str = "file-permissions";
    if mode & 0o020 != 0 {
        return Finding::weak(
            CHECK,
            "the lock directory can be written by its group",
            "whoever is in that group can delete a lock file, and so take every lock away",
            "fine if that is meant; else chmod g-w it",
        );
    }
    Finding::fine(CHECK, "only its owner can write to the lock directory")
}
