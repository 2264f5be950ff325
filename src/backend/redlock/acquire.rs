//! Asking for the lock: a majority in the first phase, a token on a majority in the second, or giving
//! everything back.

use anyhow::Result;

use super::answer::Answer;
use super::nodes::{Node, Reply, count, no_majority};
use super::waiting::{Began, Then};
use super::{OURS, Redlock, SLACK, flag, millis, script};
use crate::backend::redis::Script;
use crate::backend::{Ask, Attempt, Lease};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Grant, Mode, Token};

pub static TAKE: Script = script!("take.lua");
pub static RAISE: Script = script!("raise.lua");

impl Redlock {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        if ask.mode != Mode::Exclusive {
            return Err(Fault::Usage.because(
                "Redlock knows only exclusive locks: nodes that each count holders for themselves would not agree \
                 on who they are. Use redis://, etcd://, zookeeper:// or postgres:// for --shared and --slots",
            ));
        }
        let keys = self.keys(&ask.name);
        self.who = ask.who.to_json();
        let from = clock::now();
        let once = ask.once.clone().unwrap_or_default();
        let [since, waited] = self.began.get_or_insert_with(Began::now).told();
        let insists = flag(std::mem::take(&mut self.insists));
        let args = [millis(ask.ttl), once, flag(ask.queue), since, waited, insists, self.who.clone()];
        let for_node = |node: &Node| {
            let (holder, details) = node.seen.clone().unwrap_or_default();
            args.iter().cloned().chain([holder, details]).collect()
        };
        let replies = self.nodes.ask_by_number(&TAKE, &keys, &ask.who.owner, for_node).await;
        let (ours, quorum) = (count(&replies, OURS), self.nodes.quorum());
        if count(&replies, |answer| matches!(answer, Answer::Ran)) > 0 {
            self.give_back(ask, &keys, Then::Leave).await;
            return Ok(Attempt::AlreadyRan);
        }
        if let Some(token) = token(&replies).filter(|_| ours >= quorum) {
            let grant = Grant { from, ttl: ask.ttl, slack: SLACK };
            let agreed = self.raise(ask, &keys, token).await;
            if agreed && grant.from.elapsed() < ask.ttl.mul_f64(0.99) - SLACK {
                self.watch_as_holder(&keys, &ask.who.owner, &replies);
                self.began = None;
                let (name, owner) = (ask.name.clone(), ask.who.owner.clone());
                return Ok(Attempt::Granted(Lease { name, owner, token, slot: None, grant, descriptors: Vec::new() }));
            }
        }
        let answered = replies.iter().filter(|reply| reply.is_ok()).count() >= quorum;
        if ours > 0 || self.nodes.any_unheard() {
            // Whoever cannot reach a majority must not be in the way of those who can.
            let and = if ask.queue && answered { Then::Wait } else { Then::Leave };
            self.give_back(ask, &keys, and).await;
        }
        if !answered {
            return Err(no_majority(replies));
        }
        Ok(Attempt::Busy(self.busy(&keys, &ask.who.owner, &replies)?))
    }

    /// Raises the counters and says whether that made the lock ours.
    async fn raise(&mut self, ask: &Ask, keys: &[String], token: Token) -> bool {
        let args = [ask.who.owner.to_string(), token.to_string(), millis(ask.ttl), ask.who.to_json()];
        let replies = self.nodes.ask(&RAISE, keys, |_| args.to_vec()).await;
        count(&replies, OURS) >= self.nodes.quorum()
    }
}

/// The token that a majority's answers to the first phase call for.
pub fn token(replies: &[Reply]) -> Option<Token> {
    let candidate = |reply: &Reply| match reply {
        Ok(Answer::Ours(token)) => *token,
        _ => None,
    };
    replies.iter().filter_map(candidate).max()
}
