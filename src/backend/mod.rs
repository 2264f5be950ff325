//! What dlock asks of a lock service, and the only place that knows how many kinds there are.
//!
//! A backend speaks its protocol and nothing else: it knows no child process, signal, terminal, retry
//! policy or exit code. Rules every backend keeps:
//!
//! * A verb may be dropped at any `await` because its caller's patience ended. Whatever was in flight
//!   may then still be applied; the next verb works on a fresh connection and repeats safely.
//! * `Err` means *we do not know*. What the server says for certain (busy, lost, revoked) is a value.
//! * An [`Instant`] that a lease counts from is read before the request that sets it is written.

mod address;
mod doctor;
#[cfg(feature = "etcd")]
pub mod etcd;
pub mod file;
#[cfg(feature = "mysql")]
pub mod mysql;
#[cfg(feature = "net")]
mod net;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "redis")]
pub mod redlock;
#[cfg(any(feature = "mysql", feature = "postgres"))]
pub mod sql;
#[cfg(any(feature = "mysql", feature = "postgres"))]
mod sslmode;
#[cfg(feature = "net")]
mod tls;
#[cfg(feature = "zookeeper")]
pub mod zookeeper;

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs::File;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;

use crate::clock::Instant;
use crate::config::nearest;
use crate::exit::Fault;
use crate::lock::{Contender, Grant, Holder, Identity, LastRun, LockName, LockState, Mode, OwnerId, Token, rounded};
use crate::report::describe;
pub use address::{Address, COMMON, Host};
pub use doctor::{Checkup, Finding, Verdict};
pub use file::{default_address as file_default_address, held_by_root, linger};

/// What a contender wants.
#[derive(Clone, Debug)]
pub struct Ask {
    pub name: LockName,
    pub who: Identity,
    pub mode: Mode,
    pub ttl: Duration,
    /// Whether to take a place in the queue if the lock is busy, or to leave no trace.
    pub queue: bool,
    /// Be told [`Attempt::AlreadyRan`] instead of being granted the lock if a successful run with this
    /// key is on record.
    pub once: Option<String>,
}

impl Ask {
    /// What is granted on a server, where nothing of this process keeps the lock.
    fn lease(&self, token: Token, slot: Option<u32>, grant: Grant) -> Lease {
        let (name, owner) = (self.name.clone(), self.who.owner.clone());
        Lease { name, owner, token, slot, grant, descriptors: Vec::new() }
    }

    /// Whether this outcome ends the wait of whoever asked, so that its place in the queue can go.
    fn is_over(&self, attempt: &Result<Attempt>) -> bool {
        match attempt {
            Ok(Attempt::Granted(_)) => false,
            Ok(Attempt::Busy(_)) => !self.queue,
            Ok(Attempt::OtherSlots(_) | Attempt::AlreadyRan) => true,
            Err(error) => matches!(Fault::of(error), Fault::NotOurs | Fault::StaleToken),
        }
    }

    /// The outcome if a contender uses the lock with another number of slots.
    fn differs_from(&self, other: Contender) -> Attempt {
        self.other_slots(describe(&other), other.mode)
    }

    fn other_slots(&self, who: impl Display, theirs: Mode) -> Attempt {
        let (theirs, ours) = (theirs.slots(), self.mode.slots());
        Attempt::OtherSlots(format!(
            "{who} uses it with --slots {theirs}, not {ours}: all contenders must name the same number"
        ))
    }

    /// Refuses a token if the server's counter of tokens went back: it is not greater than all on record. With shares and
    /// slots a holder may end before another one asks for its token, so that only the `next` one that the counter gives
    /// tells. No dlock makes one that does not fit an i64: such a record is nonsense, and refuses nobody.
    fn check_token(
        &self,
        [own, next]: [Token; 2],
        recorded: impl IntoIterator<Item = Token>,
        [cause, advice]: [&str; 2],
    ) -> Result<()> {
        let newest = if self.mode == Mode::Exclusive { own } else { next };
        let possible = recorded.into_iter().filter(|token| i64::try_from(token.0).is_ok());
        let Some(recorded) = possible.max().filter(|recorded| *recorded >= newest) else { return Ok(()) };
        Err(Fault::StaleToken.because(format_args!(
            "its fencing token would be {newest}, but an earlier run had {recorded}: {cause}. Nothing was started. \
             {advice}"
        )))
    }
}

