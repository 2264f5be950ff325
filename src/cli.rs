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
    /// Show the last runs of a lock: when, how long, how each ended, where and by whom
    History(HistoryArgs),
    /// Check locks against limits, as a plugin of Nagios, Icinga, Zabbix or Sensu: exits with 0, 1, 2 or 3
    Check(CheckArgs),
    /// Take a lock away from its holder
    ForceRelease(ForceReleaseArgs),
    /// Remove the history and the --once keys of a lock that nobody uses; its tokens never go back
    Forget(ForgetArgs),
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
    /// Print the help of dlock, or of one verb
    Help { verb: Option<String> },
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

// One lock: `--name NAME`, or NAME as a word of its own. Every word before `--` is taken, so that whoever forgot the
// dashes can be told so.
#[derive(Args, Debug, Default)]
pub struct Named {
    /// The lock: up to 200 characters of A-Z a-z 0-9 . _ : @ + - /
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,

    /// The lock, without --name
    #[arg(value_name = "NAME")]
    pub words: Vec<String>,
}

// Any number of locks.
#[derive(Args, Debug, Default)]
pub struct Names {
    /// Locks, or patterns with * and ? like 'nightly-*'
    pub names: Vec<String>,

    /// One more of them
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
}

#[derive(Args, Debug, Default)]
#[command(override_usage = "dlock run --name <NAME> [OPTIONS] -- <CMD> [ARG]...")]
#[command(after_help = "\
Durations are like 500ms, 30s, '1h 5m' or, as for sleep(1), bare seconds like 2.5. Every option that takes a \
duration or a choice can also be set by an environment variable (--ttl: DLOCK_TTL) and in the config file (ttl = \"1m\").")]
pub struct RunArgs {
    #[command(flatten)]
    pub named: Named,

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

    /// Run `/bin/sh -c CMD` for warnings, errors, acquired and released, with the event as JSON on its standard input
    #[arg(long, value_name = "CMD")]
    pub on_event: Option<String>,

    /// Warn once when the command has run for DUR; it goes on
    #[arg(long, value_name = "DUR")]
    pub warn_after: Option<String>,

    /// A note for others: shown by status, in their busy messages and in the history [at most 200 characters]
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,

    /// How many of its runs the lock remembers, 0 to 100; the last one always [default: 20]
    #[arg(long, value_name = "N")]
    pub history: Option<String>,

    /// Print the timeline and the settings with where each came from; run nothing
    #[arg(long)]
    pub explain: bool,

    /// The command and its arguments
    #[arg(last = true, value_name = "CMD")]
    pub argv: Vec<OsString>,
}

#[derive(Args, Debug, Default)]
pub struct StatusArgs {
    #[command(flatten)]
    pub locks: Names,

    #[command(flatten)]
    pub common: Common,

    /// Print one JSON array: --format json
    #[arg(long, conflicts_with = "format")]
    pub json: bool,

    /// How to print: table, json or prometheus [default: table; one lock on a terminal is described]
    #[arg(long, value_name = "FORMAT")]
    pub format: Option<String>,

    /// Only locks that are held
    #[arg(long)]
    pub held: bool,

    /// When to use colours: auto, always or never [default: auto, which heeds $NO_COLOR]
    #[arg(long, value_name = "WHEN")]
    pub color: Option<String>,

    /// Show it again every EVERY, until interrupted; a word behind it that is no duration is a lock [default: 2s]
    #[arg(long, value_name = "EVERY", num_args = 0..=1, require_equals = true, default_missing_value = "2s")]
    pub watch: Option<String>,

    /// Exit with 75 if any of the named locks is held
    #[arg(long)]
    pub exit_code: bool,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock history [OPTIONS] <NAME>")]
pub struct HistoryArgs {
    #[command(flatten)]
    pub named: Named,

    #[command(flatten)]
    pub common: Common,

    /// Show the last N runs only
    #[arg(short = 'n', long, value_name = "N")]
    pub limit: Option<String>,

    /// Print one JSON object
    #[arg(long)]
    pub json: bool,

    /// Forget that a run with this --once key succeeded, so that the next one runs again
    #[arg(long, value_name = "KEY", conflicts_with_all = ["limit", "json"])]
    pub forget_once: Option<String>,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock forget [OPTIONS] <NAME>")]
pub struct ForgetArgs {
    #[command(flatten)]
    pub named: Named,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(after_help = "\
Prints one line, `DLOCK OK - …`, and exits with 0 (OK), 1 (WARNING), 2 (CRITICAL) or 3 (UNKNOWN: the backend cannot be \
reached, or dlock was called in a wrong way). A limit that is passed is CRITICAL; --warn 80% makes it WARNING from 80% of \
each limit on.")]
pub struct CheckArgs {
    #[command(flatten)]
    pub locks: Names,

    #[command(flatten)]
    pub common: Common,

    /// CRITICAL if a lock has been held for longer
    #[arg(long, value_name = "DUR")]
    pub held_at_most: Option<String>,

    /// CRITICAL if no run has succeeded for longer, or ever
    #[arg(long, value_name = "DUR")]
    pub last_success_within: Option<String>,

    /// CRITICAL if somebody has waited for longer
    #[arg(long, value_name = "DUR")]
    pub waiting_at_most: Option<String>,

    /// WARNING from this part of each limit on, like 80%
    #[arg(long, value_name = "PERCENT")]
    pub warn: Option<String>,

    /// Print one JSON object instead of the line
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock force-release [OPTIONS] <NAME>")]
pub struct ForceReleaseArgs {
    #[command(flatten)]
    pub named: Named,

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
#[command(override_usage = "dlock acquire [OPTIONS] <NAME>")]
pub struct AcquireArgs {
    #[command(flatten)]
    pub named: Named,

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

    /// A note for others: shown by status, in their busy messages and in the history [at most 200 characters]
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,

    /// Print a JSON object instead of shell assignments
    #[arg(long)]
    pub json: bool,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock renew [OPTIONS] <NAME>")]
pub struct RenewArgs {
    #[command(flatten)]
    pub named: Named,

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
#[command(override_usage = "dlock release [OPTIONS] <NAME>")]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub named: Named,

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
