//! Reading a lock for people: what the server keeps about it, as [`LockState`].

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail};

use super::Redis;
use super::link::refusal;
use super::resp::{Command, Value, command};
use super::script::{Script, script};
use super::server::Server;
use crate::backend::Page;
use crate::lock::{Contender, Identity, LastRun, LockName, LockState, Mode, Token};

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
    Contender {
        who: parts.next().and_then(Identity::from_json).filter(|who| who.owner.as_str() == owner),
        foreign_owner: Some(owner.chars().take(LONGEST_OWNER).collect()),
        token: token.map(Token),
        slot: slot.and_then(|slot| u32::try_from(slot).ok()),
        waiting_since: since,
        acquired_at: since,
        ttl: ttl.map(Duration::from_millis),
        expires_in,
        ..Contender::unknown(mode)
    }
}

/// Reads the answer of `inspect.lua`.
pub fn read(name: &LockName, reply: &Value) -> Option<LockState> {
    let [now, mode, last, holders, waiters] = reply.items() else { return None };
    let (now, mode) = (now.number()?, Mode::parse(&mode.text()?).unwrap_or(Mode::Exclusive));
    let until = |ends: &Value| ends.number::<u64>().map(|ends| Duration::from_millis(ends.saturating_sub(now)));
    let one = |one: &[Value]| Some(contender(one[0].text()?, &one[2].text()?, until(&one[1])));
    let holder = |of: &[Value]| Some(Contender { mode, revoked: of[3] == Value::Integer(1), ..one(of)? });
    let holders = holders.items().chunks_exact(4).map(holder).collect::<Option<_>>()?;
    let waiters = waiters.items().chunks_exact(3).map(one).collect::<Option<_>>()?;
    Some(LockState::of(name.clone(), "redis", holders, waiters, LastRun::from_json(&last.text()?)))
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
    Ok(Page { locks: inspect_all(redis, &names).await?, next: next_place(node, &cursor, nodes.len()) })
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
    let answer = server.call(&[command!["SCAN", cursor, "MATCH", pattern, "COUNT", "200"]]).await?.remove(0);
    let [cursor, keys] = answer.items() else { bail!("a SCAN was answered with {answer:?}") };
    let (mut names, mut bare) = (BTreeSet::new(), Vec::new());
    for key in keys.items().iter().filter_map(Value::text) {
        let counted = key.strip_prefix('{').and_then(|key| key.strip_suffix("}:token"));
        if let Some(name) = counted.and_then(|key| key.strip_prefix(prefix)).and_then(|name| name.parse().ok()) {
            names.insert(name);
        } else if let Some(name) = key.strip_prefix(prefix).and_then(|name| name.parse::<LockName>().ok()) {
            bare.push(name);
        }
    }
    if !bare.is_empty() {
        let counters = bare.iter().map(|name| command!["EXISTS", format!("{{{prefix}{name}}}:token")]);
        let answers = server.call(&counters.collect::<Vec<_>>()).await?;
        let foreign = bare.into_iter().zip(answers).filter(|(_, counted)| *counted == Value::Integer(0));
        names.extend(foreign.map(|(name, _)| name));
    }
    Ok((names, cursor.text().context("a SCAN without a cursor")?))
}

async fn inspect_all(redis: &mut Redis, names: &BTreeSet<LockName>) -> Result<Vec<LockState>> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let looks = names.iter().map(|name| INSPECT.by_hash(&redis.keys(name), &[]));
    let commands: Vec<Command> = std::iter::once(INSPECT.load()).chain(looks).collect();
    let answers = redis.server.call(&commands).await?;
    let mut locks = Vec::new();
    for (name, answer) in names.iter().zip(answers.iter().skip(1)) {
        match answer {
            // A key with our prefix that is no lock.
            Value::Error(error) if error.contains("WRONGTYPE") => {}
            Value::Error(error) => return Err(refusal(error)),
            answer => locks.push(read(name, answer).with_context(|| format!("an unreadable state of {name}"))?),
        }
    }
    Ok(locks)
}

/// As it must be written in a pattern to stand for itself.
fn escaped(text: &str) -> String {
    text.chars().flat_map(|c| "*?[]^-\\".contains(c).then_some('\\').into_iter().chain([c])).collect()
}
