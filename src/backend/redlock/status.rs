//! Reading a Redlock for people: what a majority says, and what each node says by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};

use super::nodes::no_majority;
use super::{Redlock, script};
use crate::backend::Page;
use crate::backend::redis::resp::Value;
use crate::backend::redis::script::Script;
use crate::backend::redis::status::{holder, page, waiter};
use crate::lock::{Holder, LastRun, LockName, LockState, NodeState, State};

static INSPECT: Script = script!("inspect.lua");

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
            Ok((_, rest)) => {
                let [owner, pttl, details, revoked, last, known, waiting] = rest.as_slice() else { continue };
                let owner = owner.text().unwrap_or_default();
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
                    let vote = (ends, holder(owner.clone(), &details, None), *revoked == Value::Integer(1));
                    votes.entry(owner.clone()).or_default().push(vote);
                    node.owner = Some(owner);
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
