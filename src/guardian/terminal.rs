//! The terminal dlock was started from, if it is in its foreground.

use std::fs::File;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::sys::signal::killpg;
use nix::unistd::{Pid, getpgrp, tcgetpgrp, tcsetpgrp};

/// A terminal whose foreground process group we are in.
#[derive(Debug)]
pub struct Terminal {
    tty: File,
    group: Pid,
}

impl Terminal {
    pub fn in_foreground() -> Option<Terminal> {
        let tty = File::options().read(true).write(true).open("/dev/tty").ok()?;
        let group = getpgrp();
        (tcgetpgrp(tty.as_fd()) == Ok(group)).then_some(Terminal { tty, group })
    }

    pub fn group(&self) -> Pid {
        self.group
    }

    /// A command that made itself the foreground, as an interactive shell does, and was then killed leaves
    /// the terminal to nobody. SIGTTOU must be blocked.
    pub fn take_back(&self) {
        let nobody = |group| killpg(group, None) == Err(Errno::ESRCH);
        if tcgetpgrp(self.tty.as_fd()).is_ok_and(nobody) {
            let _ = tcsetpgrp(self.tty.as_fd(), self.group);
        }
    }
}
