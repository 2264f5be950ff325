//! A wall clock of a server's own, which a test can step while the server runs.

use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// Reaches every program that asks the C library for the time: Redis, PostgreSQL and the JVM do. Go asks the
/// kernel itself, so it does not reach etcd.
pub struct Clock(TempDir);

impl Clock {
    pub fn new() -> Clock {
        // Where libraries can be loaded from, also by the user that PostgreSQL runs as.
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/support/clock.c");
        let clock = Clock(dir);
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-shared", "-fPIC", "-o"]);
        let made = cc.arg(clock.library()).arg(source).output().expect("cc; see tests/run");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        std::fs::write(clock.0.path().join("ahead"), 0i64.to_ne_bytes()).unwrap();
        clock
    }

    fn library(&self) -> std::path::PathBuf {
        self.0.path().join("clock.so")
    }

    /// Makes a server that is about to be started go by it.
    pub fn govern(&self, server: &mut Command) {
        server.env("LD_PRELOAD", self.library()).env("STEPPED_CLOCK", self.0.path().join("ahead"));
    }

    /// From now on it is so many seconds ahead of the true one, or behind.
    pub fn set_ahead(&self, seconds: i64) {
        let file = std::fs::File::options().write(true).open(self.0.path().join("ahead")).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }
}
