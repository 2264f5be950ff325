//! What `dlock doctor` wants to know about a cluster: which members answer, and whether their word can be relied on.

use std::time::Duration;

use anyhow::Result;
use etcd_client::{AlarmAction, AlarmMember, AlarmType, Client, StatusResponse};

use super::client::Members;
use crate::backend::{Checkup, Finding, Verdict};
use crate::clock;

/// A member's account of itself, and how long it took to give it.
type Account = (StatusResponse, Duration);

/// What cannot be asked is left out: the doctor's own probe says what is wrong with the whole.
pub async fn examine(cluster: &mut Members) -> Result<Checkup> {
    let ask = async |mut client: Client| {
        // The first answer takes a connection as well.
        client.status().await?;
        let began = clock::now();
        client.status().await.map(|status| (status, began.elapsed()))
    };
    let members = cluster.ask_each(ask).await;
    let mut findings: Vec<_> = members.iter().map(|(endpoint, account)| member(endpoint, account)).collect();
    let leader = leader(&members);
    let led = leader.verdict == Verdict::Fine;
    findings.push(leader);
    if led {
        let list = cluster.call(async |mut client| client.member_list().await).await;
        let (named, all) = (members.len(), list.map_or(0, |list| list.members().len()));
        if named < all {
            let found = Finding::of("etcd-endpoints", format!("the URL names {named} of {all} members"));
            findings.push(found.weak(
                "when those are down or cut off, locks are lost although the cluster works",
                "name them all: etcd://host1,host2,host3",
            ));
        }
        let ask = async |mut client: Client| client.alarm(AlarmAction::Get, AlarmType::None, None).await;
        findings.extend(cluster.call(ask).await.ok().map(|answer| alarms(answer.alarms())));
        // Nothing that a running cluster shows tells whether somebody will restore a snapshot.
        findings.push(Finding::of(
            "etcd-tokens",
            "fencing tokens are etcd's revisions, which only the restore of a snapshot takes back: restore with etcdutl \
             snapshot restore --bump-revision",
        ));
    }
    Ok(Checkup { findings, clock_offset_us: None })
}

fn alarms(raised: &[AlarmMember]) -> Finding {
    const CHECK: &str = "etcd-alarm";
    let Some(alarm) = raised.first() else { return Finding::of(CHECK, "no alarm is raised") };
    let what = format!("the alarm {:?} is raised on member {:x}", alarm.alarm(), alarm.member_id());
    Finding::of(CHECK, what).broken(
        "etcd takes no more writes: no lock can be taken, and none released before its lease ends",
        "see etcdctl alarm list; compact and defragment, then etcdctl alarm disarm",
    )
}

fn leader(members: &[(String, Result<Account>)]) -> Finding {
    const CHECK: &str = "etcd-leader";
    let known = || members.iter().filter_map(|(endpoint, account)| Some((endpoint, &account.as_ref().ok()?.0)));
    let Some(leader) = known().map(|(_, status)| status.leader()).find(|leader| *leader != 0) else {
        return Finding::of(CHECK, "no member that answers has a leader").broken(
            "without a majority of the members no lock can be taken, renewed or released",
            "bring members back until more than half of them run and reach each other: etcdctl endpoint status",
        );
    };
    let leads = |status: &StatusResponse| status.header().is_some_and(|header| header.member_id() == leader);
    let endpoint = known().find(|(_, status)| leads(status)).map(|(endpoint, _)| endpoint.clone());
    Finding::of(CHECK, format!("{} leads", endpoint.unwrap_or_else(|| format!("member {leader:x}"))))
}

fn member(endpoint: &str, account: &Result<Account>) -> Finding {
    let (status, took) = match account {
        Ok(account) => account,
        Err(error) => {
            return Finding::of("etcd-members", error.root_cause().to_string()).weak(
                "each member that is missing brings the cluster nearer to the point where no lease can be renewed",
                "repair it, or take it out of the URL and of the cluster",
            );
        }
    };
    let what = format!("{endpoint} is etcd {}, and answers in {:.2} ms", status.version(), took.as_secs_f64() * 1e3);
    let found = Finding::of("etcd-version", what);
    match flaw(status.version()) {
        None => found,
        Some(why) => found.weak(why, "upgrade to 3.4.38, 3.5.13 or later"),
    }
}

/// What is known to be wrong with a version that bears on locks.
fn flaw(version: &str) -> Option<&'static str> {
    let mut numbers = version.split(['.', '-', '+']).map_while(|part| part.parse::<u32>().ok());
    Some(match [numbers.next()?, numbers.next()?, numbers.next()?] {
        [3, 5, ..=2] => "its members may come to hold different data after a crash (etcd issue 13766)",
        [..=2, ..] | [3, ..=3, _] | [3, 4, ..=30] | [3, 5, ..=12] => {
            "a leader that was frozen may revoke leases that its successor has renewed (etcd issue 15247): a lock can \
             be lost before its time"
        }
        [3, 4, ..=37] => {
            "it may confirm the renewal of a lease that is revoked already; dlock reads its key behind every renewal, \
             other programs that take the same locks may not"
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::flaw;

    #[test]
    fn versions_are_judged_by_what_was_mended_in_them() {
        for bad in ["3.3.27", "3.4.23", "3.4.30", "3.4.37", "3.5.0", "3.5.12", "3.5.2-rc.1", "2.3.8"] {
            assert!(flaw(bad).is_some(), "{bad}");
        }
        for good in ["3.4.38", "3.5.13", "3.6.0", "3.6.0-rc.1", "4.0.0", "not a version"] {
            assert!(flaw(good).is_none(), "{good}");
        }
    }
}
