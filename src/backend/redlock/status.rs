//! Reading a Redlock for people: what a majority says, and what each node says by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;

use super::nodes::{Reply, no_majority};
use super::{Redlock, script};
use crate::backend::Page;
use crate::backend::redis::Script;
use crate::backend::redis::status::{self as redis, in_order, next_place, page, place};
use crate::lock::{Contender, History, LastRun, LockName, LockState, NodeState, Outcome};

pub static INSPECT: Script = script!("../redis/inspect.lua");

pub struct Look {
    pub state: LockState,
    /// The first node that knows the lock, so that a list names it once.
    first: Option<usize>,
}

pub async fn look(redlock: &mut Redlock, name: &LockName) -> Result<Look> {
    let (keys, quorum) = (redlock.keys(name), redlock.nodes.quorum());
    let replies: Vec<Reply<redis::Look>> = redlock.nodes.ask(&INSPECT, &keys, |_| Vec::new()).await;
    if replies.iter().filter(|reply| reply.is_ok()).count() < quorum {
        return Err(no_majority(replies));
    }
    let mut votes: BTreeMap<Option<String>, Vec<(Duration, Contender)>> = BTreeMap::new();
    let mut waiters = BTreeMap::new();
    let (mut nodes, mut runs, mut last_success_at, mut first) = (Vec::new(), Vec::new(), None, None);
    for (n, reply) in replies.iter().enumerate() {
        let mut node = NodeState { node: redlock.nodes.all[n].server.host().to_owned(), owner: None, error: None };
        match reply {
            Ok(seen) => {
                first = first.or(seen.counter.map(|_| n));
                runs.extend(seen.history.runs.iter().cloned());
                last_success_at = last_success_at.max(seen.history.last_success_at);
                for waiter in &seen.waiters {
                    waiters.entry(waiter.owner.clone()).or_insert_with(|| waiter.clone());
                }
                if let Some(holder) = seen.holders.first() {
                    node.owner = holder.owner.clone();
                    // Without an expiry it lasts: a foreign program may take a lock so.
                    let vote = (holder.expires_in.unwrap_or(Duration::MAX), holder.clone());
                    votes.entry(holder.owner.clone()).or_default().push(vote);
                }
            }
            Err(error) => node.error = Some(format!("{error:#}")),
        }
        nodes.push(node);
    }
    let mut waiters: Vec<Contender> = waiters.into_values().collect();
    waiters.sort_by_key(|waiter| waiter.waiting_since);
    let holder = votes.into_values().find(|votes| votes.len() >= quorum).and_then(|mut votes| {
        votes.sort_by_key(|(ends, _)| *ends);
        // It is held for as long as a majority has it.
        let expires_in = Some(votes[votes.len() - quorum].0).filter(|&ends| ends != Duration::MAX);
        let revoked = votes.iter().any(|(_, vote)| vote.revoked);
        let best = votes.into_iter().map(|(_, vote)| vote).max_by_key(|vote| vote.host.is_some())?;
        Some(Contender { expires_in, revoked, ..best })
    });
    // A node that was out of reach when the holder released may still take it for vanished.
    let present = |run: &LastRun| holder.as_ref().is_some_and(|one| one.fencing_token == Some(run.fencing_token));
    let runs = in_order(runs.into_iter().filter(|run| run.outcome != Outcome::Vanished || !present(run)));
    let history = History { runs, last_success_at };
    let state = LockState::of(name.clone(), "redlock", Vec::from_iter(holder), waiters, history);
    Ok(Look { state: LockState { nodes, ..state }, first })
}

/// One SCAN of one node, then the next node. A place in the list is `NODE CURSOR`. A lock is on most
/// nodes, so one that cannot be asked is left out.
pub async fn list(redlock: &mut Redlock, after: Option<String>) -> Result<Page> {
    let (n, cursor) = place(after.as_deref())?;
    let (prefix, nodes) = (redlock.prefix.clone(), redlock.nodes.all.len());
    let Some(node) = redlock.nodes.all.get_mut(n) else { return Ok(Page::default()) };
    let (names, cursor) = page(&mut node.server, &prefix, cursor).await.unwrap_or_default();
    let mut locks = Vec::new();
    for name in names {
        let look = look(redlock, &name).await?;
        if look.first == Some(n) {
            locks.push(look.state);
        }
    }
    Ok(Page { locks, next: next_place(n, &cursor, nodes) })
}
