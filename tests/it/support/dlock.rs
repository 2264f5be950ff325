//! dlock as its users run it: the built binary, in an environment that holds nothing but what a test
//! puts there.

use std::ffi::OsStr;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Once;

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use tempfile::TempDir;

use super::{children_of, signal, until};

pub struct Dlock {
    command: Command,
    home: TempDir,
}

/// A dlock that runs in the background. Killed, with all it started, when the test is done with it.
pub struct Running {
    child: Child,
    home: PathBuf,
    _home: TempDir,
}

/// How a dlock ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; `None` if it died of a signal itself.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Dlock {
    pub fn new() -> Dlock {
        Dlock::played_by(assert_cmd::cargo::cargo_bin!("dlock"))
    }

    /// Another program in dlock's place: a build of it that is meant to fail, or somebody else's.
    pub fn played_by(program: impl AsRef<OsStr>) -> Dlock {
        heed_signals();
        let home = tempfile::tempdir().unwrap();
        let mut command = Command::new(program);
        let path = std::env::var_os("PATH").unwrap();
        command.env_clear().env("PATH", path).env("HOME", home.path()).stdin(Stdio::null());
        command.env("XDG_STATE_HOME", home.path().join("state"));
        Dlock { command, home }
    }

    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Dlock {
        self.command.env(key, value);
        self
    }

    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Dlock {
        self.command.arg(arg);
        self
    }

    pub fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Dlock {
        self.command.args(args);
        self
    }

    /// `dlock run --name NAME`; options and `-- CMD` follow.
    pub fn run(self, name: &str) -> Dlock {
        self.args(["run", "--name", name])
    }

    /// `-- sh -c SCRIPT`.
    pub fn sh(self, script: &str) -> Dlock {
        self.args(["--", "sh", "-c", script])
    }

    /// For what the builder does not say: descriptors, users, working directory.
    pub fn configure(mut self, change: impl FnOnce(&mut Command)) -> Dlock {
        change(&mut self.command);
        self
    }

    pub fn home(&self) -> PathBuf {
        self.home.path().to_owned()
    }

    pub fn spawn(self) -> Running {
        let err = std::fs::File::create(self.home.path().join("stderr")).unwrap();
        self.spawn_saying(err)
    }

    /// What it says on standard error goes elsewhere.
    pub fn spawn_saying(mut self, err: impl Into<Stdio>) -> Running {
        let out = std::fs::File::create(self.home.path().join("stdout")).unwrap();
        let child = self.command.stdout(out).stderr(err).spawn().unwrap();
        Running { child, home: self.home.path().to_owned(), _home: self.home }
    }

    /// Runs to its end with a standard output of the test's own.
    pub fn ended_writing_to(mut self, out: impl Into<Stdio>) -> Ended {
        let done = self.command.stdout(out).output().unwrap();
        let stderr = String::from_utf8_lossy(&done.stderr).into_owned();
        Ended { code: done.status.code(), stdout: String::new(), stderr }
    }

    /// Runs to its end.
    pub fn ended(self) -> Ended {
        self.spawn().ended()
    }
}

/// dlock ignores what it is told to ignore from birth; these tests may run under nohup or behind a shell's `&`.
fn heed_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP] {
            let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
            #[allow(unsafe_code)]
            // SAFETY: setting a default disposition installs no handler.
            unsafe { sigaction(signal, &default) }.unwrap();
        }
    });
}

impl Running {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The process that guards the command: dlock's only child.
    pub fn guardian(&self) -> u32 {
        let mut found = Vec::new();
        until("dlock to have a guardian", || {
            found = children_of(self.pid());
            !found.is_empty()
        });
        found[0]
    }

    pub fn signal(&self, which: Signal) {
        signal(self.pid(), which);
    }

    /// Until it has read a signal of this kind: before that, a second one would be the same.
    pub fn await_taken(&self, which: Signal) {
        let status = format!("/proc/{}/status", self.pid());
        let pending = || {
            let status = std::fs::read_to_string(&status).unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap().trim();
            u64::from_str_radix(mask, 16).unwrap() & (1 << (which as i32 - 1)) != 0
        };
        until(&format!("{which} to be read"), || !pending());
    }

    /// At once, and its end is waited for.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Its exit code once it has ended, as a shell would see it: 128+N if it died of signal N itself.
    pub fn code(&mut self) -> Option<i32> {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.try_wait().unwrap()?;
        status.code().or_else(|| status.signal().map(|signal| 128 + signal))
    }

    pub fn stdout(&self) -> String {
        self.text("stdout")
    }

    pub fn stderr(&self) -> String {
        self.text("stderr")
    }

    fn text(&self, name: &str) -> String {
        let mut bytes = Vec::new();
        // There is none if it went elsewhere.
        let Ok(mut file) = std::fs::File::open(self.home.join(name)) else { return String::new() };
        file.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn ended(mut self) -> Ended {
        until("dlock to end", || self.has_ended());
        let status = self.child.wait().unwrap();
        Ended { code: status.code(), stdout: self.stdout(), stderr: self.stderr() }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("dlock {} (exit code {:?}) said: {:?}", self.pid(), self.code(), self.stderr());
        }
        // The guardian ends the command when dlock is gone.
        self.kill();
    }
}

impl Ended {
    #[track_caller]
    pub fn expect(self, code: i32) -> Ended {
        assert_eq!(self.code, Some(code), "{self:#?}");
        self
    }

    /// Silence on success: cron mails whatever is printed.
    #[track_caller]
    pub fn silently(self) -> Ended {
        assert_eq!(self.stderr, "", "{self:#?}");
        self
    }

    /// dlock has said a line on standard error with these words in it.
    #[track_caller]
    pub fn saying(self, words: &str) -> Ended {
        let said = self.stderr.lines().any(|line| line.starts_with("dlock: ") && line.contains(words));
        assert!(said, "should say {words:?}: {self:#?}");
        self
    }
}
