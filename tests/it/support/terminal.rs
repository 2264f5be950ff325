//! A real pseudo-terminal with an interactive bash on it, as somebody at a desk has.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use nix::pty::openpty;

use super::until;

pub struct Terminal {
    shell: Child,
    keyboard: File,
    screen: Arc<Mutex<String>>,
    /// What has been looked at already.
    seen: usize,
}

impl Terminal {
    /// Has `$DLOCK` and `$DLOCK_BACKEND` set.
    pub fn with_shell(backend: &str) -> Terminal {
        let pty = openpty(None, None).unwrap();
        let mut command = Command::new("bash");
        command.args(["--norc", "--noprofile", "-i"]).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.env("PS1", "$ ").env("TERM", "dumb").env("DLOCK_BACKEND", backend);
        command.env("DLOCK", assert_cmd::cargo::cargo_bin!("dlock"));
        let stdio = || File::from(pty.slave.try_clone().unwrap());
        command.stdin(stdio()).stdout(stdio()).stderr(stdio());
        #[allow(unsafe_code)]
        // SAFETY: setsid(2) and ioctl(2) may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                let taken = nix::libc::ioctl(std::io::stdin().as_raw_fd(), nix::libc::TIOCSCTTY, 0);
                if taken == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
            });
        }
        let shell = command.spawn().unwrap();
        drop(pty.slave);
        let keyboard = File::from(pty.master);
        let screen = Arc::new(Mutex::new(String::new()));
        let (mut output, shown) = (keyboard.try_clone().unwrap(), Arc::clone(&screen));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                shown.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..length]));
            }
        });
        Terminal { shell, keyboard, screen, seen: 0 }
    }

    pub fn type_line(&mut self, line: &str) {
        // What is typed is echoed; only what comes behind the echo counts as output.
        self.keyboard.write_all(format!("{line}\n").as_bytes()).unwrap();
    }

    pub fn press(&mut self, key: u8) {
        self.keyboard.write_all(&[key]).unwrap();
    }

    pub fn press_all(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is on the screen, not counting what was expected before or stands in a typed line.
    #[track_caller]
    pub fn expect(&mut self, text: &str) {
        let screen = Arc::clone(&self.screen);
        let mut found = None;
        let start = self.seen;
        until(&format!("{text:?} on the terminal"), || {
            let shown = screen.lock().unwrap();
            found = shown[start..].find(text).map(|at| start + at + text.len());
            found.is_some()
        });
        self.seen = found.unwrap_or(start);
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.shell.kill();
        let _ = self.shell.wait();
        if std::thread::panicking() {
            eprintln!("the terminal showed:\n{}", self.screen.lock().unwrap());
        }
    }
}
