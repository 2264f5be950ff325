//! What can be typed: clap's structs and the help text. `config` turns this into what is meant. `-h` shows the
//! common options on one screen, `--help` and the manual pages all of them, in these groups.

mod advice;
mod read;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand};

pub use advice::{incomplete_run, mistake, no_single_lock};
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
    Run(Box<RunArgs>),
    /// Show who holds locks and who waits for them
    ///
    /// It also shows since when and for how much longer a lock is held, and how its last run ended. Without a NAME, all
    /// locks of the backend are shown.
    Status(StatusArgs),
    /// Show the last runs of a lock
    ///
    /// The newest is the first. Each line says when it ran, how long, how it ended, where, and by whom.
    History(HistoryArgs),
    /// Check locks against limits, for Nagios and the like
    ///
    /// It is a plugin for Nagios, Icinga, Zabbix or Sensu: it prints one line, "DLOCK OK - ...", and exits with 0 (OK), 1
    /// (WARNING), 2 (CRITICAL) or 3 (UNKNOWN: the backend cannot be reached, or dlock was called in a wrong way).
    Check(CheckArgs),
    /// Take a lock away from its holder
    ///
    /// The holder is asked to stop its command and to release the lock. If the holder is dead, its lease runs out. Only then
    /// can somebody else acquire the lock. On a terminal dlock shows the holder and asks first.
    ForceRelease(ForceReleaseArgs),
    /// Remove what is recorded about a lock
    ///
    /// It removes the history and the --once keys of a lock that nobody uses. Its fencing tokens go on growing.
    Forget(ForgetArgs),
    /// Acquire a lock without a command, for the steps of a CI job
    ///
    /// It is for steps that cannot be wrapped in dlock run. It prints DLOCK_NAME, DLOCK_OWNER and DLOCK_FENCING_TOKEN as
    /// shell assignments. The lock is yours for --ttl, unless you renew it. When that time is over, nobody stops your steps.
    Acquire(AcquireArgs),
    /// Extend an acquired lock
    ///
    /// The exit code is 79 if the lock is not yours any more.
    Renew(RenewArgs),
    /// Release an acquired lock
    ///
    /// The exit code is 79 if the lock was not yours any more.
    Release(ReleaseArgs),
    /// Run a command only if its fencing token is not stale
    ///
    /// A token is stale if the resource has seen a higher one. The highest token is recorded beside the resource. While the
    /// command runs, other commands for the same resource wait. The exit code is 79 if the token is stale.
    Fence(FenceArgs),
    /// Test a backend, and find settings that weaken its locks
    ///
    /// It connects, logs in, acquires, renews and releases a probe lock, and looks for settings of the server that weaken the
    /// promise. Every finding says what to do about it.
    Doctor(DoctorArgs),
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

#[derive(Args, Debug, Default)]
#[command(
    override_usage = "dlock run [OPTIONS] --name <NAME> -- <CMD> [ARG]...",
    help_template = WITH_EXAMPLES,
    after_help = "  dlock run --name nightly -- ./report.sh     Wait for the lock, then run it
  dlock run -n --name nightly -- ./report.sh  Exit with 75 if the lock is busy",
    after_long_help = "  dlock run --name nightly -- ./report.sh     Wait for the lock, then run it
  dlock run -n --name nightly -- ./report.sh  Exit with 75 if the lock is busy

DUR is a duration like 500ms, 30s, '1h 5m' or, in seconds, 2.5. Most options can also be set in the environment \
(--ttl: DLOCK_TTL) and in the config file (ttl = \"1m\"); see dlock-config(5)."
)]
pub struct RunArgs {
    #[command(flatten)]
    pub asking: Asking,

    /// Wait for the lock again after a loss or a failure; only success or a signal ends it
    #[arg(long, conflicts_with_all = ["no_wait", "wait"], help_heading = WAITING, hide_short_help = true)]
    pub keep_trying: bool,

    /// Run `$SHELL -c STRING` instead of a command after --
    #[arg(short, long, value_name = "STRING", conflicts_with = "argv", help_heading = COMMAND)]
    pub command: Option<OsString>,

    /// Run only if no run with this KEY has succeeded before
    ///
    /// If one has, nothing is run and the exit code is 0. --once "$(date +%F)" runs a job once a day, on the host that
    /// comes first.
    #[arg(long, value_name = "KEY", help_heading = COMMAND)]
    pub once: Option<String>,

    /// Stop the command after DUR, as timeout(1) does
    #[arg(long, value_name = "DUR", help_heading = COMMAND)]
    pub timeout: Option<String>,

    /// Signal sent first to stop the command [default: TERM]
    #[arg(long, value_name = "SIG", help_heading = COMMAND, hide_short_help = true)]
    pub signal: Option<String>,

    /// Send SIGKILL so long after the first signal [default: a sixth of the ttl, at most 5s]
    #[arg(short, long, value_name = "DUR", help_heading = COMMAND, hide_short_help = true)]
    pub kill_after: Option<String>,

