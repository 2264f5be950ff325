//! `dlock force-release`: take a lock away from its holder, having shown whose it is.

use std::io::{IsTerminal, Write};

use anyhow::Result;

use super::block_on;
use crate::backend::{Revoke, Revoked, within};
use crate::cli::ForceReleaseArgs;
use crate::clock;
use crate::config::{Layers, flag, values};
use crate::exit::{Exit, Fault};
use crate::lock::{Holder, Identity, LockName, LockState, Revocation, Token};
use crate::report::{NobodyReads, Voice, describe, escape, print};

/// More than that is read by nobody, and some backends keep less than others.
const LONGEST_REASON: usize = 500;

pub fn force_release(args: ForceReleaseArgs, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let token = flag("--token", &args.token, values::token)?;
    let service = layers.service(None)?;
    let name = &values::lock("force-release", &args.named)?;
    let patience = service.patience.connect;
    let mut backend = service.open()?;
    block_on(async {
        let state = within(patience, backend.inspect(name)).await?;
        if state.holders.is_empty() {
            say(format!("{name}: nobody holds it"))?;
            return Ok(Exit::OK);
        }
        let holders = chosen(&state, token)?;
        if !confirmed(&args, &state, &holders)? {
            say(format!("{name}: not released"))?;
            return Ok(Exit::OK);
        }
        let reason = signed(args.reason.as_deref().unwrap_or("no reason given"))?;
        let how = if args.now { Revoke::Now { reason } } else { Revoke::Safely { reason } };
        for holder in holders {
            let revoked = within(patience, backend.revoke(name, holder, &how)).await?;
            tell(&args, name, holder, revoked)?;
        }
        Ok(Exit::OK)
    })
}

/// The reason, and who gives it when.
fn signed(reason: &str) -> Result<String> {
    let who = Identity::of_this_process("")?;
    let reason = reason.chars().take(LONGEST_REASON).collect();
    let by = Some(format!("{}@{}", who.user, who.host));
    Ok(Revocation { reason, by, at: Some(clock::wall()) }.to_string())
}

/// The holders that are meant: all, or the one with the token that was named.
fn chosen(state: &LockState, token: Option<Token>) -> Result<Vec<&Holder>> {
    let meant = |holder: &&Holder| token.is_none() || holder.fencing_token == token;
    let holders: Vec<_> = state.holders.iter().filter(meant).collect();
    match token {
        Some(token) if holders.is_empty() => Err(Fault::NotOurs.because(format_args!(
            "{}: no holder has the token {token} (any more); it is held by {}",
            state.name,
            state.holders.iter().map(who).collect::<Vec<_>>().join(", "),
        ))),
        _ => Ok(holders),
    }
}

fn confirmed(args: &ForceReleaseArgs, state: &LockState, holders: &[&Holder]) -> Result<bool> {
    if args.yes {
        return Ok(true);
    }
    if !std::io::stdin().is_terminal() {
        return Err(Fault::Usage.because("force-release needs --yes where there is no terminal to ask on"));
    }
    // Where the question is asked, and not where the outcome may be piped to.
    let mut terminal = std::io::stderr();
    for holder in holders {
        writeln!(terminal, "{}", escape(format_args!("{}: held by {}", state.name, who(holder))))?;
    }
    let waiting = state.waiters.len();
    let effect = if args.now {
        "Free it at once, while the command may still run"
    } else {
        "Ask the holder to stop and release it"
    };
    write!(terminal, "{waiting} waiting. {effect}? [y/N] ")?;
    let mut answer = String::new();
    if std::io::stdin().read_line(&mut answer)? == 0 {
        writeln!(terminal)?;
    }
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn tell(args: &ForceReleaseArgs, name: &LockName, holder: &Holder, revoked: Revoked) -> Result<()> {
    let who = who(holder);
    match revoked {
        Revoked::Marked => say(format!(
            "{name}: asked the holder to stop: {who}; the next waiter gets the lock when that command or its lease has ended"
        )),
        Revoked::Freed => {
            let foreign = holder.owner.is_none() || holder.command.is_none();
            let beside = match foreign {
                false => "its command may still run for a moment beside the next one",
                true => "that program is not dlock and is not told: it runs on, beside the next one",
            };
            let unheard = match &args.reason {
                Some(_) if foreign => "; the reason is only kept for status --json",
                _ => "",
            };
            say(format!("{name}: taken from its holder: {who}; {beside}{unheard}"))
        }
        Revoked::NotHeld => say(format!("{name}: not held any more by {who}")),
        Revoked::Impossible(why) => Err(Fault::Refused.because(format_args!("{name}: {why}"))),
    }
}

fn who(holder: &Holder) -> String {
    let token = holder.fencing_token.map(|token| format!(", token {token}")).unwrap_or_default();
    format!("{}{token}", describe(holder))
}

/// Should nobody read it, what was begun is done all the same.
fn say(line: String) -> Result<()> {
    match print(format!("{}\n", escape(line))) {
        Err(error) if error.is::<NobodyReads>() => Ok(()),
        printed => printed,
    }
}
