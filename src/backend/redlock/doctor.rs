//! What the doctor wants to know about a Redlock: every node by itself, what they amount to together, and whether they
//! tell the same of the locks they have on record, as far as a sample of them shows.
//!
//! They need not agree at every moment: what looks odd is looked at twice, and counts only if nothing about it has
//! changed. Nor need all of them have every lock: a majority will do, and a node that was too slow for the last grant is
//! told of the next. One that has forgotten lacks what was granted before it was started.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use futures_util::future::{join_all, try_join_all};

use super::Redlock;
use super::status::INSPECT;
use crate::backend::redis::doctor as one_node;
use crate::backend::redis::server::Server;
use crate::backend::redis::status::{Look, look_at_all, page};
use crate::backend::{Checkup, Finding, within};
use crate::lock::LockName;

const AGREEMENT: &str = "redlock-agreement";
/// How many locks are compared, and how many steps each node looks for them.
const SAMPLE: usize = 300;
const STEPS: usize = 10;
const EXAMPLES: usize = 3;
/// A node that lacks more than half of at least so many has forgotten them, whenever it was started.
const MANY: usize = 10;
/// Nodes count the time since they were started in seconds, and their clocks may differ a little.
const VAGUE_US: u64 = 2_000_000;
/// Longer than any request takes that is on its way.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A node that has answered just now.
struct Answering<'a> {
    host: String,
    /// In microseconds since the epoch, as tokens are.
    started_us: Option<u64>,
    server: &'a mut Server,
}

/// What one node says of a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Said {
    owner: Option<String>,
    /// The owner's key has no expiry.
    lasts: bool,
    counter: Option<u64>,
}

/// A lock, and what each of the nodes says of it.
type Lock = (LockName, Vec<Said>);

pub async fn examine(redlock: &mut Redlock) -> Result<Checkup> {
    let (quorum, patience, prefix) = (redlock.nodes.quorum(), redlock.patience, redlock.prefix.clone());
    let asked = redlock.nodes.all.iter_mut().map(|node| async {
        let found = one_node::examine(&mut node.server, 0).await;
        (node.server.host().to_owned(), &mut node.server, found)
    });
    let answers = join_all(asked).await;
    let nodes = answers.len();
    let (mut findings, mut missing, mut offsets, mut run_ids) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut answering = Vec::new();
    for (host, server, found) in answers {
        match found {
            Ok((found, process)) => {
                let named = |finding: Finding| Finding { what: format!("{host}: {}", finding.what), ..finding };
                findings.extend(found.findings.into_iter().map(named));
                offsets.extend(found.clock_offset_us.map(|offset| (offset, host.clone())));
                let started_us = process.as_ref().map(|process| process.started_us);
                run_ids.extend(process.map(|process| (process.run_id, host.clone())));
                answering.push(Answering { host, started_us, server });
            }
            Err(error) => missing.push(format!("{host}: {error:#}")),
        }
    }
    findings.push(presence(nodes, quorum, &missing));
    findings.extend(independence(answering.len(), run_ids));
    findings.extend(clocks(&offsets));
    if answering.len() >= quorum {
        findings.extend(agreement(&mut answering, &prefix, quorum, patience).await);
    }
    let clock_offset_us = offsets.iter().map(|(offset, _)| *offset).max_by_key(|offset| offset.abs());
    Ok(Checkup { findings, clock_offset_us })
}

/// Whether every address is a server of its own. Who may not be asked for its name says so by itself.
fn independence(answering: usize, mut run_ids: Vec<(String, String)>) -> Option<Finding> {
    const CHECK: &str = "redlock-independence";
    run_ids.sort();
    let same = |one: &&[(String, String)]| one.len() > 1;
    let chunks = run_ids.chunk_by(|one, other| one.0 == other.0).filter(same);
    let hosts = |one: &[(String, String)]| one.iter().map(|(_, host)| host.as_str()).collect::<Vec<_>>().join(" and ");
    let twice: Vec<String> = chunks.map(hosts).collect();
    if !twice.is_empty() {
        let found = Finding::of(CHECK, format!("one and the same server: {}", twice.join("; ")));
        return Some(found.broken(
            "it has several votes, so that what looks like a majority is none: when it fails or forgets, two can hold a \
             lock at once",
            "name every server once, and as many as there are; each on a machine of its own",
        ));
    }
    let all = run_ids.len() == answering && answering > 1;
    all.then(|| Finding::of(CHECK, format!("the {answering} nodes are as many servers")))
}

