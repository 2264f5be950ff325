//! Holders that are not dlock: what the kernel tells about flocks in /proc/locks. Reading it disturbs
//! nobody, while trying the lock ourselves could make somebody else's `flock -n` fail.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::libc;

use crate::lock::Holder;

/// All flocks of this host that are held, not those waited for.
pub struct Locks(Vec<Entry>);

struct Entry {
    pid: i32,
    device: (u32, u32),
    inode: u64,
}

impl Locks {
    pub fn read() -> Locks {
        let text = std::fs::read_to_string("/proc/locks").unwrap_or_default();
        Locks(text.lines().filter_map(parse).collect())
    }

    pub fn holder_of(&self, path: &Path) -> Option<Holder> {
        let meta = std::fs::symlink_metadata(path).ok()?;
        let device = (libc::major(meta.dev()), libc::minor(meta.dev()));
        // Some file systems (btrfs, overlayfs) show another device here than stat(2) does.
        let is_it = |entry: &&Entry| entry.inode == meta.ino() && (entry.device == device || has_open(entry.pid, path));
        let entry = self.0.iter().find(is_it)?;
        let host = nix::unistd::gethostname().ok().map(|host| host.to_string_lossy().into_owned());
        // A lock whose taker has handed its descriptor on shows the pid of a process that may be gone.
        let pid = u32::try_from(entry.pid).ok().filter(|pid| Path::new(&format!("/proc/{pid}")).exists());
        Some(Holder { host, pid, command: pid.and_then(command_of), ..Holder::default() })
    }
}

/// `1: FLOCK  ADVISORY  WRITE 4242 08:01:131 0 EOF`; a waiter's line has `->` after the number.
fn parse(line: &str) -> Option<Entry> {
    let mut words = line.split_ascii_whitespace().skip(1);
    if words.next()? != "FLOCK" {
        return None;
    }
    let pid = words.nth(2)?.parse().ok()?;
    let mut place = words.next()?.split(':');
    let mut hex = || u32::from_str_radix(place.next()?, 16).ok();
    let device = (hex()?, hex()?);
    Some(Entry { pid, device, inode: place.next()?.parse().ok()? })
}

fn has_open(pid: i32, path: &Path) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    open.flatten().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path))
}

fn command_of(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<_> = line.split(|&byte| byte == 0).map(String::from_utf8_lossy).collect();
    Some(words.join(" ").trim_end().to_owned()).filter(|line| !line.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_held_flocks_and_nothing_else() {
        let entry = parse("5: FLOCK  ADVISORY  WRITE 717 fd:01:1048 0 EOF").unwrap();
        assert_eq!((entry.pid, entry.device, entry.inode), (717, (0xfd, 1), 1048));
        for other in
            ["5: -> FLOCK  ADVISORY  WRITE 718 fd:01:1048 0 EOF", "1: POSIX  ADVISORY  WRITE 1 08:01:1 0 EOF", ""]
        {
            assert!(parse(other).is_none(), "{other}");
        }
    }
}
