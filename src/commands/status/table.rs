//! Locks as a table: one line for each holder, or for a lock that nobody holds.

use std::time::Duration;

use crate::commands::table::{Cell, Layout, Paint, Row, Screen, Table};
use crate::lock::{Holder, LastRun, LockState, State};
use crate::report::{brief, escape, how_it_ended_and_when, since, whose};

const COLUMNS: usize = 8;
const HELD_FOR: usize = 2;
const WAITERS: usize = 3;
const TOKEN: usize = 4;
const EXPIRES_IN: usize = 5;
const LAST_RUN: usize = 6;
const HOLDER: usize = 7;
/// A free lock shows its last run as its holder where there is no room for both.
static LAYOUT: Layout<COLUMNS> = Layout {
    heads: ["NAME", "STATE", "HELD FOR", "WAITERS", "TOKEN", "EXPIRES IN", "LAST RUN", "HOLDER"],
    dispensable: &[(LAST_RUN, 24), (EXPIRES_IN, 24), (TOKEN, 24), (WAITERS, 20), (HELD_FOR, 8)],
};

/// Laid out by the first locks.
pub type LockTable = Option<Table<COLUMNS>>;

/// These locks, below a head if they are the first.
pub fn lines(table: &mut LockTable, states: &[LockState], screen: Screen) -> String {
    let rows: Vec<_> = states.iter().flat_map(rows).collect();
    let is_first = table.is_none();
    let table = table.get_or_insert_with(|| Table::for_rows(&LAYOUT, &rows, screen));
    let mut text = if is_first { table.head() } else { String::new() };
    for mut row in rows {
        if !table.shows(LAST_RUN) && row[HOLDER].text == "-" && row[LAST_RUN].text != "-" {
            let last = &row[LAST_RUN].text;
            let last = if last == NEVER { NEVER.to_owned() } else { format!("last run: {last}") };
            row[HOLDER] = last.into();
        }
        text += &table.line(&row);
    }
    text
}

/// What is shown of a name that nobody ever used, or whose runs were forgotten.
pub const NEVER: &str = "no run on record";

/// Held locks first, those that are held longest before the others.
pub fn sort(states: &mut [LockState]) {
    states.sort_by_key(|state| (state.state == State::Free, state.held_since(), state.name.clone()));
}

/// Held for more than twice as long as any run on record, and for more than a minute.
pub fn is_held_long(state: &LockState) -> bool {
    let Some(longest) = state.runs().filter_map(LastRun::duration).max() else { return false };
    state.held_since().is_some_and(|at| since(at) > (longest * 2).max(Duration::from_secs(60)))
}

/// The colour of a lock's state.
pub fn paint(state: &LockState) -> Paint {
    match state.state {
        State::Free => Paint::Plain,
        State::Revoked => Paint::Bad,
        State::Held if is_held_long(state) => Paint::Odd,
        State::Held => Paint::Good,
    }
}

