//! Locks as a table. Its columns are laid out by the first page and stay where they are for all that follow; what does
//! not fit into its column moves the rest of its line, and is never broken. The last column takes the room that is left,
//! and is cut off where a terminal ends; a narrow one does without some of the others.

use std::time::Duration;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::clock;
use crate::lock::{Holder, LastRun, LockState, Outcome, State};
use crate::report::{escape, whole_seconds};

const HEAD: [&str; 8] = ["NAME", "STATE", "TOKEN", "HELD FOR", "EXPIRES IN", "WAITERS", "LAST RUN", "HOLDER"];
const LAST_RUN: usize = 6;
const HOLDER: usize = 7;
/// What a narrow terminal does without, the first of them first. A free lock then shows its last run as its holder.
const DISPENSABLE: [usize; 4] = [LAST_RUN, 4, 5, 3];
/// The least that is worth reading of a holder.
const ENOUGH: usize = 24;
const GAP: usize = 2;

type Row = [String; 8];

pub struct Table {
    /// Of the terminal; some do not know their own, and say 0.
    room: Option<usize>,
    /// `None` for a column that is left out.
    widths: [Option<usize>; 8],
}

impl Table {
    /// These locks, below a head if they are the first.
    pub fn of(table: &mut Option<Table>, states: &[LockState]) -> String {
        let rows: Vec<Row> = states.iter().flat_map(rows).collect();
        let head = table.is_none().then(|| HEAD.map(str::to_owned));
        let table = table.get_or_insert_with(|| Table::for_rows(&rows, terminal_width()));
        head.iter().chain(&rows).map(|row| table.line(row)).collect()
    }

    fn for_rows(rows: &[Row], room: Option<usize>) -> Table {
        let widest = |n: usize| rows.iter().map(|row| row[n].width()).chain([HEAD[n].len()]).max();
        let mut widths = std::array::from_fn(widest);
        for dispensable in DISPENSABLE {
            let holder = widths[HOLDER].map(|width: usize| width.min(ENOUGH));
            let others: usize = widths[..HOLDER].iter().flatten().map(|width| width + GAP).sum();
            if room.is_some_and(|room| others + holder.unwrap_or_default() > room) {
                widths[dispensable] = None;
            }
        }
        Table { room, widths }
    }

    fn line(&self, row: &Row) -> String {
        let mut line = String::new();
        for (cell, width) in row[..HOLDER].iter().zip(self.widths) {
            if let Some(width) = width {
                line += cell;
                line.extend(std::iter::repeat_n(' ', width.saturating_sub(cell.width()) + GAP));
            }
        }
        let unseen = self.widths[LAST_RUN].is_none() && row[HOLDER] == "-" && row[LAST_RUN] != "-";
        let holder = if unseen { format!("last run: {}", row[LAST_RUN]) } else { row[HOLDER].clone() };
        line += &match self.room {
            Some(room) => clipped(&holder, room.saturating_sub(line.width())),
            None => holder,
        };
        line.truncate(line.trim_end().len());
        line + "\n"
    }
}

fn terminal_width() -> Option<usize> {
    const NARROWEST: u16 = 40;
    let (width, _) = terminal_size::terminal_size_of(std::io::stdout())?;
    Some(usize::from(width.0)).filter(|_| width.0 >= NARROWEST)
}

fn clipped(text: &str, room: usize) -> String {
    if text.width() <= room {
        return text.to_owned();
    }
    let mut used = 1;
    let fits = |c: &char| {
        used += c.width().unwrap_or_default();
        used <= room
    };
    let start: String = text.chars().take_while(fits).collect();
    start + "…"
}

