//! Whether the nodes tell the same of the locks they have on record, as far as a sample of them shows.
//!
//! They need not agree at every moment: what looks odd is looked at twice, and counts only if nothing about it has
//! changed. Nor need all of them have every lock: a majority will do, and a node that was too slow for the last grant is
//! told of the next. One that has forgotten lacks what was granted before it was started.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use futures_util::future::try_join_all;
use redis::{RedisError, Value, pipe};

use crate::backend::redis::answer::{number, text};
use crate::backend::redis::connection::refusal;
use crate::backend::redis::server::Server;
use crate::backend::redis::{beside, status};
use crate::backend::{Finding, within};
use crate::lock::LockName;

const CHECK: &str = "redlock-agreement";
/// How many locks are compared, and how many steps each node looks for them.
const SAMPLE: usize = 300;
const STEPS: usize = 10;
const LONGEST_OWNER: usize = 200;
const EXAMPLES: usize = 3;
/// A node that lacks more than half of at least so many has forgotten them, whenever it was started.
const MANY: usize = 10;
/// Nodes count the time since they were started in seconds, and their clocks may differ a little.
const VAGUE_US: u64 = 2_000_000;
/// Longer than any request takes that is on its way.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A node that has answered just now.
pub struct Answering<'a> {
    pub host: String,
    /// In microseconds since the epoch, as tokens are.
    pub started_us: Option<u64>,
    pub server: &'a mut Server,
}

/// What one node says of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Said {
    owner: Option<String>,
    /// The owner's key has no expiry.
    lasts: bool,
    counter: Option<u64>,
}

/// A lock, and what each of the nodes says of it.
type Lock = (LockName, Vec<Said>);

