//! Whether the nodes tell the same of the locks they have on record, as far as a sample of them shows.
//!
//! They need not agree at every moment: what looks odd is looked at twice, and counts only if nothing about it has
//! changed. Nor need all of them have every lock: a majority will do, and a node that was too slow for the last grant is
//! told of the next. One that has forgotten lacks what was granted before it was started.

use std::time::Duration;

use anyhow::Result;

use super::Redlock;
use super::status::{self, Look};
use crate::backend::{Finding, within};
use crate::clock::{self, Instant};
use crate::lock::{LockName, NodeState};

const CHECK: &str = "redlock-agreement";
/// So many locks are compared, if the time is enough for them.
const SAMPLE: usize = 300;
const EXAMPLES: usize = 3;
/// A node that lacks more than half of at least so many has forgotten them, whenever it was started.
const MANY: usize = 10;
/// Nodes count the time since they were started in seconds, and their clocks may differ a little.
const VAGUE_US: u64 = 2_000_000;
/// Longer than any request takes that is on its way.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// What one node says of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Vote {
    node: usize,
    host: String,
    owner: Option<String>,
    token: Option<u64>,
}

/// What those that answer say of one lock.
#[derive(PartialEq, Eq)]
struct Votes {
    name: LockName,
    all: Vec<Vote>,
    quorum: usize,
}

/// A node that has answered just now, and when it was started.
type Answering = (usize, Option<u64>);

/// Takes no longer than any other request may.
pub async fn examine(redlock: &mut Redlock, answering: &[Answering]) -> Vec<Finding> {
    let patience = redlock.patience;
    within(patience, compared(redlock, answering)).await.unwrap_or_else(|error| {
        vec![Finding::weak(
            CHECK,
            format!("what the nodes have on record cannot be compared: {error:#}"),
            "a node that has forgotten its locks, or has others, is not noticed",
            "let this user run SCAN and GET on the keys of locks",
        )]
    })
}

async fn compared(redlock: &mut Redlock, answering: &[Answering]) -> Result<Vec<Finding>> {
    let quorum = redlock.nodes.quorum();
    let all = sample(redlock, answering).await?;
    let known = all.len();
    let odd: Vec<Votes> = all.into_iter().map(|look| Votes::of(look, quorum)).filter(Votes::are_odd).collect();
    if !odd.is_empty() {
        tokio::time::sleep(LOOK_AGAIN.min(redlock.patience / 4)).await;
    }
    let mut lasting = Vec::new();
    for before in odd {
        let again = Votes::of(status::look(redlock, &before.name).await?, quorum);
        lasting.extend(Some(before).filter(|before| *before == again));
    }
    let findings: Vec<_> = [splits(&lasting), lags(&lasting, known, answering)].into_iter().flatten().collect();
    if !findings.is_empty() {
        return Ok(findings);
    }
    let all = if known < SAMPLE { "" } else { "first " };
    Ok(vec![Finding::fine(CHECK, format!("the nodes agree about the {all}{known} lock(s) that they have on record"))])
}

/// Locks that any of these nodes knows.
async fn sample(redlock: &mut Redlock, answering: &[Answering]) -> Result<Vec<Look>> {
    let (until, mut all, mut failed) = (clock::now() + redlock.patience / 2, Vec::new(), None);
    for (n, _) in answering {
        failed = add_to(&mut all, redlock, *n, until).await.err().or(failed);
    }
    match failed {
        Some(error) if all.is_empty() => Err(error),
        _ => Ok(all),
    }
}

/// Adds what one node knows.
async fn add_to(all: &mut Vec<Look>, redlock: &mut Redlock, n: usize, until: Instant) -> Result<()> {
    let mut cursor = "0".to_owned();
    while all.len() < SAMPLE && !until.has_passed() {
        let (names, next) = status::scan(redlock, n, &cursor).await?;
        all.extend(status::looks(redlock, n, &names).await?);
        if next == "0" {
            break;
        }
        cursor = next;
    }
    Ok(())
}

