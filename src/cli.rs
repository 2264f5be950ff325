//! What can be typed: clap's structs and the help text. Nothing of ours is imported; `config` turns this into what is
//! meant.

mod read;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

pub use read::mistake;

#[derive(Debug, Parser)]
#[command(
    name = "dlock",
    version,
    about = "Run a command under a named lock, and never beside another holder of it",
    after_help = "The first thing to try:  dlock run --name nightly-report -- ./report.sh",
    disable_help_subcommand = true,
    max_term_width = 100
)]
pub struct Cli {
    #[command(subcommand)]
    pub verb: Verb,
}

// Only the verb that was typed is set up: all of them would take longer than locking a file.
#[derive(Debug, Subcommand)]
#[command(defer = true)]
pub enum Verb {
    /// Acquire a lock, run a command while it is held, release it, exit as the command did
    Run(Box<RunArgs>),
    /// Show who holds locks, since when, for how much longer, who waits, how the last run ended
    Status(StatusArgs),
    /// Take a lock away from its holder
    ForceRelease(ForceReleaseArgs),
    /// Acquire a lock for steps that cannot be wrapped, and print it as shell assignments
    Acquire(AcquireArgs),
    /// Extend an acquired lock
    Renew(RenewArgs),
    /// Let go of an acquired lock
    Release(ReleaseArgs),
    /// Run a command only if its fencing token is not older than what the resource has seen
    Fence(FenceArgs),
    /// Check a backend end to end: reach it, take and release a probe lock, find what weakens the promise
    Doctor(DoctorArgs),
    /// Print the completions of a shell
    Completions { shell: clap_complete::Shell },
    /// Print the manual page
    Man,
    /// What completes a word: asked by the completions
    #[command(hide = true)]
    Words(WordsArgs),
}

// Which backend, and how dlock talks about it. A doc comment would be shown as the help of every verb that has these.
#[derive(Args, Debug, Default)]
pub struct Common {
    /// Backend URL, or the name of a profile in the config file; without one, local files
    #[arg(short, long, value_name = "URL|PROFILE")]
    pub backend: Option<String>,

    /// How long the backend may take to answer the first time [default: 5s]
    #[arg(long, value_name = "DUR")]
    pub connect_timeout: Option<String>,

    /// Read this config file instead of the usual one
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Say more on standard error
    #[arg(short, long, conflicts_with = "quiet")]
    pub verbose: bool,

    /// Say nothing on standard error but errors
    #[arg(short, long)]
    pub quiet: bool,

    /// How to write on standard error: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log: Option<String>,
}

#[derive(Args, Debug, Default)]
#[command(after_help = "\
Durations are like 500ms, 30s, '1h 5m' or, as for sleep(1), bare seconds like 2.5. Every option that takes a \
duration or a choice can also be set by an environment variable (--ttl: DLOCK_TTL) and in the config file (ttl = \"1m\").")]
pub struct RunArgs {
    /// The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /
    #[arg(long)]
    pub name: String,

    #[command(flatten)]
    pub common: Common,

    /// How long the lock stays taken if dlock dies [default: 30s]
    #[arg(long, value_name = "DUR")]
    pub ttl: Option<String>,

    /// Give up if the lock was not acquired within DUR; 0 is --no-wait [default: wait for ever]
    #[arg(short, long, value_name = "DUR", conflicts_with = "no_wait")]
    pub wait: Option<String>,

    /// Give up at once if the lock is busy
    #[arg(short, long, visible_aliases = ["nb", "nonblock"])]
    pub no_wait: bool,

    /// Hold it together with other --shared holders, exclusive of everybody else
    #[arg(short, long, conflicts_with = "slots")]
    pub shared: bool,

    /// Let up to N holders in at once; each sees its own DLOCK_SLOT
    #[arg(long, value_name = "N")]
    pub slots: Option<String>,

    /// Signal sent first to stop the command [default: TERM]
    #[arg(long, value_name = "SIG")]
    pub signal: Option<String>,

    /// SIGKILL follows after DUR [default: a sixth of the ttl, at most 5s]
    #[arg(short, long, value_name = "DUR")]
    pub kill_after: Option<String>,

    /// End the command after DUR, as timeout(1) does
    #[arg(long, value_name = "DUR")]
    pub timeout: Option<String>,

    /// When the lock is already not ours: kill at once, or signal first: kill or signal [default: kill]
    #[arg(long, value_name = "HOW")]
    pub on_lost: Option<String>,

    /// What happens to processes the command left behind: kill, wait or leave [default: kill]
    #[arg(long, value_name = "HOW")]
    pub leftovers: Option<String>,

    /// After a short command keep the lock until DUR since it was granted
    #[arg(long, value_name = "DUR")]
    pub hold_at_least: Option<String>,

    /// Run only if no successful run with this key is on record for the lock
    #[arg(long, value_name = "KEY")]
    pub once: Option<String>,

    /// Exit code for "not acquired", 0 to 255 [default: 75]
    #[arg(short = 'E', long, value_name = "N", allow_negative_numbers = true)]
    pub conflict_exit_code: Option<String>,

    /// Run `$SHELL -c STRING` instead of a command behind `--`
    #[arg(short, long, value_name = "STRING", conflicts_with = "argv")]
    pub command: Option<OsString>,

