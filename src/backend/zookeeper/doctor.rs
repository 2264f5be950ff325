//! What `dlock doctor` wants to know: how many servers there are, whether the URL names them all, and which
//! ttl they grant.

use std::time::Duration;

use anyhow::Result;
use humantime::format_duration;

use super::ZooKeeper;
use super::wire::{self, Request};
use crate::backend::doctor::{Checkup, Finding, micros};
use crate::clock;

/// Where an ensemble describes itself, for everybody to read.
const CONFIGURATION: &str = "/zookeeper/config";

pub async fn examine(here: &mut ZooKeeper) -> Result<Checkup> {
    let shortest = granted(here, Duration::from_millis(1)).await?;
    let longest = granted(here, Duration::from_secs(7 * 24 * 3600)).await?;
    let (shortest, longest) = (format_duration(shortest), format_duration(longest));
    let granted = format!("the server grants a ttl from {shortest} to {longest}, and the nearer one for any other");
    let mut findings = vec![Finding::of("zookeeper-ttl", granted)];
    if let Ok(answer) = here.ensemble.call_one(Request::get_data(CONFIGURATION)).await? {
        let (text, _) = wire::read_data(&answer)?;
        let text = String::from_utf8_lossy(&text);
        let servers = text.lines().filter(|line| line.starts_with("server.") && !line.contains(":observer")).count();
        findings.push(size(servers));
        let named = here.ensemble.hosts.len();
        if named < servers {
            let found = Finding::of("zookeeper-url", format!("the URL names {named} of {servers} servers"));
            findings.push(found.weak(
                "when those fail, dlock does not find the others, and has to end the command",
                "name them all: zookeeper://h1,h2,h3",
            ));
        }
    }
    findings.push(authentication(here.ensemble.is_authenticated()));
    findings.push(Finding::of(
        "zookeeper-tokens",
        "fencing tokens are the servers' transaction numbers, which only the loss of their data takes back",
    ));
    Ok(Checkup { findings, clock_offset_us: here.server_time().map(|date| micros(date) - micros(clock::wall())) })
}

/// The ttl that a server grants if it is asked for this one.
async fn granted(here: &mut ZooKeeper, ttl: Duration) -> Result<Duration> {
    here.leave().await?;
    here.ensemble.attach(ttl).await?;
    Ok(here.ensemble.session()?.ttl)
}

fn authentication(authenticated: bool) -> Finding {
    const CHECK: &str = "zookeeper-authentication";
    if authenticated {
        return Finding::of(CHECK, "dlock logs in, and only the same user can change or delete what it writes");
    }
    Finding::of(CHECK, "dlock does not log in: everybody can change and delete what it writes").weak(
        "whoever reaches the servers can delete the node of a holder, and so let a second one in",
        "give all users of the locks a username and a password-file in the URL, or keep others away from the servers",
    )
}

fn size(servers: usize) -> Finding {
    const CHECK: &str = "zookeeper-servers";
    match servers {
        0 | 1 => Finding::of(CHECK, "one server, alone").weak(
            "while it is down no lock can be taken or kept, and with its disk go the tokens, which then start anew",
            "run an ensemble of three servers",
        ),
        2 => Finding::of(CHECK, "an ensemble of 2 servers")
            .weak("two have a quorum only together: the failure of either stops both", "add a third"),
        _ => Finding::of(CHECK, format!("an ensemble of {servers} servers")),
    }
}
