//! What the doctor wants to know about a cluster: who of it answers, and whether its word can be relied on.

use anyhow::Result;
use etcd_client::{AlarmAction, AlarmType, StatusResponse};

use super::Etcd;
use crate::backend::{Checkup, Finding, Verdict};

impl Etcd {
    pub(super) async fn check_up(&mut self) -> Result<Checkup> {
        let members = self.members.ask_each(async |mut client| client.status().await).await;
        let mut findings = Vec::new();
        for (endpoint, status) in &members {
            findings.push(match status {
                Ok(status) => version(endpoint, status),
                Err(error) => absent(error),
            });
        }
        findings.extend(self.unnamed_members(members.len()).await?);
        findings.push(self.alarms().await?);
        Ok(Checkup { findings, clock_offset_us: None })
    }

    async fn unnamed_members(&mut self, named: usize) -> Result<Option<Finding>> {
        let list = self.members.call(async |mut client| client.member_list().await).await?;
        let all = list.members().len();
        Ok((named < all).then(|| {
            Finding::weak(
                "etcd-endpoints",
                format!("the URL names {named} of {all} members"),
                "when those are down or cut off, locks are lost although the cluster works",
                "name them all: etcd://host1,host2,host3",
            )
        }))
    }

    async fn alarms(&mut self) -> Result<Finding> {
        const CHECK: &str = "etcd-alarm";
        let ask = async |mut client: etcd_client::Client| client.alarm(AlarmAction::Get, AlarmType::None, None).await;
        let answer = self.members.call(ask).await?;
        let Some(alarm) = answer.alarms().first() else { return Ok(Finding::fine(CHECK, "no alarm is raised")) };
        Ok(Finding {
            verdict: Verdict::Broken,
            ..Finding::weak(
                CHECK,
                format!("the alarm {:?} is raised on member {:x}", alarm.alarm(), alarm.member_id()),
                "etcd takes no more writes: no lock can be taken, and none released before its lease ends",
                "see etcdctl alarm list; compact and defragment, then etcdctl alarm disarm",
            )
        })
    }
}

fn absent(error: &anyhow::Error) -> Finding {
    Finding::weak(
        "etcd-members",
        format!("{error:#}"),
        "each member that is missing brings the cluster nearer to the point where no lease can be renewed",
        "repair it, or take it out of the URL and of the cluster",
    )
}

fn version(endpoint: &str, status: &StatusResponse) -> Finding {
    const CHECK: &str = "etcd-version";
    let what = format!("{endpoint} is etcd {}", status.version());
    match flaw(status.version()) {
        None => Finding::fine(CHECK, what),
        Some(why) => Finding::weak(CHECK, what, why, "upgrade to 3.5.13, 3.4.31 or later"),
    }
}

/// What is known to be wrong with a version that bears on locks.
fn flaw(version: &str) -> Option<&'static str> {
    let mut numbers = version.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    let numbers = [numbers.next()?, numbers.next()?, numbers.next()?];
    match numbers {
        [3, 5, ..=2] => Some("its members may come to hold different data after a crash (etcd issue 13766)"),
        [..=2, ..] | [3, ..=3, _] | [3, 4, ..=30] | [3, 5, ..=12] => Some(
            "a leader that was frozen may revoke leases that its successor has renewed (etcd issue 15247): a lock can \
             be lost before its time",
        ),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::flaw;

    #[test]
    fn versions_are_judged_by_what_was_mended_in_them() {
        for bad in ["3.3.27", "3.4.23", "3.4.30", "3.5.0", "3.5.12", "3.5.2-rc.1", "2.3.8"] {
            assert!(flaw(bad).is_some(), "{bad}");
        }
        for good in ["3.4.31", "3.4.38", "3.5.13", "3.6.0", "3.6.0-rc.1", "4.0.0", "not a version"] {
            assert!(flaw(good).is_none(), "{good}");
        }
    }
}
