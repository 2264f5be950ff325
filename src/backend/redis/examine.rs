//! What the doctor wants to know about a Redis server: whether it keeps what it was given.

use std::collections::HashMap;

use anyhow::{Context, Result};

use super::link::refusal;
use super::resp::{Value, command};
use super::server::Server;
use crate::backend::{Checkup, Finding};
use crate::clock;

/// `replicas` is how many the locks wait for.
pub async fn examine(server: &mut Server, replicas: u32) -> Result<Checkup> {
    let before = clock::wall();
    let time = server.call(&[command!["TIME"]]).await?.remove(0);
    let round_trip = clock::wall().duration_since(before).unwrap_or_default();
    let offset = clock_offset(&time, before + round_trip / 2);
    let info = server.call(&[command!["INFO"]]).await?.remove(0);
    let findings = match &info {
        Value::Error(error) => vec![Finding::weak(
            "redis-info",
            format!("{:#}", refusal(error)),
            "whether this server evicts keys or forgets them in a restart cannot be seen",
            "let this user run INFO, or look yourself: maxmemory-policy noeviction, appendonly yes",
        )],
        info => {
            let text = info.text().context("INFO without a text")?;
            let facts: HashMap<&str, &str> = text.lines().filter_map(|line| line.trim_end().split_once(':')).collect();
            vec![version(&facts), eviction(&facts), persistence(&facts), replication(&facts, replicas)]
        }
    };
    Ok(Checkup { findings, clock_offset_us: offset })
}

fn clock_offset(time: &Value, ours: std::time::SystemTime) -> Option<i64> {
    let [seconds, micros] = time.items() else { return None };
    let theirs = seconds.number::<i64>()? * 1_000_000 + micros.number::<i64>()?;
    let ours = ours.duration_since(std::time::UNIX_EPOCH).ok()?.as_micros();
    Some(theirs - i64::try_from(ours).ok()?)
}

fn version(facts: &HashMap<&str, &str>) -> Finding {
    const CHECK: &str = "redis-version";
    let version = facts.get("redis_version").copied().unwrap_or("unknown");
    let what = format!("the server is version {version}");
    match version.split('.').next().and_then(|major| major.parse::<u32>().ok()) {
        Some(major) if major >= 6 => Finding::fine(CHECK, what),
        _ => Finding::weak(
            CHECK,
            what,
            "it cannot tell a holder at once that its lock was taken away, nor a waiter that it is free",
            "use Redis 6 or newer",
        ),
    }
}

fn eviction(facts: &HashMap<&str, &str>) -> Finding {
    const CHECK: &str = "redis-eviction";
    let fact = |key| facts.get(key).copied().unwrap_or("unknown");
    let (limit, policy) = (fact("maxmemory"), fact("maxmemory_policy"));
    let what = format!("maxmemory-policy is {policy}, maxmemory {limit}");
    if limit == "0" || policy == "noeviction" {
        return Finding::fine(CHECK, what);
    }
    Finding::weak(
        CHECK,
        what,
        "a server short of memory may throw away a lock that is held, and the record of its last token",
        "set maxmemory-policy to noeviction, or give the locks a server of their own",
    )
}

fn persistence(facts: &HashMap<&str, &str>) -> Finding {
    const CHECK: &str = "redis-persistence";
    if facts.get("aof_enabled") == Some(&"1") {
        return Finding::fine(CHECK, "the append-only file is on");
    }
    Finding::weak(
        CHECK,
        "the append-only file is off",
        "after a restart locks are free whose commands still run; tokens still grow, by the server's clock",
        "set appendonly yes and appendfsync always",
    )
}

fn replication(facts: &HashMap<&str, &str>, waited_for: u32) -> Finding {
    const CHECK: &str = "redis-replication";
    let replicas: u32 = facts.get("connected_slaves").and_then(|count| count.parse().ok()).unwrap_or(0);
    let what = format!("{replicas} replica(s), of which {waited_for} must have a lock before it counts");
    if waited_for >= replicas {
        return Finding::fine(CHECK, what);
    }
    Finding::weak(
        CHECK,
        what,
        "a replica that becomes the master may not have heard of a lock that is held",
        format!("add wait-replicas={replicas} to the URL, or let only so many replicas become the master"),
    )
}
