//! Everything dlock prints on standard error: one line an event, as text or as JSON, and a live line
//! while somebody at a terminal waits. Text from elsewhere is escaped here and nowhere else.

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use humantime::format_duration;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::json;

use crate::clock;
use crate::exit::Fault;
use crate::lock::{Holder, LockName, Token};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Text,
    Json,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loudness {
    Quiet,
    Normal,
    Verbose,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Error,
    Warning,
    Info,
}

/// What can happen to a run that is worth a line.
#[derive(Debug)]
pub enum Event<'a> {
    Acquired { token: Token, waited: Duration },
    Released,
    Busy { holder: Option<&'a Holder> },
    AlreadyRan { key: &'a str },
    Trouble { why: &'a str, ends_in: Duration },
    WaitingForBackend { why: &'a str },
    Recovered,
    Lost { why: &'a str },
    Revoked { reason: &'a str },
    Expired,
    TimedOut { after: Duration },
    Leftovers { processes: usize },
    GuardianDied,
    Orphaned,
    ReleaseFailed { why: &'a str },
    NotFound { program: &'a str },
    CannotExecute { program: &'a str, why: &'a str },
    MetricsFailed { why: &'a str },
    StandsAgain { after: Duration },
    ShorterTtl { granted: Duration, asked: Duration },
}

/// How dlock speaks in this run.
#[derive(Clone, Debug)]
pub struct Voice {
    format: Format,
    loudness: Loudness,
    /// Whether a person watches: only then is there a live line.
    live: bool,
    drawn: bool,
}

impl Voice {
    pub fn new(format: Format, loudness: Loudness) -> Voice {
        let live = format == Format::Text && loudness != Loudness::Quiet && std::io::stderr().is_terminal();
        Voice { format, loudness, live, drawn: false }
    }

    pub fn tell(&mut self, name: &LockName, event: &Event) {
        let (level, kind, text) = event.describe();
        self.line(level, kind, Some(name), &text);
    }

    /// The same where no lock is spoken of.
    pub fn say(&mut self, event: &Event) {
        let (level, kind, text) = event.describe();
        self.line(level, kind, None, &text);
    }

    pub fn error(&mut self, error: &anyhow::Error) {
        let fault = Fault::of(error);
        let hint = match fault {
            Fault::Unreachable => "; see that the server runs and that the URL is right, or raise --connect-timeout",
            _ => "",
        };
        let text = match fault {
            // "usage" and the like would only repeat what the sentence behind them says.
            Fault::Usage | Fault::Internal | Fault::OtherTerms => causes(error, &fault.to_string()),
            _ => causes(error, ""),
        };
        self.line(Level::Error, "failed", None, &format!("{text}{hint}"));
    }

    fn line(&mut self, level: Level, kind: &str, name: Option<&LockName>, text: &str) {
        let needed = match level {
            Level::Error => Loudness::Quiet,
            Level::Warning => Loudness::Normal,
            Level::Info => Loudness::Verbose,
        };
        if self.loudness < needed {
            return;
        }
        self.clear();
        let line = match self.format {
            Format::Text => match name {
                Some(name) => format!("dlock: {name}: {}\n", escape(text)),
                None => format!("dlock: {}\n", escape(text)),
            },
            Format::Json => {
                let level = match level {
                    Level::Error => "error",
                    Level::Warning => "warning",
                    Level::Info => "info",
                };
                let time = humantime::format_rfc3339_millis(clock::wall()).to_string();
                format!("{}\n", json!({"time": time, "level": level, "event": kind, "name": name, "message": text}))
            }
        };
        speak(&line);
    }

    /// Whether a live line would be seen, and is worth a wake-up every second.
    pub fn is_live(&self) -> bool {
        self.live
    }

    pub fn waiting(&mut self, name: &LockName, holder: Option<&Holder>, ahead: Option<usize>, since: Duration) {
        if !self.live {
            return;
        }
        let holder = holder.map_or_else(String::new, |holder| format!(", held by {}", describe(holder)));
        let place = match ahead {
            Some(ahead) if ahead > 0 => format!(", {ahead} ahead of us"),
            _ => String::new(),
        };
        let text = format!("dlock: waiting for {name} for {}{holder}{place}", whole_seconds(since));
        let text: String = escape(&text).chars().take(terminal_width().saturating_sub(1)).collect();
        speak(&format!("\r\x1b[K{text}"));
        self.drawn = true;
    }

    /// Takes the live line away again.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.drawn) {
            speak("\r\x1b[K");
        }
    }
}

impl Event<'_> {
    fn describe(&self) -> (Level, &'static str, String) {
        match self {
            Event::Acquired { token, waited } => {
                (Level::Info, "acquired", format!("acquired with token {token} after {}", rounded(*waited)))
            }
            Event::Released => (Level::Info, "released", "released".into()),
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
            Event::Revoked { reason } => {
                (Level::Error, "revoked", format!("an operator takes the lock away ({reason}); ending the command"))
            }
            Event::Expired => (
                Level::Error,
                "expired",
                "the lease could not be kept alive; ended the command before it ran out".into(),
            ),
            Event::TimedOut { after } => (
                Level::Warning,
                "timed-out",
                format!("--timeout of {} has passed; ending the command", rounded(*after)),
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
            Event::NotFound { program } => (Level::Error, "not-found", format!("{program}: command not found")),
            Event::CannotExecute { program, why } => {
                (Level::Error, "cannot-execute", format!("{program}: cannot be executed: {why}"))
            }
            Event::MetricsFailed { why } => (Level::Warning, "metrics-failed", format!("no metrics: {why}")),
            Event::StandsAgain { after } => {
                (Level::Info, "stands-again", format!("stands for the lock again in {}", rounded(*after)))
            }
            Event::ShorterTtl { granted, asked } => (
                Level::Warning,
                "shorter-ttl",
                format!("the server grants a ttl of {}, not {}", rounded(*granted), rounded(*asked)),
            ),
        }
    }
}

/// Writes to standard error, unless nobody takes it: a full pipe or a terminal stopped by Ctrl-S must not
/// keep whoever holds a lock from its duty. A pipe that can be written to has room for this many bytes.
fn speak(text: &str) {
    const ROOM: usize = 4096;
    const PATIENCE_MS: u16 = 100;
    let stderr = std::io::stderr();
    let mut fds = [PollFd::new(stderr.as_fd(), PollFlags::POLLOUT)];
    if matches!(poll(&mut fds, PollTimeout::from(PATIENCE_MS)), Ok(1..)) {
        let bytes = text.as_bytes();
        let _ = stderr.lock().write_all(&bytes[..bytes.len().min(ROOM)]);
    }
}

/// Whoever read our standard output has seen enough, as head(1) has: no failure, and nobody to tell.
#[derive(Debug)]
pub struct NobodyReads;

impl Display for NobodyReads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for NobodyReads {}

/// Writes to standard output; fails with [`NobodyReads`] when that leads nowhere any more.
pub fn print(text: impl AsRef<[u8]>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(NobodyReads.into()),
        written => written.context("cannot write to standard output"),
    }
}

/// A holder in a few words: `web1 pid 4242 (./report.sh) for 3m 12s`.
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
    if let Some(age) = holder.acquired_at.and_then(|at| clock::wall().duration_since(at).ok()) {
        words.push(format!("for {}", whole_seconds(age)));
    }
    words.join(" ")
}

const LONGEST_ERROR: usize = 1000;

/// All causes of an error but one, outermost first, in one line and without saying anything twice.
pub fn causes(error: &anyhow::Error, but: &str) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        let text = cause.to_string().trim().replace('\n', " ");
        if text != but && !parts.iter().any(|before| before.ends_with(&text)) {
            parts.push(text);
        }
    }
    let text = parts.join(": ");
    // What somebody typed, or a server said, may be of any length; a line is not.
    match text.char_indices().nth(LONGEST_ERROR) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Makes text from elsewhere harmless on a terminal: no control characters, no change of direction.
pub fn escape(text: impl Display) -> String {
    let hidden = |c: char| {
        c.is_control()
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
    };
    let mut safe = String::new();
    for c in text.to_string().chars() {
        if hidden(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

pub fn whole_seconds(span: Duration) -> String {
    format_duration(Duration::from_secs(span.as_secs())).to_string()
}

/// Milliseconds are as precise as anybody reads.
fn rounded(span: Duration) -> String {
    format_duration(Duration::from_millis(u64::try_from(span.as_millis()).unwrap_or(u64::MAX))).to_string()
}

/// Some terminals do not know how wide they are, and say 0.
fn terminal_width() -> usize {
    let asked = terminal_size::terminal_size_of(std::io::stderr()).map(|(width, _)| usize::from(width.0));
    asked.filter(|width| *width > 0).unwrap_or(80)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_move_the_cursor_or_turn_around() {
        assert_eq!(escape("a\x1b[2Jb\n\u{202e}c"), "a\\u{1b}[2Jb\\n\\u{202e}c");
        assert_eq!(escape("grüße 東京"), "grüße 東京");
    }

    #[test]
    fn an_error_is_one_line_that_says_nothing_twice() {
        let error = anyhow::anyhow!("refused\nhard").context("refused hard").context("connect").context(Fault::Refused);
        assert_eq!(causes(&error, ""), "the backend refused us: connect: refused hard");
    }
}
