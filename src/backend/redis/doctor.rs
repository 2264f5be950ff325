//! What the doctor wants to know about a Redis server: whether it keeps what it was given.

use std::collections::HashMap;

use anyhow::Result;
use redis::cmd;

use super::server::Server;
use crate::backend::doctor::{Checkup, Finding, micros};
use crate::clock;
use crate::exit::Fault;

/// A server process, by whatever address it is reached.
pub struct Process {
    /// What it calls itself.
    pub run_id: String,
    /// When it was started, by its own clock and at the latest: in microseconds since the epoch, as tokens are.
    pub started_us: u64,
}

/// `replicas` is how many the locks wait for. Who may not run INFO does not learn which process it is.
pub async fn examine(server: &mut Server, replicas: u32) -> Result<(Checkup, Option<Process>)> {
    let before = micros(clock::wall());
    let (seconds, rest): (i64, i64) = server.call(&cmd("TIME")).await?;
    let ours = i64::midpoint(before, micros(clock::wall()));
    let clock_offset_us = seconds.checked_mul(1_000_000).and_then(|us| us.checked_add(rest)).map(|us| us - ours);
    let text = match server.call::<String>(&cmd("INFO")).await {
        Err(error) if Fault::of(&error) != Fault::Refused => return Err(error),
        Err(error) => {
            let unknown = Finding::of("redis-info", format!("{error:#}")).weak(
                "whether this server evicts keys or forgets them in a restart cannot be seen",
                "let this user run INFO, or look yourself: maxmemory-policy noeviction, appendonly yes",
            );
            return Ok((Checkup { findings: vec![unknown], clock_offset_us }, None));
        }
        Ok(text) => text,
    };
    let facts: HashMap<&str, &str> = text.lines().filter_map(|line| line.trim_end().split_once(':')).collect();
    let mut question = cmd("CONFIG");
    question.arg("GET").arg("appendfsync");
    let settings = server.call::<HashMap<String, String>>(&question).await.unwrap_or_default();
    let persistence = persistence(&facts, settings.get("appendfsync").map(String::as_str));
    let findings = vec![role(&facts), version(&facts), eviction(&facts), persistence, replication(&facts, replicas)];
    Ok((Checkup { findings, clock_offset_us }, process(&facts, seconds)))
}

fn process(facts: &HashMap<&str, &str>, now: i64) -> Option<Process> {
    let up: i64 = facts.get("uptime_in_seconds")?.parse().ok()?;
    let started_us = u64::try_from(now.checked_sub(up)?).ok()?.checked_mul(1_000_000)?;
    Some(Process { run_id: facts.get("run_id")?.to_string(), started_us })
}

/// Which product it is, and whether it can push. All of them say which version of Redis they are like.
fn version(facts: &HashMap<&str, &str>) -> Finding {
    let fact = |key| facts.get(key).copied();
    let like = fact("redis_version").unwrap_or("unknown");
    let what = [("Valkey", "valkey_version"), ("Dragonfly", "dragonfly_version")]
        .iter()
        .find_map(|(name, key)| Some(format!("the server is {name} {}, like Redis {like}", fact(key)?)))
        .unwrap_or_else(|| format!("the server is Redis {like}"));
    let found = Finding::of("redis-version", what);
    match like.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
        Some(6..) => found,
        _ => found.weak(
            "it cannot tell a holder at once that its lock was taken away, nor a waiter that it is free",
            "use Redis 6 or newer",
        ),
    }
}

fn eviction(facts: &HashMap<&str, &str>) -> Finding {
    let fact = |key| facts.get(key).copied().unwrap_or("unknown");
    let (limit, policy) = (fact("maxmemory"), fact("maxmemory_policy"));
    let found = Finding::of("redis-eviction", format!("maxmemory-policy is {policy}, maxmemory {limit}"));
    if limit == "0" || policy == "noeviction" {
        return found;
    }
    found.weak(
        "a server short of memory may throw away a lock that is held, and the record of its last token",
        "set maxmemory-policy to noeviction, or give the locks a server of their own",
    )
}

fn persistence(facts: &HashMap<&str, &str>, appendfsync: Option<&str>) -> Finding {
    const CHECK: &str = "redis-persistence";
    match appendfsync {
        _ if facts.get("aof_enabled") != Some(&"1") => Finding::of(CHECK, "the append-only file is off").weak(
            "after a restart locks are free whose commands still run; tokens still grow, by the server's clock",
            "set appendonly yes and appendfsync always",
        ),
        Some("always") => Finding::of(CHECK, "the append-only file is on, and written before a lock counts"),
        Some(late) => Finding::of(CHECK, format!("the append-only file is on, with appendfsync {late}")).weak(
            "a crash of the server's machine can forget the last grants, and let a second holder in",
            "set appendfsync always",
        ),
        None => Finding::of(CHECK, "the append-only file is on, but this user may not see appendfsync").weak(
            "unless it is always, a crash of the server's machine can forget the last grants",
            "let this user run CONFIG GET, or look yourself: appendfsync always",
        ),
    }
}

fn role(facts: &HashMap<&str, &str>) -> Finding {
    let fact = |key| facts.get(key).copied().unwrap_or("unknown");
    let found = |what: String| Finding::of("redis-role", format!("the server is a {what}"));
    match fact("role") {
        "slave" => found(format!("replica of {}:{}", fact("master_host"), fact("master_port"))).broken(
            "a replica takes no locks, or forgets those that it took when it hears from its master",
            "name the master in the URL, or let sentinels tell who it is: redis+sentinel://h1,h2,h3/NAME",
        ),
        role => found(role.to_owned()),
    }
}

fn replication(facts: &HashMap<&str, &str>, waited_for: u32) -> Finding {
    let replicas: u32 = facts.get("connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
    let what = format!("{replicas} replica(s), of which {waited_for} must have a lock before it counts");
    let found = Finding::of("redis-replication", what);
    if waited_for >= replicas {
        return found;
    }
    found.weak(
        "a replica that becomes the master may not have heard of a lock that is held",
        format!("add wait-replicas={replicas} to the URL, or let only so many replicas become the master"),
    )
}
