//! `dlock status`: who holds what, since when, who waits, how the last run ended.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use comfy_table::{ContentArrangement, Table, presets};

use super::block_on;
use crate::backend::{self, Backend, within};
use crate::clock;
use crate::config::StatusQuery;
use crate::exit::Exit;
use crate::lock::{Holder, LastRun, LockState, Outcome, State};
use crate::report::{escape, whole_seconds};

pub fn status(query: &StatusQuery) -> Result<Exit> {
    let mut backend = backend::open(&query.service.address, query.service.patience)?;
    block_on(async {
        loop {
            let mut page = Printer::new(query.json, query.watch.is_some());
            let held = show(query, backend.as_mut(), &mut page).await?;
            page.finish()?;
            match query.watch {
                Some(every) => tokio::time::sleep(every).await,
                None if held && query.exit_code => return Ok(Exit::Code(Exit::BUSY)),
                None => return Ok(Exit::OK),
            }
        }
    })
}

/// Prints what was asked for, page by page; says whether any of it is held.
async fn show(query: &StatusQuery, backend: &mut dyn Backend, printer: &mut Printer) -> Result<bool> {
    let patience = query.service.patience.connect;
    if !query.names.is_empty() {
        let mut states = Vec::new();
        for name in &query.names {
            states.push(within(patience, backend.inspect(name)).await?);
        }
        printer.print(&states)?;
        return Ok(states.iter().any(|state| state.state != State::Free));
    }
    let mut held = false;
    let mut next = None;
    loop {
        let page = within(patience, backend.list(next)).await?;
        held |= page.locks.iter().any(|state| state.state != State::Free);
        printer.print(&page.locks)?;
        next = page.next;
        if next.is_none() {
            return Ok(held);
        }
    }
}

/// Prints pages as they come: one JSON array, or a table with one head.
struct Printer {
    json: bool,
    /// In the place of what the terminal shows already.
    redraw: bool,
    /// How wide a table may be, if it is for a terminal; some do not know their own width, and say 0.
    width: Option<u16>,
    printed: usize,
    out: std::io::Stdout,
}

impl Printer {
    fn new(json: bool, again: bool) -> Printer {
        const NARROWEST: u16 = 40;
        let out = std::io::stdout();
        let width = terminal_size::terminal_size_of(&out).map(|(width, _)| width.0).filter(|width| *width >= NARROWEST);
        Printer { json, redraw: again && !json && out.is_terminal(), width, printed: 0, out }
    }

    /// Once there is something to show instead: until then the old picture stays.
    fn clear_screen(&mut self) -> Result<()> {
        if std::mem::take(&mut self.redraw) {
            self.out.write_all(b"\x1b[H\x1b[2J")?;
        }
        Ok(())
    }

    fn print(&mut self, states: &[LockState]) -> Result<()> {
        self.clear_screen()?;
        if self.json {
            for state in states {
                let before = if self.printed == 0 { "[" } else { ",\n " };
                write!(self.out, "{before}{}", serde_json::to_string(state)?)?;
                self.printed += 1;
            }
            return Ok(());
        }
        if !states.is_empty() {
            let head = self.printed == 0;
            writeln!(self.out, "{}", table(states, head, self.width))?;
            self.printed += states.len();
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.clear_screen()?;
        match (self.json, self.printed) {
            (true, 0) => writeln!(self.out, "[]")?,
            (true, _) => writeln!(self.out, "]")?,
            (false, 0) => writeln!(self.out, "no locks")?,
            (false, _) => {}
        }
        Ok(self.out.flush()?)
    }
}

fn table(states: &[LockState], head: bool, width: Option<u16>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    if let Some(width) = width {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    if head {
        table.set_header(["NAME", "STATE", "HOLDER", "HELD FOR", "EXPIRES IN", "TOKEN", "WAITERS", "LAST RUN"]);
    }
    for state in states {
        let mut holders = state.holders.iter();
        let first = holders.next();
        let last_run = state.last_run.as_ref().map_or_else(|| "-".into(), last_run);
        let waiters = state.waiters.len().to_string();
        table.add_row(row(state.name.as_str(), &word(state), first, waiters, last_run));
        for holder in holders {
            table.add_row(row("", "", Some(holder), String::new(), String::new()));
        }
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn row(name: &str, state: &str, holder: Option<&Holder>, waiters: String, last_run: String) -> [String; 8] {
    let dash = || "-".to_owned();
    let span = |span: Option<Duration>| span.map_or_else(dash, whole_seconds);
    let age = holder.and_then(|holder| holder.acquired_at).and_then(|at| clock::wall().duration_since(at).ok());
    [
        name.to_owned(),
        state.to_owned(),
        holder.map_or_else(dash, |holder| escape(who(holder))),
        span(age),
        span(holder.and_then(|holder| holder.expires_in)),
        holder.and_then(|holder| holder.fencing_token).map_or_else(dash, |token| token.to_string()),
        waiters,
        last_run,
    ]
}

/// `held`; or `held 2/3`, where that is what so many of the nodes say.
fn word(state: &LockState) -> String {
    let word = match state.state {
        State::Free => "free",
        State::Held => "held",
        State::Revoked => "revoked",
    };
    match state.agreement() {
        Some((agreeing, nodes)) => format!("{word} {agreeing}/{nodes}"),
        None => word.to_owned(),
    }
}

/// `root@web1:4242 ./report.sh`, as far as it is known.
fn who(holder: &Holder) -> String {
    let user = holder.user.as_ref().map(|user| format!("{user}@")).unwrap_or_default();
    let host = holder.host.as_deref().or(holder.owner.as_deref()).unwrap_or("?");
    let pid = holder.pid.map(|pid| format!(":{pid}")).unwrap_or_default();
    let slot = holder.slot.map(|slot| format!("[{slot}] ")).unwrap_or_default();
    format!("{slot}{user}{host}{pid} {}", holder.command.as_deref().unwrap_or("(not dlock)"))
}

fn last_run(run: &LastRun) -> String {
    let how = match (run.outcome, run.exit_code) {
        (Outcome::Exited, Some(code)) => format!("exit {code}"),
        (Outcome::Signaled, Some(code)) => format!("signal {}", code.saturating_sub(128)),
        (Outcome::TimedOut, _) => "timed out".into(),
        (Outcome::Lost, _) => "lost".into(),
        (_, None) => "ended".into(),
    };
    let when = run.ended_at.unwrap_or(run.started_at);
    let ago = clock::wall()
        .duration_since(when)
        .map_or_else(|_| String::new(), |ago| format!(", {} ago", whole_seconds(ago)));
    escape(format!("{how}{ago}"))
}
