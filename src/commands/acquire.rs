//! `dlock acquire`, `renew` and `release`: a lock for steps that cannot be wrapped. Nobody keeps it alive
//! but its ttl, and nobody is ended when it runs out: the fencing token matters more here than anywhere.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use super::block_on;
use super::run::{is_inside, take};
use crate::backend::{Backend, Reheld, within};
use crate::cli::{AcquireArgs, Acquired, RenewArgs, RunArgs};
use crate::clock::millis;
use crate::config::{Layers, RunJob, values};
use crate::exit::{Exit, Fault};
use crate::lock::{LeaseTiming, LockName, OwnerId, Revocation};
use crate::report::{Voice, print};

pub fn acquire(args: AcquireArgs, layers: Layers, voice: &mut Voice) -> Result<Exit> {
    values::lock("acquire", &args.asking.named)?;
    let as_run = RunArgs {
        asking: args.asking,
        ttl: args.ttl,
        note: args.note,
        // Never started, only shown by `status`.
        argv: vec!["dlock".into(), "acquire".into()],
        ..RunArgs::default()
    };
    let job = RunJob::from_args(as_run, layers)?;
    let service = job.service.clone();
    let lease = match take(job, voice)? {
        Ok(lease) => lease,
        Err(exit) => return Ok(fail_the_eval(exit)),
    };
    let (name, owner, token, slot) = (&lease.name, &lease.owner, lease.token, lease.slot);
    let text = if args.json {
        let ttl = millis(lease.grant.ttl);
        format!("{}\n", json!({"name": name, "owner": owner, "fencing_token": token, "slot": slot, "ttl_ms": ttl}))
    } else {
        // Names, owners and numbers need no quotes in any shell, nor in a CI service's environment file.
        let slot = slot.map(|slot| format!("DLOCK_SLOT={slot}\n")).unwrap_or_default();
        format!("DLOCK_NAME={name}\nDLOCK_OWNER={owner}\nDLOCK_FENCING_TOKEN={token}\n{slot}")
    };
    if print(text).is_err() {
        // Nobody was told of this lock, so nobody would release it.
        let mut backend = service.open()?;
        block_on(within(service.patience.connect, backend.rehold(name, owner, Duration::ZERO)))?;
        return Err(Fault::Internal.because("cannot write to standard output: the lock was released again"));
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

pub fn renew(args: RenewArgs, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let ttl = layers.ttl(&args.ttl)?;
    LeaseTiming::new(ttl, None).context(Fault::Usage)?;
    let service = layers.service(None)?;
    let (name, owner) = (values::lock("renew", &args.lock.named)?, owner(args.lock.owner)?);
    let (mut backend, patience) = (service.open()?, service.patience.connect);
    block_on(async {
        // Without --ttl, for as long as it was taken or last renewed, if that is known.
        let before = match args.ttl {
            Some(_) => None,
            None => within(patience, backend.inspect(&name)).await?.holder(&owner).and_then(|holder| holder.ttl),
        };
        rehold(backend.as_mut(), patience, &name, &owner, before.unwrap_or(ttl)).await
    })
}

pub fn release(args: Acquired, mut layers: Layers, _: &mut Voice) -> Result<Exit> {
    let service = layers.service(None)?;
    let (name, owner) = (values::lock("release", &args.named)?, owner(args.owner)?);
    block_on(rehold(service.open()?.as_mut(), service.patience.connect, &name, &owner, Duration::ZERO))
}

fn owner(typed: Option<String>) -> Result<OwnerId> {
    let owner = typed.or_else(|| std::env::var("DLOCK_OWNER").ok()).filter(|owner| !owner.is_empty());
    let missing = || Fault::Usage.because("whose lock? Pass what dlock acquire has printed: --owner \"$DLOCK_OWNER\"");
    owner.ok_or_else(missing)?.parse::<OwnerId>().context("--owner or $DLOCK_OWNER").context(Fault::Usage)
}

/// Holds a lock that was acquired for `ttl` from now on or, with zero, releases it.
async fn rehold(
    backend: &mut dyn Backend,
    patience: Duration,
    name: &LockName,
    owner: &OwnerId,
    ttl: Duration,
) -> Result<Exit> {
    let why = match within(patience, backend.rehold(name, owner, ttl)).await? {
        Reheld::Done => return Ok(Exit::OK),
        // Nothing was renewed: that is fine only for whom the run itself ends before its lease does.
        Reheld::Running if !ttl.is_zero() && is_inside(name, owner) => return Ok(Exit::OK),
        Reheld::Running => {
            let why = format!("{name} is held by a dlock run, which renews and releases it by itself");
            return Err(Fault::Usage.because(why));
        }
        Reheld::NotOurs => format!("{name} is not held by {owner} (any more)"),
        Reheld::ForceReleased(mark) => {
            let by = Revocation::parse(&mark);
            let how = format!("with force-release --now ({})", by.reason);
            format!("{} took {name} away {how}: stop what needs it", by.operator())
        }
        Reheld::Revoked(mark) => {
            let by = Revocation::parse(&mark);
            format!("{} takes {name} away ({}): stop what needs it", by.operator(), by.reason)
        }
    };
    Err(Fault::NotOurs.because(why))
}
