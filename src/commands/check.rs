//! `dlock check`: locks against limits, as a monitoring plugin. One line on standard output, and an exit code that Nagios
//! and all who call such plugins understand. Whatever goes wrong is UNKNOWN.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde::Serialize;
use serde_json::json;

use super::block_on;
use super::selected::each_page;
use super::table::clipped;
use crate::cli::CheckArgs;
use crate::clock::millis;
use crate::config::{Layers, flag, values};
use crate::exit::{Exit, Fault};
use crate::lock::{Holder, LockName, LockState, State, rfc3339};
use crate::report::{
    Voice, brief, causes, describe, escape, how_it_ended, how_it_ended_and_when, print, print_json, since,
};

/// The best comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Ok,
    Unknown,
    Warning,
    Critical,
}

impl Status {
    fn code(self) -> u8 {
        match self {
            Status::Ok => 0,
            Status::Warning => 1,
            Status::Critical => 2,
            Status::Unknown => 3,
        }
    }
}

/// What was found out about one lock.
#[derive(Serialize)]
struct Verdict {
    name: LockName,
    status: Status,
    /// What is wrong or, if nothing is, how it is.
    message: String,
    held_ms: Option<u64>,
    waiting_ms: Option<u64>,
    last_success_at_s: Option<u64>,
    /// Performance data: `x_held=192s;2880;3600;0`.
    #[serde(skip)]
    data: Vec<String>,
}

/// What a lock is checked against.
struct Limits {
    held_at_most: Option<Duration>,
    last_success_within: Option<Duration>,
    waiting_at_most: Option<Duration>,
    /// The part of a limit from which on there is a warning.
    warn: Option<f64>,
}

pub fn check(args: CheckArgs, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let wanted = values::locks(&args.locks)?;
    if wanted.is_empty() {
        return Err(Fault::Usage.because("which lock? dlock check NAME, or for all locks: dlock check '*'"));
    }
    let service = layers.service(None)?;
    let limits = Limits {
        held_at_most: flag("--held-at-most", &args.held_at_most, values::duration)?,
        last_success_within: flag("--last-success-within", &args.last_success_within, values::duration)?,
        waiting_at_most: flag("--waiting-at-most", &args.waiting_at_most, values::duration)?,
        warn: flag("--warn", &args.warn, values::part)?,
    };
    let mut backend = service.open()?;
    let mut verdicts = Vec::new();
    block_on(each_page(&wanted, service.patience.connect, backend.as_mut(), |page| {
        verdicts.extend(page.iter().map(|state| judge(state, &limits)));
        Ok(())
    }))?;
    if verdicts.is_empty() {
        return Err(Fault::Usage.because("no lock has such a name"));
    }
    let status = verdicts.iter().map(|verdict| verdict.status).max().unwrap_or(Status::Unknown);
    answer(status, &message(&verdicts), &verdicts, args.json)
}

/// For whatever kept us from checking.
pub fn unknown(error: &anyhow::Error) -> Exit {
    let as_json = std::env::args_os().any(|word| word == "--json");
    let message = causes(error, &Fault::Usage.to_string());
    let code = Exit::Code(Status::Unknown.code());
    answer(Status::Unknown, &message, &[], as_json).unwrap_or(code)
}

fn answer(status: Status, message: &str, verdicts: &[Verdict], as_json: bool) -> Result<Exit> {
    let code = status.code();
    if as_json {
        print_json(&json!({"status": status, "exit_code": code, "message": message, "locks": verdicts}))?;
    } else {
        let data: Vec<_> = verdicts.iter().flat_map(|verdict| verdict.data.iter().map(String::as_str)).collect();
        let data = if data.is_empty() { String::new() } else { format!(" | {}", data.join(" ")) };
        let word = format!("{status:?}").to_uppercase();
        // What stands behind a bar is performance data.
        print(format!("DLOCK {word} - {}{data}\n", escape(message).replace('|', "¦")))?;
    }
    Ok(Exit::Code(code))
}

