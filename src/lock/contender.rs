//! A contender of a lock: who it is, under an id that is unique among all runs everywhere; what it stores beside its place
//! in the queue; and what others see of it, whichever backend keeps it.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;
use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize};

use super::{Contends, Mode, Token, rfc3339};
use crate::clock;

/// `host.pid.random`: safe in a shell, in `ps`, as a Redis value and as part of a file name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct OwnerId(String);

impl OwnerId {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What others have written is not to be trusted: it becomes part of a path.
impl TryFrom<String> for OwnerId {
    type Error = anyhow::Error;

    fn try_from(text: String) -> Result<OwnerId> {
        text.parse()
    }
}

impl FromStr for OwnerId {
    type Err = anyhow::Error;

    /// Takes what [`Identity::of_this_process`] makes, and nothing that could be more than one path segment.
    fn from_str(text: &str) -> Result<OwnerId> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
        ensure!(
            (1..=200).contains(&text.len()) && text.chars().all(allowed) && !text.starts_with('.'),
            "{text:?} is not an owner id: it is the one that DLOCK_OWNER and `dlock status` show"
        );
        Ok(OwnerId(text.to_owned()))
    }
}

/// A contender as others see it. Stored by the backends as JSON beside the lock; what others stored is
/// untrusted, see [`Identity::from_json`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub owner: OwnerId,
    pub host: String,
    pub pid: u32,
    pub user: String,
    pub command: String,
    /// What the user wants others to know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

const LONGEST_COMMAND: usize = 500;
/// In characters.
pub const LONGEST_NOTE: usize = 200;

impl Identity {
    pub fn of_this_process(command: &str) -> Result<Identity> {
        let host = nix::unistd::gethostname().context("gethostname")?.to_string_lossy().into_owned();
        let user = nix::unistd::geteuid();
        let user = match std::env::var("USER") {
            Ok(name) if !name.is_empty() && !user.is_root() => name,
            _ if user.is_root() => "root".to_owned(),
            _ => user.to_string(),
        };
        let pid = std::process::id();
        let label: String = host.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(63).collect();
        let random = getrandom::u64().context("the kernel gave no random bytes")?;
        let owner = OwnerId(format!("{label}.{pid}.{random:016x}"));
        Ok(Identity { owner, host, pid, user, command: clip(command, LONGEST_COMMAND), note: None })
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers always serialise")
    }

    /// Reads what a contender, perhaps of another version or with bad intent, has stored.
    pub fn from_json(text: &str) -> Option<Identity> {
        let mut read: Identity = serde_json::from_str(text).ok()?;
        read.host = clip(&read.host, 255);
        read.user = clip(&read.user, 255);
        read.command = clip(&read.command, LONGEST_COMMAND);
        read.note = read.note.map(|note| clip(&note, LONGEST_NOTE));
        Some(read)
    }
}

fn clip(text: &str, longest: usize) -> String {
    text.chars().take(longest).collect()
}

/// What a contender stores, as one flat JSON object: who it is, and what its backend needs to know besides.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record<T> {
    #[serde(flatten)]
    pub who: Identity,
    #[serde(flatten)]
    pub details: T,
}

impl<T: Serialize + DeserializeOwned> Record<T> {
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers always serialise")
    }

    /// Reads what a dlock of any version has stored. Other programs store anything or nothing, which is `None`.
    pub fn from_json(json: &[u8]) -> Option<Record<T>> {
        let text = std::str::from_utf8(json).ok()?;
        let record: Record<T> = serde_json::from_str(text).ok()?;
        Some(Record { who: Identity::from_json(text)?, ..record })
    }
}

/// A contender as it is shown. What is not known, as of another program's contender, is `None`.
#[derive(Clone, Debug, Default)]
pub struct Contender {
    pub mode: Mode,
    /// `None` for a program other than dlock.
    pub who: Option<Identity>,
    /// What another program's lock tells of its owner.
    pub foreign_owner: Option<String>,
    pub token: Option<Token>,
    pub slot: Option<u32>,
    pub waiting_since: Option<SystemTime>,
    pub acquired_at: Option<SystemTime>,
    pub ttl: Option<Duration>,
    pub expires_in: Option<Duration>,
    /// An operator has asked it to release the lock.
    pub revoked: bool,
}