    /// What to do with processes that the command left behind: kill, wait or leave [default: kill]
    ///
    /// kill them; wait for them while holding the lock; or leave them running without the lock.
    #[arg(long, value_name = "HOW", help_heading = COMMAND, hide_short_help = true)]
    pub leftovers: Option<String>,

    /// If an outer dlock run holds this lock already, run under its lease
    ///
    /// Without it, a nested run of the same lock is refused with 64.
    #[arg(long, help_heading = COMMAND, hide_short_help = true)]
    pub reentrant: bool,

    /// How long the lock stays taken if dlock dies [default: 30s]
    ///
    /// The lease is renewed every third of it, for as long as the command runs.
    #[arg(long, value_name = "DUR", help_heading = LEASE)]
    pub ttl: Option<String>,

    /// Keep the lock for at least DUR, even if the command ends earlier
    ///
    /// dlock itself exits at once. On hosts whose clocks differ, the others then skip a short cron job instead of
    /// repeating it.
    #[arg(long, value_name = "DUR", help_heading = LEASE, hide_short_help = true)]
    pub hold_at_least: Option<String>,

    /// When the server says that the lock is lost: kill or signal [default: kill]
    ///
    /// kill sends SIGKILL at once; signal sends --signal first and SIGKILL after --kill-after.
    #[arg(long, value_name = "HOW", help_heading = LEASE, hide_short_help = true)]
    pub on_lost: Option<String>,

    /// A note for others, up to 200 characters
    ///
    /// It is shown by dlock status, to those who find the lock busy, and in the history.
    #[arg(long, value_name = "TEXT", help_heading = OUTPUT, hide_short_help = true)]
    pub note: Option<String>,

    /// Print a warning when the command has run for DUR
    ///
    /// It is printed once, and the command goes on.
    #[arg(long, value_name = "DUR", help_heading = OUTPUT, hide_short_help = true)]
    pub warn_after: Option<String>,

    /// Run `/bin/sh -c CMD` for every warning and error, and when the lock is acquired and released
    ///
    /// CMD reads the event as a JSON object from its standard input.
    #[arg(long, value_name = "CMD", help_heading = OUTPUT, hide_short_help = true)]
    pub on_event: Option<String>,

    /// Write Prometheus metrics of this lock to FILE, for the textfile collector of the node exporter
    #[arg(long, value_name = "FILE", help_heading = OUTPUT, hide_short_help = true)]
    pub metrics_file: Option<String>,

    /// How many runs the lock keeps in its history, 0 to 100 [default: 20]
    ///
    /// The last run is kept in any case.
    #[arg(long, value_name = "N", help_heading = OUTPUT, hide_short_help = true)]
    pub history: Option<String>,

    /// Show the timeline and the settings; run nothing
    #[arg(long, help_heading = OUTPUT)]
    pub explain: bool,

    #[command(flatten)]
    pub common: Common,

    #[arg(last = true, value_name = "CMD", hide = true)]
    pub argv: Vec<OsString>,
}

#[derive(Args, Debug, Default)]
#[command(
    override_usage = "dlock status [OPTIONS] [NAME]...",
    help_template = WITH_EXAMPLES,
    after_help = "  dlock status                  Show all locks
  dlock status nightly          Describe one lock, and what you can do about it
  dlock status --watch 5s       Show all locks again every 5 seconds"
)]
pub struct StatusArgs {
    #[command(flatten)]
    pub locks: Names,

    /// Show held locks only
    #[arg(long, help_heading = LOCK)]
    pub held: bool,

    /// Print JSON: the same as --format json
    #[arg(long, conflicts_with = "format", help_heading = OUTPUT)]
    pub json: bool,

    /// Print a table, json or prometheus [default: table]
    ///
    /// On a terminal, one NAME without --format is described instead.
    #[arg(long, value_name = "FORMAT", help_heading = OUTPUT)]
    pub format: Option<String>,

    /// Show it again every EVERY [default: 2s]
    ///
    /// Ctrl-C ends it.
    #[arg(
        long, value_name = "EVERY", num_args = 0..=1, require_equals = true, default_missing_value = "2s",
        help_heading = OUTPUT
    )]
    pub watch: Option<String>,

    /// Exit with 75 if any of the named locks is held
    #[arg(long, help_heading = OUTPUT)]
    pub exit_code: bool,

    /// When to use colours: auto, always or never [default: auto]
    ///
    /// auto: on a terminal, unless NO_COLOR is set.
    #[arg(long, value_name = "WHEN", help_heading = OUTPUT, hide_short_help = true)]
    pub color: Option<String>,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock history [OPTIONS] <NAME>")]
pub struct HistoryArgs {
    #[command(flatten)]
    pub named: Named,

    /// Let a job with this --once KEY run again
    #[arg(long, value_name = "KEY", conflicts_with_all = ["limit", "json"], help_heading = LOCK)]
    pub forget_once: Option<String>,

