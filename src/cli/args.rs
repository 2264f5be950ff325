//! The options of each verb, with their help text. What several verbs take is in `cli.rs`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Args;

use super::{Acquired, Asking, COMMAND, Helped, LEASE, LIMITS, LOCK, Named, Names, OUTPUT, WAITING, WITH_EXAMPLES};

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
}

#[derive(Args, Debug)]
#[command(override_usage = "dlock renew [OPTIONS] --name <NAME>")]
pub struct RenewArgs {
    #[command(flatten)]
    pub lock: Acquired,

    /// How long the lock is yours from now on [default: as long as the last time]
    #[arg(long, value_name = "DUR", help_heading = LEASE)]
    pub ttl: Option<String>,
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
