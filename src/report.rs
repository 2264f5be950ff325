//! Everything dlock prints on standard error: one line an event, as text or as JSON, and a live line
//! while somebody at a terminal waits. Text from elsewhere is escaped here and nowhere else.

mod event;
mod wording;

use std::fmt::Display;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::{Value, json};

use crate::clock;
use crate::exit::Fault;
use crate::guardian::Hooks;
use crate::lock::{Holder, LockName};
pub use event::Event;
use event::{Level, WAITING};
pub use wording::{
    brief, date_and_age, describe, escape, how_it_ended, how_it_ended_and_when, json_escaped, since, whole_seconds,
    whose,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
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

/// How dlock speaks in this run.
#[derive(Clone, Debug)]
pub struct Voice {
    format: Format,
    loudness: Loudness,
    /// Whether a person watches: only then is there a live line.
    live: bool,
    drawn: bool,
    /// Who hears of what is worth it, however loud we are.
    hooks: Option<Hooks>,
}

impl Voice {
    pub fn new(format: Format, loudness: Loudness) -> Voice {
        let live = format == Format::Text && loudness != Loudness::Quiet && std::io::stderr().is_terminal();
        Voice { format, loudness, live, drawn: false, hooks: None }
    }

    /// From now on calls hooks as well.
    pub fn call(&mut self, hooks: Hooks) {
        self.hooks = Some(hooks);
    }

    /// For a process that does not know whether dlock has drawn a live line.
    pub fn of_another_process(&self) -> Voice {
        Voice { drawn: self.live, hooks: None, ..*self }
    }

    pub fn error(&mut self, error: &anyhow::Error) {
        let fault = Fault::of(error);
        let text = match fault {
            // "usage" and the like would only repeat what the sentence behind them says.
            Fault::Usage | Fault::Config | Fault::Disk | Fault::Internal | Fault::OtherSlots => {
                causes(error, &fault.to_string())
            }
            Fault::Unreachable => format!("{}; {CHECK_SERVER}", causes(error, "")),
            _ => causes(error, ""),
        };
        self.tell(None, &Event::failed(text, fault.exit().code()));
    }

    /// The name is that of the lock, if the event is about one.
    pub fn tell<'a>(&mut self, name: impl Into<Option<&'a LockName>>, event: &Event) {
        let name = name.into();
        let has_hook = event.level != Level::Info || matches!(event.kind, "acquired" | "released");
        if let Some(hooks) = self.hooks.as_ref().filter(|_| has_hook) {
            hooks.call(event.kind, &json_line(name, event));
        }
        let needed = match event.level {
            Level::Error => Loudness::Quiet,
            Level::Warning => Loudness::Normal,
            // A log for machines has it in any case.
            Level::Info if event.kind == WAITING && self.format == Format::Json => Loudness::Normal,
            Level::Info => Loudness::Verbose,
        };
        if self.loudness < needed {
            return;
        }
        self.clear();
        speak(&match (self.format, name) {
            (Format::Text, Some(name)) => clipped_line(format!("dlock: {name}: {}", escape(&event.text))),
            (Format::Text, None) => clipped_line(format!("dlock: {}", escape(&event.text))),
            (Format::Json, name) => json_line(name, event),
        });
    }

    /// Whether anybody hears of what goes as it should: if not, such an event need not be made.
    pub fn tells_all(&self) -> bool {
        self.loudness == Loudness::Verbose || self.hooks.is_some()
    }

    /// Whether a live line would be seen, and is worth a wake-up every second.
    pub fn is_live(&self) -> bool {
        self.live
    }

    /// Whether an event that says who is waited for would be seen.
    pub fn logs_waiting(&self) -> bool {
        let least = if self.format == Format::Json { Loudness::Normal } else { Loudness::Verbose };
        !self.live && self.loudness >= least
    }

    pub fn waiting(&mut self, name: &LockName, holder: Option<&Holder>, ahead: Option<usize>, since: Duration) {
        if !self.live {
            return;
        }
        let holder = holder.map_or_else(String::new, |holder| format!(", held by {}", describe(holder)));
        let text = format!("dlock: waiting for {name} for {}{holder}{}", whole_seconds(since), place(ahead));
        // Some terminals do not know how wide they are, and say 0.
        let width = terminal_size::terminal_size_of(std::io::stderr()).map(|(width, _)| usize::from(width.0));
        let width = width.filter(|width| *width > 0).unwrap_or(80);
        let text: String = escape(&text).chars().take(width - 1).collect();
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

/// What to do about a backend that cannot be reached.
pub const CHECK_SERVER: &str = "check that the server runs and that the URL is right, or raise --connect-timeout";

/// A pipe that can be written to has room for this many bytes.
const ROOM: usize = 4096;

fn clipped_line(mut text: String) -> String {
    let end = (0..ROOM.min(text.len() + 1)).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or_default());
    text + "\n"
}

/// One object a line, whole however long the message is.
fn json_line(name: Option<&LockName>, event: &Event) -> String {
    let time = humantime::format_rfc3339_millis(clock::wall()).to_string();
    let (level, kind) = (event.level, event.kind);
    let (mut text, mut fields) = (event.text.clone(), event.fields.clone());
    loop {
        let mut object = json!({"time": time, "level": level, "event": kind, "name": name, "message": text});
        if let (Some(object), Some(fields)) = (object.as_object_mut(), fields.as_object()) {
            object.extend(fields.clone());
        }
        let line = json_escaped(&object.to_string()) + "\n";
        match text.chars().count() / 2 {
            _ if line.len() <= ROOM => return line,
            0 if fields.is_null() => return line,
            0 => fields = Value::Null,
            half => text = text.chars().take(half).collect(),
        }
    }
}

/// Writes to standard error, unless nobody takes it: a full pipe or a terminal stopped by Ctrl-S must not
/// keep whoever holds a lock from its duty.
fn speak(text: &str) {
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

/// Writes to standard output; fails with [`NobodyReads`] when that leads nowhere any more.
pub fn print(text: impl AsRef<[u8]>) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(anyhow::Error::msg(NobodyReads)),
        written => written.context("cannot write to standard output"),
    }
}

/// Writes one JSON text and a line break to standard output, with nothing hidden in it.
pub fn print_json(value: &serde_json::Value) -> Result<()> {
    print(json_escaped(&value.to_string()) + "\n")
}

/// Where we are in the queue, if others are before us.
fn place(ahead: Option<usize>) -> String {
    ahead.filter(|ahead| *ahead > 0).map_or_else(String::new, |ahead| format!(", {ahead} ahead of us"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_machines_is_whole_however_long_its_parts_are() {
        for length in [10, 1000, 3000, 5000, 100_000] {
            for c in ['x', '\u{202e}', 'ü'] {
                let long = c.to_string().repeat(length);
                let line = json_line(None, &Event::lost(&long));
                assert!(line.len() <= ROOM && line.ends_with("}\n"), "{} bytes", line.len());
                let read: Value = serde_json::from_str(&line).unwrap();
                assert_eq!(read["event"], "lost");
                assert!(length > 100 || read["reason"] == long);
                assert!(clipped_line(long).len() <= ROOM);
            }
        }
    }

    #[test]
    fn an_error_is_one_line_that_says_nothing_twice() {
        let error = anyhow::anyhow!("refused\nhard").context("refused hard").context("connect").context(Fault::Refused);
        assert_eq!(causes(&error, ""), "the backend denied access: connect: refused hard");
    }
}
