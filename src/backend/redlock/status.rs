//! Reading a Redlock for people: what a majority says, and what each node says by itself.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::join_all;

use super::nodes::no_majority;
use super::{Redlock, script};
use crate::backend::redis::resp::Value;
use crate::backend::redis::script::Script;
use crate::backend::redis::status::{holder, page, waiter};
use crate::backend::{Checkup, Finding, Page, redis};
use crate::lock::{Holder, LastRun, LockName, LockState, NodeState, State};

static INSPECT: LazyLock<Script> = script!("inspect.lua");

pub struct Look {
    pub state: LockState,
    /// The first node that knows the lock, so that a list names it once.
    first: Option<usize>,
}

pub async fn look(redlock: &mut Redlock, name: &LockName) -> Result<Look> {
    let (keys, quorum) = (redlock.keys(name), redlock.nodes.quorum());
    let replies = redlock.nodes.ask(&INSPECT, &keys, |_| Vec::new()).await;
    if replies.iter().filter(|reply| reply.is_ok()).count() < quorum {
        return Err(no_majority(replies));
    }
    let mut state = LockState::free(name.clone(), "redlock");
    let mut votes: BTreeMap<String, Vec<(Duration, Holder, bool)>> = BTreeMap::new();
    let mut waiters = BTreeMap::new();
    let mut first = None;
    for (n, reply) in replies.iter().enumerate() {
        let mut node = NodeState { node: redlock.nodes.host(n).to_owned(), owner: None, error: None };
        match reply {
            Ok((owner, rest)) => {
                let [pttl, details, note, last, known, waiting] = rest.as_slice() else { continue };
                first = first.or((*known == Value::Integer(1)).then_some(n));
                state.last_run = state.last_run.into_iter().chain(last_run(last)).max_by_key(|run| run.fencing_token);
                for one in waiting.items().chunks_exact(3) {
                    let (Some(owner), Some(details)) = (one[0].text(), one[2].text()) else { continue };
                    let left = one[1].number().map(Duration::from_millis);
                    waiters.entry(owner.clone()).or_insert_with(|| waiter(owner, &details, left));
                }
                if !owner.is_empty() {
                    // Without an expiry it lasts: a foreign program may take a lock so.
                    let ends = pttl.number().map_or(Duration::MAX, Duration::from_millis);
                    let details = details.text().unwrap_or_default();
                    let revoked = note.text().is_some_and(|note| note.starts_with("revoked "));
                    let vote = (ends, holder(owner.clone(), &details, None), revoked);
                    votes.entry(owner.clone()).or_default().push(vote);
                    node.owner = Some(owner.clone());
                }
            }
            Err(error) => node.error = Some(format!("{error:#}")),
        }
        state.nodes.push(node);
    }
    state.waiters = waiters.into_values().collect();
    state.waiters.sort_by_key(|waiter| waiter.waiting_since);
    if let Some(mut votes) = votes.into_values().find(|votes| votes.len() >= quorum) {
        votes.sort_by_key(|(ends, ..)| *ends);
        state.state = if votes.iter().any(|(.., revoked)| *revoked) { State::Revoked } else { State::Held };
        // It is held for as long as a majority has it.
        let ends = Some(votes[votes.len() - quorum].0).filter(|&ends| ends != Duration::MAX);
        let best = votes.into_iter().map(|(_, holder, _)| holder).max_by_key(|holder| holder.host.is_some());
        state.holders.extend(best.map(|holder| Holder { expires_in: ends, ..holder }));
    }
    Ok(Look { state, first })
}

fn last_run(value: &Value) -> Option<LastRun> {
    LastRun::from_json(&value.text()?)
}

/// One SCAN of one node, then the next node. A place in the list is `NODE CURSOR`. A lock is on most
/// nodes, so one that cannot be asked is left out.
pub async fn list(redlock: &mut Redlock, after: Option<String>) -> Result<Page> {
    let after = after.unwrap_or_else(|| "0 0".to_owned());
    let (n, cursor) = after.split_once(' ').context("not a place in a list of Redlocks")?;
    let n: usize = n.parse().context("not a place in a list of Redlocks")?;
    let prefix = redlock.prefix.clone();
    let Some(node) = redlock.nodes.get_mut(n) else { return Ok(Page::default()) };
    let (names, cursor) = page(&mut node.server, &prefix, cursor).await.unwrap_or_default();
    let mut locks = Vec::new();
    for name in names {
        let look = look(redlock, &name).await?;
        if look.first == Some(n) {
            locks.push(look.state);
        }
    }
    let next = match cursor.as_str() {
        "" | "0" => Some(n + 1).filter(|&n| redlock.nodes.get_mut(n).is_some()).map(|n| format!("{n} 0")),
        cursor => Some(format!("{n} {cursor}")),
    };
    Ok(Page { locks, next })
}

/// Every node by itself, and what they amount to together.
pub async fn examine(redlock: &mut Redlock) -> Result<Checkup> {
    let quorum = redlock.nodes.quorum();
    let asked = redlock.nodes.iter_mut().map(|node| async {
        let host = node.server.host().to_owned();
        (host, redis::examine::examine(&mut node.server, 0).await)
    });
    let answers = join_all(asked).await;
    let (mut findings, mut missing, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    let nodes = answers.len();
    for (host, answer) in answers {
        match answer {
            Ok(found) => {
                let named = |finding: Finding| Finding { what: format!("{host}: {}", finding.what), ..finding };
                findings.extend(found.findings.into_iter().map(named));
                offsets.extend(found.clock_offset_us.map(|offset| (offset, host)));
            }
            Err(error) => missing.push(format!("{host}: {error:#}")),
        }
    }
    findings.push(presence(nodes, quorum, &missing));
    findings.extend(clocks(&offsets));
    let clock_offset_us = offsets.iter().map(|(offset, _)| *offset).max_by_key(|offset| offset.abs());
    Ok(Checkup { findings, clock_offset_us })
}

fn presence(nodes: usize, quorum: usize, missing: &[String]) -> Finding {
    const CHECK: &str = "redlock-nodes";
    let answering = nodes - missing.len();
    let what = format!("{answering} of {nodes} nodes answer, and {quorum} must");
    let why = || format!("of the nodes that are left, {quorum} must stay for any lock to be had or kept");
    match missing {
        [] => Finding::fine(CHECK, what),
        missing if answering >= quorum => {
            Finding::weak(CHECK, format!("{what}; {}", missing.join("; ")), why(), "bring the node back")
        }
        missing => Finding::broken(
            CHECK,
            format!("{what}; {}", missing.join("; ")),
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
        return Some(Finding::fine(CHECK, what));
    }
    Some(Finding::weak(
        CHECK,
        format!("{what}: {early} is behind {late}"),
        "a clock that is set while locks are held ends them early on that node, and such a clock wants to be set",
        "let all nodes take their time from NTP, by slewing and not by steps",
    ))
}
