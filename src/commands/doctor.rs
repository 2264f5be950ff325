//! `dlock doctor`: does this backend work, and does it keep the promise? Takes, renews and releases a
//! probe lock as a run would, and asks the backend what weakens the promise.

use std::future::Future;
use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::block_on;
use crate::backend::{self, Ask, Attempt, Backend, Checkup, Ending, Finding, Released, Renewal, Verdict, within};
use crate::clock::{self, Instant};
use crate::config::Examination;
use crate::exit::{Exit, Fault};
use crate::lock::{Identity, Mode, Term};
use crate::report::escape;

/// How long each step of a run takes here.
#[derive(Default)]
struct Latencies(Vec<(&'static str, Duration)>);

pub fn doctor(order: &Examination) -> Result<Exit> {
    if order.print_schema {
        std::io::stdout().write_all(backend::schema(&order.service.address)?.as_bytes())?;
        return Ok(Exit::OK);
    }
    let mut backend = backend::open(&order.service.address, order.service.patience)?;
    let mut latencies = Latencies::default();
    let mut checkup = block_on(async {
        probe(order, backend.as_mut(), &mut latencies).await?;
        within(order.service.patience.connect, backend.examine()).await
    })?;
    checkup.findings.extend(slowness(order, &latencies));
    checkup.findings.extend(clock_offset(&checkup));
    let text = if order.json { as_json(order, &latencies, &checkup) } else { as_text(order, &latencies, &checkup) };
    std::io::stdout().write_all(text.as_bytes())?;
    let worst = checkup.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Fine);
    Ok(match worst {
        Verdict::Broken => Fault::Unreachable.exit(),
        Verdict::Weak if order.strict => Exit::Code(1),
        Verdict::Weak | Verdict::Fine => Exit::OK,
    })
}

/// The life of a lease, with nobody else interested in it.
async fn probe(order: &Examination, backend: &mut dyn Backend, latencies: &mut Latencies) -> Result<()> {
    let who = Identity::of_this_process("dlock doctor")?;
    let ask = Ask {
        name: "dlock-doctor".parse()?,
        who,
        mode: Mode::Exclusive,
        ttl: order.terms.ttl,
        queue: false,
        once: None,
    };
    let connect = order.service.patience.connect;
    let give_up = clock::now() + connect;
    let lease = loop {
        match latencies.take("connect and acquire", within(connect, backend.try_acquire(&ask))).await? {
            Attempt::Granted(lease) => break lease,
            Attempt::Busy(_) if !give_up.has_passed() => {
                // Another doctor is here.
                tokio::time::sleep(Duration::from_millis(20)).await;
                latencies.0.clear();
            }
            _ => return Err(Fault::Internal.because("the probe lock dlock-doctor is not free: see dlock status")),
        }
    };
    let renewal = latencies.take("renew", within(connect, backend.renew(&lease))).await?;
    let ending = Ending { last_run: None, hold_until: None };
    let released = latencies.take("release", within(connect, backend.release(&lease, &ending))).await?;
    match (renewal, released) {
        (Renewal::Held(_), Released::Done) => Ok(()),
        (Renewal::Lost(why) | Renewal::Revoked(why), _) => {
            Err(Fault::Internal.because(format_args!("the probe lock was lost: {why}")))
        }
        (_, Released::NotOurs) => Err(Fault::Internal.because("the probe lock was not ours any more")),
    }
}

impl Latencies {
    async fn take<T>(&mut self, step: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let began = clock::now();
        let done = work.await?;
        self.0.push((step, began.elapsed()));
        Ok(done)
    }
}

fn slowness(order: &Examination, latencies: &Latencies) -> Option<Finding> {
    let limit = order.terms.attempt() / 4;
    let (step, took) = latencies.0.iter().max_by_key(|(_, took)| *took)?;
    (*took > limit).then(|| {
        Finding::weak(
            "latency",
            format!("{step} took {took:.0?}"),
            format!("a renewal counts as unanswered after {:.0?}; there is little room", order.terms.attempt()),
            "raise --ttl, or come nearer to the server",
        )
    })
}

fn clock_offset(checkup: &Checkup) -> Option<Finding> {
    const TOLERABLE_US: i64 = 1_000_000;
    let offset = checkup.clock_offset_us?;
    let what = format!("the server's clock is {:+.3}s from ours", offset as f64 / 1e6);
    Some(if offset.abs() <= TOLERABLE_US {
        Finding::fine("clock", what)
    } else {
        Finding::weak(
            "clock",
            what,
            "no lease depends on it, but dates in `status` and in logs do not fit together, and tokens that are made \
             from a date jump when it is set",
            "let both hosts take their time from NTP",
        )
    })
}

/// The instants of a lease, in seconds from its last renewal.
fn timeline(order: &Examination) -> [(&'static str, f64); 4] {
    let zero = Instant::from_nanos(0);
    let at = order.terms.deadlines(Term { from: zero, ttl: order.terms.ttl, slack: Duration::ZERO });
    [
        ("renewal", order.terms.renew_every().as_secs_f64()),
        ("first signal", at.term.since(zero).as_secs_f64()),
        ("SIGKILL", at.kill.since(zero).as_secs_f64()),
        ("end of the lease", at.end.since(zero).as_secs_f64()),
    ]
}

fn as_text(order: &Examination, latencies: &Latencies, checkup: &Checkup) -> String {
    let mut text = format!("{}\n", order.service.address);
    for (step, took) in &latencies.0 {
        text += &format!("  ok    {step}: {:.2} ms\n", took.as_secs_f64() * 1e3);
    }
    for finding in &checkup.findings {
        let mark = match finding.verdict {
            Verdict::Fine => "ok  ",
            Verdict::Weak => "WEAK",
            Verdict::Broken => "FAIL",
        };
        text += &format!("  {mark}  {}\n", escape(&finding.what));
        if finding.verdict != Verdict::Fine {
            text += &format!("        why: {}\n        do:  {}\n", escape(&finding.why), escape(&finding.advice));
        }
    }
    let timeline = timeline(order).map(|(what, at)| format!("{what} {at:.2}s"));
    text + &format!("  with a ttl of {}: {}\n", humantime::format_duration(order.terms.ttl), timeline.join(", "))
}

fn as_json(order: &Examination, latencies: &Latencies, checkup: &Checkup) -> String {
    let worst = checkup.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Fine);
    let millis = |took: &Duration| took.as_secs_f64() * 1e3;
    let steps: Vec<_> = latencies.0.iter().map(|(step, took)| json!({"step": step, "ms": millis(took)})).collect();
    let timeline: Vec<_> = timeline(order).iter().map(|(what, at)| json!({"what": what, "seconds": at})).collect();
    let report = json!({
        "backend": order.service.address.to_string(),
        "healthy": worst == Verdict::Fine,
        "latencies": steps,
        "clock_offset_ms": checkup.clock_offset_us.map(|offset| offset as f64 / 1e3),
        "findings": checkup.findings,
        "timeline": timeline,
    });
    format!("{report}\n")
}