impl Votes {
    fn of(look: Look, quorum: usize) -> Votes {
        let nodes = look.state.nodes.into_iter().zip(look.tokens).enumerate();
        let vote = |(node, (says, token)): (usize, (NodeState, Option<String>))| {
            let token = token.and_then(|token| token.parse().ok());
            says.error.is_none().then_some(Vote { node, host: says.node, owner: says.owner, token })
        };
        Votes { name: look.state.name, all: nodes.filter_map(vote).collect(), quorum }
    }

    fn are_odd(&self) -> bool {
        self.split().is_some() || !self.behind().is_empty()
    }

    /// Who has how many of the nodes, if they name different holders, or one that has no majority.
    fn split(&self) -> Option<(Option<&str>, usize)> {
        let mut owners: Vec<&str> = self.all.iter().filter_map(|vote| vote.owner.as_deref()).collect();
        owners.sort_unstable();
        let most = owners.chunk_by(|one, other| one == other).max_by_key(|votes| votes.len())?;
        let holder = Some(most[0]).filter(|_| most.len() >= self.quorum);
        (holder.is_none() || most.len() < owners.len()).then_some((holder, most.len()))
    }

    fn greatest_token(&self) -> Option<u64> {
        self.all.iter().filter_map(|vote| vote.token).max()
    }

    /// The nodes that have not heard of a token that a majority has heard of, or of none at all.
    fn behind(&self) -> Vec<&Vote> {
        let mut tokens: Vec<Option<u64>> = self.all.iter().map(|vote| vote.token).collect();
        tokens.sort_unstable_by(|one, other| other.cmp(one));
        let (some, agreed) = (self.greatest_token().is_some(), tokens.get(self.quorum - 1).copied().flatten());
        self.all.iter().filter(|vote| some && (vote.token.is_none() || vote.token < agreed)).collect()
    }

    /// Of those, whether one has known better: the token is from before it was started.
    fn forgotten_by(&self, started: Option<u64>) -> bool {
        let both = self.greatest_token().zip(started);
        both.is_some_and(|(token, started)| token.saturating_add(VAGUE_US) < started)
    }
}

/// Locks of which the nodes name different holders.
fn splits(odd: &[Votes]) -> Option<Finding> {
    let (mut held, mut stray) = (Vec::new(), Vec::new());
    for votes in odd {
        let (name, Some((holder, count))) = (&votes.name, votes.split()) else { continue };
        let others = votes.all.iter().filter(|vote| vote.owner.is_some() && vote.owner.as_deref() != holder);
        let says = |vote: &Vote| format!("{} says {}", vote.host, vote.owner.as_deref().unwrap_or_default());
        let others = others.map(says).collect::<Vec<_>>().join(", ");
        match holder {
            Some(holder) => {
                held.push(format!("{name} is held by {holder} on {count} of {} nodes, {others}", votes.all.len()));
            }
            None => stray.push(format!("{name} is on a minority of nodes only, and so held by nobody: {others}")),
        }
    }
    let mut lines = [held, stray].concat();
    let more = lines.len().saturating_sub(EXAMPLES);
    lines.truncate(EXAMPLES);
    lines.extend((more > 0).then(|| format!("and {more} more")));
    (!lines.is_empty()).then(|| {
        Finding::weak(
            CHECK,
            lines.join("; "),
            "nodes that name somebody else are in the way of whoever wants the lock, and a holder that lacks them loses it \
             should one more node fail: somebody died while taking it, or put a key there by hand",
            "what a dead contender left runs out by itself; a key without an expiry does not: redis-cli -h HOST PTTL \
             'dlock:NAME', and DEL only if nobody uses the lock",
        )
    })
}

