//! Whether the nodes tell the same of the locks they have on record, as far as a sample of them shows.
//!
//! They need not agree at every moment: what looks odd is looked at twice, and counts only if nothing about it has
//! changed. Nor need all of them have every lock: a majority will do, and a node that was too slow for the last grant is
//! told of the next. One that has forgotten lacks what was granted before it was started.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::join_all;
use redis::{Value, pipe};

use super::{Redlock, TOKEN};
use crate::backend::redis::answer::{number, text};
use crate::backend::redis::server::Server;
use crate::backend::redis::status::page;
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

/// What one node says of a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Word {
    owner: Option<String>,
    counter: Option<u64>,
}

type Words = Vec<(usize, Word)>;

/// Asks only those that have answered just now, and no longer than any other request may take. `started` is when each node
/// was started, in microseconds since the epoch, as tokens are.
pub async fn examine(redlock: &mut Redlock, answering: &[bool], started: Vec<Option<u64>>) -> Vec<Finding> {
    let patience = redlock.patience;
    within(patience, compared(redlock, answering, started)).await.unwrap_or_else(|error| {
        vec![Finding::weak(
            CHECK,
            format!("what the nodes have on record cannot be compared: {error:#}"),
            "a node that has forgotten its locks, or has others, is not noticed",
            "let this user run SCAN and GET on the keys of locks",
        )]
    })
}

async fn compared(redlock: &mut Redlock, answering: &[bool], started: Vec<Option<u64>>) -> Result<Vec<Finding>> {
    let names = sample(redlock, answering).await?;
    let quorum = redlock.nodes.quorum();
    let first = words(redlock, answering, &names).await?;
    let odd = |(_, words): &(LockName, Words)| split(words, quorum).is_some() || !behind(words, quorum).is_empty();
    let mut odd: Vec<(LockName, Words)> = names.iter().cloned().zip(first).filter(odd).collect();
    if !odd.is_empty() {
        tokio::time::sleep(LOOK_AGAIN.min(redlock.patience / 4)).await;
        let names: Vec<LockName> = odd.iter().map(|(name, _)| name.clone()).collect();
        let mut again = words(redlock, answering, &names).await?.into_iter();
        odd.retain(|(_, before)| again.next().as_ref() == Some(before));
    }
    let nodes: Vec<_> = redlock.nodes.iter_mut().map(|node| node.server.host().to_owned()).zip(started).collect();
    let findings = [splits(&odd, quorum, &nodes), lags(&odd, names.len(), quorum, &nodes)];
    let findings: Vec<_> = findings.into_iter().flatten().collect();
    if !findings.is_empty() {
        return Ok(findings);
    }
    let (all, locks) = (if names.len() < SAMPLE { "" } else { "first " }, names.len());
    Ok(vec![Finding::fine(CHECK, format!("the nodes agree about the {all}{locks} lock(s) that they have on record"))])
}

/// The names of locks that any node knows.
async fn sample(redlock: &mut Redlock, answering: &[bool]) -> Result<Vec<LockName>> {
    let prefix = redlock.prefix.clone();
    let asked = redlock.nodes.iter_mut().zip(answering).filter(|(_, asked)| **asked);
    let (mut all, mut failed) = (BTreeSet::new(), Vec::new());
    for found in join_all(asked.map(|(node, _)| names(&mut node.server, &prefix))).await {
        match found {
            Ok(names) => all.extend(names),
            Err(error) => failed.push(error),
        }
    }
    let answers = answering.iter().filter(|asked| **asked).count() - failed.len();
    match failed.pop() {
        Some(error) if answers < redlock.nodes.quorum() => Err(error),
        _ => Ok(all.into_iter().take(SAMPLE).collect()),
    }
}