/// One for each holder; only the first says what is true of all.
fn rows(state: &LockState) -> Vec<Row> {
    let last_run = state.last_run.as_ref().map_or_else(|| "-".into(), last_run);
    let mut rows: Vec<Row> = state.holders.iter().map(|holder| row("", String::new(), Some(holder))).collect();
    if rows.is_empty() {
        rows.push(row("", String::new(), None));
    }
    let common = [(0, state.name.to_string()), (1, word(state)), (5, state.waiters.len().to_string())];
    for (n, cell) in common.into_iter().chain([(LAST_RUN, last_run)]) {
        rows[0][n] = cell;
    }
    rows
}

fn row(name: &str, state: String, holder: Option<&Holder>) -> Row {
    let dash = || "-".to_owned();
    let span = |span: Option<Duration>| span.map_or_else(dash, brief);
    let age = holder.and_then(|holder| holder.acquired_at).and_then(|at| clock::wall().duration_since(at).ok());
    [
        name.to_owned(),
        state,
        holder.and_then(|holder| holder.fencing_token).map_or_else(dash, |token| token.to_string()),
        span(age),
        span(holder.and_then(|holder| holder.expires_in)),
        String::new(),
        String::new(),
        holder.map_or_else(dash, |holder| escape(who(holder))),
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
    let ago = clock::wall().duration_since(when).map_or_else(|_| String::new(), |ago| format!(", {} ago", brief(ago)));
    escape(format!("{how}{ago}"))
}

/// The two greatest units say enough.
fn brief(span: Duration) -> String {
    whole_seconds(span).split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(name: &str, token: &str, last_run: &str, holder: &str) -> Row {
        [name, "held", token, "3m 12s", "29s", "1", last_run, holder].map(str::to_owned)
    }

    #[test]
    fn a_narrow_terminal_cuts_off_the_holder_and_breaks_no_name_or_token() {
        let holder = format!("root@web1:4242 ./report.sh {}", "--an-option ".repeat(10));
        let row = cells("nightly-report-of-the-sales", "1794882121234567", "exit 0, 3h ago", &holder);
        for room in [60, 80, 120, 300] {
            let table = Table::for_rows(std::slice::from_ref(&row), Some(room));
            let line = table.line(&row);
            assert!(line.trim_end().width() <= room && line.lines().count() == 1, "{line}");
            assert!(line.starts_with("nightly-report-of-the-sales  held   1794882121234567  "), "{line}");
            assert!(room < 80 || line.contains("root@web1:4242 ./rep"), "{line}");
        }
        let piped = Table::for_rows(std::slice::from_ref(&row), None).line(&row);
        assert!(piped.trim_end().ends_with(holder.trim_end()), "{piped}");
    }

    #[test]
    fn a_free_lock_shows_its_last_run_where_there_is_no_room_for_both() {
        let free = cells("a", "-", "exit 0, 3h ago", "-");
        let held = cells("b", "1794882121234567", "exit 0, 3h ago", &"x".repeat(50));
        let table = Table::for_rows(&[free.clone(), held], Some(80));
        assert!(table.line(&free).contains("last run: exit 0, 3h ago"), "{}", table.line(&free));
    }

    #[test]
    fn what_is_wider_than_the_first_page_moves_its_own_line_only() {
        let (mut table, name) = (None, "long-".repeat(30));
        let state = |name: &str| LockState::free(name.parse().unwrap(), "file");
        let first = Table::of(&mut table, &[state("a")]);
        let second = Table::of(&mut table, &[state(&name), state("b")]);
        let column = |line: &str| line.find("free").or(line.find("STATE"));
        let columns: Vec<_> = first.lines().chain(second.lines()).map(column).collect();
        assert_eq!(columns, [Some(6), Some(6), Some(name.len() + 2), Some(6)], "{first}{second}");
        assert_eq!(second.matches("NAME").count(), 0);
    }

    #[test]
    fn wide_characters_are_counted_as_wide() {
        assert_eq!(clipped("東京東京", 5), "東京…");
        assert_eq!(clipped("abcdef", 5), "abcd…");
        assert_eq!(clipped("abcde", 5), "abcde");
        assert_eq!(clipped("abc", 0), "…");
    }
}
