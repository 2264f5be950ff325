//! What can happen, in words for people and in fields for machines.

use std::time::Duration;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{describe, place, whole_seconds};
use crate::clock::millis;
use crate::guardian::Pace;
use crate::lock::{Holder, Revocation, Token, rounded};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Error,
    Warning,
    Info,
}

pub const WAITING: &str = "waiting";

/// What can happen to a run that is worth a line.
#[derive(Debug)]
pub enum Event<'a> {
    Acquired { token: Token, waited: Duration },
    Released { token: Token, exit_code: u8, duration: Duration },
    Waiting { holder: Option<&'a Holder>, ahead: Option<usize>, waited: Duration },
    Busy { holder: Option<&'a Holder> },
    AlreadyRan { key: &'a str },
    Trouble { why: &'a str, ends_in: Duration },
    WaitingForBackend { why: &'a str },
    Recovered,
    Lost { why: &'a str },
    // Noticed only when the command had ended.
    FoundLost,
    ForceReleased { by: &'a Revocation },
    Revoked { by: &'a Revocation },
    // The job was suspended for so long, if that is why.
    Expired { suspended: Option<Duration> },
    TooLate,
    Pace { pace: Pace },
    Outgrown { pace: Pace },
    CannotSignal { processes: &'a [(String, i32)] },
    TimedOut { after: Duration },
    HeldLong { after: Duration },
    Leftovers { processes: usize },
    GuardianDied,
    Orphaned,
    ReleaseFailed { why: &'a str },
    Unrecorded { what: &'a str },
    NotFound { program: &'a str },
    CannotExecute { program: &'a str, why: &'a str },
    MetricsFailed { why: &'a str },
    HookFailed { event: &'a str, why: &'a str },
    StandsAgain { after: Duration },
    ShorterTtl { granted: Duration, asked: Duration },
    FenceBusy { resource: &'a str, mark: &'a str },
}

/// An event as it is message.
pub struct Message {
    pub level: Level,
    /// The `event` of a line for machines.
    pub kind: &'static str,
    pub text: String,
    /// What machines read beside the text.
    pub fields: Map<String, Value>,
}

impl Message {
    pub fn new(level: Level, kind: &'static str, text: String) -> Message {
        Message { level, kind, text, fields: Map::new() }
    }

    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Message {
        self.fields.insert(field.to_owned(), value.into());
        self
    }

    fn with_span(self, field: &str, span: Duration) -> Message {
        self.with(field, millis(span))
    }

    fn with_pace(self, pace: Pace) -> Message {
        self.with_span("margin_ms", pace.margin())
            .with("processes", pace.processes)
            .with_span("lateness_ms", pace.lateness)
            .with_span("walk_ms", pace.walk)
    }
}

/// What the guardian has seen of itself.
fn slowness(pace: &Pace) -> String {
    let (lateness, walk) = (rounded(pace.lateness), rounded(pace.walk));
    format!("it wakes {lateness} late and needs {walk} to look at {} processes", pace.processes)
}

impl Event<'_> {
    /// The manual page lists these names under MONITORING.
    pub fn message(&self) -> Message {
        let error = |kind, text| Message::new(Level::Error, kind, text);
        let warning = |kind, text| Message::new(Level::Warning, kind, text);
        let info = |kind, text| Message::new(Level::Info, kind, text);
        match *self {
            Event::Acquired { token, waited } => {
                info("acquired", format!("acquired with token {token} after {}", rounded(waited)))
                    .with("fencing_token", token.0)
                    .with_span("waited_ms", waited)
            }
            Event::Released { token, exit_code, duration } => {
                info("released", format!("released: exit code {exit_code} after {}", rounded(duration)))
                    .with("fencing_token", token.0)
                    .with("exit_code", exit_code)
                    .with_span("duration_ms", duration)
            }
            Event::Waiting { holder, ahead, waited } => {
                let who = match holder {
                    Some(holder) => format!(", held by {}", describe(holder)),
                    None => ": somebody else holds it or was first".into(),
                };
                info(WAITING, format!("waiting for {}{who}{}", rounded(waited), place(ahead)))
                    .with("holder", json!(holder))
                    .with("ahead", json!(ahead))
                    .with_span("waited_ms", waited)
            }
            Event::Busy { holder } => {
                let who = holder.map(|holder| format!("held by {}", describe(holder)));
                let who = who.unwrap_or_else(|| "somebody else holds it or was first".into());
                warning("busy", format!("not acquired: {who}")).with("holder", json!(holder))
            }
            Event::AlreadyRan { key } => {
                info("already-ran", format!("a successful run with --once {key} is on record; not run again"))
                    .with("once", key)
            }
            Event::Trouble { why, ends_in } => {
                let span = rounded(ends_in);
                warning("trouble", format!("cannot renew: {why}; the command is ended in {span} unless that changes"))
                    .with("reason", why)
                    .with_span("ends_in_ms", ends_in)
            }
            Event::WaitingForBackend { why } => {
                warning("trouble", format!("the backend does not answer: {why}; still waiting for it"))
                    .with("reason", why)
            }
            Event::Recovered => warning("recovered", "the backend answers again".into()),
            Event::Lost { why } => {
                error("lost", format!("lost the lock: {why}; ending the command")).with("reason", why)
            }
            Event::FoundLost => {
                let why = "it was not ours any more when the command had ended";
                error("lost", format!("lost the lock: {why}")).with("reason", why)
            }
            Event::ForceReleased { by } => {
                let how = format!("{} took it away with force-release --now ({})", by.operator(), by.reason);
                error("lost", format!("lost the lock: {how}; ending the command"))
                    .with("reason", by.reason.as_str())
                    .with("revoked_by", json!(by.by))
            }
            Event::Revoked { by } => {
                let (who, reason) = (by.operator(), by.reason.as_str());
                error("revoked", format!("{who} takes the lock away ({reason}); ending the command"))
                    .with("reason", reason)
                    .with("revoked_by", json!(by.by))
            }
            Event::Expired { suspended: Some(span) } => error(
                "expired",
                format!(
                    "the job was suspended for {}, so that its lease could not be kept alive; ended the command before \
                     it ran out",
                    whole_seconds(span)
                ),
            )
            .with_span("suspended_ms", span),
            Event::Expired { suspended: None } => {
                error("expired", "the lease could not be kept alive; ending the command before it runs out".into())
            }
            Event::TooLate => {
                let text = "the lease was nearly over before the command could be started; nothing was started";
                error("expired", text.into())
            }
            Event::Pace { pace } => {
                let margin = rounded(pace.margin());
                info("pace", format!("SIGKILL would come {margin} before the lease ends: {}", slowness(&pace)))
                    .with_pace(pace)
            }
            Event::Outgrown { pace } => error(
                "outgrown",
                format!(
                    "the lease is too short to kill the command in time, which would take {}: {}; ending it while that \
                     is possible; raise --ttl",
                    rounded(pace.margin()),
                    slowness(&pace)
                ),
            )
            .with_pace(pace),
            Event::CannotSignal { processes } => {
                let named: Vec<_> = processes.iter().map(|(name, pid)| format!("{name} ({pid})")).collect();
                let text = format!(
                    "not permitted to kill {}, which the command started; waiting for its end, which may come after \
                     that of the lease",
                    named.join(", ")
                );
                let pids: Vec<_> = processes.iter().map(|(_, pid)| *pid).collect();
                error("cannot-signal", text).with("pids", pids)
            }
            Event::TimedOut { after } => {
                warning("timed-out", format!("--timeout of {} has passed; ending the command", rounded(after)))
                    .with_span("after_ms", after)
            }
            Event::HeldLong { after } => {
                let span = rounded(after);
                warning("held-long", format!("the command has run for more than {span} (--warn-after); it goes on"))
                    .with_span("after_ms", after)
            }
            Event::Leftovers { processes } => {
                let text = format!("the command left {processes} process(es) behind; ended them (see --leftovers)");
                warning("leftovers", text).with("processes", processes)
            }
            Event::GuardianDied => {
                error("guardian-died", "the guardian process was killed; no process of the command is left".into())
            }
            Event::Orphaned => error("orphaned", "dlock itself was killed; ended the command".into()),
            Event::ReleaseFailed { why } => {
                warning("release-failed", format!("not released: {why}; the lease will run out by itself"))
                    .with("reason", why)
            }
            Event::Unrecorded { what } => warning("unrecorded", format!("released, but {what}")).with("reason", what),
            Event::NotFound { program } => {
                error("not-found", format!("{program}: command not found")).with("program", program)
            }
            Event::CannotExecute { program, why } => {
                error("cannot-execute", format!("{program}: cannot be executed: {why}"))
                    .with("program", program)
                    .with("reason", why)
            }
            Event::MetricsFailed { why } => warning("metrics-failed", format!("no metrics: {why}")).with("reason", why),
            Event::HookFailed { event, why } => {
                warning("hook-failed", format!("the --on-event command for {event} failed: {why}"))
                    .with("hook_event", event)
                    .with("reason", why)
            }
            Event::StandsAgain { after } => {
                info("stands-again", format!("stands for the lock again in {}", rounded(after)))
                    .with_span("after_ms", after)
            }
            Event::ShorterTtl { granted, asked } => {
                let text = format!("the server grants a ttl of {}, not {}", rounded(granted), rounded(asked));
                warning("shorter-ttl", text).with_span("ttl_ms", granted).with_span("asked_ms", asked)
            }
            Event::FenceBusy { resource, mark } => {
                let text = format!(
                    "waiting for another fence on {resource}, or for something that its command left running; \
                     fuser -v {mark} tells"
                );
                warning("fence-busy", text).with("resource", resource)
            }
        }
    }
}
