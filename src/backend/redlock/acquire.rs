//! Asking for the lock: a majority in the first phase, a token on a majority in the second, or giving
//! everything back.

use std::sync::LazyLock;
use std::time::Duration;

use anyhow::{Result, bail};

use super::nodes::{Reply, count, no_majority};
use super::{Redlock, SLACK, flag, millis, script, some_of};
use crate::backend::redis::resp::Value;
use crate::backend::redis::script::Script;
use crate::backend::redis::status::holder;
use crate::backend::redis::watch::Watch;
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Mode, Term, Token};
use crate::mutant::{self, Mutant};

static TAKE: LazyLock<Script> = script!("take.lua");
static RAISE: LazyLock<Script> = script!("raise.lua");

/// A waiter that has not asked again for this long is not shown any more.
const PLACE: Duration = Duration::from_secs(6);
/// So often a waiter asks although nothing seems to change.
const BEAT: Duration = Duration::from_secs(2);
/// So often it asks nodes that cannot notify.
const BLIND_BEAT: Duration = Duration::from_millis(250);
/// Contenders that split the nodes between them part ways within this time.
const SCATTER: Duration = Duration::from_millis(60);

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
        let (owner, once) = (ask.who.owner.to_string(), ask.once.clone().unwrap_or_default());
        let args = [millis(ask.ttl), once, flag(ask.queue), millis(PLACE), self.who.clone()];
        let replies = self.nodes.ask_to_take(&TAKE, &keys, &owner, &args).await;
        let (ours, quorum) = (count(&replies, "ours"), self.nodes.quorum());
        if count(&replies, "ran") > 0 {
            self.give_back(&ask.who.owner, &keys, true).await;
            return Ok(Attempt::AlreadyRan);
        }
        if let Some(token) = token(&replies).filter(|_| ours >= quorum) {
            let term = Term { from, ttl: ask.ttl, slack: SLACK };
            let agreed = mutant::is(Mutant::NaiveRedlockToken) || self.raise(ask, &keys, token).await;
            if agreed && term.from.elapsed() < ask.ttl.mul_f64(0.99) - SLACK {
                self.watch_as_holder(&keys, &ask.who.owner, &replies);
                let (name, owner) = (ask.name.clone(), ask.who.owner.clone());
                return Ok(Attempt::Granted(Lease { name, owner, token, slot: None, term, descriptors: Vec::new() }));
            }
        }
        self.give_back(&ask.who.owner, &keys, false).await;
        if replies.iter().filter(|reply| reply.is_ok()).count() < quorum {
            return Err(no_majority(replies));
        }
        Ok(Attempt::Busy(self.busy(&keys, &replies)?))
    }

    /// Raises the counters and says whether that made the lock ours.
    async fn raise(&mut self, ask: &Ask, keys: &[String], token: Token) -> bool {
        let args = [ask.who.owner.to_string(), token.to_string(), millis(ask.ttl), ask.who.to_json()];
        let replies = self.nodes.ask(&RAISE, keys, |_| args.to_vec()).await;
        count(&replies, "ours") >= self.nodes.quorum()
    }

    /// Who is in the way, and when enough of the nodes will be free of them by themselves.
    fn busy(&mut self, keys: &[String], replies: &[Reply]) -> Result<Busy> {
        let quorum = self.nodes.quorum();
        let (mut others, mut ends) = (Vec::new(), Vec::new());
        for (node, reply) in self.nodes.iter_mut().zip(replies) {
            node.watch = Watch::default();
            let Some(rest) = theirs(reply) else { continue };
            let [value, pttl, details] = rest else { bail!("a node answered {rest:?}") };
            node.watch = Watch { keys: vec![keys[0].clone()], seen: vec![value.text()] };
            ends.push(pttl.number::<u64>().map_or(BEAT, Duration::from_millis));
            others.push(holder(value.text().unwrap_or_default(), &details.text().unwrap_or_default(), None));
        }
        ends.sort_unstable();
        // So many of them have to go before a majority is free; none, if contenders got in each other's way.
        let in_the_way = (others.len() + 1).saturating_sub(quorum);
        let by_itself = in_the_way.checked_sub(1).map_or(Duration::ZERO, |n| ends[n] + Duration::from_millis(1));
        (self.needed, self.crowded) = (in_the_way.max(1), true);
        let beat = if self.nodes.deaf() { BLIND_BEAT } else { BEAT };
        Ok(Busy {
            holder: others.into_iter().max_by_key(|other| other.host.is_some()),
            ahead: None,
            ask_again: clock::now() + by_itself.min(beat) + some_of(SCATTER)?,
        })
    }
}

fn theirs(reply: &Reply) -> Option<&[Value]> {
    reply.as_ref().ok().filter(|(word, _)| word == "theirs").map(|(_, rest)| rest.as_slice())
}

/// The token that a majority's answers to the first phase call for.
pub(super) fn token(replies: &[Reply]) -> Option<Token> {
    let candidate = |reply: &Reply| match reply {
        Ok((word, rest)) if word == "ours" => rest.first()?.number().map(Token),
        _ => None,
    };
    replies.iter().filter_map(candidate).max()
}