async fn names(server: &mut Server, prefix: &str) -> Result<BTreeSet<LockName>> {
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

/// What each node that answers says of each lock.
async fn words(redlock: &mut Redlock, answering: &[bool], names: &[LockName]) -> Result<Vec<Words>> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let mut commands = pipe();
    for keys in names.iter().map(|name| redlock.keys(name)) {
        commands.get(&keys[0]).get(&keys[TOKEN]);
    }
    let asked = redlock.nodes.iter_mut().zip(answering).enumerate().filter(|(_, (_, asked))| **asked);
    let commands = &commands;
    let asked = join_all(asked.map(async |(n, (node, _))| (n, node.server.call_all(commands).await))).await;
    let mut all: Vec<Words> = vec![Vec::new(); names.len()];
    let mut answers = 0;
    for (node, answer) in asked {
        let Ok(answer) = answer else { continue };
        answers += 1;
        for (words, pair) in all.iter_mut().zip(answer.chunks_exact(2)) {
            // A key of another type is no lock, and no counter; one that may not be read says nothing.
            let refused = |value: &Value| matches!(value, Value::ServerError(why) if why.code() != "WRONGTYPE");
            if !pair.iter().any(refused) {
                let owner = text(&pair[0]).map(|owner| owner.chars().take(LONGEST_OWNER).collect());
                words.push((node, Word { owner, counter: number(&pair[1]) }));
            }
        }
    }
    (answers >= redlock.nodes.quorum()).then_some(all).context("a majority of the nodes does not answer any more")
}

/// Who has how many of the nodes, if they name different holders, or one that has no majority.
fn split(words: &Words, quorum: usize) -> Option<(Option<&str>, usize)> {
    let mut owners: Vec<&str> = words.iter().filter_map(|(_, word)| word.owner.as_deref()).collect();
    owners.sort_unstable();
    let most = owners.chunk_by(|one, other| one == other).max_by_key(|votes| votes.len())?;
    let holder = Some(most[0]).filter(|_| most.len() >= quorum);
    (holder.is_none() || most.len() < owners.len()).then_some((holder, most.len()))
}

/// The nodes that have not heard of a token that a majority has heard of, or of none at all.
fn behind(words: &Words, quorum: usize) -> Vec<usize> {
    let mut counters: Vec<Option<u64>> = words.iter().map(|(_, word)| word.counter).collect();
    counters.sort_unstable_by(|one, other| other.cmp(one));
    let (greatest, agreed) = (counters.first().copied().flatten(), counters.get(quorum - 1).copied().flatten());
    let is_behind = |word: &Word| greatest.is_some() && (word.counter.is_none() || word.counter < agreed);
    words.iter().filter(|(_, word)| is_behind(word)).map(|(node, _)| *node).collect()
}

/// Of those, whether a node has known better: the token is from before it was started.
fn forgot(words: &Words, started: Option<u64>) -> bool {
    let greatest = words.iter().filter_map(|(_, word)| word.counter).max();
    matches!((greatest, started), (Some(token), Some(started)) if token.saturating_add(VAGUE_US) < started)
}

/// Some of many, in words.
fn examples(all: &[String]) -> String {
    let more = all.len().saturating_sub(EXAMPLES);
    let rest = if more > 0 { format!("; and {more} more") } else { String::new() };
    all[..all.len() - more].join("; ") + &rest
}

/// Locks of which the nodes name different holders.
fn splits(odd: &[(LockName, Words)], quorum: usize, nodes: &[(String, Option<u64>)]) -> Option<Finding> {
    let (mut held, mut stray) = (Vec::new(), Vec::new());
    for (name, words) in odd {
        let Some((holder, votes)) = split(words, quorum) else { continue };
        let says = |(node, word): &(usize, Word)| {
            format!("{} says {}", nodes[*node].0, word.owner.as_deref().unwrap_or("nobody"))
        };
        match holder {
            Some(holder) => {
                let differs = |word: &Word| word.owner.as_deref().is_some_and(|owner| owner != holder);
                let others = words.iter().filter(|(_, word)| differs(word)).map(says);
                let others = others.collect::<Vec<_>>().join(", ");
                held.push(format!("{name} is held by {holder} on {votes} of {} nodes, {others}", words.len()));
            }
            None => {
                let all = words.iter().filter(|(_, word)| word.owner.is_some()).map(says).collect::<Vec<_>>();
                stray.push(format!("{name} is on a minority of nodes only, and so held by nobody: {}", all.join(", ")));
            }
        }
    }
    let all = [held, stray].concat();
    (!all.is_empty()).then(|| {
        Finding::weak(
            CHECK,
            examples(&all),
            "nodes that name somebody else are in the way of whoever wants the lock, and a holder that lacks them loses it \
             should one more node fail: somebody died while taking it, or put a key there by hand",
            "what a dead contender left runs out by itself; a key without an expiry does not: redis-cli -h HOST PTTL \
             'dlock:NAME', and DEL only if nobody uses the lock",
        )
    })
}

