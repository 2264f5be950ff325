//! `dlock doctor`: does this backend work, and does it keep the promise? Takes, renews and releases a
//! probe lock as a run would, and asks the backend what weakens the promise. Whatever fails becomes a finding: a sick
//! backend is the one that has to be examined.

use std::future::Future;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use humantime::format_duration;
use serde_json::{Value, json};

use super::block_on;
use crate::backend::{
    self, Ask, Attempt, Backend, Checkup, Ending, Finding, Lease, Released, Renewal, Verdict, within,
};
use crate::cli::DoctorArgs;
use crate::clock::{self, Instant};
use crate::config::{Layers, Service, values};
use crate::exit::{Exit, Fault};
use crate::guardian::{self, Priority, possible_priority};
use crate::lock::{Grant, Identity, LeaseTiming, LockState, Mode, State};
use crate::report::{CHECK_SERVER, Voice, causes, describe, escape, print, print_json};

const PROBE: &str = "dlock-doctor";

/// What was found out.
#[derive(Default)]
struct Report {
    /// How long each step of a run takes here.
    latencies: Vec<(&'static str, Duration)>,
    /// What the probe was granted.
    grant: Option<Grant>,
    checkup: Checkup,
    /// The exit code, if anything is broken.
    broken: Option<Exit>,
}

pub fn doctor(args: DoctorArgs, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let ttl = layers.ttl(&args.ttl)?;
    let kill_after = layers.option("kill-after", &None, values::duration, "")?;
    let timing = LeaseTiming::new(ttl, kill_after).context(Fault::Usage)?;
    let service = layers.service(Some(timing))?;
    if args.print_schema {
        print(backend::schema(&service.address)?)?;
        return Ok(Exit::OK);
    }
    let mut backend = service.open()?;
    let mut report = Report::default();
    block_on(async {
        let probed = report.probe(&service, ttl, backend.as_mut()).await;
        let failure = probed.err().map(|error| causes(&error, ""));
        // Several requests, some of them to servers that are not well, each with its own patience.
        match within(service.patience.connect * 2, backend.examine()).await {
            Ok(Checkup { findings, clock_offset_us }) => {
                report.checkup.findings.extend(findings);
                report.checkup.clock_offset_us = clock_offset_us;
            }
            // What keeps us from taking a lock mostly keeps us from asking as well.
            Err(error) if failure.as_deref() == Some(&causes(&error, "")) => {}
            Err(error) => report.fail("examine", "the server cannot be asked about itself", &error),
        }
        Ok(())
    })?;
    let (slowness, clock) = (report.slowness(timing), report.clock_offset());
    report
        .checkup
        .findings
        .extend([Some(process_table()), Some(guardian_priority()), slowness, clock].into_iter().flatten());
    let address = service.address.to_string();
    match args.json {
        true => print_json(&report.as_json(&address, timing))?,
        false => print(report.as_text(&address, timing))?,
    }
    Ok(match report.worst() {
        Verdict::Broken => report.broken.unwrap_or(Fault::Unreachable.exit()),
        Verdict::Weak if args.strict => Exit::Code(1),
        Verdict::Weak | Verdict::Fine => Exit::OK,
    })
}

/// Whether this is a probe lock that nobody holds: nothing that anybody wants to see in a list.
pub fn is_spent_probe(state: &LockState) -> bool {
    state.name.as_str() == PROBE && state.state == State::Free && state.last_run.is_none()
}

impl Report {
    /// The life of a lease, with nobody else interested in it.
    async fn probe(&mut self, service: &Service, ttl: Duration, backend: &mut dyn Backend) -> Result<()> {
        let patience = service.patience;
        let ask = Ask {
            name: PROBE.parse()?,
            who: Identity::of_this_process("dlock doctor")?,
            mode: Mode::Exclusive,
            ttl,
            queue: false,
            once: None,
        };
        let lease = match self.acquire(&ask, patience.connect, backend).await {
            Ok(Some(lease)) => lease,
            Ok(None) => return Ok(()),
            Err(error) => {
                // Whether it was granted is not known; the server may still hear that nobody wants it.
                let _ = within(patience.attempt, backend.withdraw(&ask)).await;
                self.fail("probe", "no lock can be taken", &error);
                return Err(error);
            }
        };
        self.grant = Some(lease.grant);
        let renewal = self.timed("renew", within(patience.connect, backend.renew(&lease))).await;
        let ending = Ending { last_run: None, keep: 0, hold_until: None };
        let released = self.timed("release", within(patience.connect, backend.release(&lease, &ending))).await;
        let lost = |why: &str| Err(Fault::Unreachable.because(why));
        let renewed = renewal.and_then(|renewal| match renewal {
            Renewal::Held(_) => Ok(()),
            Renewal::Lost(why) | Renewal::ForceReleased(why) | Renewal::Revoked(why) => {
                lost(&format!("the probe lock was lost: {why}"))
            }
        });
        renewed.inspect_err(|error| self.fail("probe", "no lock can be kept", error))?;
        let released = released.and_then(|released| match released {
            Released::Done => Ok(()),
            Released::NotOurs | Released::ForceReleased(_) => lost("the probe lock was not ours any more"),
        });
        released.inspect_err(|error| self.fail("probe", "no lock can be released", error))
    }

