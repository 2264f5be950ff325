//! Redlock: a majority of independent Redis nodes, each with the same plain key `dlock:NAME` that
//! redlock-py, pottery and redsync know. Exclusive only. Waiters are served in order by the clocks of
//! their own hosts, as far as the nodes agree on it; `acquire` says how.
//!
//! The token takes two phases. First take a majority of nodes and learn their counters; then, on each
//! node that is still ours, raise the counter to the greatest of them plus one. It is granted only if
//! *that* reaches a majority: any later majority has a node in common with it, and on that node the
//! counter was raised before the lock could change hands. A counter also follows its node's clock, for
//! nodes that lost their data.
//!
//! Keys on every node: the lock, and beside it what `common.lua` lists, under `{dlock:NAME}:…`.

pub mod acquire;
mod doctor;
pub mod nodes;
mod status;

use std::time::{Duration, SystemTime};

use ::redis::Value;
use anyhow::Result;
use async_trait::async_trait;

use super::redis::server::Watch;
use super::redis::{self, Script, beside, flag, grant_from, millis, script};
use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Patience, Reheld, Released,
    Renewal, Revoke, Revoked,
};
use crate::clock::{self, Instant};
use crate::lock::{Holder, LockName, LockState, OwnerId};
use acquire::Then;
use nodes::{Answer, Node, Nodes, Reply, agreed, any, count, no_majority};

pub static GIVE_BACK: Script = script!("give_back.lua");
pub static RENEW: Script = script!("renew.lua");
pub static RELEASE: Script = script!("release.lua");
static REHOLD: Script = script!("../redis/rehold.lua");
pub static REVOKE: Script = script!("../redis/revoke.lua");
static FORGET: Script = script!("../redis/forget.lua");

pub const OURS: fn(&Answer) -> bool = |answer| matches!(answer, Answer::Ours(_));

pub struct Redlock {
    nodes: Nodes,
    /// How long all of them together may take to answer.
    patience: Duration,
    prefix: String,
    /// Who we are, for nodes that have to be told again.
    who: String,
    /// How many of the watched nodes must have changed to make it worth asking.
    needed: usize,
    /// Since when we wait.
    began: Option<(Instant, SystemTime)>,
    /// The nodes have not agreed on who is first: next time we do not heed their queues.
    ignores_queue: bool,
}

impl Redlock {
    pub fn open(address: &Address, patience: Patience) -> Result<Redlock> {
        let prefix = redis::prefix(address)?;
        Ok(Redlock {
            nodes: Nodes::new(address, patience)?,
            patience: patience.connect,
            prefix,
            who: String::new(),
            needed: 1,
            began: None,
            ignores_queue: false,
        })
    }

    pub fn keys(&self, name: &LockName) -> Vec<String> {
        keys(&self.prefix, name)
    }

    /// Undoes what was taken, also where it is not known whether it was.
    async fn give_back(&mut self, ask: &Ask, keys: &[String], and: Then) -> Vec<Reply<Value>> {
        let [since, waited] = self.began();
        let rest = [flag(and == Then::Wait).to_owned(), since, waited, millis(ask.ttl), ask.who.to_json()];
        let args = |node: &Node| std::iter::once(node.given_up()).chain(rest.clone()).collect();
        let replies = self.nodes.ask_by_number(&GIVE_BACK, keys, &ask.who.owner, args).await;
        // The nodes that have answered this were told which requests are given up.
        for (node, _) in self.nodes.all.iter_mut().zip(&replies).filter(|(_, reply)| reply.is_ok()) {
            node.unanswered = None;
        }
        replies
    }

    /// From here on a change on any node is worth a renewal, which takes that node again.
    fn watch_as_holder(&mut self, name: &LockName, owner: &OwnerId, replies: &[Reply]) {
        self.needed = 1;
        for (node, reply) in self.nodes.all.iter_mut().zip(replies) {
            node.watch = match reply {
                Ok(answer) => redis::lock_and_note(&self.prefix, name, owner, seen_by_holder(answer, owner)),
                Err(_) => Watch::new(),
            };
        }
    }
}

fn keys(prefix: &str, name: &LockName) -> Vec<String> {
    redis::keys(prefix, name, &["taken", "turn:", "late:"])
}

/// What a node holds after we asked it to be ours.
fn seen_by_holder(answer: &Answer, owner: &OwnerId) -> Option<String> {
    match answer {
        Answer::Ours(_) => Some(owner.to_string()),
        Answer::Gone(value) => value.clone(),
        Answer::Busy(busy) => busy.owner.clone(),
        _ => None,
    }
}