/// Nodes that have forgotten tokens, or never heard of them.
fn lags(odd: &[Votes], known: usize, answering: &[Answering]) -> Option<Finding> {
    let mut lines = Vec::new();
    for (node, started) in answering {
        let behind = |votes: &&Votes| votes.behind().iter().any(|vote| vote.node == *node);
        let mut lacks: Vec<&Votes> = odd.iter().filter(behind).collect();
        if lacks.len() < MANY || lacks.len() <= known / 2 {
            lacks.retain(|votes| votes.forgotten_by(*started));
        }
        let Some((votes, others)) = lacks.split_first() else { continue };
        let Some(own) = votes.all.iter().find(|vote| vote.node == *node) else { continue };
        let token = own.token.map_or_else(|| "none".to_owned(), |token| token.to_string());
        let (host, name, greatest) = (&own.host, &votes.name, votes.greatest_token().unwrap_or_default());
        let more = if others.is_empty() { String::new() } else { format!(", nor of {} more", others.len()) };
        lines.push(format!("{host} does not know the last token of {name} ({greatest}; it knows {token}){more}"));
    }
    let why = if lines.len() < odd.first()?.quorum {
        "it has come back without its data, and has let go of what was held then: should another node forget too, a \
         second holder gets in beside the first, and only the nodes' clocks keep tokens growing"
    } else {
        "a majority has come back without its data: what was held then may have been granted to a second holder, and \
         only the nodes' clocks keep tokens growing"
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

    fn votes(of: &[(Option<&str>, Option<u64>)]) -> Votes {
        let vote = |(node, (owner, token)): (usize, &(Option<&str>, Option<u64>))| Vote {
            node,
            host: String::new(),
            owner: owner.map(str::to_owned),
            token: *token,
        };
        Votes { name: "job".parse().unwrap(), all: of.iter().enumerate().map(vote).collect(), quorum: 2 }
    }

    #[test]
    fn nodes_that_say_the_same_are_not_odd() {
        for (owner, token) in [(None, None), (Some("a"), Some(7)), (None, Some(7)), (Some("foreign"), None)] {
            assert!(!votes(&[(owner, token); 3]).are_odd(), "{owner:?} {token:?}");
        }
    }

    #[test]
    fn a_majority_holds_and_a_minority_does_not() {
        let split = |owners: [Option<&'static str>; 3]| {
            let votes = votes(&owners.map(|owner| (owner, None)));
            votes.split().map(|(holder, count)| (holder.map(str::to_owned), count))
        };
        assert_eq!(split([Some("a"), Some("a"), None]), None, "the third was too slow");
        assert_eq!(split([Some("a"), Some("a"), Some("b")]), Some((Some("a".to_owned()), 2)));
        assert_eq!(split([Some("a"), None, None]), Some((None, 1)));
        assert_eq!(split([Some("a"), Some("b"), None]), Some((None, 1)));
    }

    #[test]
    fn whoever_is_behind_a_majority_is_behind_and_whoever_is_before_it_is_not() {
        let behind = |tokens: [Option<u64>; 3]| {
            let votes = votes(&tokens.map(|token| (None, token)));
            votes.behind().iter().map(|vote| vote.node).collect::<Vec<_>>()
        };
        assert_eq!(behind([Some(9), Some(9), Some(7)]), [2]);
        assert_eq!(behind([Some(9), Some(9), None]), [2]);
        // A second phase that did not reach a majority granted nothing.
        assert_eq!(behind([Some(9), Some(7), Some(7)]), [0; 0]);
        assert_eq!(behind([Some(9), None, None]), [1, 2]);
    }

    #[test]
    fn only_what_was_granted_before_a_node_was_started_can_have_been_forgotten_by_it() {
        let granted = votes(&[(None, Some(60_000_000)), (None, Some(60_000_000)), (None, None)]);
        assert!(granted.forgotten_by(Some(70_000_000)));
        for started in [None, Some(10_000_000), Some(61_000_000)] {
            assert!(!granted.forgotten_by(started), "{started:?}");
        }
    }
}
