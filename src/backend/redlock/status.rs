//! Reading a Redlock for people: what a majority says, and what each node says by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;

use super::nodes::no_majority;
use super::{Redlock, script};
use crate::backend::Page;
use crate::backend::redis::resp::Value;
use crate::backend::redis::script::Script;
use crate::backend::redis::status::{contender, next_place, page, place};
use crate::lock::{Contender, LastRun, LockName, LockState, NodeState};

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
    let mut votes: BTreeMap<String, Vec<(Duration, Contender)>> = BTreeMap::new();
    let mut waiters = BTreeMap::new();
    let (mut nodes, mut last_run, mut first) = (Vec::new(), None::<LastRun>, None);
    for (n, reply) in replies.iter().enumerate() {
        let mut node = NodeState { node: redlock.nodes.host(n).to_owned(), owner: None, error: None };
        match reply {
            Ok((_, rest)) => {
                let [owner, pttl, details, revoked, last, known, waiting] = rest.as_slice() else { continue };
                let owner = owner.text().unwrap_or_default();
                first = first.or((*known == Value::Integer(1)).then_some(n));
                let run = last.text().and_then(|run| LastRun::from_json(&run));
                last_run = last_run.into_iter().chain(run).max_by_key(|run| run.fencing_token);
                for one in waiting.items().chunks_exact(3) {
                    let (Some(owner), Some(details)) = (one[0].text(), one[2].text()) else { continue };
                    let left = one[1].number().map(Duration::from_millis);
                    waiters.entry(owner.clone()).or_insert_with(|| contender(owner, &details, left));
                }
                if !owner.is_empty() {
                    // Without an expiry it lasts: a foreign program may take a lock so.
                    let ends = pttl.number().map_or(Duration::MAX, Duration::from_millis);
                    let details = details.text().unwrap_or_default();
                    let holder = contender(owner.clone(), &details, None);
                    let vote = (ends, Contender { revoked: *revoked == Value::Integer(1), ..holder });
                    votes.entry(owner.clone()).or_default().push(vote);
                    node.owner = Some(owner);
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
        let best = votes.into_iter().map(|(_, vote)| vote).max_by_key(|vote| vote.who.is_some())?;
        Some(Contender { expires_in, revoked, ..best })
    });
    let state = LockState::of(name.clone(), "redlock", Vec::from_iter(holder), waiters, last_run);
    Ok(Look { state: LockState { nodes, ..state }, first })
}

/// One SCAN of one node, then the next node. A place in the list is `NODE CURSOR`. A lock is on most
/// nodes, so one that cannot be asked is left out.
pub async fn list(redlock: &mut Redlock, after: Option<String>) -> Result<Page> {
    let (n, cursor) = place(after.as_deref())?;
    let (prefix, nodes) = (redlock.prefix.clone(), redlock.nodes.iter_mut().count());
    let Some(node) = redlock.nodes.get_mut(n) else { return Ok(Page::default()) };
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