/// `held`; or `held 2/3`, where that is what so many of the nodes say.
pub fn word(state: &LockState) -> String {
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

/// One for each holder; only the first says what is true of all.
fn rows(state: &LockState) -> Vec<Row<COLUMNS>> {
    let mut rows: Vec<_> = state.holders.iter().map(|holder| row(Some(holder))).collect();
    if rows.is_empty() {
        rows.push(row(None));
    }
    let paint = paint(state);
    rows[0][0] = state.name.to_string().into();
    rows[0][1] = Cell { text: word(state), paint };
    rows[0][HELD_FOR].paint = paint;
    rows[0][WAITERS] = state.waiters.len().to_string().into();
    rows[0][LAST_RUN] = match &state.last_run {
        Some(run) => how_it_ended_and_when(run).into(),
        None if state.holders.is_empty() && state.waiters.is_empty() => NEVER.into(),
        None => "-".into(),
    };
    rows
}

fn row(holder: Option<&Holder>) -> Row<COLUMNS> {
    let dash = || "-".to_owned();
    let of = |text: Option<String>| Cell::from(text.unwrap_or_else(dash));
    [
        Cell::default(),
        Cell::default(),
        of(holder.and_then(|holder| holder.acquired_at).map(|at| brief(since(at)))),
        Cell::default(),
        of(holder.and_then(|holder| holder.fencing_token).map(|token| token.to_string())),
        of(holder.and_then(|holder| holder.expires_in).map(brief)),
        Cell::default(),
        of(holder.map(|holder| escape(who(holder)))),
    ]
}

/// `root@web1:4242 ./report.sh "maintenance"`, as far as it is known.
fn who(holder: &Holder) -> String {
    let host = holder.host.as_deref().or(holder.owner.as_deref());
    let slot = holder.slot.map(|slot| format!("[{slot}] ")).unwrap_or_default();
    let note = holder.note.as_ref().map(|note| format!(" \"{note}\"")).unwrap_or_default();
    let command = holder.command.as_deref().unwrap_or("(not dlock)");
    format!("{slot}{} {command}{note}", whose(holder.user.as_deref(), host, holder.pid))
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::clock;

    fn screen(width: usize) -> Screen {
        Screen { width: Some(width), height: None, color: false, strict: false }
    }

    fn held(name: &str, ago: u64) -> LockState {
        let holder = Holder {
            host: Some("web1.example.com".into()),
            user: Some("root".into()),
            pid: Some(4242),
            command: Some("./report.sh --all".into()),
            note: Some("maintenance".into()),
            acquired_at: Some(clock::wall() - Duration::from_secs(ago)),
            ..Holder::default()
        };
        LockState { state: State::Held, holders: vec![holder], ..free(name) }
    }

    fn free(name: &str) -> LockState {
        LockState::free(name.parse().unwrap(), "file")
    }

    fn run(seconds: u64) -> LastRun {
        let mut run = LastRun::vanished(&Holder::default());
        run.started_at = SystemTime::UNIX_EPOCH;
        run.duration_ms = Some(seconds * 1000);
        run
    }

    #[test]
    fn the_columns_that_matter_stay_longest() {
        let states = [held("nightly-report", 192), free("other")];
        for (width, heads) in [
            (60, &["NAME", "STATE", "HELD FOR", "HOLDER"][..]),
            (80, &["NAME", "STATE", "HELD FOR", "WAITERS", "TOKEN", "HOLDER"]),
            (200, &LAYOUT.heads),
        ] {
            let text = lines(&mut None, &states, screen(width));
            let head = text.lines().next().unwrap();
            let shown: Vec<_> = LAYOUT.heads.iter().filter(|one| head.contains(*one)).collect();
            assert_eq!(shown, heads.iter().collect::<Vec<_>>(), "{text}");
            assert!(text.contains("3m 12s") && text.contains("root@web1.ex") && text.contains(NEVER), "{text}");
        }
    }

    #[test]
    fn what_is_wider_than_the_first_page_moves_its_own_line_only() {
        let (mut table, piped, name) = (None, Screen { width: None, ..screen(0) }, "long-".repeat(30));
        let first = lines(&mut table, &[free("a")], piped);
        let second = lines(&mut table, &[free(&name), free("b")], piped);
        let column = |line: &str| line.find("free").or(line.find("STATE"));
        let columns: Vec<_> = first.lines().chain(second.lines()).map(column).collect();
        assert_eq!(columns, [Some(6), Some(6), Some(name.len() + 2), Some(6)], "{first}{second}");
        assert_eq!(second.matches("NAME").count(), 0);
    }

    #[test]
    fn held_locks_come_first_and_the_longest_held_of_them_first() {
        let mut states = [free("b"), held("new", 1), free("a"), held("old", 100)];
        sort(&mut states);
        assert_eq!(states.map(|state| state.name.to_string()), ["old", "new", "a", "b"]);
    }

    #[test]
    fn twice_as_long_as_ever_before_is_long() {
        let usual = |seconds| LockState { last_run: Some(run(100)), ..held("x", seconds) };
        assert!(!is_held_long(&usual(190)) && is_held_long(&usual(210)));
        let outlier = LockState { earlier: vec![run(500)], ..usual(210) };
        assert!(!is_held_long(&outlier) && !is_held_long(&held("x", 1_000_000)));
        assert_eq!([paint(&usual(210)), paint(&usual(1)), paint(&free("x"))], [Paint::Odd, Paint::Good, Paint::Plain]);
    }
}