    /// `None` if somebody else has the probe lock, which is a finding.
    async fn acquire(&mut self, ask: &Ask, patience: Duration, backend: &mut dyn Backend) -> Result<Option<Lease>> {
        let give_up = clock::now() + patience;
        loop {
            let holder = match self.timed("connect and acquire", within(patience, backend.try_acquire(ask))).await? {
                Attempt::Granted(lease) => return Ok(Some(lease)),
                Attempt::Busy(busy) if give_up.has_passed() => busy.holder,
                Attempt::Busy(_) => {
                    // Another doctor is here.
                    tokio::time::sleep(Duration::from_millis(20)).await;
                    self.latencies.clear();
                    continue;
                }
                Attempt::OtherSlots(_) | Attempt::AlreadyRan => None,
            };
            let holder = holder.map_or_else(|| "somebody".into(), |holder| describe(&holder));
            self.broken = Some(Exit::Code(Exit::BUSY));
            self.checkup.findings.push(Finding::of("probe", format!("the lock {PROBE} is held by {holder}")).broken(
                "the backend answers, but whether a lock can be taken, renewed and released was not tried",
                format!("wait for it, or take it away: dlock force-release {PROBE}"),
            ));
            return Ok(None);
        }
    }

    fn fail(&mut self, check: &'static str, consequence: &str, error: &Error) {
        let (exit, advice) = match Fault::of(error) {
            Fault::Refused => (Fault::Refused, "check the user, the password, the certificates and their permissions"),
            Fault::Config => (Fault::Config, "check the URL and the config file"),
            _ => (Fault::Unreachable, CHECK_SERVER),
        };
        self.broken.get_or_insert(exit.exit());
        self.checkup.findings.push(Finding::of(check, causes(error, "")).broken(consequence, advice));
    }

    async fn timed<T>(&mut self, step: &'static str, work: impl Future<Output = Result<T>>) -> Result<T> {
        let began = clock::now();
        let done = work.await?;
        self.latencies.push((step, began.elapsed()));
        Ok(done)
    }

    fn slowness(&self, timing: LeaseTiming) -> Option<Finding> {
        let limit = timing.attempt() / 4;
        let (step, took) = self.latencies.iter().max_by_key(|(_, took)| *took)?;
        (*took > limit).then(|| {
            Finding::of("latency", format!("{step} took {took:.0?}")).weak(
                format!("a renewal counts as unanswered after {:.0?}; there is little room", timing.attempt()),
                "raise --ttl, or use a server with a shorter round trip",
            )
        })
    }

