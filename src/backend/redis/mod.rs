//! Locks on one Redis, or on what stands for one: the master of a Sentinel group, the node of a cluster.
//!
//! The lock is the plain string `dlock:NAME` with the owner in it and an expiry, the one that every
//! `SET … NX PX` program knows. All else lies under `{dlock:NAME}:…`, in the same cluster slot; see
//! `common.lua` for what. Each verb is one script, atomic on the server and safe to repeat.
//!
//! The token is the greater of the last one plus one and the server's time in microseconds, so it grows
//! even over the loss of all data, as long as the server's clock does.
//!
//! What a plain Redis cannot promise: a server that loses its data, in a restart or a failover, grants a
//! newcomer what is still held. Waiters tell it whom they have seen, and keep the lock for that holder's whole
//! ttl: it may have renewed its lease after they looked. That closes the gap while there are any waiters;
//! `wait-replicas=N` in the URL counts a grant or renewal only once so many replicas have it.
//!
//! Whoever waits or holds watches keys by client-side caching (Redis 6): the server pushes a message when
//! one of them changes for whatever reason, be it `DEL`, `FLUSHALL`, expiry or eviction. That needs no
//! configuration and no other permission than reading the keys. A server that cannot is asked more often.

pub mod answer;
pub mod connection;
pub mod doctor;
pub mod server;
pub mod status;
pub mod target;

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use async_trait::async_trait;
use redis::cmd;

use super::{
    Address, Ask, Attempt, Backend, Busy, Checkup, DEFAULT_HISTORY, Ending, Forget, Forgotten, KEPT_FOR_THE_LATE,
    Lease, Page, Patience, Reheld, Released, Renewal, Revoke, Revoked,
};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::{Grant, Holder, LastRun, LockName, LockState, OwnerId};
use answer::{Acquire, NotRenewed, Seen};
use server::{Server, Watch};
use status::Look;
use target::Target;

/// A verb as Lua, which the server runs in one atomic step.
pub type Script = LazyLock<redis::Script>;

/// A verb of one Redis, or of a node of a Redlock: the file named, after what all of them share and what those beside the
/// caller share.
macro_rules! script {
    ($file:literal) => {
        $crate::backend::redis::Script::new(|| {
            let all = concat!(include_str!("../redis/prelude.lua"), include_str!("common.lua"), include_str!($file));
            ::redis::Script::new(all)
        })
    };
}
pub(super) use script;

static ACQUIRE: Script = script!("acquire.lua");
static RENEW: Script = script!("renew.lua");
static RELEASE: Script = script!("release.lua");
static REHOLD: Script = script!("rehold.lua");
static REVOKE: Script = script!("revoke.lua");
static FORGET: Script = script!("forget.lua");

pub const PARAMETERS: &[&str] = &["db", "wait-replicas", "sentinel-username", "sentinel-password-file"];

pub const NO_ARGS: &[&str] = &[];

/// A Redis server counts expiry in whole milliseconds, and looks at its clock once a command. For clocks that differ in
/// speed every deadline leaves a hundredth.
const SLACK: Duration = Duration::from_millis(2);

/// A waiter that has not asked again for this long is taken for dead.
const PLACE: Duration = Duration::from_secs(6);
/// How often a waiter asks although nothing seems to change.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// The second in the queue asks so often, to notice soon that the first does not come; the third half as often, and
/// so on.
const NEXT_ASKS_EVERY: Duration = Duration::from_millis(500);
/// How often it asks a server that cannot push.
const ASK_EVERY_WITHOUT_PUSHES: Duration = Duration::from_millis(250);

pub struct Redis {
    server: Server,
    prefix: String,
    /// How many replicas must have a grant before it counts.
    replicas: u32,
    watch: Watch,
    /// With when we asked.
    seen: Option<(Instant, Seen)>,
    /// An acquire of ours got no answer: it may still arrive, after we have left.
    unanswered: bool,
}

impl Redis {
    pub fn open(address: &Address, patience: Patience) -> Result<Redis> {
        let prefix = prefix(address)?;
        let replicas = address.param("wait-replicas").unwrap_or("0").parse();
        let replicas = replicas.context("wait-replicas is a number").context(Fault::Config)?;
        let server = Server::new(Target::new(address)?, patience);
        Ok(Redis { server, prefix, replicas, watch: Watch::new(), seen: None, unanswered: false })
    }

    fn keys(&self, name: &LockName) -> Vec<String> {
        keys(&self.prefix, name, &["slots"])
    }

