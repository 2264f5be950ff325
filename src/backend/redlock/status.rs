//! Reading a Redlock for people: what a majority says, and what each node says by itself.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Result;

use super::nodes::{Reply, no_majority};
use super::{Redlock, script};
use crate::backend::Page;
use crate::backend::redis::Script;
use crate::backend::redis::status::{self as redis, in_order, next_place, page, place};
use crate::exit::Fault;
use crate::lock::{Contender, History, LastRun, LockName, LockState, NodeState, Outcome};

static INSPECT: Script = script!("../redis/inspect.lua");

pub struct Look {
    pub state: LockState,
    /// The last token that each node knows. A word that is not a number is no token.
    pub tokens: Vec<Option<String>>,
}

impl Look {
    /// The first node that knows the lock, so that a list names it once.
    fn first(&self) -> Option<usize> {
        let knows = |(node, token): (&NodeState, &Option<String>)| node.owner.is_some() || token.is_some();
        self.state.nodes.iter().zip(&self.tokens).position(knows)
    }
}

pub async fn look(redlock: &mut Redlock, name: &LockName) -> Result<Look> {
    let (keys, quorum) = (redlock.keys(name), redlock.nodes.quorum());
    let replies: Vec<Reply<redis::Look>> = redlock.nodes.ask(&INSPECT, &keys, |_| Vec::new()).await;
    if replies.iter().filter(|reply| reply.is_ok()).count() < quorum {
        return Err(no_majority(replies));
    }
    let mut votes: BTreeMap<Option<String>, Vec<(Duration, Contender)>> = BTreeMap::new();
    let mut waiters = BTreeMap::new();
    let (mut nodes, mut tokens, mut runs, mut last_success_at) = (Vec::new(), Vec::new(), Vec::new(), None);
    for (n, reply) in replies.iter().enumerate() {
        tokens.push(None);
        let mut node = NodeState { node: redlock.nodes.host(n).to_owned(), owner: None, error: None };
        match reply {
            Ok(seen) => {
                tokens[n] = seen.token.clone();
                runs.extend(seen.history.runs.iter().cloned());
                last_success_at = last_success_at.max(seen.history.last_success_at);
                for waiter in &seen.waiters {
                    waiters.entry(waiter.foreign_owner.clone()).or_insert_with(|| waiter.clone());
                }
                if let Some(holder) = seen.holders.first() {
                    node.owner = holder.foreign_owner.clone();
                    // Without an expiry it lasts: a foreign program may take a lock so.
                    let vote = (holder.expires_in.unwrap_or(Duration::MAX), holder.clone());
                    votes.entry(holder.foreign_owner.clone()).or_default().push(vote);
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
    // A node that was out of reach when the holder released may still take it for vanished.
    let present = |run: &LastRun| holder.as_ref().is_some_and(|one| one.token == Some(run.fencing_token));
    let runs = in_order(runs.into_iter().filter(|run| run.outcome != Outcome::Vanished || !present(run)));
    let history = History { runs, last_success_at };
    let state = LockState::of(name.clone(), "redlock", Vec::from_iter(holder), waiters, history);
    Ok(Look { state: LockState { nodes, ..state }, tokens })
}

/// One SCAN of one node, then the next node. A place in the list is `NODE CURSOR`.
pub async fn list(redlock: &mut Redlock, after: Option<String>) -> Result<Page> {
    let (n, cursor) = place(after.as_deref())?;
    let (names, cursor) = match scan(redlock, n, cursor).await {
        // A lock is on most nodes, so one that does not answer is left out.
        Err(error) if Fault::of(&error) == Fault::Unreachable => Default::default(),
        found => found?,
    };
    let locks = looks(redlock, n, &names).await?.into_iter().map(|look| look.state).collect();
    Ok(Page { locks, next: next_place(n, &cursor, redlock.nodes.len()) })
}

/// The names that one SCAN of one node finds, and where the next begins.
pub async fn scan(redlock: &mut Redlock, n: usize, cursor: &str) -> Result<(BTreeSet<LockName>, String)> {
    match redlock.nodes.get_mut(n) {
        Some(node) => page(&mut node.server, &redlock.prefix, cursor).await,
        None => Ok(Default::default()),
    }
}

/// Of these, the locks that no node before this one knows.
pub async fn looks(redlock: &mut Redlock, n: usize, names: &BTreeSet<LockName>) -> Result<Vec<Look>> {
    let mut looks = Vec::new();
    for name in names {
        match look(redlock, name).await {
            Ok(look) if look.first() == Some(n) => looks.push(look),
            // A key with our prefix that is no lock.
            Err(error) if !format!("{error:#}").contains("WRONGTYPE") => return Err(error),
            _ => {}
        }
    }
    Ok(looks)
}