impl Contender {
    /// One of which nothing is known but what it wants.
    pub fn unknown(mode: Mode) -> Contender {
        Contender { mode, ..Contender::default() }
    }

    pub fn into_holder(self) -> Holder {
        let who = self.who.map(Holder::from).unwrap_or_default();
        Holder {
            owner: who.owner.or(self.foreign_owner),
            fencing_token: self.token,
            acquired_at: self.acquired_at,
            ttl: self.ttl,
            expires_in: self.expires_in,
            slot: self.slot,
            ..who
        }
    }

    pub fn into_waiter(self) -> Waiter {
        let waiting_since = self.waiting_since;
        let Holder { owner, host, pid, user, command, note, fencing_token, ttl, expires_in, .. } = self.into_holder();
        Waiter { owner, host, pid, user, command, note, fencing_token, waiting_since, ttl, expires_in }
    }
}

impl Contends for Contender {
    fn mode(&self) -> Mode {
        self.mode
    }
}

/// One holder. What a foreign program's lock does not tell is `None`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Holder {
    pub owner: Option<String>,
    pub host: Option<String>,
    pub pid: Option<u32>,
    pub user: Option<String>,
    pub command: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    pub fencing_token: Option<Token>,
    #[serde(flatten, serialize_with = "acquired")]
    pub acquired_at: Option<SystemTime>,
    #[serde(rename = "ttl_ms", serialize_with = "in_millis")]
    pub ttl: Option<Duration>,
    #[serde(rename = "expires_in_ms", serialize_with = "in_millis")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    pub fencing_token: Option<Token>,
    #[serde(flatten, serialize_with = "waiting")]
    pub waiting_since: Option<SystemTime>,
    #[serde(rename = "ttl_ms", serialize_with = "in_millis")]
    pub ttl: Option<Duration>,
    #[serde(rename = "expires_in_ms", serialize_with = "in_millis")]
    pub expires_in: Option<Duration>,
}

impl Holder {
    /// Whether it is still the one that was seen before.
    pub fn is_still(&self, seen: &Holder) -> bool {
        self.owner == seen.owner && seen.fencing_token.is_none_or(|token| Some(token) == self.fencing_token)
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
            note: who.note,
            ..Holder::default()
        }
    }
}

fn in_millis<S: serde::Serializer>(span: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
    span.map(clock::millis).serialize(out)
}

fn acquired<S: serde::Serializer>(at: &Option<SystemTime>, out: S) -> Result<S::Ok, S::Error> {
    let mut map = out.serialize_map(None)?;
    rfc3339::entries(&mut map, ["acquired_at", "acquired_at_s"], *at)?;
    let held = at.map(|at| clock::millis(clock::wall().duration_since(at).unwrap_or_default()));
    map.serialize_entry("held_ms", &held)?;
    map.end()
}

fn waiting<S: serde::Serializer>(since: &Option<SystemTime>, out: S) -> Result<S::Ok, S::Error> {
    let mut map = out.serialize_map(None)?;
    rfc3339::entries(&mut map, ["waiting_since", "waiting_since_s"], *since)?;
    map.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Serialize, Deserialize)]
    struct Details {
        ttl_ms: u64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        slot: Option<u32>,
    }

    #[test]
    fn a_record_is_one_flat_object_and_unknown_fields_are_ignored() {
        let json = r#"{"owner":"h.1.x","host":"h","pid":1,"user":"u","command":"c","ttl_ms":30000}"#;
        let record = Record::<Details>::from_json(json.as_bytes()).unwrap();
        assert_eq!(record.to_json(), json);
        let newer = json.replace("\"pid\"", "\"extra\":\"from a newer version\",\"pid\"");
        assert_eq!(Record::<Details>::from_json(newer.as_bytes()).unwrap().to_json(), json);
    }

    #[test]
    fn what_is_no_record_is_another_programs() {
        for other in [&b""[..], b"x", b"{}", b"\xff", br#"{"owner":"h.1.x","ttl_ms":1}"#] {
            assert!(Record::<Details>::from_json(other).is_none(), "{other:?}");
        }
    }
}