/// What is wrong, the worst first; or how they all are.
fn message(verdicts: &[Verdict]) -> String {
    let mut wrong: Vec<_> = verdicts.iter().filter(|verdict| verdict.status != Status::Ok).collect();
    wrong.sort_by_key(|verdict| std::cmp::Reverse(verdict.status));
    let sentence = |verdict: &Verdict| format!("{}: {}", verdict.name, verdict.message);
    match (verdicts, wrong.len()) {
        ([only], _) => sentence(only),
        (all, 0) => format!("{} locks", all.len()),
        (all, bad) => {
            let sentences: Vec<_> = wrong.into_iter().map(sentence).collect();
            format!("{bad} of {} locks: {}", all.len(), sentences.join("; "))
        }
    }
}

fn judge(state: &LockState, limits: &Limits) -> Verdict {
    let held = lasts(state.state != State::Free, state.held_since());
    let waiting = lasts(!state.waiters.is_empty(), state.oldest_waiter());
    let mut verdict = Verdict {
        name: state.name.clone(),
        status: Status::Ok,
        message: String::new(),
        held_ms: held.map(millis),
        waiting_ms: waiting.map(millis),
        last_success_at_s: state.last_success().map(rfc3339::seconds),
        data: Vec::new(),
    };
    let holder = state.holders.iter().min_by_key(|holder| holder.acquired_at);
    // Since when is said apart.
    let who = |holder: &Holder| clipped(&describe(&Holder { acquired_at: None, ..holder.clone() }), 120);
    let by = holder.map(|holder| format!(" by {}", who(holder))).unwrap_or_default();
    verdict.measured("held", held, limits.held_at_most, limits.warn, &format!("held{by}"));
    verdict.measured("waiting", waiting, limits.waiting_at_most, limits.warn, "somebody has waited");
    match (limits.last_success_within, state.last_success(), &state.last_run) {
        (None, ..) => {}
        (limit, Some(at), _) => verdict.measured("last_success", Some(since(at)), limit, limits.warn, "no success"),
        (_, None, last_run) => {
            verdict.data.push(format!("{}_last_success=U", verdict.name));
            let failed = |run| format!("never succeeded (last run: {})", how_it_ended(run));
            verdict.find(Status::Critical, &last_run.as_ref().map_or_else(|| "never ran".into(), failed));
        }
    }
    if verdict.message.is_empty() {
        let last_run = match &state.last_run {
            Some(run) => format!("last run: {}", how_it_ended_and_when(run)),
            None => "no run on record".into(),
        };
        let is = match (state.state, held) {
            (State::Free, _) => "free".into(),
            (_, Some(span)) => format!("held for {}", brief(span)),
            _ => "held".into(),
        };
        verdict.message = format!("{is}, {last_run}");
    }
    verdict
}

/// How long something has been so: no time if it is not, and `None` if nobody knows since when it is.
fn lasts(is: bool, from: Option<SystemTime>) -> Option<Duration> {
    if is { from.map(since) } else { Some(Duration::ZERO) }
}

impl Verdict {
    fn find(&mut self, status: Status, what: &str) {
        self.status = self.status.max(status);
        self.message += if self.message.is_empty() { "" } else { ", " };
        self.message += what;
    }

    /// Compares with a limit, if there is one.
    fn measured(
        &mut self,
        what: &str,
        span: Option<Duration>,
        limit: Option<Duration>,
        warn: Option<f64>,
        sentence: &str,
    ) {
        let Some(limit) = limit else { return };
        let warn = warn.map(|part| limit.mul_f64(part));
        let value = span.map_or_else(|| "U".into(), |span| format!("{}s", millis(span) as f64 / 1e3));
        let seconds = |span: Duration| span.as_secs_f64().to_string();
        let warn_at = warn.map(seconds).unwrap_or_default();
        self.data.push(format!("{}_{what}={value};{warn_at};{};0", self.name, seconds(limit)));
        let Some(span) = span else {
            return self.find(Status::Unknown, &format!("{sentence}, nobody knows since when"));
        };
        let status = match () {
            () if span > limit => Status::Critical,
            () if warn.is_some_and(|warn| span > warn) => Status::Warning,
            () => return,
        };
        self.find(status, &format!("{sentence} for {}, the limit is {}", brief(span), brief(limit)));
    }
}
