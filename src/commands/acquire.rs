//! `dlock acquire`, `renew` and `release`: a lock for steps that cannot be wrapped. Nobody keeps it alive
//! but its ttl, and nobody is ended when it runs out: the fencing token matters more here than anywhere.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use serde_json::json;

use super::block_on;
use super::run::{ancestry, take};
use crate::backend::{self, Lease, Reheld, within};
use crate::clock::millis;
use crate::config::{AcquireJob, Extension, OwnedLockJob};
use crate::exit::{Exit, Fault};
use crate::lock::Revocation;
use crate::report::{Voice, print};

pub fn acquire(order: AcquireJob, voice: Voice) -> Result<Exit> {
    let (as_json, address, patience) = (order.json, order.job.service.address.clone(), order.job.service.patience);
    let lease = match take(order.job, voice)? {
        Ok(lease) => lease,
        Err(exit) => return Ok(fail_the_eval(exit)),
    };
    let printed = print(if as_json { json_of(&lease) } else { assignments(&lease) });
    if printed.is_err() {
        // Who was not told of a lock will not let go of it.
        let mut backend = backend::open(&address, patience)?;
        block_on(within(patience.connect, backend.rehold(&lease.name, &lease.owner, Duration::ZERO)))?;
        return Err(Fault::Internal.because("cannot write to standard output: the lock was let go again"));
    }
    Ok(Exit::OK)
}

/// `eval` of nothing succeeds, so that `eval "$(dlock acquire …)"` would go on without the lock. Prints what makes it
/// fail with our exit code, and forgets an earlier lock's owner and token; `-E 0` makes no lock of it, either.
pub fn fail_the_eval(exit: Exit) -> Exit {
    if !std::io::stdout().is_terminal() && !std::env::args_os().any(|word| word == "--json") {
        let code = if exit == Exit::OK { Exit::BUSY } else { exit.code() };
        // Whoever does not read this does not eval it.
        let _ = write!(std::io::stdout(), "DLOCK_OWNER=\nDLOCK_FENCING_TOKEN=$(exit {code})\n");
    }
    exit
}

/// Lets it live for its ttl from now on, or ends it.
pub fn change(order: &OwnedLockJob) -> Result<Exit> {
    let mut backend = backend::open(&order.service.address, order.service.patience)?;
    let (name, owner) = (&order.name, &order.owner);
    let patience = order.service.patience.connect;
    let reheld = block_on(async {
        let ttl = match order.extension {
            Extension::To(ttl) => ttl,
            Extension::AsBefore(unknown) => {
                let state = within(patience, backend.inspect(name)).await?;
                state.holder(owner).and_then(|holder| holder.ttl).unwrap_or(unknown)
            }
            Extension::End => Duration::ZERO,
        };
        within(patience, backend.rehold(name, owner, ttl)).await
    })?;
    match reheld {
        Reheld::Done => Ok(Exit::OK),
        Reheld::NotOurs => Err(Fault::NotOurs.because(format_args!("{name} is not held by {owner} (any more)"))),
        Reheld::ForceReleased(mark) => {
            let by = Revocation::parse(&mark);
            Err(Fault::NotOurs.because(format_args!(
                "{} took {name} away with force-release --now ({}): stop what needs it",
                by.operator(),
                by.reason
            )))
        }
        Reheld::Revoked(mark) => {
            let by = Revocation::parse(&mark);
            let (operator, reason) = (by.operator(), &by.reason);
            Err(Fault::NotOurs.because(format_args!("{operator} takes {name} away ({reason}): stop what needs it")))
        }
        // Nothing was renewed: that is fine only for whom the run itself ends before its lease does.
        Reheld::Running if order.extension != Extension::End && ancestry::is_inside(name, owner) => Ok(Exit::OK),
        Reheld::Running => Err(Fault::Usage
            .because(format_args!("{name} is held by a dlock run, which renews it and lets go of it by itself"))),
    }
}

/// Names, owners and numbers need no quotes in any shell, nor in a CI service's environment file.
fn assignments(lease: &Lease) -> String {
    let slot = lease.slot.map(|slot| format!("DLOCK_SLOT={slot}\n")).unwrap_or_default();
    let (name, owner, token) = (&lease.name, &lease.owner, lease.token);
    format!("DLOCK_NAME={name}\nDLOCK_OWNER={owner}\nDLOCK_FENCING_TOKEN={token}\n{slot}")
}

fn json_of(lease: &Lease) -> String {
    let ttl = millis(lease.grant.ttl);
    let (name, owner, token) = (&lease.name, &lease.owner, lease.token);
    format!("{}\n", json!({"name": name, "owner": owner, "fencing_token": token, "slot": lease.slot, "ttl_ms": ttl}))
}
