//! How dlock can end, and the one table of exit codes.

use std::fmt;

/// The value `main` hands to the operating system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    Code(u8),
    /// The command died of this signal: 128+N.
    Signal(i32),
    /// The same, after Ctrl-C or Ctrl-\ on our terminal: die of it too, so that a calling shell stops as well.
    Reraise(i32),
}

impl Exit {
    pub const OK: Exit = Exit::Code(0);
    pub const BUSY: u8 = 75;
    pub const LOST: Exit = Exit::Code(79);
    pub const TIMED_OUT: Exit = Exit::Code(124);
    pub const CANNOT_EXECUTE: Exit = Exit::Code(126);
    pub const NOT_FOUND: Exit = Exit::Code(127);

    pub fn by(signal: i32, typed_at_terminal: bool) -> Exit {
        if typed_at_terminal { Exit::Reraise(signal) } else { Exit::Signal(signal) }
    }

    /// What execve(2) failed with, as every shell and timeout(1) have it.
    pub fn of_exec(why: &std::io::Error) -> Exit {
        if why.kind() == std::io::ErrorKind::NotFound { Exit::NOT_FOUND } else { Exit::CANNOT_EXECUTE }
    }

    pub fn code(self) -> u8 {
        match self {
            Exit::Code(code) => code,
            Exit::Signal(signal) | Exit::Reraise(signal) => 128u8.wrapping_add(signal as u8),
        }
    }
}

/// Why something failed, where the reason has an exit code of its own. Travels as context of an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Usage,
    OtherSlots,
    Unreachable,
    /// The disk with the locks is full, or fails.
    Disk,
    /// Somebody uses the lock.
    Busy,
    Refused,
    Config,
    NotOurs,
    /// The server's counter of fencing tokens went back.
    StaleToken,
    Internal,
}

impl Fault {
    pub fn of(error: &anyhow::Error) -> Fault {
        error.downcast_ref::<Fault>().copied().unwrap_or(Fault::Internal)
    }

    pub fn exit(self) -> Exit {
        Exit::Code(match self {
            Fault::Usage => 64,
            Fault::OtherSlots => 65,
            Fault::Unreachable | Fault::Disk => 69,
            Fault::Busy => Exit::BUSY,
            Fault::Refused => 77,
            Fault::Config => 78,
            Fault::NotOurs => 79,
            Fault::StaleToken | Fault::Internal => 125,
        })
    }

    /// An error of this kind, in one go: `Fault::Config.because("…")`.
    pub fn because(self, what: impl fmt::Display) -> anyhow::Error {
        anyhow::anyhow!("{what}").context(self)
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Fault::Usage => "usage",
            Fault::OtherSlots => "in use with another number of slots",
            Fault::Unreachable => "the backend cannot be reached",
            Fault::Disk => "the disk with the locks cannot be used",
            Fault::Busy => "the lock is in use",
            Fault::Refused => "the backend denied access",
            Fault::Config => "configuration",
            Fault::NotOurs => "refused",
            Fault::StaleToken => "the fencing token would go back",
            Fault::Internal => "dlock failed",
        })
    }
}

impl std::error::Error for Fault {}
