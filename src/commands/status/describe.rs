//! One lock, described for whoever has to decide what to do about it.

use super::Query;
use super::table::{NEVER, is_held_long, paint, word};
use crate::commands::table::Screen;
use crate::lock::{Contender, Holder, LastRun, LockState, Mode, State, rfc3339};
use crate::report::{brief, date_and_age, escape, how_it_ended, whose};

/// How many of the last runs are shown.
const RUNS: usize = 5;

pub fn describe(state: &LockState, query: &Query, screen: Screen) -> String {
    let mut lines = vec![("state", screen.paint(paint(state), &word(state)) + &circumstances(state))];
    lines.extend(state.holders.iter().flat_map(of_holder));
    let waiters = state.waiters.iter().enumerate().map(|(n, waiter)| format!("{}. {}", n + 1, of_waiter(waiter)));
    lines.extend(below("waiters", waiters));
    lines.extend(below("last runs", state.runs().take(RUNS).map(of_run)));
    if let Some(at) = state.last_success().filter(|_| !state.runs().take(RUNS).any(LastRun::succeeded)) {
        lines.push(("", format!("the last success was at {}", date_and_age(at))));
    }
    lines.extend(below("next", next_steps(state, query)));
    let lines = lines.into_iter().map(|(head, text)| format!("  {head:<9}  {text}\n"));
    format!("{} on {}\n{}", state.name, query.service.address, lines.collect::<String>())
}

/// Lines below each other, of which only the first has a head.
fn below(head: &'static str, lines: impl IntoIterator<Item = String>) -> impl Iterator<Item = (&'static str, String)> {
    std::iter::once(head).chain(std::iter::repeat("")).zip(lines)
}

fn circumstances(state: &LockState) -> String {
    let mode = match state.mode {
        Mode::Exclusive => String::new(),
        Mode::Shared => ", shared".into(),
        Mode::Slots(n) => format!(", {} of {n} slots", state.holders.len()),
    };
    let note = match state.state {
        State::Revoked => "; its holder was asked to stop and release it",
        State::Held if is_held_long(state) => "; more than twice as long as any run on record",
        State::Free if state.last_run.is_none() && state.waiters.is_empty() => {
            return format!(", {NEVER} under this name");
        }
        _ => "",
    };
    format!("{mode}{note}")
}

fn of_holder(holder: &Holder) -> impl Iterator<Item = (&'static str, String)> {
    let host = holder.host.as_deref().or(holder.owner.as_deref());
    let command = holder.command.as_deref().unwrap_or("(not dlock)");
    let slot = holder.slot.map(|slot| format!(" in slot {slot}")).unwrap_or_default();
    let who = whose(holder.user.as_deref(), host, holder.pid);
    let ends = holder.expires_in.map(|left| format!("ends in {} unless renewed", brief(left)));
    let lease: Vec<_> = holder.ttl.map(brief).into_iter().chain(ends).collect();
    let lines = [
        Some(("holder", escape(format_args!("{who}{slot} {command}")))),
        holder.note.as_ref().map(|note| ("note", escape(note))),
        holder.acquired_at.map(|at| ("since", date_and_age(at))),
        (!lease.is_empty()).then(|| ("lease", lease.join(", "))),
        holder.fencing_token.map(|token| ("token", token.to_string())),
    ];
    lines.into_iter().flatten()
}

/// Since when comes first: a command may be longer than a terminal is wide.
fn of_waiter(waiter: &Contender) -> String {
    let host = waiter.host.as_deref().or(waiter.owner.as_deref());
    let who = whose(waiter.user.as_deref(), host, waiter.pid);
    let since = waiter.waiting_since.map(|at| format!("{}: ", date_and_age(at))).unwrap_or_default();
    let note = waiter.note.as_ref().map(|note| format!(" \"{note}\"")).unwrap_or_default();
    escape(format_args!("{since}{who} {}{note}", waiter.command.as_deref().unwrap_or("(not dlock)")))
}

fn of_run(run: &LastRun) -> String {
    let took = run.duration().map(|took| format!(" after {}", brief(took))).unwrap_or_default();
    let by = run.revoked_by.as_ref().map(|by| format!(" by {by}")).unwrap_or_default();
    let reason = run.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    let (date, how) = (rfc3339::in_words(run.started_at), how_it_ended(run));
    let who = whose(Some(&run.user), Some(&run.host), run.pid);
    escape(format_args!("{date}Z  {how}{by}{reason}{took}, {who}"))
}

/// What an operator can type, and below each what it does.
fn next_steps(state: &LockState, query: &Query) -> Vec<String> {
    let (name, backend) = (&state.name, &query.backend_flag);
    let mut steps = Vec::new();
    match state.state {
        State::Held => steps.extend([
            format!("dlock force-release {backend}{name} --reason 'TEXT'"),
            "asks the holder to stop its command and release the lock".into(),
        ]),
        State::Revoked => steps.extend([
            format!("dlock force-release {backend}{name} --now --reason 'TEXT'"),
            "frees it at once, while the holder's command may still run".into(),
        ]),
        State::Free if state.last_run.is_none() => {
            steps.extend([format!("dlock status {backend}").trim_end().into(), "shows every lock there is".into()]);
        }
        State::Free => {}
    }
    if state.last_run.is_some() {
        steps.extend([format!("dlock history {backend}{name}"), "shows all runs on record".into()]);
    }
    steps
}
