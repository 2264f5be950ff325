//! Locks, holders and runs in a few words.

use std::time::{Duration, SystemTime};

use humantime::format_duration;

use crate::clock;
use crate::lock::{Holder, LastRun, Outcome, rfc3339, rounded};

/// A holder in a few words: `web1 pid 4242 (./report.sh) for 3m 12s, note "maintenance"`.
pub fn describe(holder: &Holder) -> String {
    let mut words = Vec::new();
    match (&holder.host, &holder.owner) {
        (Some(host), _) => words.push(host.clone()),
        (None, Some(owner)) => words.push(owner.clone()),
        (None, None) => words.push("another program".into()),
    }
    if let Some(pid) = holder.pid {
        words.push(format!("pid {pid}"));
    }
    if let Some(command) = &holder.command {
        words.push(format!("({command})"));
    }
    if let Some(at) = holder.acquired_at.filter(|at| *at <= clock::wall()) {
        words.push(format!("for {}", whole_seconds(since(at))));
    }
    let note = holder.note.as_ref().map(|note| format!(", note \"{note}\"")).unwrap_or_default();
    words.join(" ") + &note
}

/// `root@web1:4242`, as far as it is known.
pub fn whose(user: Option<&str>, host: Option<&str>, pid: Option<u32>) -> String {
    let user = user.filter(|user| !user.is_empty()).map(|user| format!("{user}@")).unwrap_or_default();
    let pid = pid.map(|pid| format!(":{pid}")).unwrap_or_default();
    format!("{user}{}{pid}", host.filter(|host| !host.is_empty()).unwrap_or("?"))
}

/// `exit 0`, `signal 9`, `vanished`.
pub fn how_it_ended(run: &LastRun) -> String {
    match (run.outcome, run.exit_code) {
        (Outcome::Exited, Some(code)) => format!("exit {code}"),
        (Outcome::Signaled, Some(code)) => format!("signal {}", code.saturating_sub(128)),
        (Outcome::TimedOut, _) => "timed out".into(),
        (Outcome::Lost, _) if run.revoked_at.is_some() => "taken away".into(),
        (Outcome::Lost, _) => "lost".into(),
        (Outcome::Vanished, _) => "vanished".into(),
        (_, None) => "ended".into(),
    }
}

/// `exit 3, 2m 1s ago`.
pub fn how_it_ended_and_when(run: &LastRun) -> String {
    format!("{}, {} ago", how_it_ended(run), brief(since(run.ended_at.unwrap_or(run.started_at))))
}

/// `2026-11-18 03:00:02Z, 3m 12s ago`.
pub fn date_and_age(at: SystemTime) -> String {
    format!("{}Z, {} ago", rfc3339::in_words(at), brief(since(at)))
}

/// How long ago; nothing if that is still to come, as where clocks differ.
pub fn since(at: SystemTime) -> Duration {
    clock::wall().duration_since(at).unwrap_or_default()
}

/// The two greatest units say enough.
pub fn brief(span: Duration) -> String {
    let whole = if span < Duration::from_secs(1) { rounded(span) } else { whole_seconds(span) };
    whole.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

pub fn whole_seconds(span: Duration) -> String {
    format_duration(Duration::from_secs(span.as_secs())).to_string()
}
