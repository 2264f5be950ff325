//! A lock as an operator sees it: the shape of `dlock status --json`, whose fields are only ever added.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{Contender, Identity, LockName, Mode, OwnerId, Token, queue};

#[derive(Clone, Debug, Serialize)]
pub struct LockState {
    pub name: LockName,
    pub backend: &'static str,
    pub state: State,
    #[serde(serialize_with = "mode_name")]
    pub mode: Mode,
    pub slots: u32,
    pub holders: Vec<Holder>,
    pub waiters: Vec<Waiter>,
    pub last_run: Option<LastRun>,
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

/// One holder. What a foreign program's lock does not tell is `None`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Holder {
    pub owner: Option<String>,
    pub host: Option<String>,
    pub pid: Option<u32>,
    pub user: Option<String>,
    pub command: Option<String>,
    pub fencing_token: Option<Token>,
    #[serde(with = "rfc3339::option")]
    pub acquired_at: Option<SystemTime>,
    #[serde(rename = "ttl_ms", serialize_with = "millis")]
    pub ttl: Option<Duration>,
    #[serde(rename = "expires_in_ms", serialize_with = "millis")]
    pub expires_in: Option<Duration>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
}

#[derive(Clone, Debug, Default, Serialize)]
pub struct Waiter {
    pub owner: Option<String>,
    pub host: Option<String>,
    pub pid: Option<u32>,
    pub user: Option<String>,
    pub command: Option<String>,
    pub fencing_token: Option<Token>,
    #[serde(with = "rfc3339::option")]
    pub waiting_since: Option<SystemTime>,
    #[serde(rename = "ttl_ms", serialize_with = "millis")]
    pub ttl: Option<Duration>,
    #[serde(rename = "expires_in_ms", serialize_with = "millis")]
    pub expires_in: Option<Duration>,
}

/// How the last run under a lock ended, kept after the lock was released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRun {
    pub fencing_token: Token,
    pub host: String,
    pub user: String,
    pub command: String,
    #[serde(with = "rfc3339")]
    pub started_at: SystemTime,
    #[serde(with = "rfc3339::option")]
    pub ended_at: Option<SystemTime>,
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub once: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Exited,
    Signaled,
    Lost,
    TimedOut,
}

impl LastRun {
    /// Of a run that an operator cuts short by freeing the lock at once. How its command then ends nobody may get to
    /// tell; of a program other than dlock, hardly anything is known.
    pub fn cut_short(holder: &Holder, reason: &str) -> LastRun {
        let now = crate::clock::wall();
        LastRun {
            fencing_token: holder.fencing_token.unwrap_or(Token(0)),
            host: holder.host.clone().unwrap_or_default(),
            user: holder.user.clone().unwrap_or_default(),
            command: holder.command.clone().or(holder.owner.clone()).unwrap_or_default(),
            started_at: holder.acquired_at.unwrap_or(now),
            ended_at: Some(now),
            outcome: Outcome::Lost,
            exit_code: None,
            once: None,
            reason: Some(reason.to_owned()),
        }
    }

    /// Whether this run makes a later one with the same `--once` key needless.
    pub fn succeeded(&self) -> bool {
        self.outcome == Outcome::Exited && self.exit_code == Some(0)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers always serialise")
    }

    pub fn from_json(text: &str) -> Option<LastRun> {
        serde_json::from_str(text).ok()
    }
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
            nodes: Vec::new(),
        }
    }

    /// A lock with these contenders, in the order of the queue, of whom the queue's rule says who holds it.
    pub fn of_queue(
        name: LockName,
        backend: &'static str,
        queue: Vec<Contender>,
        last_run: Option<LastRun>,
    ) -> LockState {
        let holding: Vec<usize> = queue::holders(&queue).collect();
        let (holders, waiters): (Vec<_>, Vec<_>) =
            queue.into_iter().enumerate().partition(|(at, _)| holding.contains(at));
        let contenders = |all: Vec<(usize, Contender)>| all.into_iter().map(|(_, one)| one).collect();
        LockState::of(name, backend, contenders(holders), contenders(waiters), last_run)
    }

    /// A lock with these holders and waiters.
    pub fn of(
        name: LockName,
        backend: &'static str,
        holders: Vec<Contender>,
        waiters: Vec<Contender>,
        last_run: Option<LastRun>,
    ) -> LockState {
        let mode = holders.first().or(waiters.first()).map_or(Mode::Exclusive, |one| one.mode);
        LockState {
            state: match () {
                () if holders.is_empty() => State::Free,
                () if holders.iter().any(|holder| holder.revoked) => State::Revoked,
                () => State::Held,
            },
            mode,
            slots: mode.slots(),
            holders: holders.into_iter().map(Contender::into_holder).collect(),
            waiters: waiters.into_iter().map(Contender::into_waiter).collect(),
            last_run,
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

    pub fn holder(&self, owner: &OwnerId) -> Option<&Holder> {
        self.holders.iter().find(|holder| holder.owner.as_deref() == Some(owner.as_str()))
    }
}

impl From<Identity> for Holder {
    fn from(who: Identity) -> Holder {
        Holder {
            owner: Some(who.owner.to_string()),
            host: Some(who.host),
            pid: Some(who.pid),
            user: Some(who.user),
            command: Some(who.command),
            ..Holder::default()
        }
    }
}

impl From<Identity> for Waiter {
    fn from(who: Identity) -> Waiter {
        Waiter {
            owner: Some(who.owner.to_string()),
            host: Some(who.host),
            pid: Some(who.pid),
            user: Some(who.user),
            command: Some(who.command),
            ..Waiter::default()
        }
    }
}

fn mode_name<S: serde::Serializer>(mode: &Mode, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(match mode {
        Mode::Exclusive => "exclusive",
        Mode::Shared => "shared",
        Mode::Slots(_) => "slots",
    })
}

fn millis<S: serde::Serializer>(span: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    span.map(|span| u64::try_from(span.as_millis()).unwrap_or(u64::MAX)).serialize(out)
}

/// Dates as RFC 3339 in UTC, to the millisecond. A stored record may claim any date; one that has no such
/// form is shown as the last that has.
mod rfc3339 {
    use std::time::{Duration, SystemTime};

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(time: &SystemTime, out: S) -> Result<S::Ok, S::Error> {
        const END_OF_9999: Duration = Duration::from_millis(253_402_300_799_999);
        let shown = (*time).clamp(SystemTime::UNIX_EPOCH, SystemTime::UNIX_EPOCH + END_OF_9999);
        out.collect_str(&humantime::format_rfc3339_millis(shown))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(text: D) -> Result<SystemTime, D::Error> {
        humantime::parse_rfc3339(&String::deserialize(text)?).map_err(D::Error::custom)
    }

    pub mod option {
        use std::time::SystemTime;

        use serde::de::Error;
        use serde::{Deserialize, Deserializer, Serializer};

        pub fn serialize<S: Serializer>(time: &Option<SystemTime>, out: S) -> Result<S::Ok, S::Error> {
            match time {
                Some(time) => super::serialize(time, out),
                None => out.serialize_none(),
            }
        }

        pub fn deserialize<'de, D: Deserializer<'de>>(text: D) -> Result<Option<SystemTime>, D::Error> {
            let text: Option<String> = Option::deserialize(text)?;
            text.map(|text| humantime::parse_rfc3339(&text).map_err(D::Error::custom)).transpose()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
