//! What can happen, in words for people and in fields for machines.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::{describe, place, rounded, whole_seconds};
use crate::guardian::Pace;
use crate::lock::{Holder, Revocation, Token};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    Error,
    Warning,
    Info,
}

impl Level {
    pub fn word(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Info => "info",
        }
    }
}

pub const WAITING: &str = "waiting";

/// What machines read of an event beside its message.
pub type Fields = Map<String, Value>;

pub fn fields<const N: usize>(known: [(&str, Value); N]) -> Fields {
    known.map(|(key, value)| (key.to_owned(), value)).into_iter().collect()
}

/// What can happen to a run that is worth a line.
#[derive(Debug)]
pub enum Event<'a> {
    Acquired {
        token: Token,
        waited: Duration,
    },
    Released {
        token: Token,
        exit_code: u8,
        duration: Duration,
    },
    Waiting {
        holder: Option<&'a Holder>,
        ahead: Option<usize>,
        waited: Duration,
    },
    Busy {
        holder: Option<&'a Holder>,
    },
    AlreadyRan {
        key: &'a str,
    },
    Trouble {
        why: &'a str,
        ends_in: Duration,
    },
    WaitingForBackend {
        why: &'a str,
    },
    Recovered,
    Lost {
        why: &'a str,
    },
    ForceReleased {
        by: &'a Revocation,
    },
    Revoked {
        by: &'a Revocation,
    },
    /// The job was suspended for so long, if that is why.
    Expired {
        suspended: Option<Duration>,
    },
    TooLate,
    Pace {
        pace: Pace,
    },
    Outgrown {
        pace: Pace,
    },
    CannotSignal {
        processes: &'a [(String, i32)],
    },
    TimedOut {
        after: Duration,
    },
    HeldLong {
        after: Duration,
    },
    Leftovers {
        processes: usize,
    },
    GuardianDied,
    Orphaned,
    ReleaseFailed {
        why: &'a str,
    },
    Unrecorded {
        what: &'a str,
    },
    NotFound {
        program: &'a str,
    },
    CannotExecute {
        program: &'a str,
        why: &'a str,
    },
    MetricsFailed {
        why: &'a str,
    },
    HookFailed {
        event: &'a str,
        why: &'a str,
    },
    StandsAgain {
        after: Duration,
    },
    ShorterTtl {
        granted: Duration,
        asked: Duration,
    },
    FenceBusy {
        resource: &'a str,
        mark: &'a str,
    },
}

/// What the guardian has seen of itself.
fn slowness(pace: &Pace) -> String {
    let (lateness, walk) = (rounded(pace.lateness), rounded(pace.walk));
    format!("it wakes {lateness} late and needs {walk} to look at {} processes", pace.processes)
}

