//! `dlock history`: the last runs of a lock, newest first, and how long they took. `dlock forget`: remove what is on record
//! about a lock. Its tokens never go back.

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};

use super::block_on;
use super::table::{Cell, Layout, Paint, Row, Screen, Table};
use crate::backend::{Forget, Forgotten, within};
use crate::cli::{HistoryArgs, Named};
use crate::clock::millis;
use crate::config::{Color, Layers, Service, flag, values};
use crate::exit::{Exit, Fault};
use crate::lock::{LastRun, LockName, LockState, rfc3339};
use crate::report::{Voice, brief, date_and_age, escape, how_it_ended, print, print_json, whose};

const COLUMNS: usize = 5;
const BAR: usize = 2;
static LAYOUT: Layout<COLUMNS> =
    Layout { heads: ["STARTED (UTC)", "TOOK", "", "ENDED", "WHO"], dispensable: &[(BAR, 12)] };

pub fn history(args: HistoryArgs, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let forget_once = flag("--forget-once", &args.forget_once, values::once_key)?;
    let limit = flag("--limit", &args.limit, values::count)?;
    let service = layers.service(None)?;
    let name = values::lock("history", &args.named)?;
    if let Some(key) = forget_once {
        return forget_from(&service, &name, &Forget::Once(key));
    }
    let mut backend = service.open()?;
    let state = block_on(within(service.patience.connect, backend.inspect(&name)))?;
    let runs: Vec<&LastRun> = state.runs().take(limit.unwrap_or(usize::MAX)).collect();
    match args.json {
        true => print_json(&as_json(&state, &runs))?,
        false => print(as_text(&state, &runs, Screen::of_stdout(Color::Auto), std::io::stdout().is_terminal()))?,
    }
    Ok(Exit::OK)
}

pub fn forget(named: Named, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let name = values::lock("forget", &named)?;
    forget_from(&layers.service(None)?, &name, &Forget::Everything)
}

fn forget_from(service: &Service, name: &LockName, what: &Forget) -> Result<Exit> {
    let mut backend = service.open()?;
    let forgotten = block_on(within(service.patience.connect, backend.forget(name, what)))?;
    let line = match (forgotten, what) {
        (Forgotten::InUse, _) => {
            return Err(Fault::Busy.because(format_args!("{name} is held or waited for; nothing was forgotten")));
        }
        (Forgotten::Done, Forget::Everything) => format!("{name}: its history and --once keys are forgotten"),
        (Forgotten::Done, Forget::Once(key)) => format!("{name}: the next run with --once {key} will run"),
        (Forgotten::Nothing, Forget::Everything) => format!("{name}: nothing is on record"),
        (Forgotten::Nothing, Forget::Once(key)) => format!("{name}: no success with --once {key} is on record"),
    };
    print(escape(line) + "\n")?;
    Ok(Exit::OK)
}

fn as_json(state: &LockState, runs: &[&LastRun]) -> Value {
    let durations = durations(runs);
    json!({
        "name": state.name,
        "backend": state.backend,
        "last_success_at": state.last_success().map(rfc3339::date),
        "last_success_at_s": state.last_success().map(rfc3339::seconds),
        "median_ms": median(&durations).map(millis),
        "longest_ms": durations.last().copied().map(millis),
        "runs": runs.iter().map(|run| json!(run.shown())).collect::<Vec<_>>(),
    })
}

fn as_text(state: &LockState, runs: &[&LastRun], screen: Screen, with_bars: bool) -> String {
    let last_success = match state.last_success() {
        Some(at) => format!("last success: {}\n", date_and_age(at)),
        None if runs.is_empty() => String::new(),
        None => "none succeeded\n".into(),
    };
    if runs.is_empty() {
        return format!("{}: no run on record\n{last_success}", state.name);
    }
    let durations = durations(runs);
    let longest = durations.last().copied().filter(|_| with_bars);
    let rows: Vec<_> = runs.iter().map(|run| row(run, longest)).collect();
    let table = Table::for_rows(&LAYOUT, &rows, screen);
    let mut text = table.head();
    for (run, row) in runs.iter().zip(&rows) {
        text += &table.line(row);
        text += &remarks(run);
    }
    let times = match (median(&durations), durations.last()) {
        (Some(median), Some(longest)) => format!(": median {}, longest {}", brief(median), brief(*longest)),
        _ => String::new(),
    };
    let count = runs.len();
    text + &format!("{count} {}{times}\n{last_success}", if count == 1 { "run" } else { "runs" })
}