fn presence(nodes: usize, quorum: usize, missing: &[String]) -> Finding {
    let answering = nodes - missing.len();
    let what = format!("{answering} of {nodes} nodes answer, and {quorum} must");
    let all = std::iter::once(what).chain(missing.iter().cloned()).collect::<Vec<_>>().join("; ");
    let found = Finding::of("redlock-nodes", all);
    match answering {
        _ if missing.is_empty() => found,
        some if some >= quorum => {
            let why = format!("of the nodes that are left, {quorum} must stay for any lock to be had or kept");
            found.weak(why, "bring the node back")
        }
        _ => found.broken(
            "without a majority no lock can be had or kept",
            "bring the nodes back; each is a Redis by itself: redis-cli -h HOST PING",
        ),
    }
}

/// How far apart the clocks of the nodes are.
fn clocks(offsets: &[(i64, String)]) -> Option<Finding> {
    const CHECK: &str = "redlock-clocks";
    const TOLERABLE_US: i64 = 1_000_000;
    let ((first, early), (last, late)) = (offsets.iter().min()?, offsets.iter().max()?);
    let spread = last - first;
    let what = format!("the clocks of the nodes are within {:.3}s of each other", spread as f64 / 1e6);
    if spread <= TOLERABLE_US {
        return Some(Finding::of(CHECK, what));
    }
    let found = Finding::of(CHECK, format!("{what}: {early} is behind {late}"));
    Some(found.weak(
        "a clock that is set while locks are held ends them early on that node; a clock that differs is likely to be set",
        "let all nodes take their time from NTP, by slewing and not by steps",
    ))
}

/// Takes no longer than any other request may.
async fn agreement(nodes: &mut [Answering<'_>], prefix: &str, quorum: usize, patience: Duration) -> Vec<Finding> {
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
            vec![Finding::of(AGREEMENT, what)]
        }
        Err(error) => {
            let found = Finding::of(AGREEMENT, format!("what the nodes have on record cannot be compared: {error:#}"));
            vec![found.weak(
                "a node that has forgotten its locks, or has others, is not noticed",
                "let this user run SCAN and GET on the keys of locks",
            )]
        }
    }
}

/// The names of locks that a node knows.
async fn names_on(server: &mut Server, prefix: &str) -> Result<BTreeSet<LockName>> {
    let (mut all, mut cursor) = page(server, prefix, "0").await?;
    for _ in 1..STEPS {
        if cursor == "0" || all.len() >= SAMPLE {
            break;
        }
        let names;
        (names, cursor) = page(server, prefix, &cursor).await?;
        all.extend(names);
    }
    Ok(all)
}

async fn read(nodes: &mut [Answering<'_>], prefix: &str, names: Vec<LockName>) -> Result<Vec<Lock>> {
    let keys: Vec<Vec<String>> = names.iter().map(|name| super::keys(prefix, name)).collect();
    let mut locks: Vec<Lock> = names.into_iter().map(|name| (name, Vec::new())).collect();
    let asked = nodes.iter_mut().map(|node| look_at_all(node.server, &INSPECT, &keys));
    for looks in try_join_all(asked).await? {
        for ((_, said), look) in locks.iter_mut().zip(looks) {
            said.push(look.map(Said::from).unwrap_or_default());
        }
    }
    Ok(locks)
}

impl From<Look> for Said {
    fn from(look: Look) -> Said {
        let holder = look.holders.into_iter().next();
        Said {
            lasts: holder.as_ref().is_some_and(|holder| holder.expires_in.is_none()),
            owner: holder.and_then(|holder| holder.owner),
            counter: look.counter.filter(|&token| token > 0),
        }
    }
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
        Finding::of(AGREEMENT, all.join("; ")).weak(
            "nodes that name somebody else are in the way of whoever wants the lock, and a holder that lacks them loses \
             it should one more node fail: somebody died while taking it, or put a key there by hand",
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
        Finding::of("redlock-tokens", lines.join("; ")).weak(why, advice)
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
