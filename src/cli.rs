//! What can be typed: clap's structs and the help text. `config` turns this into what is meant. `-h` shows the
//! common options on one screen, `--help` and the manual pages all of them, in these groups. The verbs are here, and what
//! several of them take; what one verb takes is in `cli/args.rs`.

mod advice;
mod args;
mod read;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

pub use advice::{incomplete_run, mistake, no_single_lock};
pub use args::*;
pub use read::given;

const LOCK: &str = "Lock";
const WAITING: &str = "Waiting";
const COMMAND: &str = "Command";
const LEASE: &str = "Lease";
const LIMITS: &str = "Limits";
const OUTPUT: &str = "Output";

/// Examples come before the options.
const WITH_EXAMPLES: &str = "{about-with-newline}\n{usage-heading} {usage}{after-help}\n\n{all-args}";

#[derive(Debug, Parser)]
#[command(
    name = "dlock",
    version,
    about = "Run a command while holding a named lock: no two commands under one lock overlap",
    override_usage = "dlock <COMMAND> ...",
    help_template = "{about-with-newline}\n{usage-heading} {usage}\n\nCommands:\n{subcommands}{after-help}",
    after_help = "\
Examples:
  dlock run --name nightly -- ./report.sh     Wait for the lock, then run it
  dlock run -n --name nightly -- ./report.sh  Exit with 75 if the lock is busy
  dlock status                                Show all locks

dlock COMMAND -h shows the common options of a command, --help all of them, and
dlock man COMMAND its manual page. dlock --version shows the version.",
    disable_help_subcommand = true,
    disable_help_flag = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,

    #[command(flatten)]
    pub helped: Helped,
}

impl Cli {
    pub fn read(words: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
        let words: Vec<_> = words.collect();
        let is_status = words.get(1).is_some_and(|verb| verb == "status");
        Cli::try_parse_from(if is_status { read::with_watch_joined(words) } else { words })
    }
}

// clap's own would stand in a group of its own, before all others.
#[derive(Args, Clone, Debug, Default)]
pub struct Helped {
    /// Show this; --help shows all options
    ///
    /// -h shows only the common ones.
    #[arg(short, long, action = ArgAction::Help, help_heading = OUTPUT, display_order = 100)]
    pub help: Option<bool>,
}

// Only the verb that was typed is set up: all of them would take longer than locking a file.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub enum Verb {
    /// Run a command while holding a lock
    ///
    /// dlock acquires the lock, runs the command, renews the lease while it runs, releases the lock, and exits as the command
    /// did. If it cannot renew the lease, it kills every process of the command before anybody else can acquire the lock.
    Run(Box<Flags<RunArgs>>),
    /// Show who holds locks and who waits for them
    ///
    /// It also shows since when and for how much longer a lock is held, and how its last run ended. Without a NAME, all
    /// locks of the backend are shown.
    Status(Flags<StatusArgs>),
    /// Show the last runs of a lock
    ///
    /// The newest is the first. Each line says when it ran, how long, how it ended, where, and by whom.
    History(Flags<HistoryArgs>),
    /// Check locks against limits, for Nagios and the like
    ///
    /// It is a plugin for Nagios, Icinga, Zabbix or Sensu: it prints one line, "DLOCK OK - ...", and exits with 0 (OK), 1
    /// (WARNING), 2 (CRITICAL) or 3 (UNKNOWN: the backend cannot be reached, or dlock was called in a wrong way).
    Check(Flags<CheckArgs>),
    /// Take a lock away from its holder
    ///
    /// The holder is asked to stop its command and to release the lock. If the holder is dead, its lease runs out. Only then
    /// can somebody else acquire the lock. On a terminal dlock shows the holder and asks first.
    ForceRelease(Flags<ForceReleaseArgs>),
    /// Remove what is recorded about a lock
    ///
    /// It removes the history and the --once keys of a lock that nobody uses. Its fencing tokens go on growing.
    #[command(override_usage = "dlock forget [OPTIONS] <NAME>")]
    Forget(Flags<Named>),
    /// Acquire a lock without a command, for the steps of a CI job
    ///
    /// It is for steps that cannot be wrapped in dlock run. It prints DLOCK_NAME, DLOCK_OWNER and DLOCK_FENCING_TOKEN as
    /// shell assignments. The lock is yours for --ttl, unless you renew it. When that time is over, nobody stops your steps.
    Acquire(Flags<AcquireArgs>),
    /// Extend an acquired lock
    ///
    /// The exit code is 79 if the lock is not yours any more.
    Renew(Flags<RenewArgs>),
    /// Release an acquired lock
    ///
    /// The exit code is 79 if the lock was not yours any more.
    #[command(override_usage = "dlock release [OPTIONS] --name <NAME>")]
    Release(Flags<Acquired>),
    /// Run a command only if its fencing token is not stale
    ///
    /// A token is stale if the resource has seen a higher one. The highest token is recorded beside the resource. While the
    /// command runs, other commands for the same resource wait. The exit code is 79 if the token is stale.
    Fence(FenceArgs),
    /// Test a backend, and find settings that weaken its locks
    ///
    /// It connects, logs in, acquires, renews and releases a probe lock, and looks for settings of the server that weaken the
    /// promise. Every finding says what to do about it.
    Doctor(Flags<DoctorArgs>),
    /// Print the completion script of a shell
    Completions {
        /// bash, fish or zsh
        #[arg(hide_possible_values = true)]
        shell: Shell,

        #[command(flatten)]
        helped: Helped,
    },
    /// Show a manual page
    Man {
        /// A command, "backends" or "config" [default: the overview]
        #[arg(value_name = "PAGE")]
        page: Option<String>,

        #[command(flatten)]
        helped: Helped,
    },
    /// Show the help of dlock or of a command
    Help {
        /// [default: dlock itself]
        #[arg(value_name = "COMMAND")]
        verb: Option<String>,

        #[command(flatten)]
        helped: Helped,
    },
    /// What can stand in the place of the last word; the completions ask this
    #[command(hide = true)]
    Words {
        #[arg(last = true, hide = true)]
        line: Vec<String>,
    },
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Shell {
    Bash,
    Fish,
    Zsh,
}

