//! The nodes of a Redlock, asked all at once: what they answer, and what their answers amount to.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Result;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use redis::{FromRedisValue, ParsingError, Value};

use crate::backend::redis::Script;
use crate::backend::redis::answer::{answers, millis, non_empty, number, shown, text};
use crate::backend::redis::server::{Server, Watch};
use crate::backend::redis::target::Target;
use crate::backend::{Address, Patience};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{OwnerId, Token};

/// The least that nodes which are slower than the majority get on top.
const GRACE: Duration = Duration::from_millis(20);
/// A release reaches the nodes at different times: so long after enough nodes have changed the others are waited for.
const SETTLE: Duration = Duration::from_millis(3);

pub struct Node {
    pub server: Server,
    pub watch: Watch,
    /// Who held this node when it last answered us as waiters, and what it said about that holder. A node that has lost
    /// its data since is told.
    pub seen: Option<(String, String)>,
    /// How many requests to take this node or to give it back we sent, and the last of them that got no answer: it
    /// may still arrive, after we have given up.
    sent: u64,
    pub unanswered: Option<u64>,
}

impl Node {
    /// The last request that may still arrive, for scripts.
    pub fn given_up(&self) -> String {
        self.unanswered.map(|n| n.to_string()).unwrap_or_default()
    }
}

pub struct Nodes {
    pub all: Vec<Node>,
}

pub type Reply<T = Answer> = Result<T>;

impl Nodes {
    pub fn new(address: &Address, patience: Patience) -> Result<Nodes> {
        let count = address.hosts().len();
        if count < 3 || count.is_multiple_of(2) {
            return Err(Fault::Config.because(format_args!(
                "Redlock needs an odd number of nodes, three or more, and {address} names {count}: one node is what \
                 redis:// is for, and an even number stands no more failures than one node less"
            )));
        }
        // A verb asks the nodes up to three times, the last to give back what was taken.
        let patience = Patience { connect: patience.connect / 3, attempt: patience.attempt / 3 };
        let node = |target| {
            let (server, watch) = (Server::new(target, patience), Watch::new());
            Node { server, watch, seen: None, sent: 0, unanswered: None }
        };
        let all: Vec<Node> = Target::each(address)?.into_iter().map(node).collect();
        if all.iter().map(|node| node.server.host()).collect::<BTreeSet<_>>().len() < count {
            return Err(Fault::Config.because(format_args!("{address} names a node twice")));
        }
        Ok(Nodes { all })
    }

    pub fn quorum(&self) -> usize {
        self.all.len() / 2 + 1
    }

    /// Runs a script on all nodes at once. Once a majority has answered, the others get as much time
    /// again and no more, so that a dead node costs little.
    pub async fn ask<T: FromRedisValue>(
        &mut self,
        script: &Script,
        keys: &[String],
        args: impl Fn(&mut Node) -> Vec<String>,
    ) -> Vec<Reply<T>> {
        let (count, quorum) = (self.all.len(), self.quorum());
        let start = clock::now();
        let mut asked: FuturesUnordered<_> = (self.all.iter_mut().enumerate())
            .map(|(n, node)| {
                let args = args(node);
                async move { (n, node.server.run(script, keys, args).await) }
            })
            .collect();
        let mut replies: Vec<Option<Reply<T>>> = (0..count).map(|_| None).collect();
        let (mut answers, mut patience) = (0, None);
        loop {
            let next = match patience {
                None => asked.next().await,
                Some(end) => tokio::select! {
                    next = asked.next() => next,
                    () = clock::sleep_until(end) => None,
                },
            };
            let Some((n, reply)) = next else { break };
            answers += usize::from(reply.is_ok());
            replies[n] = Some(reply);
            if answers == quorum {
                patience = Some(clock::now() + start.elapsed().max(GRACE));
            }
        }
        drop(asked);
        let silent = || Err(Fault::Unreachable.because("slower than the others"));
        replies.into_iter().map(|reply| reply.unwrap_or_else(silent)).collect()
    }

