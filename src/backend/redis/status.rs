//! Reading a lock for people: what the server keeps about it, as [`LockState`].

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use redis::{FromRedisValue, ParsingError, RedisError, Value, cmd, pipe};

use super::answer::{answers, items, millis, number, text};
use super::connection::refusal;
use super::server::Server;
use super::{Redis, Script, beside, script};
use crate::backend::Page;
use crate::lock::{Contender, History, Identity, LastRun, LockName, LockState, Mode, Outcome, Token};

pub static INSPECT: Script = script!("inspect.lua");

/// A contender, from what `details` says of it: `MODE TTL SINCE TOKEN SLOT IDENTITY`, written by `acquire.lua`.
/// Of a foreign program there is no more than what stands in its key; that may be long.
pub fn contender(owner: String, details: &str, expires_in: Option<Duration>) -> Contender {
    const LONGEST_OWNER: usize = 200;
    let mut parts = details.splitn(6, ' ');
    let mode = parts.next().and_then(Mode::parse).unwrap_or(Mode::Exclusive);
    let mut number = || parts.next().and_then(|part| part.parse::<u64>().ok());
    let (ttl, since, token, slot) = (number(), number(), number(), number());
    let since = since.map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms));
    let who = parts.next().and_then(Identity::from_json).filter(|who| who.owner.as_str() == owner);
    Contender {
        mode,
        owner: Some(owner.chars().take(LONGEST_OWNER).collect()),
        fencing_token: token.map(Token),
        slot: slot.and_then(|slot| u32::try_from(slot).ok()),
        waiting_since: since,
        acquired_at: since,
        ttl: ttl.map(Duration::from_millis),
        expires_in,
        ..who.map(Contender::from).unwrap_or_default()
    }
}

/// A run as the server keeps it: as JSON, or what was known of a holder that vanished.
fn run(text: &str) -> Option<LastRun> {
    let Some(details) = text.strip_prefix("vanished ") else { return LastRun::from_json(text) };
    let who = Identity::from_json(details.splitn(6, ' ').nth(5)?)?;
    Some(LastRun::vanished(&contender(who.owner.to_string(), details, None)))
}

/// Newest first, each once. Whoever was taken for vanished may have told later how its run ended, and a node of a Redlock
/// that an operator's order has not reached yet takes a run that was cut short for one that ended by itself.
pub fn in_order(runs: impl Iterator<Item = LastRun>) -> Vec<LastRun> {
    let mut runs: Vec<LastRun> = runs.collect();
    runs.sort_by_key(|run| (Reverse(run.fencing_token), run.outcome == Outcome::Vanished, run.reason.is_none()));
    runs.dedup_by(|later, first| {
        later.owner.is_some() && later.owner == first.owner && later.fencing_token == first.fencing_token
    });
    runs
}

/// The answer of `inspect.lua`.
#[derive(Clone, Debug)]
pub struct Look {
    pub holders: Vec<Contender>,
    pub waiters: Vec<Contender>,
    pub history: History,
    /// The last token that the server knows, zero if none; `None` if it does not know the lock at all.
    pub counter: Option<u64>,
}

impl Look {
    pub fn of(self, name: &LockName) -> LockState {
        LockState::of(name.clone(), "redis", self.holders, self.waiters, self.history)
    }

    /// What follows the word `state`.
    fn read(reply: &[Value]) -> Option<Look> {
        let [mode, last, counter, holders, waiters, earlier, success] = reply else { return None };
        let mode = Mode::parse(&text(mode)?).unwrap_or(Mode::Exclusive);
        let one = |one: &[Value]| Some(contender(text(&one[0])?, &text(&one[2])?, millis(&one[1])));
        let holder = |of: &[Value]| Some(Contender { mode, revoked: of[3] == Value::Int(1), ..one(of)? });
        Some(Look {
            holders: items(holders).chunks_exact(4).map(holder).collect::<Option<_>>()?,
            waiters: items(waiters).chunks_exact(3).map(one).collect::<Option<_>>()?,
            history: History {
                runs: in_order([last].into_iter().chain(items(earlier)).filter_map(text).filter_map(|one| run(&one))),
                last_success_at: millis(success).map(|since| SystemTime::UNIX_EPOCH + since),
            },
            counter: number(counter),
        })
    }
}

answers! { Look:
    ("state", rest) => Look::read(rest)?,
}

