//! What the doctor says, for people and as JSON.

use std::time::Duration;

use humantime::format_duration;
use serde_json::json;

use super::Report;
use crate::backend::Verdict;
use crate::clock::Instant;
use crate::config::DoctorJob;
use crate::lock::Grant;
use crate::report::{escape, json_escaped};

impl Report {
    pub fn as_text(&self, order: &DoctorJob) -> String {
        let mut text = format!("{}\n", order.service.address);
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
        let timeline = self.timeline(order).map(|(what, at)| format!("{what} {at:.2}s"));
        text + &format!("  with a ttl of {}: {}\n", format_duration(self.grant(order).ttl), timeline.join(", "))
    }

    pub fn as_json(&self, order: &DoctorJob) -> String {
        let millis = |took: &Duration| took.as_secs_f64() * 1e3;
        let steps: Vec<_> =
            self.latencies.iter().map(|(step, took)| json!({"step": step, "ms": millis(took)})).collect();
        let timeline = self.timeline(order).map(|(what, at)| json!({"what": what, "seconds": at}));
        let report = json!({
            "backend": order.service.address.to_string(),
            "healthy": self.worst() == Verdict::Fine,
            "latencies": steps,
            "clock_offset_ms": self.checkup.clock_offset_us.map(|offset| offset as f64 / 1e3),
            "findings": self.checkup.findings,
            "timeline": timeline,
        });
        json_escaped(&report.to_string()) + "\n"
    }

    /// What the server grants or, as long as that is not known, what would be asked for.
    fn grant(&self, order: &DoctorJob) -> Grant {
        let (from, ttl) = (Instant::from_nanos(0), order.timing.ttl);
        let granted = self.grant.map(|grant| Grant { from, ttl: grant.ttl.min(ttl), ..grant });
        granted.unwrap_or(Grant { from, ttl, slack: Duration::ZERO })
    }

    /// The instants of a lease, in seconds from its last renewal.
    fn timeline(&self, order: &DoctorJob) -> [(&'static str, f64); 5] {
        let grant = self.grant(order);
        let at = order.timing.deadlines(grant);
        let seconds = |instant: Instant| instant.since(grant.from).as_secs_f64();
        [
            ("renewal", order.timing.shortened_to(grant.ttl).renew_every().as_secs_f64()),
            ("first signal", seconds(at.signal_at)),
            ("SIGKILL", seconds(at.kill_at)),
            ("last instant we may claim it", seconds(at.end)),
            ("end of the lease", grant.ttl.as_secs_f64()),
        ]
    }
}