/// Takes no longer than any other request may.
pub async fn examine(nodes: &mut [Answering<'_>], prefix: &str, quorum: usize, patience: Duration) -> Vec<Finding> {
    let odd = async {
        let found = try_join_all(nodes.iter_mut().map(|node| names_on(node.server, prefix))).await?;
        let names: BTreeSet<LockName> = found.into_iter().flatten().collect();
        let names: Vec<LockName> = names.into_iter().take(SAMPLE).collect();
        let known = names.len();
        let mut odd = read(nodes, prefix, names).await?;
        odd.retain(|(_, said)| split(said, quorum).is_some() || !behind(said, quorum).is_empty());
        if !odd.is_empty() {
            tokio::time::sleep(LOOK_AGAIN.min(patience / 4)).await;
            let again = read(nodes, prefix, odd.iter().map(|(name, _)| name.clone()).collect()).await?;
            odd.retain(|lock| again.contains(lock));
        }
        Ok((odd, known))
    };
    match within(patience, odd).await {
        Ok((odd, known)) => {
            let findings = [splits(&odd, quorum, nodes), lags(&odd, known, quorum, nodes)];
            let findings: Vec<_> = findings.into_iter().flatten().collect();
            if !findings.is_empty() {
                return findings;
            }
            let all = if known < SAMPLE { "" } else { "first " };
            let what = format!("the nodes agree about the {all}{known} lock(s) that they have on record");
            vec![Finding::fine(CHECK, what)]
        }
        Err(error) => vec![Finding::weak(
            CHECK,
            format!("what the nodes have on record cannot be compared: {error:#}"),
            "a node that has forgotten its locks, or has others, is not noticed",
            "let this user run SCAN and GET on the keys of locks",
        )],
    }
}

/// The names of locks that a node knows.
async fn names_on(server: &mut Server, prefix: &str) -> Result<BTreeSet<LockName>> {
    let (mut all, mut cursor) = status::page(server, prefix, "0").await?;
    for _ in 1..STEPS {
        if cursor == "0" || all.len() >= SAMPLE {
            break;
        }
        let names;
        (names, cursor) = status::page(server, prefix, &cursor).await?;
        all.extend(names);
    }
    Ok(all)
}

async fn read(nodes: &mut [Answering<'_>], prefix: &str, names: Vec<LockName>) -> Result<Vec<Lock>> {
    let mut commands = pipe();
    for name in &names {
        let lock = format!("{prefix}{name}");
        commands.get(&lock).pttl(&lock).get(beside(prefix, name, "token"));
    }
    let mut locks: Vec<Lock> = names.into_iter().map(|name| (name, Vec::new())).collect();
    if locks.is_empty() {
        return Ok(locks);
    }
    for values in try_join_all(nodes.iter_mut().map(|node| node.server.call_all(&commands))).await? {
        for ((_, said), of_lock) in locks.iter_mut().zip(values.chunks_exact(3)) {
            // A key of another type is no lock, and no counter.
            let refused = of_lock.iter().find_map(|value| match value {
                Value::ServerError(why) if why.code() != "WRONGTYPE" => Some(why.clone()),
                _ => None,
            });
            if let Some(why) = refused {
                return Err(refusal(RedisError::from(why)));
            }
            let owner = text(&of_lock[0]).map(|owner| owner.chars().take(LONGEST_OWNER).collect());
            said.push(Said { owner, lasts: of_lock[1] == Value::Int(-1), counter: number(&of_lock[2]) });
        }
    }
    Ok(locks)
}

/// Who has how many of the nodes, if they name different holders, or one that has no majority and does not expire: what a
/// contender left on a few nodes, because it died or they were slow, is gone soon.
fn split(said: &[Said], quorum: usize) -> Option<(Option<&str>, usize)> {
    let mut owners: Vec<&str> = said.iter().filter_map(|one| one.owner.as_deref()).collect();
    owners.sort_unstable();
    let most = owners.chunk_by(|one, other| one == other).max_by_key(|votes| votes.len())?;
    let holder = Some(most[0]).filter(|_| most.len() >= quorum);
    let differs = if holder.is_some() { most.len() < owners.len() } else { said.iter().any(|one| one.lasts) };
    differs.then_some((holder, most.len()))
}

/// The nodes that have not heard of a token that a majority has heard of, or of none at all.
fn behind(said: &[Said], quorum: usize) -> Vec<usize> {
    let mut counters: Vec<Option<u64>> = said.iter().map(|one| one.counter).collect();
    counters.sort_unstable_by(|one, other| other.cmp(one));
    let (greatest, agreed) = (counters.first().copied().flatten(), counters.get(quorum - 1).copied().flatten());
    let is_behind = |one: &Said| greatest.is_some() && (one.counter.is_none() || one.counter < agreed);
    (0..said.len()).filter(|&node| is_behind(&said[node])).collect()
}

fn latest_token(said: &[Said]) -> Option<u64> {
    said.iter().filter_map(|one| one.counter).max()
}

/// Whether a node that does not know the latest token has known better: the token is from before it was started.
fn forgot(said: &[Said], started_us: Option<u64>) -> bool {
    let known_before = |(token, started): (u64, u64)| token.saturating_add(VAGUE_US) < started;
    latest_token(said).zip(started_us).is_some_and(known_before)
}

/// Locks of which the nodes name different holders.
fn splits(odd: &[Lock], quorum: usize, nodes: &[Answering]) -> Option<Finding> {
    let mut all = Vec::new();
    for (name, said) in odd {
        let Some((holder, votes)) = split(said, quorum) else { continue };
        let others = said.iter().zip(nodes).filter(|(one, _)| one.owner.is_some() && one.owner.as_deref() != holder);
        let others =
            others.map(|(one, node)| format!("{} says {}", node.host, one.owner.as_deref().unwrap_or("nobody")));
        let others = others.collect::<Vec<_>>().join(", ");
        all.push(match holder {
            Some(holder) => format!("{name} is held by {holder} on {votes} of {} nodes, {others}", said.len()),
            None => format!("{name} is on a minority of nodes only, and so held by nobody: {others}"),
        });
    }
    let more = all.len().saturating_sub(EXAMPLES);
    all.truncate(EXAMPLES);
    if more > 0 {
        all.push(format!("and {more} more"));
    }
    (!all.is_empty()).then(|| {
        Finding::weak(
            CHECK,
            all.join("; "),
            "nodes that name somebody else are in the way of whoever wants the lock, and a holder that lacks them loses it \
             should one more node fail: somebody died while taking it, or put a key there by hand",
            "what a dead contender left runs out by itself; a key without an expiry does not: redis-cli -h HOST PTTL \
             'dlock:NAME', and DEL only if nobody uses the lock",
        )
    })
}

/// Nodes that have forgotten tokens, or never heard of them.
fn lags(odd: &[Lock], known: usize, quorum: usize, nodes: &[Answering]) -> Option<Finding> {
    let mut lines = Vec::new();
    for (n, node) in nodes.iter().enumerate() {
        let mut late: Vec<_> = odd.iter().filter(|(_, said)| behind(said, quorum).contains(&n)).collect();
        if late.len() < MANY || late.len() <= known / 2 {
            late.retain(|(_, said)| forgot(said, node.started_us));
        }
        let Some((name, said)) = late.first() else { continue };
        let latest = latest_token(said).unwrap_or_default();
        let own = said[n].counter.map_or_else(|| "none".to_owned(), |own| own.to_string());
        let more = if late.len() > 1 { format!(", nor of {} more", late.len() - 1) } else { String::new() };
        lines.push(format!("{} does not know the last token of {name} ({latest}; it knows {own}){more}", node.host));
    }
    let why = match lines.len() >= quorum {
        false => {
            "it has come back without its data, and has let go of what was held then: should another node forget too, a \
             second holder gets in beside the first, and only the nodes' clocks keep tokens growing"
        }
        true => {
            "a majority has come back without its data: what was held then may have been granted to a second holder, and \
             only the nodes' clocks keep tokens growing"
        }
    };
    (!lines.is_empty()).then(|| {
        let advice = "keep what nodes know over a restart (appendonly yes, appendfsync always), and leave an empty node off \
                      for the longest ttl before it comes back; the next grant of a lock tells all nodes of its token";
        Finding::weak("redlock-tokens", lines.join("; "), why, advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(all: &[(Option<&str>, Option<u64>)]) -> Vec<Said> {
        let one = |(owner, counter): &(Option<&str>, _)| Said {
            owner: owner.map(str::to_owned),
            lasts: owner.is_some(),
            counter: *counter,
        };
        all.iter().map(one).collect()
    }

    #[test]
    fn nodes_that_say_the_same_are_not_odd() {
        for (owner, counter) in [(None, None), (Some("a"), Some(7)), (None, Some(7)), (Some("foreign"), None)] {
            let said = said(&[(owner, counter); 3]);
            assert!(split(&said, 2).is_none() && behind(&said, 2).is_empty(), "{said:?}");
        }
    }

    #[test]
    fn a_majority_holds_and_a_minority_does_not() {
        let held = said(&[(Some("a"), None), (Some("a"), None), (None, None)]);
        assert_eq!(split(&held, 2), None, "the third was too slow");
        let contested = said(&[(Some("a"), None), (Some("a"), None), (Some("b"), None)]);
        assert_eq!(split(&contested, 2), Some((Some("a"), 2)));
        assert_eq!(split(&said(&[(Some("a"), None), (None, None), (None, None)]), 2), Some((None, 1)));
        let mut few = said(&[(Some("a"), None), (Some("b"), None), (None, None)]);
        assert_eq!(split(&few, 2), Some((None, 1)));
        few.iter_mut().for_each(|one| one.lasts = false);
        assert_eq!(split(&few, 2), None, "it is gone soon");
    }

    #[test]
    fn whoever_is_behind_a_majority_is_behind_and_whoever_is_before_it_is_not() {
        let counters = |all: [Option<u64>; 3]| behind(&said(&all.map(|counter| (None, counter))), 2);
        assert_eq!(counters([Some(9), Some(9), Some(7)]), [2]);
        assert_eq!(counters([Some(9), Some(9), None]), [2]);
        // A second phase that did not reach a majority granted nothing.
        assert_eq!(counters([Some(9), Some(7), Some(7)]), [0; 0]);
        assert_eq!(counters([Some(9), None, None]), [1, 2]);
    }

    #[test]
    fn only_what_was_granted_before_a_node_was_started_can_have_been_forgotten_by_it() {
        let granted = said(&[(None, Some(60_000_000)), (None, Some(60_000_000)), (None, None)]);
        assert!(forgot(&granted, Some(70_000_000)));
        for started in [None, Some(10_000_000), Some(61_000_000)] {
            assert!(!forgot(&granted, started), "{started:?}");
        }
    }
}
