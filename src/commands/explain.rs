//! `dlock run --explain`: the timeline and where each setting came from. Runs nothing.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Result;

use crate::clock::Instant;
use crate::config::RunJob;
use crate::exit::Exit;
use crate::guardian::{Priority, possible_priority};
use crate::lock::Grant;
use crate::report::print;

pub fn explain(job: &RunJob) -> Result<Exit> {
    print(text(job)?)?;
    Ok(Exit::OK)
}

fn text(job: &RunJob) -> Result<String> {
    let zero = Instant::from_nanos(0);
    let timing = job.timing;
    let at = timing.deadlines(Grant { from: zero, ttl: timing.ttl, slack: Duration::ZERO });
    let row = |instant: Instant, what: &str| {
        let span = instant.since(zero);
        format!("  {:>9.3}s  {what}\n", span.as_secs_f64())
    };
    let mut out = format!("lock {} ({}) on {}\n\n", job.name, job.mode, job.service.address);
    writeln!(out, "counted from the last renewal that succeeded:")?;
    out += &row(zero, "the request that sets the lease is sent");
    out += &row(zero + timing.renew_every(), "renewal; repeated if it fails");
    out += &row(zero + timing.renew_every() + timing.attempt(), "that attempt counts as unanswered");
    out += &row(at.signal_at, &format!("{} to every process of the command", signal_name(job.signal)));
    out += &row(at.kill_at, "SIGKILL to every process of the command");
    out += &row(at.end, "dlock claims the lock no longer");
    out += &row(zero + timing.ttl, "the lease ends on the server");
    let early = "SIGKILL comes earlier where the guardian finds that it needs more time";
    writeln!(out, "\nthe guardian has {}; {early}", guardian_priority())?;
    writeln!(out, "\nsettings:")?;
    for one in &job.explained {
        writeln!(out, "  {:<20} {:<20} {}", one.key, one.value, one.source)?;
    }
    Ok(out)
}

fn guardian_priority() -> String {
    match possible_priority() {
        Priority::Ordinary => "ordinary priority (only root or CAP_SYS_NICE may raise it)".to_owned(),
        raised => format!("{raised} priority"),
    }
}

fn signal_name(signal: i32) -> String {
    nix::sys::signal::Signal::try_from(signal).map_or_else(|_| signal.to_string(), |signal| signal.to_string())
}