    /// If an ancestor holds this very lock, run under its lease instead of refusing
    #[arg(long)]
    pub reentrant: bool,

    /// After a loss or a failure stand for the lock again, for ever; only success or a signal ends it
    #[arg(long, conflicts_with_all = ["no_wait", "wait"])]
    pub keep_trying: bool,

    /// Keep Prometheus metrics of this lock in FILE, for the node exporter's textfile collector
    #[arg(long, value_name = "FILE")]
    pub metrics_file: Option<String>,

    /// Print the timeline and the settings with where each came from; run nothing
    #[arg(long)]
    pub explain: bool,

    /// The command and its arguments
    #[arg(last = true, value_name = "CMD", required_unless_present_any = ["command", "explain"])]
    pub argv: Vec<OsString>,
}

#[derive(Args, Debug, Default)]
pub struct StatusArgs {
    /// The locks to show; without any, every lock of the backend
    pub names: Vec<String>,

    #[command(flatten)]
    pub common: Common,

    /// Print one JSON array
    #[arg(long)]
    pub json: bool,

    /// Show it again every EVERY, until interrupted; a word behind it that is no duration is a lock [default: 2s]
    #[arg(long, value_name = "EVERY", num_args = 0..=1, require_equals = true, default_missing_value = "2s")]
    pub watch: Option<String>,

    /// Exit with 75 if any of the named locks is held
    #[arg(long, requires = "names")]
    pub exit_code: bool,
}

#[derive(Args, Debug)]
pub struct ForceReleaseArgs {
    /// The lock
    pub name: String,

    #[command(flatten)]
    pub common: Common,

    /// Free it on the spot instead of telling its holder first: two commands may overlap for a moment
    #[arg(long)]
    pub now: bool,

    /// Do not ask
    #[arg(long)]
    pub yes: bool,

    /// Act only if N is still the holder's fencing token
    #[arg(long, value_name = "N")]
    pub token: Option<String>,

    /// Why: told to the holder, and kept in the record of its run; a program other than dlock is not told
    #[arg(long, value_name = "TEXT")]
    pub reason: Option<String>,
}

#[derive(Args, Debug)]
pub struct AcquireArgs {
    /// The lock
    #[arg(long)]
    pub name: String,

    #[command(flatten)]
    pub common: Common,

    /// How long the lock is ours unless it is renewed [default: 30s]
    #[arg(long, value_name = "DUR")]
    pub ttl: Option<String>,

    /// Give up if the lock was not acquired within DUR; 0 is --no-wait [default: wait for ever]
    #[arg(short, long, value_name = "DUR", conflicts_with = "no_wait")]
    pub wait: Option<String>,

    /// Give up at once if the lock is busy
    #[arg(short, long, visible_aliases = ["nb", "nonblock"])]
    pub no_wait: bool,

    /// Hold it together with other --shared holders, exclusive of everybody else
    #[arg(short, long, conflicts_with = "slots")]
    pub shared: bool,

    /// Let up to N holders in at once
    #[arg(long, value_name = "N")]
    pub slots: Option<String>,

    /// Exit code for "not acquired", 0 to 255 [default: 75]
    #[arg(short = 'E', long, value_name = "N", allow_negative_numbers = true)]
    pub conflict_exit_code: Option<String>,

    /// Print a JSON object instead of shell assignments
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
pub struct RenewArgs {
    /// The lock
    #[arg(long)]
    pub name: String,

    #[command(flatten)]
    pub common: Common,

    /// Who holds it [default: $DLOCK_OWNER]
    #[arg(long)]
    pub owner: Option<String>,

    /// How long the lock is ours from now on [default: as long as it was acquired or last renewed for]
    #[arg(long, value_name = "DUR")]
    pub ttl: Option<String>,
}

#[derive(Args, Debug)]
pub struct ReleaseArgs {
    /// The lock
    #[arg(long)]
    pub name: String,

    #[command(flatten)]
    pub common: Common,

    /// Who holds it [default: $DLOCK_OWNER]
    #[arg(long)]
    pub owner: Option<String>,
}

#[derive(Args, Debug)]
pub struct DoctorArgs {
    #[command(flatten)]
    pub common: Common,

    /// The ttl to judge the timeline for [default: 30s]
    #[arg(long, value_name = "DUR")]
    pub ttl: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    /// Exit with 1 if there is anything to warn of
    #[arg(long)]
    pub strict: bool,

    /// Only print the SQL that an administrator can run where dlock may not (PostgreSQL)
    #[arg(long)]
    pub print_schema: bool,
}

#[derive(Args, Debug)]
pub struct WordsArgs {
    pub kind: Words,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Words {
    /// The locks of the backend
    Names,
    /// The profiles of the config file
    Profiles,
}

#[derive(Args, Debug)]
pub struct FenceArgs {
    /// The file or directory that the command writes to
    pub resource: PathBuf,

    /// The fencing token [default: $DLOCK_FENCING_TOKEN]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub token: Option<String>,

    /// How to write on standard error: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    pub log: Option<String>,

    /// The command and its arguments
    #[arg(last = true, value_name = "CMD", required = true)]
    pub argv: Vec<OsString>,
}