    /// Who is in the way, what to watch, and when to ask again.
    fn busy(&mut self, ask: &Ask, from: Instant, reply: answer::Busy) -> Busy {
        let answer::Busy { ahead, again, value, holder, mut seen } = reply;
        self.watch = lock_and_note(&self.prefix, &ask.name, &ask.who.owner, value);
        // Only the first in the queue need see the lock change; the others are told when it is their turn.
        if ahead > 0 {
            self.watch.remove(0);
        }
        let holder = holder.map(|owner| status::contender(owner, &seen.details, None));
        // A foreign program may give a lock the time again that it had when we saw it first.
        if let Some((_, before)) = self.seen.take()
            && seen.details.is_empty()
            && before.owner == seen.owner
        {
            seen.lasts = seen.lasts.max(before.lasts);
        }
        let every = match ahead {
            _ if self.server.cannot_push => ASK_EVERY_WITHOUT_PUSHES,
            // Often enough to see every renewal, so that one that the server loses is missed.
            0 if !seen.lasts.is_zero() => (seen.lasts / 3).clamp(ASK_EVERY_WITHOUT_PUSHES, ASK_EVERY),
            0 => ASK_EVERY,
            ahead => ASK_EVERY.min(NEXT_ASKS_EVERY * ahead),
        };
        self.seen = Some((from, seen));
        // One millisecond more than the server said: it counts whole ones.
        let again = again.map_or(every, |again| (again + Duration::from_millis(1)).min(every));
        Busy { holder, ahead: usize::try_from(ahead).ok(), ask_again: clock::now() + again }
    }

    /// Gives up our place in the queue, or what was granted.
    async fn leave(&mut self, ask: &Ask, unanswered: &str) -> Result<()> {
        self.watch.clear();
        let args = [ask.who.owner.as_str(), "", "0", "", "", unanswered];
        self.server.run::<Released>(&RELEASE, &self.keys(&ask.name), &args).await?;
        Ok(())
    }

    /// Waits until so many replicas have what this connection wrote. Nothing else is sent on it meanwhile.
    async fn replicated(&mut self) -> Result<()> {
        if self.replicas == 0 {
            return Ok(());
        }
        let within = millis(self.server.allowed() / 2);
        let have: u32 = self.server.call(cmd("WAIT").arg(self.replicas).arg(&within)).await?;
        if have < self.replicas {
            let few = format!("only {have} of {} replicas confirmed it within {within} ms", self.replicas);
            return Err(Fault::Unreachable.because(few));
        }
        Ok(())
    }
}

/// In the order in which `prelude.lua` unpacks them, and after them the scripts of a backend its own.
pub fn keys(prefix: &str, name: &LockName, own: &[&str]) -> Vec<String> {
    let shared =
        ["held", "queue", "places", "details", "token", "last", "once", "note:", "earlier", "success", "holders"];
    let beside = shared.iter().chain(own).map(|part| beside(prefix, name, part));
    std::iter::once(format!("{prefix}{name}")).chain(beside).collect()
}

/// A key beside the lock, in the same cluster slot.
pub fn beside(prefix: &str, name: &LockName, part: &str) -> String {
    format!("{{{prefix}{name}}}:{part}")
}

/// What a contender watches: the lock with what it holds, and the notes that are left for it.
pub fn lock_and_note(prefix: &str, name: &LockName, owner: &OwnerId, value: Option<String>) -> Watch {
    vec![(format!("{prefix}{name}"), value), (beside(prefix, name, &format!("note:{owner}")), None)]
}

/// What the keys of all locks begin with.
pub fn prefix(address: &Address) -> Result<String> {
    let prefix = address.param("prefix").unwrap_or("dlock:");
    if prefix.contains(['{', '}']) {
        return Err(Fault::Config.because("a prefix for Redis must not have braces: they choose the cluster slot"));
    }
    Ok(prefix.to_owned())
}

/// What `release.lua` is told of the ending: for how long the lock stays taken, the run and its once key, how many runs to
/// remember, and when this one succeeded (ms), if it did.
pub fn ending_args(ending: &Ending) -> [String; 5] {
    // Up to whole milliseconds: held a little too long rather than too short.
    let hold = ending.hold_until.map_or(Duration::ZERO, |until| until.remaining() + Duration::from_micros(999));
    let run = ending.last_run.as_ref();
    let success = run.filter(|run| run.succeeded());
    let once = success.and_then(|run| run.once.clone()).unwrap_or_default();
    let since_epoch = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).ok().map(millis);
    let success_ms = success.and_then(|run| run.ended_at).and_then(since_epoch).unwrap_or_default();
    let run = run.map(LastRun::to_json).unwrap_or_default();
    [millis(hold), run, once, ending.keep.to_string(), success_ms]
}