fn row(run: &LastRun, longest: Option<Duration>) -> Row<COLUMNS> {
    let took = run.duration();
    let paint = if run.succeeded() { Paint::Good } else { Paint::Bad };
    [
        rfc3339::in_words(run.started_at).into(),
        took.map_or_else(|| "-".into(), brief).into(),
        took.zip(longest).map(|(took, longest)| bar(took, longest)).unwrap_or_default().into(),
        Cell { text: how_it_ended(run), paint },
        escape(format_args!("{} {}", whose(Some(&run.user), Some(&run.host), run.pid), run.command)).into(),
    ]
}

/// What does not fit into a column, each on a line of its own below the run.
fn remarks(run: &LastRun) -> String {
    let by = run.revoked_by.as_deref().unwrap_or("an operator");
    let at = run.revoked_at.map(|at| format!(" at {}", rfc3339::in_words(at))).unwrap_or_default();
    let remarks = [
        run.note.as_ref().map(|note| format!("note: {note}")),
        run.reason.as_ref().map(|reason| format!("taken away by {by}{at}: {reason}")),
        run.once.as_ref().map(|key| format!("once: {key}")),
    ];
    remarks.into_iter().flatten().map(|remark| format!("  {}\n", escape(remark))).collect()
}

/// As long as the run compared with the longest; something for each.
fn bar(took: Duration, longest: Duration) -> String {
    const WIDTH: f64 = 8.0;
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let part = if longest.is_zero() { 0.0 } else { took.as_secs_f64() / longest.as_secs_f64() };
    let eighths = ((part * WIDTH * 8.0).round() as usize).max(1);
    "█".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

/// In order, of the runs that have one.
fn durations(runs: &[&LastRun]) -> Vec<Duration> {
    let mut all: Vec<_> = runs.iter().filter_map(|run| run.duration()).collect();
    all.sort();
    all
}

fn median(sorted: &[Duration]) -> Option<Duration> {
    // Of an odd number of runs, both are the same.
    let (below, above) = (sorted.len().checked_sub(1)? / 2, sorted.len() / 2);
    Some((sorted[below] + sorted[above]) / 2)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use crate::lock::{Holder, Outcome, Revocation};

    fn run(seconds: u64, outcome: Outcome, exit_code: Option<i32>) -> LastRun {
        let mut run = LastRun::vanished(&Holder::default());
        run.started_at = SystemTime::UNIX_EPOCH + Duration::from_secs(1_794_882_121);
        run.duration_ms = (outcome != Outcome::Vanished).then_some(seconds * 1000);
        (run.outcome, run.exit_code) = (outcome, exit_code);
        (run.host, run.user, run.command) = ("web1".into(), "ann".into(), "./report.sh\u{1b}[2J".into());
        run
    }

    #[test]
    fn a_table_says_how_each_run_ended_and_how_long_they_take() {
        let mut taken = run(600, Outcome::Lost, None);
        taken.note = Some("monthly".into());
        let at = taken.started_at;
        taken.revoked(&Revocation { reason: "disk full".into(), by: Some("bob@ops".into()), at: Some(at) });
        let mut state = LockState::free("nightly".parse().unwrap(), "file");
        state.last_run = Some(run(60, Outcome::Exited, Some(0)));
        state.earlier = vec![taken, run(0, Outcome::Vanished, None), run(120, Outcome::Signaled, Some(137))];
        let runs: Vec<_> = state.runs().collect();
        let piped = Screen { width: None, height: None, color: false, strict: false };
        let text = as_text(&state, &runs, piped, false);
        for words in [
            "2026-11-17 02:22:01  1m",
            "exit 0",
            "signal 9",
            "vanished",
            "taken away by bob@ops at 2026-11-17 02:22:01: disk full",
            "note: monthly",
            "ann@web1",
            "\\u{1b}[2J",
            "4 runs: median 2m, longest 10m\nnone succeeded\n",
        ] {
            assert!(text.contains(words), "{words:?} is missing:\n{text}");
        }
        assert!(!text.contains('█'), "{text}");
        let drawn = as_text(&state, &runs, Screen { width: Some(100), ..piped }, true);
        assert_eq!(drawn.matches('█').count(), 8 + 1, "{drawn}");
        let json = as_json(&state, &runs);
        assert_eq!((&json["median_ms"], &json["longest_ms"]), (&120_000.into(), &600_000.into()));
        assert_eq!(
            (&json["runs"][1]["revoked_by"], &json["runs"][1]["started_at_s"]),
            (&"bob@ops".into(), &1_794_882_121.into())
        );
    }

    #[test]
    fn the_median_is_in_the_middle() {
        let seconds = |all: &[u64]| all.iter().map(|s| Duration::from_secs(*s)).collect::<Vec<_>>();
        assert_eq!(median(&seconds(&[])), None);
        assert_eq!(median(&seconds(&[1, 2, 9])), Some(Duration::from_secs(2)));
        assert_eq!(median(&seconds(&[1, 3])), Some(Duration::from_secs(2)));
    }
}
