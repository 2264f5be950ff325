//! What the doctor says, for people and as JSON.

use std::time::Duration;

use humantime::format_duration;
use serde_json::{Value, json};

use super::Report;
use crate::backend::Verdict;
use crate::clock::Instant;
use crate::lock::{Grant, LeaseTiming};
use crate::report::escape;

impl Report {
    pub fn as_text(&self, address: &str, timing: LeaseTiming) -> String {
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

    pub fn as_json(&self, address: &str, timing: LeaseTiming) -> Value {
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