#[derive(Debug)]
pub enum Attempt {
    Granted(Lease),
    Busy(Busy),
    /// Someone uses the lock with another number of slots; the text says who and how.
    OtherSlots(String),
    /// The `once` key is on record already.
    AlreadyRan,
}

#[derive(Clone, Debug)]
pub struct Busy {
    /// Who holds it, if that is known. Nobody if the lock is free and we may not have it yet.
    pub holder: Option<Holder>,
    /// How many waiters are served before us, holders not counted; `None` where the backend keeps no order.
    pub ahead: Option<usize>,
    /// Ask again by then even if nothing seems to change: our place must be kept alive, or the holder's
    /// lease ends.
    pub ask_again: Instant,
}

/// A lock that is ours.
#[derive(Clone, Debug)]
pub struct Lease {
    pub name: LockName,
    pub owner: OwnerId,
    pub token: Token,
    /// Which of the slots, for [`Mode::Slots`].
    pub slot: Option<u32>,
    pub grant: Grant,
    /// Descriptors that keep the lock held, for whoever has to outlive us; empty for remote backends.
    pub descriptors: Vec<Arc<File>>,
}

#[derive(Debug)]
pub enum Renewal {
    Held(Grant),
    /// The server says that the lock is not ours; the text says how it knows.
    Lost(String),
    /// The same, because an operator has freed it on the spot. The text is the operator's reason.
    ForceReleased(String),
    /// An operator wants it back; still ours until the lease ends. The text is the operator's reason.
    Revoked(String),
}

/// How many runs a lock remembers, unless its runs say otherwise.
pub const DEFAULT_HISTORY: usize = 20;