impl Event<'_> {
    pub fn describe(&self) -> (Level, &'static str, String) {
        match self {
            Event::Acquired { token, waited } => {
                (Level::Info, "acquired", format!("acquired with token {token} after {}", rounded(*waited)))
            }
            Event::Released { exit_code, duration, .. } => {
                let how = format!("exit code {exit_code} after {}", rounded(*duration));
                (Level::Info, "released", format!("released: {how}"))
            }
            Event::Waiting { holder, ahead, waited } => {
                let place = place(*ahead);
                let text = match holder {
                    Some(holder) => format!("waiting for {}, held by {}{place}", rounded(*waited), describe(holder)),
                    None => format!("waiting for {}: somebody else holds it or was first{place}", rounded(*waited)),
                };
                (Level::Info, WAITING, text)
            }
            Event::Busy { holder: Some(holder) } => {
                (Level::Warning, "busy", format!("not acquired: held by {}", describe(holder)))
            }
            Event::Busy { holder: None } => {
                (Level::Warning, "busy", "not acquired: somebody else holds it or was first".into())
            }
            Event::AlreadyRan { key } => {
                (Level::Info, "already-ran", format!("a successful run with --once {key} is on record; not run again"))
            }
            Event::Trouble { why, ends_in } => (
                Level::Warning,
                "trouble",
                format!("cannot renew: {why}; the command is ended in {} unless that changes", rounded(*ends_in)),
            ),
            Event::WaitingForBackend { why } => {
                (Level::Warning, "trouble", format!("the backend does not answer: {why}; still waiting for it"))
            }
            Event::Recovered => (Level::Warning, "recovered", "the backend answers again".into()),
            Event::Lost { why } => (Level::Error, "lost", format!("lost the lock: {why}; ending the command")),
            Event::ForceReleased { by } => {
                let (who, reason) = (by.operator(), &by.reason);
                let how = format!("{who} took it away with force-release --now");
                (Level::Error, "lost", format!("lost the lock: {how} ({reason}); ending the command"))
            }
            Event::Revoked { by } => {
                let (who, reason) = (by.operator(), &by.reason);
                (Level::Error, "revoked", format!("{who} takes the lock away ({reason}); ending the command"))
            }
            Event::Expired { suspended: Some(span) } => (
                Level::Error,
                "expired",
                format!(
                    "the job was suspended for {}, so that its lease could not be kept alive; ended the command before \
                     it ran out",
                    whole_seconds(*span)
                ),
            ),
            Event::Expired { suspended: None } => (
                Level::Error,
                "expired",
                "the lease could not be kept alive; ending the command before it runs out".into(),
            ),
            Event::TooLate => (
                Level::Error,
                "expired",
                "the lease was nearly over before the command could be started; nothing was started".into(),
            ),
            Event::Pace { pace } => (
                Level::Info,
                "pace",
                format!("SIGKILL would come {} before the lease ends: {}", rounded(pace.margin()), slowness(pace)),
            ),
            Event::Outgrown { pace } => (
                Level::Error,
                "outgrown",
                format!(
                    "the lease is too short to kill the command in time, which would take {}: {}; ending it while that \
                     is possible; raise --ttl",
                    rounded(pace.margin()),
                    slowness(pace)
                ),
            ),
            Event::CannotSignal { processes } => {
                let named: Vec<_> = processes.iter().map(|(name, pid)| format!("{name} ({pid})")).collect();
                (
                    Level::Error,
                    "cannot-signal",
                    format!(
                        "not permitted to kill {}, which the command started; waiting for its end, which may come \
                         after that of the lease",
                        named.join(", ")
                    ),
                )
            }
            Event::TimedOut { after } => (
                Level::Warning,
                "timed-out",
                format!("--timeout of {} has passed; ending the command", rounded(*after)),
            ),
            Event::HeldLong { after } => (
                Level::Warning,
                "held-long",
                format!("the command has run for more than {} (--warn-after); it goes on", rounded(*after)),
            ),
            Event::Leftovers { processes } => (
                Level::Warning,
                "leftovers",
                format!("the command left {processes} process(es) behind; ended them (see --leftovers)"),
            ),
            Event::GuardianDied => {
                (Level::Error, "guardian-died", "the guardian process was killed; ended the command".into())
            }
            Event::Orphaned => (Level::Error, "orphaned", "dlock itself was killed; ended the command".into()),
            Event::ReleaseFailed { why } => {
                (Level::Warning, "release-failed", format!("not released: {why}; the lease will run out by itself"))
            }
            Event::Unrecorded { what } => (Level::Warning, "unrecorded", format!("released, but {what}")),
            Event::NotFound { program } => (Level::Error, "not-found", format!("{program}: command not found")),
            Event::CannotExecute { program, why } => {
                (Level::Error, "cannot-execute", format!("{program}: cannot be executed: {why}"))
            }
            Event::MetricsFailed { why } => (Level::Warning, "metrics-failed", format!("no metrics: {why}")),
            Event::HookFailed { event, why } => {
                (Level::Warning, "hook-failed", format!("the --on-event command for {event} failed: {why}"))
            }
            Event::StandsAgain { after } => {
                (Level::Info, "stands-again", format!("stands for the lock again in {}", rounded(*after)))
            }
            Event::ShorterTtl { granted, asked } => (
                Level::Warning,
                "shorter-ttl",
                format!("the server grants a ttl of {}, not {}", rounded(*granted), rounded(*asked)),
            ),
            Event::FenceBusy { resource, mark } => (
                Level::Warning,
                "fence-busy",
                format!(
                    "waiting for another fence on {resource}, or for something that its command left running; \
                     fuser -v {mark} tells"
                ),
            ),
        }
    }

    pub fn fields(&self) -> Fields {
        let millis = |span: &Duration| Value::from(u64::try_from(span.as_millis()).unwrap_or(u64::MAX));
        match self {
            Event::Acquired { token, waited } => {
                fields([("fencing_token", token.0.into()), ("waited_ms", millis(waited))])
            }
            Event::Released { token, exit_code, duration } => fields([
                ("fencing_token", token.0.into()),
                ("exit_code", (*exit_code).into()),
                ("duration_ms", millis(duration)),
            ]),
            Event::Waiting { holder, ahead, waited } => {
                fields([("holder", json!(holder)), ("ahead", json!(ahead)), ("waited_ms", millis(waited))])
            }
            Event::Busy { holder } => fields([("holder", json!(holder))]),
            Event::AlreadyRan { key } => fields([("once", (*key).into())]),
            Event::Trouble { why, ends_in } => fields([("reason", (*why).into()), ("ends_in_ms", millis(ends_in))]),
            Event::WaitingForBackend { why: reason }
            | Event::Lost { why: reason }
            | Event::ReleaseFailed { why: reason }
            | Event::Unrecorded { what: reason }
            | Event::MetricsFailed { why: reason } => fields([("reason", (*reason).into())]),
            Event::ForceReleased { by } | Event::Revoked { by } => {
                fields([("reason", by.reason.as_str().into()), ("revoked_by", json!(by.by))])
            }
            Event::TimedOut { after } | Event::HeldLong { after } | Event::StandsAgain { after } => {
                fields([("after_ms", millis(after))])
            }
            Event::Expired { suspended: Some(span) } => fields([("suspended_ms", millis(span))]),
            Event::HookFailed { event, why } => fields([("hook_event", (*event).into()), ("reason", (*why).into())]),
            Event::Leftovers { processes } => fields([("processes", (*processes).into())]),
            Event::NotFound { program } => fields([("program", (*program).into())]),
            Event::CannotExecute { program, why } => {
                fields([("program", (*program).into()), ("reason", (*why).into())])
            }
            Event::ShorterTtl { granted, asked } => fields([("ttl_ms", millis(granted)), ("asked_ms", millis(asked))]),
            Event::FenceBusy { resource, .. } => fields([("resource", (*resource).into())]),
            Event::Pace { pace } | Event::Outgrown { pace } => fields([
                ("margin_ms", millis(&pace.margin())),
                ("processes", pace.processes.into()),
                ("lateness_ms", millis(&pace.lateness)),
                ("walk_ms", millis(&pace.walk)),
            ]),
            Event::CannotSignal { processes } => {
                fields([("pids", processes.iter().map(|(_, pid)| *pid).collect::<Vec<_>>().into())])
            }
            Event::Recovered
            | Event::Expired { suspended: None }
            | Event::TooLate
            | Event::GuardianDied
            | Event::Orphaned => Fields::new(),
        }
    }
}
