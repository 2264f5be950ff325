//! A lock as an operator sees it: the shape of `dlock status --json`, whose fields are only ever added.

use std::time::SystemTime;

use serde::Serialize;
use serde::ser::SerializeMap;

use super::{Contender, History, Holder, LastRun, LockName, Mode, OwnerId, queue, rfc3339};

#[derive(Clone, Debug, Serialize)]
pub struct LockState {
    pub name: LockName,
    pub backend: &'static str,
    pub state: State,
    #[serde(serialize_with = "mode_name")]
    pub mode: Mode,
    pub slots: u32,
    pub holders: Vec<Holder>,
    pub waiters: Vec<Contender>,
    #[serde(serialize_with = "last_run")]
    pub last_run: Option<LastRun>,
    /// The runs before it, newest first; for `history`.
    #[serde(skip)]
    pub earlier: Vec<LastRun>,
    #[serde(flatten, serialize_with = "last_success")]
    pub last_success_at: Option<SystemTime>,
    /// What each node says by itself, where the lock is on several independent ones.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeState>,
}

/// One node's part of a lock: whom it has as the holder, or why it does not say.
#[derive(Clone, Debug, Serialize)]
pub struct NodeState {
    pub node: String,
    pub owner: Option<String>,
    pub error: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Free,
    Held,
    /// Held, and its holder has been asked to release it.
    Revoked,
}

impl LockState {
    /// A lock nobody ever used: not an error, just free.
    pub fn free(name: LockName, backend: &'static str) -> LockState {
        LockState {
            name,
            backend,
            state: State::Free,
            mode: Mode::Exclusive,
            slots: 1,
            holders: Vec::new(),
            waiters: Vec::new(),
            last_run: None,
            earlier: Vec::new(),
            last_success_at: None,
            nodes: Vec::new(),
        }
    }

    /// A lock with these contenders, in the order of the queue, of whom the queue's rule says who holds it.
    pub fn of_queue(
        name: LockName,
        backend: &'static str,
        queue: Vec<Contender>,
        history: impl Into<History>,
    ) -> LockState {
        let holding: Vec<usize> = queue::holders(&queue).collect();
        let (holders, waiters): (Vec<_>, Vec<_>) =
            queue.into_iter().enumerate().partition(|(at, _)| holding.contains(at));
        let contenders = |all: Vec<(usize, Contender)>| all.into_iter().map(|(_, one)| one).collect();
        LockState::of(name, backend, contenders(holders), contenders(waiters), history)
    }

    /// A lock with these holders and waiters.
    pub fn of(
        name: LockName,
        backend: &'static str,
        holders: Vec<Contender>,
        waiters: Vec<Contender>,
        history: impl Into<History>,
    ) -> LockState {
        let mode = holders.first().or(waiters.first()).map_or(Mode::Exclusive, |one| one.mode);
        let History { runs, last_success_at } = history.into();
        let mut runs = runs.into_iter();
        LockState {
            state: match () {
                () if holders.is_empty() => State::Free,
                () if holders.iter().any(|holder| holder.revoked) => State::Revoked,
                () => State::Held,
            },
            mode,
            slots: mode.slots(),
            holders,
            waiters: waiters.into_iter().map(|one| Contender { waits: true, ..one }).collect(),
            last_run: runs.next(),
            earlier: runs.collect(),
            last_success_at,
            ..LockState::free(name, backend)
        }
    }

    /// How many of how many nodes say what the lock's state says, where it is on several.
    pub fn agreement(&self) -> Option<(usize, usize)> {
        let owner = self.holders.first().and_then(|holder| holder.owner.as_ref());
        let agrees = |node: &&NodeState| node.error.is_none() && node.owner.as_ref() == owner;
        let agreeing = self.nodes.iter().filter(agrees).count();
        (!self.nodes.is_empty()).then_some((agreeing, self.nodes.len()))
    }

    /// The last run and those before it, newest first.
    pub fn runs(&self) -> impl Iterator<Item = &LastRun> {
        self.last_run.iter().chain(&self.earlier)
    }

    /// When a run last succeeded, also where an older dlock has recorded only the last run.
    pub fn last_success(&self) -> Option<SystemTime> {
        let of_last_run = || self.last_run.as_ref().filter(|run| run.succeeded())?.ended_at;
        self.last_success_at.or_else(of_last_run)
    }

    /// Since when it has been held, by whoever has held it longest.
    pub fn held_since(&self) -> Option<SystemTime> {
        self.holders.iter().filter_map(|holder| holder.acquired_at).min()
    }

    pub fn oldest_waiter(&self) -> Option<SystemTime> {
        self.waiters.iter().filter_map(|waiter| waiter.waiting_since).min()
    }

    pub fn holder(&self, owner: &OwnerId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.owner.as_deref() == Some(owner.as_str()))
    }
}

fn mode_name<S: serde::Serializer>(mode: &Mode, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(mode.word())
}

fn last_success<S: serde::Serializer>(at: &Option<SystemTime>, out: S) -> Result<S::Ok, S::Error> {
    let mut map = out.serialize_map(None)?;
    rfc3339::entries(&mut map, ["last_success_at", "last_success_at_s"], *at)?;
    map.end()
}

fn last_run<S: serde::Serializer>(run: &Option<LastRun>, out: S) -> Result<S::Ok, S::Error> {
    run.as_ref().map(LastRun::shown).serialize(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::Identity;

    proptest::proptest! {
        /// What others have stored is read or ignored, and what was read can be shown.
        #[test]
        fn no_stored_record_makes_the_reader_panic(
            text in "\\PC{0,80}",
            host in "\\PC{0,20}",
            date in "[0-9TZ:.-]{0,24}",
            number in proptest::num::i64::ANY,
        ) {
            let last_run = serde_json::json!({
                "fencing_token": number, "host": host, "user": host, "command": text, "started_at": date,
                "ended_at": date, "outcome": "exited", "exit_code": number, "once": null,
            });
            let identity = serde_json::json!({
                "owner": host, "host": host, "pid": number, "user": text, "command": text.repeat(50),
            });
            for json in [text.clone(), last_run.to_string(), identity.to_string()] {
                if let Some(last_run) = LastRun::from_json(&json) {
                    let _ = last_run.to_json();
                }
                if let Some(identity) = Identity::from_json(&json) {
                    assert!(identity.command.chars().count() <= 500);
                    let _ = crate::report::escape(crate::report::describe(&Holder::from(identity)));
                }
            }
        }
    }
}