/// How a lease is given back.
#[derive(Clone, Debug)]
pub struct Ending {
    /// `None` if there was no run: the lock is only to be held on to.
    pub last_run: Option<LastRun>,
    /// How many runs the lock remembers; the last one always.
    pub keep: usize,
    /// Keep others out until then, without us.
    pub hold_until: Option<Instant>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Released {
    Done,
    /// It was not ours any more; nothing was changed.
    NotOurs,
    /// The same, because an operator had freed it on the spot, for this reason.
    ForceReleased(String),
}

/// Why a release failed although the lock is free: what was to be written down about the run is not. The root cause.
#[derive(Debug)]
pub struct Unrecorded(pub String);

impl std::fmt::Display for Unrecorded {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Unrecorded {}

/// What became of a hold whose end was to be moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reheld {
    Done,
    /// It has ended, or was never this owner's.
    NotOurs,
    /// An operator has freed it on the spot, for this reason.
    ForceReleased(String),
    /// An operator wants the lock back; the hold ends when it was going to.
    Revoked(String),
    /// A `dlock run` of this owner keeps the lock alive by itself.
    Running,
}

/// How an operator takes a lock away.
#[derive(Clone, Debug)]
pub enum Revoke {
    /// Mark it; the holder lets go, or its lease runs out.
    Safely { reason: String },
    /// Free it on the spot, whatever its holder is doing. The holder learns of the reason when it learns of its loss;
    /// where a run is cut short by it, that and the reason become the last run in the same step.
    Now { reason: String },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Revoked {
    Marked,
    Freed,
    /// The holder that was looked at does not hold it any more.
    NotHeld,
    /// It cannot be done with this holder; the text says why and what can.
    Impossible(String),
}

/// Which records of a lock to remove.
#[derive(Clone, Debug)]
pub enum Forget {
    /// Its history and its `--once` keys: as if it had never been used, but for its tokens. Not while it is held.
    Everything,
    /// The record that a run with this `--once` key succeeded.
    Once(String),
}

impl Forget {
    /// The key, if it is only about one.
    fn once(&self) -> Option<&str> {
        match self {
            Forget::Everything => None,
            Forget::Once(key) => Some(key),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgotten {
    Done,
    /// There was nothing to forget.
    Nothing,
    /// It is held, or somebody waits for it.
    InUse,
}

/// A part of all locks of a backend, so that a long list needs little memory.
#[derive(Debug, Default)]
pub struct Page {
    pub locks: Vec<LockState>,
    /// Hand this in to get the next page; `None` after the last.
    pub next: Option<String>,
}

/// The next names of a list, where a server tells all of them at once, and what a [`Page`] says if there are more.
fn next_names(list: &mut BTreeSet<LockName>, most: usize) -> (Vec<LockName>, Option<String>) {
    let names = std::iter::from_fn(|| list.pop_first()).take(most).collect();
    (names, (!list.is_empty()).then(|| "more".to_owned()))
}

#[async_trait(?Send)]
pub trait Backend: Send {
    /// Takes the lock, or our place in the queue. Idempotent under the same owner: asking again after
    /// an unknown outcome finds what was granted, and keeps our place.
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt>;

    /// Returns when it is worth asking (while waiting) or renewing (while holding) again: a hint, which
    /// may come early or, if the server cannot notify, never.
    async fn changed(&mut self) -> Result<()>;

    /// Gives up our place in the queue, and the lock itself should an unanswered request have got it.
    async fn withdraw(&mut self, ask: &Ask) -> Result<()>;

    /// Extends the lease.
    async fn renew(&mut self, lease: &Lease) -> Result<Renewal>;

    /// Notes that a run began under this lease, where the lease itself vanishes from the server with its holder: without
    /// it nobody could tell later that there was a run. Called once the run has lasted a moment.
    async fn note_start(&mut self, _lease: &Lease) -> Result<()> {
        Ok(())
    }

    /// Lets go of the lock if it is still ours, and records how the run ended: one atomic step.
    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released>;

    /// Moves the end of what a release with `hold_until` has left behind, for its owner, from any process:
    /// to `ttl` from now or, with zero, to now.
    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld>;

    async fn inspect(&mut self, name: &LockName) -> Result<LockState>;

    /// Removes records of a lock. Never the counter of its tokens: they must not go back.
    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten>;

    async fn list(&mut self, after: Option<String>) -> Result<Page>;

    /// For `dlock doctor`: every setting and state of the server that bears on the promise. That a lock can
    /// be taken, renewed and released is tried by the doctor itself.
    async fn examine(&mut self) -> Result<Checkup>;

    /// Takes the lock away from exactly the holder that was looked at.
    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked>;
}

/// How long a backend may wait inside a verb; its callers keep their own time as well.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// For the first answer.
    pub connect: Duration,
    /// For every later request.
    pub attempt: Duration,
}

/// No client library is trusted to give up by itself: every verb is called through this.
pub async fn within<T>(patience: Duration, verb: impl Future<Output = Result<T>>) -> Result<T> {
    match tokio::time::timeout(patience, verb).await {
        Ok(answer) => answer,
        Err(_) => {
            let patience = rounded(patience);
            Err(Fault::Unreachable.because(format_args!("no answer within {patience}")))
        }
    }
}

/// How long what a holder is to learn of its loss is kept for it, where it is kept apart: nobody may ever come for it.
const KEPT_FOR_THE_LATE: Duration = Duration::from_secs(24 * 3600);

const FOREIGN_HOLDER: &str =
    "its holder is not dlock and would not notice that it is asked to stop; --now takes the lock away at once";

/// The record of a contender of ours is not ours any more.
fn overwritten(what: impl Display) -> String {
    format!("{what} has been overwritten: force-release --now takes it away")
}

/// What came of a place in the queue that an operator took away when it was its turn, before anything was started.
fn taken_away(reason: &str) -> anyhow::Error {
    Fault::NotOurs.because(format_args!("an operator took it away before the command was started: {reason}"))
}

/// A backend, as an address names it.
pub struct Kind {
    pub schemes: &'static [&'static str],
    /// What its URLs take beside the [`COMMON`] parameters.
    pub parameters: &'static [&'static str],
    /// Nothing is sent yet: the first verb connects.
    open: fn(&Address, Patience) -> Result<Box<dyn Backend>>,
    /// What an administrator can create beforehand, where locks live in a schema.
    schema: Option<fn(&Address) -> Result<String>>,
}

impl Kind {
    const fn new(
        schemes: &'static [&'static str],
        parameters: &'static [&'static str],
        open: fn(&Address, Patience) -> Result<Box<dyn Backend>>,
    ) -> Kind {
        Kind { schemes, parameters, open, schema: None }
    }
}