/// Nodes that have forgotten tokens, or never heard of them.
fn lags(odd: &[(LockName, Words)], known: usize, quorum: usize, nodes: &[(String, Option<u64>)]) -> Option<Finding> {
    let (mut lines, mut forgetful) = (Vec::new(), 0);
    for (node, (host, started)) in nodes.iter().enumerate() {
        let late: Vec<_> = odd.iter().filter(|(_, words)| behind(words, quorum).contains(&node)).collect();
        let mut forgotten: Vec<_> = late.iter().filter(|(_, words)| forgot(words, *started)).collect();
        if late.len() >= MANY && late.len() > known / 2 {
            forgotten = late.iter().collect();
        }
        let Some((name, words)) = forgotten.first() else { continue };
        forgetful += 1;
        let greatest = words.iter().filter_map(|(_, word)| word.counter).max().unwrap_or_default();
        let own = words.iter().find(|(at, _)| *at == node).and_then(|(_, word)| word.counter);
        let own = own.map_or_else(|| "none".to_owned(), |own| own.to_string());
        let others = forgotten.len() - 1;
        let more = if others > 0 { format!(", nor of {others} more") } else { String::new() };
        lines.push(format!("{host} does not know the last token of {name} ({greatest}; it knows {own}){more}"));
    }
    let why = match forgetful >= quorum {
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

    fn words(of: &[(Option<&str>, Option<u64>)]) -> Words {
        let word = |(owner, counter): &(Option<&str>, Option<u64>)| Word {
            owner: owner.map(str::to_owned),
            counter: *counter,
        };
        of.iter().map(word).enumerate().collect()
    }

    #[test]
    fn nodes_that_say_the_same_are_not_odd() {
        for (owner, counter) in [(None, None), (Some("a"), Some(7)), (None, Some(7)), (Some("foreign"), None)] {
            let words = words(&[(owner, counter); 3]);
            assert!(split(&words, 2).is_none() && behind(&words, 2).is_empty(), "{words:?}");
        }
    }

    #[test]
    fn a_majority_holds_and_a_minority_does_not() {
        let held = words(&[(Some("a"), None), (Some("a"), None), (None, None)]);
        assert_eq!(split(&held, 2), None, "the third was too slow");
        let contested = words(&[(Some("a"), None), (Some("a"), None), (Some("b"), None)]);
        assert_eq!(split(&contested, 2), Some((Some("a"), 2)));
        assert_eq!(split(&words(&[(Some("a"), None), (None, None), (None, None)]), 2), Some((None, 1)));
        assert_eq!(split(&words(&[(Some("a"), None), (Some("b"), None), (None, None)]), 2), Some((None, 1)));
    }

    #[test]
    fn whoever_is_behind_a_majority_is_behind_and_whoever_is_before_it_is_not() {
        let counters = |all: [Option<u64>; 3]| behind(&words(&all.map(|counter| (None, counter))), 2);
        assert_eq!(counters([Some(9), Some(9), Some(7)]), [2]);
        assert_eq!(counters([Some(9), Some(9), None]), [2]);
        // A second phase that did not reach a majority granted nothing.
        assert_eq!(counters([Some(9), Some(7), Some(7)]), [0; 0]);
        assert_eq!(counters([Some(9), None, None]), [1, 2]);
    }

    #[test]
    fn only_what_was_granted_before_a_node_was_started_can_have_been_forgotten_by_it() {
        let granted = words(&[(None, Some(60_000_000)), (None, Some(60_000_000)), (None, None)]);
        assert!(forgot(&granted, Some(70_000_000)));
        for started in [None, Some(10_000_000), Some(61_000_000)] {
            assert!(!forgot(&granted, started), "{started:?}");
        }
    }
}