#[async_trait(?Send)]
impl Backend for Redlock {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.acquire(ask).await
    }

    async fn changed(&mut self) -> Result<()> {
        self.nodes.changed(self.needed).await;
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        let keys = self.keys(&ask.name);
        let replies = self.give_back(ask, &keys, Then::Leave).await;
        if count(&replies, |_| true) < self.nodes.quorum() { Err(no_majority(replies)) } else { Ok(()) }
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let (keys, quorum) = (self.keys(&lease.name), self.nodes.quorum());
        let from = clock::now();
        let args = [lease.token.to_string(), millis(lease.grant.ttl), self.who.clone()];
        let replies = self.nodes.ask_by_number(&RENEW, &keys, &lease.owner, |_| args.to_vec()).await;
        // If an operator has freed a single node, or else marked one, all of them were meant.
        if let Some(Answer::Taken(reason)) = any(&replies, |answer| matches!(answer, Answer::Taken(_))) {
            return Ok(Renewal::ForceReleased(reason));
        }
        if let Some(Answer::Revoked(reason)) = any(&replies, |answer| matches!(answer, Answer::Revoked(_))) {
            return Ok(Renewal::Revoked(reason));
        }
        let gone = count(&replies, |answer| matches!(answer, Answer::Gone(_)));
        if gone >= quorum {
            return Ok(Renewal::Lost(format!("{gone} of the Redlock nodes do not have it as ours any more")));
        }
        if count(&replies, OURS) < quorum {
            return Err(no_majority(replies));
        }
        self.watch_as_holder(&lease.name, &lease.owner, &replies);
        Ok(Renewal::Held(grant_from(from, lease.grant.ttl)))
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let (keys, quorum) = (self.keys(&lease.name), self.nodes.quorum());
        let [hold, run, once, runs, succeeded] = redis::ending_args(ending);
        let args = [lease.owner.to_string(), lease.token.to_string(), hold, run, once];
        let for_node =
            |node: &mut Node| args.iter().cloned().chain([node.given_up(), runs.clone(), succeeded.clone()]).collect();
        let replies = self.nodes.ask(&RELEASE, &keys, for_node).await;
        let taken = any(&replies, |answer| matches!(answer, Released::ForceReleased(_)));
        let gone = count(&replies, |answer| *answer != Released::Done) >= quorum;
        match (agreed(&replies, quorum), taken) {
            (Some(Released::Done), _) => Ok(Released::Done),
            (_, taken) if gone => Ok(taken.unwrap_or(Released::NotOurs)),
            _ => Err(no_majority(replies)),
        }
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        let (keys, quorum) = (self.keys(name), self.nodes.quorum());
        let replies = self.nodes.ask(&REHOLD, &keys, |_| vec![owner.to_string(), millis(ttl)]).await;
        let taken = any(&replies, |answer| matches!(answer, Reheld::ForceReleased(_)));
        let revoked = any(&replies, |answer| matches!(answer, Reheld::Revoked(_)));
        taken.or(revoked).or_else(|| agreed(&replies, quorum)).ok_or_else(|| no_majority(replies))
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        Ok(status::look(self, name).await?.state)
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let (keys, quorum) = (self.keys(name), self.nodes.quorum());
        let replies = self.nodes.ask(&FORGET, &keys, |_| vec![what.once().unwrap_or_default().to_owned()]).await;
        let said = |wanted: Forgotten| count(&replies, |said: &Forgotten| *said == wanted);
        Ok(match [Forgotten::InUse, Forgotten::Done, Forgotten::Nothing].map(said) {
            [in_use, ..] if in_use > 0 => Forgotten::InUse,
            [_, done, nothing] if done + nothing < quorum => return Err(no_majority(replies)),
            [_, 0, _] => Forgotten::Nothing,
            _ => Forgotten::Done,
        })
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        status::list(self, after).await
    }

    async fn examine(&mut self) -> Result<Checkup> {
        doctor::examine(self).await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let (keys, quorum) = (self.keys(name), self.nodes.quorum());
        let Some(args) = redis::revoke_args(from, how) else { return Ok(Revoked::NotHeld) };
        let replies = self.nodes.ask(&REVOKE, &keys, |_| args.to_vec()).await;
        let foreign = any(&replies, |answer| matches!(answer, Revoked::Impossible(_)));
        agreed(&replies, quorum).or(foreign).ok_or_else(|| no_majority(replies))
    }
}
