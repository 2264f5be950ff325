//! What can happen to a run that is worth a line: in words for people, and in fields for machines.

use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

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
const SOMEBODY: &str = "somebody else holds it or was first";

#[derive(Debug)]
pub struct Event {
    pub level: Level,
    /// The `event` of a line for machines.
    pub kind: &'static str,
    pub text: String,
    /// What machines read beside the text: an object, or nothing.
    pub fields: Value,
}

fn error(kind: &'static str, text: impl Into<String>) -> Event {
    Event { level: Level::Error, kind, text: text.into(), fields: Value::Null }
}

fn warning(kind: &'static str, text: impl Into<String>) -> Event {
    Event { level: Level::Warning, ..error(kind, text) }
}

fn info(kind: &'static str, text: impl Into<String>) -> Event {
    Event { level: Level::Info, ..error(kind, text) }
}

/// What the guardian has measured of itself.
fn slowness(pace: Pace) -> String {
    let (lateness, walk) = (rounded(pace.lateness), rounded(pace.walk));
    format!("the guardian wakes {lateness} late and needs {walk} to look at {} processes", pace.processes)
}

/// The manual page lists the kinds under MONITORING.
impl Event {
    fn with(self, fields: Value) -> Event {
        Event { fields, ..self }
    }

    fn with_pace(self, pace: Pace) -> Event {
        let (margin, lateness, walk) = (millis(pace.margin()), millis(pace.lateness), millis(pace.walk));
        let processes = pace.processes;
        self.with(json!({"margin_ms": margin, "processes": processes, "lateness_ms": lateness, "walk_ms": walk}))
    }

    pub fn failed(text: String, exit_code: u8) -> Event {
        error("failed", text).with(json!({"exit_code": exit_code}))
    }

    pub fn acquired(token: Token, waited: Duration) -> Event {
        info("acquired", format!("acquired with token {token} after {}", rounded(waited)))
            .with(json!({"fencing_token": token.0, "waited_ms": millis(waited)}))
    }

    pub fn released(token: Token, exit_code: u8, duration: Duration) -> Event {
        info("released", format!("released: exit code {exit_code} after {}", rounded(duration)))
            .with(json!({"fencing_token": token.0, "exit_code": exit_code, "duration_ms": millis(duration)}))
    }

    pub fn waiting(holder: Option<&Holder>, ahead: Option<usize>, waited: Duration) -> Event {
        let who = holder.map_or_else(|| format!(": {SOMEBODY}"), |holder| format!(", held by {}", describe(holder)));
        info(WAITING, format!("waiting for {}{who}{}", rounded(waited), place(ahead)))
            .with(json!({"holder": holder, "ahead": ahead, "waited_ms": millis(waited)}))
    }

    pub fn busy(holder: Option<&Holder>) -> Event {
        let who = holder.map_or_else(|| SOMEBODY.into(), |holder| format!("held by {}", describe(holder)));
        warning("busy", format!("not acquired: {who}")).with(json!({"holder": holder}))
    }

    pub fn already_ran(key: &str) -> Event {
        info("already-ran", format!("a successful run with --once {key} is on record; not run again"))
            .with(json!({"once": key}))
    }

    /// The lease cannot be renewed.
    pub fn trouble(why: &str, ends_in: Duration) -> Event {
        let span = rounded(ends_in);
        warning("trouble", format!("cannot renew the lease: {why}; ending the command in {span} unless that changes"))
            .with(json!({"reason": why, "ends_in_ms": millis(ends_in)}))
    }

    pub fn waiting_for_backend(why: &str) -> Event {
        warning("trouble", format!("the backend does not answer: {why}; still waiting for it"))
            .with(json!({"reason": why}))
    }

    pub fn recovered() -> Event {
        warning("recovered", "the backend answers again")
    }

    pub fn lost(why: &str) -> Event {
        error("lost", format!("lost the lock: {why}; ending the command")).with(json!({"reason": why}))
    }

    /// Noticed only when the command had ended.
    pub fn found_lost() -> Event {
        let why = "it was no longer ours when the command had ended";
        error("lost", format!("lost the lock: {why}")).with(json!({"reason": why}))
    }

    pub fn force_released(by: &Revocation) -> Event {
        let how = format!("{} took it away with force-release --now ({})", by.operator(), by.reason);
        error("lost", format!("lost the lock: {how}; ending the command"))
            .with(json!({"reason": by.reason, "revoked_by": by.by}))
    }

    pub fn revoked(by: &Revocation) -> Event {
        let (who, reason) = (by.operator(), by.reason.as_str());
        error("revoked", format!("{who} takes the lock away ({reason}); ending the command"))
            .with(json!({"reason": reason, "revoked_by": by.by}))
    }