    fn clock_offset(&self) -> Option<Finding> {
        const TOLERABLE_US: i64 = 1_000_000;
        let offset = self.checkup.clock_offset_us?;
        let what = format!("the server's clock is {:+.3}s from ours", offset as f64 / 1e6);
        Some(if offset.abs() <= TOLERABLE_US {
            Finding::of("clock", what)
        } else {
            Finding::of("clock", what).weak(
                "no lease depends on it, but dates in `status` and in logs do not match, and tokens that are made \
                 from a date jump when that clock is set",
                "synchronise the clocks of both hosts with NTP",
            )
        })
    }

    fn worst(&self) -> Verdict {
        self.checkup.findings.iter().map(|finding| finding.verdict).max().unwrap_or(Verdict::Fine)
    }

    fn as_text(&self, address: &str, timing: LeaseTiming) -> String {
        let mut text = format!("{address}\n");
        for (step, took) in &self.latencies {
            text += &format!("  ok    {step}: {:.2} ms\n", took.as_secs_f64() * 1e3);
        }
        for finding in &self.checkup.findings {
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
        let timeline = self.timeline(timing).map(|(what, at)| format!("{what} {at:.2}s"));
        text + &format!("  with a ttl of {}: {}\n", format_duration(self.grant(timing).ttl), timeline.join(", "))
    }

    fn as_json(&self, address: &str, timing: LeaseTiming) -> Value {
        let millis = |took: &Duration| took.as_secs_f64() * 1e3;
        let steps: Vec<_> =
            self.latencies.iter().map(|(step, took)| json!({"step": step, "ms": millis(took)})).collect();
        let timeline = self.timeline(timing).map(|(what, at)| json!({"what": what, "seconds": at}));
        json!({
            "backend": address,
            "healthy": self.worst() == Verdict::Fine,
            "latencies": steps,
            "clock_offset_ms": self.checkup.clock_offset_us.map(|offset| offset as f64 / 1e3),
            "findings": self.checkup.findings,
            "timeline": timeline,
        })
    }

    /// What the server grants or, as long as that is not known, what would be asked for.
    fn grant(&self, timing: LeaseTiming) -> Grant {
        let (from, ttl) = (Instant::from_nanos(0), timing.ttl);
        let granted = self.grant.map(|grant| Grant { from, ttl: grant.ttl.min(ttl), ..grant });
        granted.unwrap_or(Grant { from, ttl, slack: Duration::ZERO })
    }

    /// The instants of a lease, in seconds from its last renewal.
    fn timeline(&self, timing: LeaseTiming) -> [(&'static str, f64); 5] {
        let grant = self.grant(timing);
        let at = timing.deadlines(grant);
        let seconds = |instant: Instant| instant.since(grant.from).as_secs_f64();
        [
            ("renewal", timing.shortened_to(grant.ttl).renew_every().as_secs_f64()),
            ("first signal", seconds(at.signal_at)),
            ("SIGKILL", seconds(at.kill_at)),
            ("last instant we may claim it", seconds(at.end)),
            ("end of the lease", grant.ttl.as_secs_f64()),
        ]
    }
}

/// No weakness by itself: the guardian measures how fast it is, and begins earlier where it is slow.
fn guardian_priority() -> Finding {
    let what = match possible_priority() {
        Priority::RealTime => "the guardian may have real-time priority",
        Priority::Nice => "the guardian may have priority before ordinary processes (nice -20), but not real-time",
        Priority::Ordinary => {
            "the guardian has ordinary priority (only root or CAP_SYS_NICE may raise it): on a starved machine it ends \
             a command earlier before the lease ends"
        }
    };
    Finding::of("guardian-priority", what)
}

/// The guardian finds the processes of a command in /proc, and starts none where it could not find them.
fn process_table() -> Finding {
    const CHECK: &str = "process-table";
    match guardian::find_processes() {
        Ok(()) => Finding::of(CHECK, "/proc shows the processes of this host or container"),
        Err(error) => Finding::of(CHECK, causes(&error, &Fault::Internal.to_string())).broken(
            "dlock finds a command's processes there; it cannot end a process that it does not find",
            "mount it where dlock runs: mount -t proc proc /proc, or unshare --mount-proc; a kernel needs \
             CONFIG_PROC_CHILDREN",
        ),
    }
}