// The flags of one verb, and those of all that talk to a backend.
#[derive(Args, Debug)]
pub struct Flags<A: Args> {
    #[command(flatten)]
    pub own: A,

    #[command(flatten)]
    pub common: Common,
}

// Which backend, and how dlock talks about it. A doc comment would be shown as the help of every verb that has these.
#[derive(Args, Clone, Debug, Default)]
pub struct Common {
    /// Where the locks are [default: local files]
    ///
    /// The default directory belongs to the user who runs dlock. Anything else is a URL like redis://host, or
    /// the name of a profile in the config file. dlock-backends(7) describes all kinds.
    #[arg(short, long, value_name = "URL|PROFILE", help_heading = LOCK, display_order = 1)]
    pub backend: Option<String>,

    /// Read this config file instead of the usual one
    #[arg(long, value_name = "FILE", help_heading = LOCK, hide_short_help = true)]
    pub config: Option<PathBuf>,

    /// How long the backend may take to answer for the first time [default: 5s]
    #[arg(long, value_name = "DUR", help_heading = LOCK, hide_short_help = true)]
    pub connect_timeout: Option<String>,

    /// Print more on standard error
    #[arg(short, long, conflicts_with = "quiet", help_heading = OUTPUT)]
    pub verbose: bool,

    /// Print only errors
    #[arg(short, long, help_heading = OUTPUT)]
    pub quiet: bool,

    /// How to write on standard error: text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = OUTPUT, hide_short_help = true)]
    pub log: Option<String>,

    #[command(flatten)]
    pub helped: Helped,
}

// One lock: `--name NAME`, or NAME as a word of its own. Every word before `--` is taken, so that whoever forgot the
// dashes can be told so.
#[derive(Args, Debug, Default)]
pub struct Named {
    /// The lock; --name itself may be left out
    ///
    /// A name has 1 to 200 characters of A-Z a-z 0-9 . _ : @ + - /.
    #[arg(long, value_name = "NAME", help_heading = LOCK)]
    pub name: Option<String>,

    #[arg(value_name = "NAME", hide = true)]
    pub words: Vec<String>,
}

impl Named {
    /// The lock, unless there is none or a word too many.
    pub fn one(&self) -> Option<&str> {
        match (&self.name, self.words.as_slice()) {
            (Some(name), []) | (None, [name]) => Some(name),
            _ => None,
        }
    }
}

// How a lock is asked for, with a command or without.
#[derive(Args, Debug, Default)]
pub struct Asking {
    #[command(flatten)]
    pub named: Named,

    /// Hold it together with other --shared holders
    ///
    /// A holder without --shared is always alone.
    #[arg(short, long, conflicts_with = "slots", help_heading = LOCK)]
    pub shared: bool,

    /// Let up to N holders in at once
    ///
    /// Each sees another number from 0 to N-1 in DLOCK_SLOT. All contenders have to use the same N.
    #[arg(long, value_name = "N", help_heading = LOCK)]
    pub slots: Option<String>,

    /// Give up after DUR [default: wait for ever]
    ///
    /// 0 is --no-wait.
    #[arg(short, long, value_name = "DUR", conflicts_with = "no_wait", help_heading = WAITING)]
    pub wait: Option<String>,

    /// Give up at once if the lock is busy
    ///
    /// --nb and --nonblock mean the same, as for flock(1).
    #[arg(short, long, aliases = ["nb", "nonblock"], help_heading = WAITING)]
    pub no_wait: bool,

    /// Exit code if it was not acquired [default: 75]
    ///
    /// A number from 0 to 255.
    #[arg(short = 'E', long, value_name = "N", allow_negative_numbers = true, help_heading = WAITING)]
    pub conflict_exit_code: Option<String>,
}

// A lock that was acquired before.
#[derive(Args, Debug)]
pub struct Acquired {
    #[command(flatten)]
    pub named: Named,

    /// The owner that dlock acquire printed [default: $DLOCK_OWNER]
    #[arg(long, help_heading = LOCK)]
    pub owner: Option<String>,
}

// Any number of locks.
#[derive(Args, Debug, Default)]
pub struct Names {
    /// Locks, or patterns with * and ? like 'nightly-*'
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,

    /// The same, for one lock or pattern
    #[arg(long, value_name = "NAME", help_heading = LOCK, hide_short_help = true)]
    pub name: Option<String>,
}
