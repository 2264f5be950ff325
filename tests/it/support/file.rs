//! The file backend in a directory of its own, or on a disk of its own.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::place::{Expect, Leader, Place, Started, Urls};
use super::{Abilities, Bed};
use crate::matrix::{Fault, faults};

pub struct FileBed {
    dir: TempDir,
    is_disk: bool,
}

/// Whether we may give a test a disk of its own.
pub fn may_mount() -> bool {
    let dir = tempfile::tempdir().unwrap();
    let may = mount(dir.path());
    if may {
        unmount(dir.path());
    }
    may
}

fn mount(dir: &Path) -> bool {
    let done = Command::new("mount").args(["-t", "tmpfs", "-o", "size=128k,mode=0700", "tmpfs"]).arg(dir).output();
    done.is_ok_and(|done| done.status.success())
}

fn unmount(dir: &Path) {
    // Whoever still has it open keeps it a little longer, out of sight.
    let done = Command::new("umount").arg("--lazy").arg(dir).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

impl FileBed {
    pub fn new() -> FileBed {
        FileBed { dir: tempfile::tempdir().unwrap(), is_disk: false }
    }

    /// On a disk with little room; where we [may](may_mount).
    pub fn on_small_disk() -> FileBed {
        let dir = tempfile::tempdir().unwrap();
        assert!(mount(dir.path()), "cannot mount a tmpfs");
        FileBed { dir, is_disk: true }
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn lock_file(&self, name: &str) -> PathBuf {
        self.dir().join(format!("{}.lock", name.replace('/', "%2F")))
    }

    /// Where everything is that belongs to a lock.
    pub fn side(&self, name: &str) -> PathBuf {
        self.lock_file(name).with_extension("d")
    }

    /// The files there whose names begin like this.
    pub fn beside(&self, name: &str, prefix: &str) -> Vec<String> {
        let (inside, prefix) = prefix.rsplit_once('/').unwrap_or(("", prefix));
        let entries = std::fs::read_dir(self.side(name).join(inside)).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.starts_with(prefix)).collect()
    }

    /// Leaves no room on its disk.
    pub fn fill(&self) {
        let mut filler = std::fs::File::options().append(true).create(true).open(self.filler()).unwrap();
        while filler.write(&[0; 4096]).is_ok() {}
    }

    /// Makes room again.
    pub fn clear(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> PathBuf {
        self.dir().join("filler")
    }
}

impl Drop for FileBed {
    fn drop(&mut self) {
        if self.is_disk {
            unmount(self.dir());
        }
    }
}

impl Bed for FileBed {
    fn url(&self) -> String {
        format!("file://{}", self.dir().display())
    }

    fn abilities(&self) -> Abilities {
        Abilities { in_order: false, ..Abilities::default() }
    }

    fn scrawl(&self, name: &str, owner: &str, text: &str) {
        let side = self.side(name);
        std::fs::create_dir_all(side.join("waiting")).unwrap();
        let own = format!("holder.{owner}");
        for file in [&own, "last-run", "once", "holder.other.1.2", "waiting/waiter.other.1.2", "revoke.other.1.2"] {
            std::fs::write(side.join(file), text).unwrap();
        }
    }

    fn scrawl_token(&self, name: &str, text: &str) {
        std::fs::write(self.side(name).join("token"), text).unwrap();
    }
}

/// No server, so none that could fail. The kernel keeps the lock for whoever has it open, awake or not: whoever wakes first
/// after a freeze decides (the guardian, whose time is over; dlock, which helps a guardian that has not acted in time; or
/// the keeper, who finds that all is well). When the file is deleted, whoever waits is told in the same moment as the
/// holder.
pub static FILE: Place = Place {
    name: "file",
    url: "file://DIR",
    hosts: 0,
    start: |_| Started::of(Vec::new()),
    independent: false,
    leader: Leader::Nobody,
    late: 32,
    faults: &[faults::ANYWHERE, &[Fault::DiskFull, Fault::RecordDeleted]],
    expect: &[(Fault::RecordDeleted, Expect::TokenRefuses), (Fault::MachineFrozen, Expect::NoOverlap)],
    exit_codes: &[(Fault::AllStopped, &[79, 125, 137]), (Fault::MachineFrozen, &[79, 125, 137])],
    short: &[&Fault::ALL],
    covered: true,
    urls: &[Urls {
        schemes: &["file"],
        encrypted: &[],
        host: "",
        hostless: true,
        path: "DIR",
        wrong_paths: &["", "relative", "/nonexistent/dir", "/dev/null"],
        wrong_values: &[],
    }],
};