/// Every backend that was built in. A feature of the crate stands for each but files.
pub const KINDS: &[Kind] = &[
    Kind::new(&["file"], &[], |address, _| Ok(Box::new(file::FileBackend::open(address)?))),
    #[cfg(feature = "redis")]
    Kind::new(
        &["redis", "rediss", "redis+unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"],
        redis::PARAMETERS,
        |address, patience| Ok(Box::new(redis::Redis::open(address, patience)?)),
    ),
    #[cfg(feature = "redis")]
    Kind::new(&["redlock", "redlocks"], &[], |address, patience| {
        Ok(Box::new(redlock::Redlock::open(address, patience)?))
    }),
    #[cfg(feature = "etcd")]
    Kind::new(&["etcd", "etcds"], &[], |address, patience| Ok(Box::new(etcd::Etcd::open(address, patience)?))),
    #[cfg(feature = "zookeeper")]
    Kind::new(&["zookeeper", "zk", "zookeepers"], zookeeper::PARAMETERS, |address, patience| {
        Ok(Box::new(zookeeper::ZooKeeper::open(address, patience)?))
    }),
    #[cfg(feature = "postgres")]
    Kind {
        schema: Some(postgres::schema),
        ..Kind::new(&["postgres", "postgresql"], postgres::PARAMETERS, |address, patience| {
            Ok(Box::new(postgres::Postgres::open(address, patience)?))
        })
    },
    #[cfg(feature = "mysql")]
    Kind {
        schema: Some(mysql::schema),
        ..Kind::new(&["mysql", "mariadb"], mysql::PARAMETERS, |address, patience| {
            Ok(Box::new(mysql::Mysql::open(address, patience)?))
        })
    },
];

/// The backends of this dlock, by their names.
pub fn built_in() -> Vec<&'static str> {
    KINDS.iter().map(|kind| kind.schemes[0]).collect()
}

/// Which backend an address means; an error also if that does not know the address's parameters.
pub fn kind(address: &Address) -> Result<&'static Kind> {
    let scheme = address.scheme();
    let Some(kind) = KINDS.iter().find(|kind| kind.schemes.contains(&scheme)) else {
        return Err(Fault::Config.because(format_args!("dlock has no backend {scheme}://; {}", other_scheme(scheme))));
    };
    address.expect_params(kind.parameters)?;
    Ok(kind)
}

/// What to write instead of a scheme that no backend has.
fn other_scheme(scheme: &str) -> String {
    let meant = match scheme {
        "http" => "etcd",
        "https" => "etcds",
        "keydb" | "valkey" => "redis",
        "pg" => "postgres",
        "valkeys" => "rediss",
        other => other,
    };
    match nearest(meant, KINDS.iter().flat_map(|kind| kind.schemes.iter().copied())) {
        Some(near) => format!("did you mean {near}://?"),
        None => format!("this dlock has {}", built_in().join(", ")),
    }
}

/// Opens what an address names.
pub fn open(address: &Address, patience: Patience) -> Result<Box<dyn Backend>> {
    (kind(address)?.open)(address, patience)
}

pub fn schema(address: &Address) -> Result<String> {
    let Some(schema) = kind(address)?.schema else {
        let what = format!("{}:// has no schema; --backend postgres://… and mysql://… have", address.scheme());
        return Err(Fault::Usage.because(what));
    };
    schema(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_to_be_greater_than_all_that_can_be_true() {
        let (name, who) = ("n".parse().unwrap(), Identity::of_this_process("").unwrap());
        let ask = Ask { name, who, mode: Mode::Exclusive, ttl: Duration::ZERO, queue: false, once: None };
        let refused = |recorded: &[u64]| {
            let checked = ask.check_token([Token(7), Token(8)], recorded.iter().copied().map(Token), ["", ""]);
            checked.map_err(|error| format!("{error:#}")).err()
        };
        assert_eq!(refused(&[5, 6, u64::MAX]), None);
        assert!(refused(&[8, 9, 2]).unwrap().contains("an earlier run had 9"));
        assert!(refused(&[7]).unwrap().contains("an earlier run had 7"));
        assert_eq!(refused(&[]), None);
    }
}