    /// The job was suspended for so long, if that is why.
    pub fn expired(suspended: Option<Duration>) -> Event {
        match suspended {
            None => error("expired", "the lease could not be renewed; ending the command before it runs out"),
            Some(span) => {
                let span_text = whole_seconds(span);
                let text = format!(
                    "the job was suspended for {span_text} and its lease could not be renewed; ended the command before \
                     the lease ran out"
                );
                error("expired", text).with(json!({"suspended_ms": millis(span)}))
            }
        }
    }

    pub fn too_late() -> Event {
        error("expired", "the lease was nearly over before the command could be started; nothing was started")
    }

    pub fn pace(pace: Pace) -> Event {
        let margin = rounded(pace.margin());
        info("pace", format!("SIGKILL would come {margin} before the lease ends: {}", slowness(pace))).with_pace(pace)
    }

    pub fn outgrown(pace: Pace) -> Event {
        let (margin, slowness) = (rounded(pace.margin()), slowness(pace));
        let text = format!(
            "the lease is too short to kill the command in time, which would take {margin}: {slowness}; ending it while \
             that is possible; raise --ttl"
        );
        error("outgrown", text).with_pace(pace)
    }

    pub fn cannot_signal(processes: &[(String, i32)]) -> Event {
        let named: Vec<_> = processes.iter().map(|(name, pid)| format!("{name} ({pid})")).collect();
        let text = format!(
            "not permitted to kill {}, which the command started; waiting for the end of it, perhaps longer than the \
             lease lasts",
            named.join(", ")
        );
        let pids: Vec<_> = processes.iter().map(|(_, pid)| pid).collect();
        error("cannot-signal", text).with(json!({"pids": pids}))
    }

    pub fn timed_out(after: Duration) -> Event {
        warning("timed-out", format!("--timeout of {} has passed; ending the command", rounded(after)))
            .with(json!({"after_ms": millis(after)}))
    }

    pub fn held_long(after: Duration) -> Event {
        let span = rounded(after);
        warning("held-long", format!("the command has run for more than {span} (--warn-after); it goes on"))
            .with(json!({"after_ms": millis(after)}))
    }

    pub fn leftovers(processes: usize) -> Event {
        let text = format!("the command left {processes} process(es) behind; ended them (see --leftovers)");
        warning("leftovers", text).with(json!({"processes": processes}))
    }

    pub fn guardian_died() -> Event {
        error("guardian-died", "the guardian process was killed; no process of the command is left")
    }

    pub fn orphaned() -> Event {
        error("orphaned", "dlock itself was killed; ended the command")
    }

    pub fn release_failed(why: &str) -> Event {
        warning("release-failed", format!("not released: {why}; the lease will run out by itself"))
            .with(json!({"reason": why}))
    }

    pub fn unrecorded(what: &str) -> Event {
        warning("unrecorded", format!("released, but {what}")).with(json!({"reason": what}))
    }

    /// execve(2) has failed.
    pub fn not_started(program: &str, why: &std::io::Error) -> Event {
        match why.kind() {
            ErrorKind::NotFound => {
                error("not-found", format!("{program}: command not found")).with(json!({"program": program}))
            }
            _ => error("cannot-execute", format!("{program}: cannot be executed: {why}"))
                .with(json!({"program": program, "reason": why.to_string()})),
        }
    }

    pub fn metrics_failed(why: &str) -> Event {
        warning("metrics-failed", format!("no metrics: {why}")).with(json!({"reason": why}))
    }

    pub fn hook_failed(event: &str, why: &str) -> Event {
        warning("hook-failed", format!("the --on-event command for {event} failed: {why}"))
            .with(json!({"hook_event": event, "reason": why}))
    }

    /// `--keep-trying` begins another round.
    pub fn stands_again(after: Duration) -> Event {
        info("stands-again", format!("trying to acquire the lock again in {}", rounded(after)))
            .with(json!({"after_ms": millis(after)}))
    }

    pub fn another_lock(of_root: &Path) -> Event {
        let path = of_root.display().to_string();
        let text = format!(
            "root holds {path}, which is another lock: this one excludes only runs of this user; for one lock, name the \
             same --backend file:///DIR for both"
        );
        warning("another-lock", text).with(json!({"path": path}))
    }

    pub fn shorter_ttl(granted: Duration, asked: Duration) -> Event {
        warning("shorter-ttl", format!("the server grants a ttl of {}, not {}", rounded(granted), rounded(asked)))
            .with(json!({"ttl_ms": millis(granted), "asked_ms": millis(asked)}))
    }

    pub fn fence_busy(resource: &str, mark: &str) -> Event {
        let text = format!(
            "waiting for another fence on {resource}, or for a process that its command left running; see which: \
             fuser -v {mark}"
        );
        warning("fence-busy", text).with(json!({"resource": resource}))
    }
}
