//! What the doctor wants to know about a Redlock: every node by itself, and what they amount to together.

use anyhow::Result;
use futures_util::future::join_all;
use redis::cmd;

use super::Redlock;
use super::agreement::{self, Answering};
use crate::backend::redis::doctor as one_node;
use crate::backend::redis::server::Server;
use crate::backend::{Checkup, Finding};

pub async fn examine(redlock: &mut Redlock) -> Result<Checkup> {
    let (quorum, patience, prefix) = (redlock.nodes.quorum(), redlock.patience, redlock.prefix.clone());
    let asked = redlock.nodes.all.iter_mut().map(|node| async {
        let (host, found) = (node.server.host().to_owned(), one_node::examine(&mut node.server, 0).await);
        let process = if found.is_ok() { process(&mut node.server).await } else { None };
        (
            Answering { host, started_us: process.as_ref().map(|one| one.started_us), server: &mut node.server },
            process,
            found,
        )
    });
    let answers = join_all(asked).await;
    let nodes = answers.len();
    let (mut findings, mut missing, mut offsets, mut run_ids) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut answering = Vec::new();
    for (node, process, found) in answers {
        let host = node.host.clone();
        match found {
            Ok(found) => {
                let named = |finding: Finding| Finding { what: format!("{host}: {}", finding.what), ..finding };
                findings.extend(found.findings.into_iter().map(named));
                run_ids.extend(process.map(|process| (process.run_id, host.clone())));
                offsets.extend(found.clock_offset_us.map(|offset| (offset, host)));
                answering.push(node);
            }
            Err(error) => missing.push(format!("{host}: {error:#}")),
        }
    }
    findings.push(presence(nodes, quorum, &missing));
    findings.extend(independence(answering.len(), run_ids));
    findings.extend(clocks(&offsets));
    if answering.len() >= quorum {
        findings.extend(agreement::examine(&mut answering, &prefix, quorum, patience).await);
    }
    let clock_offset_us = offsets.iter().map(|(offset, _)| *offset).max_by_key(|offset| offset.abs());
    Ok(Checkup { findings, clock_offset_us })
}

/// A server process, by whatever address it is reached.
struct Process {
    /// What it calls itself.
    run_id: String,
    /// When it was started, by its own clock and at the latest.
    started_us: u64,
}

async fn process(server: &mut Server) -> Option<Process> {
    let (now, _): (u64, u64) = server.call(&cmd("TIME")).await.ok()?;
    let info: String = server.call(cmd("INFO").arg("server")).await.ok()?;
    let fact = |key| info.lines().find_map(|line| line.trim_end().strip_prefix(key));
    let up: u64 = fact("uptime_in_seconds:")?.parse().ok()?;
    let started_us = now.checked_sub(up)?.checked_mul(1_000_000)?;
    Some(Process { run_id: fact("run_id:")?.to_owned(), started_us })
}

/// Whether every address is a server of its own. Who may not be asked for its name says so by itself.
fn independence(answering: usize, mut run_ids: Vec<(String, String)>) -> Option<Finding> {
    const CHECK: &str = "redlock-independence";
    run_ids.sort();
    let same = |one: &&[(String, String)]| one.len() > 1;
    let chunks = run_ids.chunk_by(|one, other| one.0 == other.0).filter(same);
    let hosts = |one: &[(String, String)]| one.iter().map(|(_, host)| host.as_str()).collect::<Vec<_>>().join(" and ");
    let twice: Vec<String> = chunks.map(hosts).collect();
    if !twice.is_empty() {
        return Some(Finding::broken(
            CHECK,
            format!("one and the same server: {}", twice.join("; ")),
            "it has several votes, so that what looks like a majority is none: when it fails or forgets, two can hold a \
             lock at once",
            "name every server once, and as many as there are; each on a machine of its own",
        ));
    }
    let all = run_ids.len() == answering && answering > 1;
    all.then(|| Finding::fine(CHECK, format!("the {answering} nodes are as many servers")))
}

fn presence(nodes: usize, quorum: usize, missing: &[String]) -> Finding {
    const CHECK: &str = "redlock-nodes";
    let answering = nodes - missing.len();
    let what = format!("{answering} of {nodes} nodes answer, and {quorum} must");
    let why = || format!("of the nodes that are left, {quorum} must stay for any lock to be had or kept");
    match missing {
        [] => Finding::fine(CHECK, what),
        missing if answering >= quorum => {
            Finding::weak(CHECK, format!("{what}; {}", missing.join("; ")), why(), "bring the node back")
        }
        missing => Finding::broken(
            CHECK,
            format!("{what}; {}", missing.join("; ")),
            "without a majority no lock can be had or kept",
            "bring the nodes back; each is a Redis by itself: redis-cli -h HOST PING",
        ),
    }
}

/// How far apart the clocks of the nodes are.
fn clocks(offsets: &[(i64, String)]) -> Option<Finding> {
    const CHECK: &str = "redlock-clocks";
    const TOLERABLE_US: i64 = 1_000_000;
    let ((first, early), (last, late)) = (offsets.iter().min()?, offsets.iter().max()?);
    let spread = last - first;
    let what = format!("the clocks of the nodes are within {:.3}s of each other", spread as f64 / 1e6);
    if spread <= TOLERABLE_US {
        return Some(Finding::fine(CHECK, what));
    }
    Some(Finding::weak(
        CHECK,
        format!("{what}: {early} is behind {late}"),
        "a clock that is set while locks are held ends them early on that node; a clock that differs is likely to be set",
        "let all nodes take their time from NTP, by slewing and not by steps",
    ))
}
