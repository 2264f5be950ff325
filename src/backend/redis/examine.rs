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
            let persistence = match facts.get("aof_enabled") {
                Some(&"1") => append_only_file(&server.call(&[command!["CONFIG", "GET", "appendfsync"]]).await?[0]),
                _ => forgetful(),
            };
            vec![role(&facts), version(&facts), eviction(&facts), persistence, replication(&facts, replicas)]
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

const PERSISTENCE: &str = "redis-persistence";

fn forgetful() -> Finding {
    Finding::weak(
        PERSISTENCE,
        "the append-only file is off",
        "after a restart locks are free whose commands still run; tokens still grow, by the server's clock",
        "set appendonly yes and appendfsync always",
    )
}

fn append_only_file(setting: &Value) -> Finding {
    let appendfsync = setting.items().get(1).and_then(Value::text);
    match appendfsync.as_deref() {
        Some("always") => Finding::fine(PERSISTENCE, "the append-only file is on, and written before a lock counts"),
        Some(late) => Finding::weak(
            PERSISTENCE,
            format!("the append-only file is on, with appendfsync {late}"),
            "a crash of the server's machine can forget the last grants, and let a second holder in",
            "set appendfsync always",
        ),
        None => Finding::weak(
            PERSISTENCE,
            "the append-only file is on, but this user may not see appendfsync",
            "unless it is always, a crash of the server's machine can forget the last grants",
            "let this user run CONFIG GET, or look yourself: appendfsync always",
        ),
    }
}

fn role(facts: &HashMap<&str, &str>) -> Finding {
    const CHECK: &str = "redis-role";
    let fact = |key| facts.get(key).copied().unwrap_or("unknown");
    match fact("role") {
        "slave" => Finding::broken(
            CHECK,
            format!("the server is a replica of {}:{}", fact("master_host"), fact("master_port")),
            "a replica takes no locks, or forgets those that it took when it hears from its master",
            "name the master in the URL, or let sentinels tell who it is: redis+sentinel://h1,h2,h3/NAME",
        ),
        role => Finding::fine(CHECK, format!("the server is a {role}")),
    }
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
