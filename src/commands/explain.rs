//! `dlock run --explain`: the timeline and where each setting came from. Runs nothing.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::Result;
use nix::sys::signal::Signal;

use crate::clock::Instant;
use crate::config::RunJob;
use crate::exit::Exit;
use crate::guardian::{Priority, possible_priority};
use crate::lock::Grant;
use crate::report::print;

pub fn explain(job: &RunJob) -> Result<Exit> {
    let zero = Instant::from_nanos(0);
    let timing = job.timing;
    let at = timing.deadlines(Grant { from: zero, ttl: timing.ttl, slack: Duration::ZERO });
    let row = |instant: Instant, what: &str| format!("  {:>9.3}s  {what}\n", instant.since(zero).as_secs_f64());
    let mut out = format!("lock {} ({}) on {}\n\n", job.name, job.mode, job.service.address);
    writeln!(out, "counted from the last renewal that succeeded:")?;
    out += &row(zero, "the request that sets the lease is sent");
    out += &row(zero + timing.renew_every(), "renewal; repeated if it fails");
    out += &row(zero + timing.renew_every() + timing.attempt(), "that attempt counts as unanswered");
    let signal = Signal::try_from(job.signal).map_or_else(|_| job.signal.to_string(), |signal| signal.to_string());
    out += &row(at.signal_at, &format!("{signal} to every process of the command"));
    out += &row(at.kill_at, "SIGKILL to every process of the command");
    out += &row(at.end, "dlock claims the lock no longer");
    out += &row(zero + timing.ttl, "the lease ends on the server");
    let early = "SIGKILL comes earlier where the guardian finds that it needs more time";
    let priority = match possible_priority() {
        Priority::Ordinary => "ordinary priority (only root or CAP_SYS_NICE may raise it)",
        Priority::Nice => "nice -20 priority",
        Priority::RealTime => "real-time priority",
    };
    writeln!(out, "\nthe guardian has {priority}; {early}")?;
    writeln!(out, "\nsettings:")?;
    for one in &job.explained {
        writeln!(out, "  {:<20} {:<20} {}", one.key, one.value, one.source)?;
    }
    print(out)?;
    Ok(Exit::OK)
}
