//! Where the servers of the tests keep their data: in memory, because a disk that others keep busy can take
//! seconds for one fsync, and an election or a commit that waits for it is no fault that a test has asked for.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use nix::sys::statvfs::statvfs;
use tempfile::TempDir;

const PREFIX: &str = "dlock-test.";

/// Room for what a dozen servers write ahead.
const ENOUGH: u64 = 4 << 30;

/// A directory for one server, or for those of one cluster.
pub fn server_home() -> TempDir {
    static ROOT: OnceLock<PathBuf> = OnceLock::new();
    let root = ROOT.get_or_init(|| {
        let memory = Path::new("/dev/shm");
        let root = if has_room(memory) { memory.to_owned() } else { std::env::temp_dir() };
        sweep(&root);
        root
    });
    tempfile::Builder::new().prefix(&format!("{PREFIX}{}.", std::process::id())).tempdir_in(root).unwrap()
}

fn has_room(directory: &Path) -> bool {
    let writable = nix::unistd::access(directory, nix::unistd::AccessFlags::W_OK).is_ok();
    writable && statvfs(directory).is_ok_and(|fs| fs.blocks_available() * fs.fragment_size() >= ENOUGH)
}

/// Removes what the servers of earlier tests left: nobody drops those that many tests share.
fn sweep(root: &Path) {
    for entry in std::fs::read_dir(root).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('.').next()?.parse().ok());
        if pid.is_none_or(super::is_alive) {
            continue;
        }
        // PostgreSQL's shared memory outlives it when it is killed.
        let notes = std::fs::read_to_string(entry.path().join("data/postmaster.pid")).unwrap_or_default();
        if let Some(segment) = notes.lines().nth(6).and_then(|line| line.split_whitespace().nth(1)) {
            let _ = Command::new("ipcrm").args(["-m", segment]).output();
        }
        let _ = std::fs::remove_dir_all(entry.path());
    }
}
