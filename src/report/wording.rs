//! Locks, holders and runs in a few words; and text from elsewhere, made harmless.

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use humantime::format_duration;

use crate::clock;
use crate::lock::{Holder, LastRun, Outcome, rfc3339, rounded};

/// A holder in a few words: `web1 pid 4242 (./report.sh) for 3m 12s, note "maintenance"`.
pub fn describe(holder: &Holder) -> String {
    let who = holder.host.as_deref().or(holder.owner.as_deref()).unwrap_or("another program");
    let pid = holder.pid.map(|pid| format!(" pid {pid}")).unwrap_or_default();
    let command = holder.command.as_ref().map(|command| format!(" ({command})")).unwrap_or_default();
    let since_when = holder.acquired_at.filter(|at| *at <= clock::wall());
    let age = since_when.map(|at| format!(" for {}", whole_seconds(since(at)))).unwrap_or_default();
    let note = holder.note.as_ref().map(|note| format!(", note \"{note}\"")).unwrap_or_default();
    format!("{who}{pid}{command}{age}{note}")
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

/// Makes text from elsewhere harmless on a terminal: no control characters, no change of direction.
pub fn escape(text: impl Display) -> String {
    let mut safe = String::new();
    for c in text.to_string().chars() {
        if is_hidden(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

/// The same for JSON, which means what it meant before: the generator leaves all but the first controls as they are.
pub fn json_escaped(json: &str) -> String {
    let mut safe = String::new();
    for c in json.chars() {
        if is_hidden(c) {
            safe.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Control characters, old and newer, separators of lines, and all that Unicode calls a format character: what turns
/// the direction of writing around, joins, hides or marks.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
            | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn foreign_text_cannot_move_the_cursor_or_turn_around() {
        assert_eq!(escape("a\x1b[2Jb\n\u{202e}c"), "a\\u{1b}[2Jb\\n\\u{202e}c");
        assert_eq!(escape("\u{61c}\u{9b}2J\u{85}\u{fff9}\u{ad}"), "\\u{61c}\\u{9b}2J\\u{85}\\u{fff9}\\u{ad}");
        assert_eq!(escape("grüße 東京 👍🏽"), "grüße 東京 👍🏽");
    }

    #[test]
    fn json_hides_nothing_either_and_says_the_same() {
        let hostile = "a\x1b\u{9b}2J\u{61c}\u{202e}\u{e0041}ü";
        let json = json_escaped(&json!({"message": hostile}).to_string());
        assert_eq!(json, "{\"message\":\"a\\u001b\\u009b2J\\u061c\\u202e\\udb40\\udc41ü\"}");
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["message"], hostile);
    }
}
