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
    /// What another program's lock tells of its owner, too.
    pub owner: Option<String>,
    pub host: Option<String>,
    pub pid: Option<u32>,
    pub user: Option<String>,
    pub command: Option<String>,
    pub note: Option<String>,
    pub fencing_token: Option<Token>,
    pub slot: Option<u32>,
    pub waiting_since: Option<SystemTime>,
    pub acquired_at: Option<SystemTime>,
    pub ttl: Option<Duration>,
    pub expires_in: Option<Duration>,
    /// An operator has asked it to release the lock.
    pub revoked: bool,
    /// It is shown among the waiters.
    pub waits: bool,
}

/// One that holds the lock.
pub type Holder = Contender;

impl Contender {
    /// Whether it is still the one that was seen before.
    pub fn is_still(&self, seen: &Holder) -> bool {
        self.owner == seen.owner && seen.fencing_token.is_none_or(|token| Some(token) == self.fencing_token)
    }
}

impl Contends for Contender {
    fn mode(&self) -> Mode {
        self.mode
    }
}

impl From<Identity> for Contender {
    fn from(who: Identity) -> Contender {
        Contender {
            owner: Some(who.owner.to_string()),
            host: Some(who.host),
            pid: Some(who.pid),
            user: Some(who.user),
            command: Some(who.command),
            note: who.note,
            ..Contender::default()
        }
    }
}

impl Serialize for Contender {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let mut map = out.serialize_map(None)?;
        map.serialize_entry("owner", &self.owner)?;
        map.serialize_entry("host", &self.host)?;
        map.serialize_entry("pid", &self.pid)?;
        map.serialize_entry("user", &self.user)?;
        map.serialize_entry("command", &self.command)?;
        self.note.iter().try_for_each(|note| map.serialize_entry("note", note))?;
        map.serialize_entry("fencing_token", &self.fencing_token)?;
        if self.waits {
            rfc3339::entries(&mut map, ["waiting_since", "waiting_since_s"], self.waiting_since)?;
        } else {
            rfc3339::entries(&mut map, ["acquired_at", "acquired_at_s"], self.acquired_at)?;
            let held = self.acquired_at.map(|at| clock::wall().duration_since(at).unwrap_or_default());
            map.serialize_entry("held_ms", &held.map(clock::millis))?;
        }
        map.serialize_entry("ttl_ms", &self.ttl.map(clock::millis))?;
        map.serialize_entry("expires_in_ms", &self.expires_in.map(clock::millis))?;
        self.slot.iter().filter(|_| !self.waits).try_for_each(|slot| map.serialize_entry("slot", slot))?;
        map.end()
    }
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