/// One SCAN's worth of locks. A place in the list is `NODE CURSOR`: which node of a cluster, and where.
pub async fn list(redis: &mut Redis, after: Option<String>) -> Result<Page> {
    let (node, cursor) = place(after.as_deref())?;
    let nodes = redis.server.nodes().await?;
    let Some(at) = nodes.get(node) else { return Ok(Page::default()) };
    if redis.server.is_cluster() {
        redis.server.visit(at.clone());
    }
    let (names, cursor) = page(&mut redis.server, &redis.prefix, cursor).await?;
    let keys: Vec<Vec<String>> = names.iter().map(|name| redis.keys(name)).collect();
    let looks = look_at_all(&mut redis.server, &INSPECT, &keys).await?;
    let locks = names.iter().zip(looks).filter_map(|(name, look)| Some(look?.of(name))).collect();
    Ok(Page { locks, next: next_place(node, &cursor, nodes.len()) })
}

pub fn place(after: Option<&str>) -> Result<(usize, &str)> {
    let (node, cursor) = after.unwrap_or("0 0").split_once(' ').context("not a place in a list of Redis locks")?;
    Ok((node.parse().context("not a place in a list of Redis locks")?, cursor))
}

pub fn next_place(node: usize, cursor: &str, nodes: usize) -> Option<String> {
    match cursor {
        "" | "0" => (node + 1 < nodes).then(|| format!("{} 0", node + 1)),
        cursor => Some(format!("{node} {cursor}")),
    }
}

/// The names of the locks that one SCAN finds, and where the next begins. A lock that dlock ever took has
/// a counter, and is listed for that; a lock without one is a foreign program's.
pub async fn page(server: &mut Server, prefix: &str, cursor: &str) -> Result<(BTreeSet<LockName>, String)> {
    let pattern = format!("*{}*", escaped(prefix));
    let mut scan = cmd("SCAN");
    scan.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(200);
    let (cursor, keys): (String, Vec<Value>) = server.call(&scan).await?;
    let (mut names, mut bare) = (BTreeSet::new(), Vec::new());
    for key in keys.iter().filter_map(text) {
        let counted = key.strip_prefix('{').and_then(|key| key.strip_suffix("}:token"));
        if let Some(name) = counted.and_then(|key| key.strip_prefix(prefix)).and_then(|name| name.parse().ok()) {
            names.insert(name);
        } else if let Some(name) = key.strip_prefix(prefix).and_then(|name| name.parse::<LockName>().ok()) {
            bare.push(name);
        }
    }
    if !bare.is_empty() {
        let mut counters = pipe();
        for name in &bare {
            counters.cmd("EXISTS").arg(beside(prefix, name, "token"));
        }
        let answers = server.call_all(&counters).await?;
        let foreign = bare.into_iter().zip(answers).filter(|(_, counted)| *counted == Value::Int(0));
        names.extend(foreign.map(|(name, _)| name));
    }
    Ok((names, cursor))
}

/// What a server says of the locks with these keys, in one round trip; nothing of a key with our prefix that is no lock.
pub async fn look_at_all(server: &mut Server, script: &Script, locks: &[Vec<String>]) -> Result<Vec<Option<Look>>> {
    if locks.is_empty() {
        return Ok(Vec::new());
    }
    server.load(script).await?;
    let mut looks = pipe();
    for keys in locks {
        looks.cmd("EVALSHA").arg(script.get_hash()).arg(keys.len()).arg(keys);
    }
    let look = |answer| match answer {
        Value::ServerError(error) if error.code() == "WRONGTYPE" => Ok(None),
        Value::ServerError(error) => Err(refusal(RedisError::from(error))),
        answer => Ok(Some(Look::from_redis_value(answer)?)),
    };
    server.call_all(&looks).await?.into_iter().map(look).collect()
}

/// As it must be written in a pattern to stand for itself.
fn escaped(text: &str) -> String {
    text.chars().flat_map(|c| "*?[]^-\\".contains(c).then_some('\\').into_iter().chain([c])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{Holder, Token};

    #[test]
    fn a_run_that_was_cut_short_is_not_one_that_ended_by_itself() {
        let holder = Holder { owner: Some("a".into()), fencing_token: Some(Token(7)), ..Holder::default() };
        let [vanished, ended, cut_short] = [
            LastRun::vanished(&holder),
            LastRun::of_holder(&holder, Outcome::Exited),
            LastRun::cut_short(&holder, "disk full"),
        ];
        assert_eq!(in_order([vanished.clone(), ended.clone(), cut_short.clone()].into_iter()), [cut_short]);
        assert_eq!(in_order([vanished, ended.clone()].into_iter()), [ended]);
    }
}