    /// Show the last N runs only
    #[arg(short = 'n', long, value_name = "N", help_heading = OUTPUT)]
    pub limit: Option<String>,

    /// Print a JSON object
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,

    #[command(flatten)]
    pub common: Common,
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
#[command(
    override_usage = "dlock check [OPTIONS] <NAME>...",
    help_template = WITH_EXAMPLES,
    after_help = "  dlock check nightly --last-success-within 26h   Has the nightly job run?
  dlock check '*' --held-at-most 2h --warn 80%    Does any job hang?"
)]
pub struct CheckArgs {
    #[command(flatten)]
    pub locks: Names,

    /// CRITICAL if no run has succeeded within DUR, or ever
    #[arg(long, value_name = "DUR", help_heading = LIMITS)]
    pub last_success_within: Option<String>,

    /// CRITICAL if a lock has been held for longer than DUR
    #[arg(long, value_name = "DUR", help_heading = LIMITS)]
    pub held_at_most: Option<String>,

    /// CRITICAL if somebody has waited for longer than DUR
    #[arg(long, value_name = "DUR", help_heading = LIMITS)]
    pub waiting_at_most: Option<String>,

    /// WARNING from PERCENT of each limit on, like 80%
    #[arg(long, value_name = "PERCENT", help_heading = LIMITS)]
    pub warn: Option<String>,

    /// Print a JSON object instead of the line
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "dlock force-release [OPTIONS] <NAME>",
    help_template = WITH_EXAMPLES,
    after_help = "  dlock force-release nightly --reason \"hangs since noon\""
)]
pub struct ForceReleaseArgs {
    #[command(flatten)]
    pub named: Named,

    /// Act only if N is still the token of the holder
    #[arg(long, value_name = "N", help_heading = LOCK)]
    pub token: Option<String>,

    /// Do not ask; needed without a terminal
    #[arg(long, help_heading = COMMAND)]
    pub yes: bool,

    /// Why: the holder prints it, and the history keeps it
    ///
    /// A program other than dlock is not told.
    #[arg(long, value_name = "TEXT", help_heading = COMMAND)]
    pub reason: Option<String>,

    /// Free the lock at once: two commands may overlap
    #[arg(long, help_heading = COMMAND)]
    pub now: bool,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "dlock acquire [OPTIONS] --name <NAME>",
    help_template = WITH_EXAMPLES,
    after_help = "  lock=$(dlock acquire --name deploy --ttl 20m) || exit
  eval \"$lock\"
  ./deploy.sh
  dlock release --name deploy --owner \"$DLOCK_OWNER\""
)]
pub struct AcquireArgs {
    #[command(flatten)]
    pub asking: Asking,

    /// How long the lock is yours unless you renew it [default: 30s]
    #[arg(long, value_name = "DUR", help_heading = LEASE)]
    pub ttl: Option<String>,

    /// A note for others, up to 200 characters
    #[arg(long, value_name = "TEXT", help_heading = OUTPUT)]
    pub note: Option<String>,

    /// Print a JSON object instead of shell assignments
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock renew [OPTIONS] --name <NAME>")]
pub struct RenewArgs {
    #[command(flatten)]
    pub lock: Acquired,

    /// How long the lock is yours from now on [default: as long as the last time]
    #[arg(long, value_name = "DUR", help_heading = LEASE)]
    pub ttl: Option<String>,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock release [OPTIONS] --name <NAME>")]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub lock: Acquired,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock doctor [OPTIONS]")]
pub struct DoctorArgs {
    /// Judge the timeline of this ttl [default: 30s]
    #[arg(long, value_name = "DUR", help_heading = LOCK)]
    pub ttl: Option<String>,

    /// Exit with 1 if there is any warning
    #[arg(long, help_heading = OUTPUT)]
    pub strict: bool,

    /// Print a JSON object
    #[arg(long, help_heading = OUTPUT)]
    pub json: bool,

    /// Only print the SQL that creates the schema in a database
    #[arg(long, help_heading = OUTPUT)]
    pub print_schema: bool,

    #[command(flatten)]
    pub common: Common,
}

#[derive(Args, Debug)]
#[command(
    override_usage = "dlock fence [OPTIONS] <RESOURCE> -- <CMD> [ARG]...",
    help_template = WITH_EXAMPLES,
    after_help = "  dlock run --name publish -- dlock fence ./website -- ./publish.sh"
)]
pub struct FenceArgs {
    /// The file or directory that the command writes to
    pub resource: PathBuf,

    /// The fencing token [default: $DLOCK_FENCING_TOKEN]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = LOCK)]
    pub token: Option<String>,

    /// Write to standard error as text or json [default: text]
    #[arg(long, value_name = "FORMAT", help_heading = OUTPUT)]
    pub log: Option<String>,

    #[command(flatten)]
    pub helped: Helped,

    #[arg(last = true, value_name = "CMD", required = true, hide = true)]
    pub argv: Vec<OsString>,
}
