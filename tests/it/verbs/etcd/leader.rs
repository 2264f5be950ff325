//! What a change of leaders may not do to us.

use std::time::Duration;

use anyhow::Result;
use dlock::backend::{Ask, Backend, Renewal, etcd};
use dlock::clock;
use dlock::lock::LockState;
use tokio::time::timeout;

use super::{LONG, ask, granted, open};
use crate::support::etcd::Etcd;

/// Seen on etcd 3.4.23: a leader that was frozen confirms a renewal when it wakes, before it learns that
/// it was deposed. Its successor never heard of it and counts from its own first day in office.
#[tokio::test]
async fn a_deposed_leader_does_not_make_us_claim_more_than_its_successor_grants() {
    let server = Etcd::cluster();
    let mut members: Vec<_> = (0..3).map(|member| open(&server, member)).collect();
    let first = ask("n");
    let lease = granted(&mut members[0], &first).await;
    // It does not happen every time, so this gives it some chances.
    for _ in 0..3 {
        let leader = server.leader();
        let other = (leader + 1) % 3;
        server.members[leader].freeze();
        let enough = clock::now() + Duration::from_secs(5);
        // Answered by a successor only.
        answered(&mut members[other], &first).await;
        clock::sleep_until(enough).await;
        let wake = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            server.members[leader].thaw();
        };
        let (renewal, ()) = tokio::join!(members[leader].renew(&lease), wake);
        check(renewal, &mut members[other], &first).await;
        // Whatever came of that one, there has to be one in the end, to be checked in the same way.
        let renewed = async { while !check(members[leader].renew(&lease).await, &mut members[other], &first).await {} };
        timeout(LONG, renewed).await.expect("a renewal");
    }
}

/// Whether the lease was renewed; never for longer than the others know of.
async fn check(renewal: Result<Renewal>, other: &mut etcd::Etcd, ask: &Ask) -> bool {
    let holder = answered(other, ask).await.holders.into_iter().next();
    match renewal {
        Ok(Renewal::Held(grant)) => {
            let claimed = (grant.from + grant.ttl).remaining();
            let granted = holder.and_then(|holder| holder.expires_in).unwrap_or_default();
            assert!(claimed <= granted + Duration::from_secs(1), "claimed {claimed:?}, granted {granted:?}");
            true
        }
        // Nobody knows.
        Err(_) => false,
        Ok(lost) => panic!("{lost:?} although a quorum was there all the time"),
    }
}

/// While leaders change, members may refuse to answer.
async fn answered(member: &mut etcd::Etcd, ask: &Ask) -> LockState {
    let answer = async {
        loop {
            if let Ok(state) = member.inspect(&ask.name).await {
                return state;
            }
        }
    };
    timeout(LONG, answer).await.expect("an answer from a quorum")
}