/// What `revoke.lua` is told.
pub fn revoke_args(from: &Holder, how: &Revoke) -> Option<[String; 7]> {
    let token = from.fencing_token.map(|token| token.to_string()).unwrap_or_default();
    let (how, reason) = match how {
        Revoke::Safely { reason } => ("safely", reason),
        Revoke::Now { reason } => ("now", reason),
    };
    let (run, keep) = (LastRun::cut_short(from, reason).to_json(), millis(KEPT_FOR_THE_LATE));
    Some([from.owner.clone()?, token, how.to_owned(), reason.clone(), run, DEFAULT_HISTORY.to_string(), keep])
}

pub fn grant_from(from: Instant, ttl: Duration) -> Grant {
    Grant { from, ttl, slack: SLACK }
}

pub fn millis(span: Duration) -> String {
    span.as_millis().to_string()
}

pub fn flag(set: bool) -> &'static str {
    if set { "1" } else { "0" }
}

#[async_trait(?Send)]
impl Backend for Redis {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.server.connect().await?;
        let unanswered = std::mem::replace(&mut self.unanswered, true);
        let from = clock::now();
        let (mode, slots, ttl) = (ask.mode.to_string(), ask.mode.slots().to_string(), millis(ask.ttl));
        let once = ask.once.as_deref().unwrap_or("");
        let (place, who) = (millis(PLACE), ask.who.to_json());
        let us = [ask.who.owner.as_str(), &mode, &slots, &ttl, flag(ask.queue), &place, once, &who];
        let seen = match &self.seen {
            Some((asked, seen)) => {
                let (left, lasts) = (millis((*asked + seen.left).remaining()), millis(seen.lasts));
                [seen.token.clone(), seen.owner.clone(), seen.details.clone(), left, lasts]
            }
            None => ["0", "", "", "0", "0"].map(str::to_owned),
        };
        let args: Vec<&str> = us.into_iter().chain(seen.iter().map(String::as_str)).collect();
        let reply = self.server.run(&ACQUIRE, &self.keys(&ask.name), &args).await?;
        self.unanswered = unanswered;
        Ok(match reply {
            Acquire::Granted { token, slot, ttl, value } => {
                self.watch = lock_and_note(&self.prefix, &ask.name, &ask.who.owner, Some(value));
                if let Err(error) = self.replicated().await {
                    // We are going to ask again: there must be no word that we have left for good.
                    self.leave(ask, flag(false)).await.ok();
                    return Err(error);
                }
                Attempt::Granted(ask.lease(token, slot, grant_from(from, ttl)))
            }
            Acquire::Busy(busy) => Attempt::Busy(self.busy(ask, from, busy)),
            Acquire::AlreadyRan => Attempt::AlreadyRan,
            Acquire::OtherSlots(theirs) => ask.other_slots("another contender", theirs),
        })
    }

    async fn changed(&mut self) -> Result<()> {
        self.server.changed(&self.watch).await;
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        self.leave(ask, flag(self.unanswered)).await
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        self.server.connect().await?;
        let from = clock::now();
        let args = [lease.owner.as_str(), &millis(lease.grant.ttl)];
        if let NotRenewed(Some(why)) = self.server.run(&RENEW, &self.keys(&lease.name), &args).await? {
            return Ok(why);
        }
        self.replicated().await?;
        Ok(Renewal::Held(grant_from(from, lease.grant.ttl)))
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        self.watch.clear();
        let (token, [hold, run, once, runs, succeeded]) = (lease.token.to_string(), ending_args(ending));
        let args = [lease.owner.as_str(), &token, &hold, &run, &once, flag(self.unanswered), &runs, &succeeded];
        self.server.run(&RELEASE, &self.keys(&lease.name), &args).await
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        self.server.run(&REHOLD, &self.keys(name), &[owner.as_str(), &millis(ttl)]).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        Ok(self.server.run::<Look>(&status::INSPECT, &self.keys(name), NO_ARGS).await?.of(name))
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        self.server.run(&FORGET, &self.keys(name), &[what.once().unwrap_or_default()]).await
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        status::list(self, after).await
    }

    async fn examine(&mut self) -> Result<Checkup> {
        Ok(doctor::examine(&mut self.server, self.replicas).await?.0)
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        let Some(args) = revoke_args(from, how) else { return Ok(Revoked::NotHeld) };
        self.server.run(&REVOKE, &self.keys(name), &args).await
    }
}