    /// The same for a script that leaves something on a node. Its first arguments are the owner and the number of the
    /// request: one that got no answer may still arrive, later.
    pub async fn ask_by_number<T: FromRedisValue>(
        &mut self,
        script: &Script,
        keys: &[String],
        owner: &OwnerId,
        args: impl Fn(&Node) -> Vec<String>,
    ) -> Vec<Reply<T>> {
        let before: Vec<Option<u64>> = self.all.iter().map(|node| node.unanswered).collect();
        let numbered = |node: &mut Node| {
            node.sent += 1;
            let args = [owner.to_string(), node.sent.to_string()].into_iter().chain(args(node)).collect();
            node.unanswered = Some(node.sent);
            args
        };
        let replies = self.ask(script, keys, numbered).await;
        for ((node, reply), before) in self.all.iter_mut().zip(&replies).zip(before) {
            if reply.is_ok() {
                node.unanswered = before;
            }
        }
        replies
    }

    /// Returns when so many nodes have changed, and the others had a moment to do so too.
    pub async fn changed(&mut self, needed: usize) {
        let mut told: FuturesUnordered<_> = (self.all.iter_mut())
            .filter(|node| !node.watch.is_empty())
            .map(|node| async move { node.server.changed(&node.watch).await })
            .collect();
        for _ in 0..needed {
            if told.next().await.is_none() {
                return std::future::pending().await;
            }
        }
        let all = async { while told.next().await.is_some() {} };
        tokio::select! {
            () = all => {}
            () = clock::sleep_until(clock::now() + SETTLE) => {}
        }
    }
}

/// How many nodes said this.
pub fn count<T>(replies: &[Reply<T>], said: impl Fn(&T) -> bool) -> usize {
    replies.iter().flatten().filter(|answer| said(answer)).count()
}

/// What a single node says, if one says this.
pub fn any<T: Clone>(replies: &[Reply<T>], said: impl Fn(&T) -> bool) -> Option<T> {
    replies.iter().flatten().find(|answer| said(answer)).cloned()
}

/// What so many nodes say alike.
pub fn agreed<T: Clone + PartialEq>(replies: &[Reply<T>], quorum: usize) -> Option<T> {
    replies.iter().flatten().find(|&said| count(replies, |other| other == said) >= quorum).cloned()
}

/// Why there was no majority: the nodes' own reasons, of which a refusal weighs more than silence.
pub fn no_majority<T>(replies: Vec<Reply<T>>) -> anyhow::Error {
    let mut errors: Vec<anyhow::Error> = replies.into_iter().filter_map(Reply::err).collect();
    errors.sort_by_key(|error| Fault::of(error) == Fault::Unreachable);
    match errors.into_iter().next() {
        Some(error) => {
            let fault = Fault::of(&error);
            error.context("no majority of the Redlock nodes answered").context(fault)
        }
        None => Fault::Unreachable.because("the Redlock nodes do not agree"),
    }
}

/// What a node says to whoever wants to take or keep it. Other scripts say the same as on a single Redis.
#[derive(Clone, Debug)]
pub enum Answer {
    /// The node is ours. If it was just taken: which token it would have to be at least.
    Ours(Option<Token>),
    /// Another has it; or nobody, but others are before us in the queue.
    Busy(Busy),
    /// The node is not ours, or not any more; perhaps somebody else's.
    Gone(Option<String>),
    /// An operator has freed the node on the spot, for this reason.
    Taken(String),
    /// An operator wants the node back, for this reason.
    Revoked(String),
    /// A successful run has left its once key.
    Ran,
}

/// What keeps us from a node.
#[derive(Clone, Debug)]
pub struct Busy {
    /// What the lock's key holds, and what the node says about that holder.
    pub owner: Option<String>,
    pub details: String,
    /// When its lease ends, if ever.
    pub left: Option<Duration>,
    pub ahead: usize,
    /// When to ask again.
    pub ask_again: Option<Duration>,
}

answers! { Answer:
    ("ours", []) => Answer::Ours(None),
    ("ours", [token]) => Answer::Ours(Some(Token(number(token)?))),
    ("busy", [owner, left, details, ahead, ask_again]) => Answer::Busy(Busy {
        owner: non_empty(owner),
        details: text(details)?,
        left: millis(left),
        ahead: number(ahead)?,
        ask_again: millis(ask_again),
    }),
    ("gone", rest) => Answer::Gone(rest.first().and_then(non_empty)),
    ("taken", [reason]) => Answer::Taken(shown(reason)),
    ("revoked", [reason]) => Answer::Revoked(shown(reason)),
    ("ran", []) => Answer::Ran,
}
