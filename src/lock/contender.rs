//! A contender of a lock: what it stores beside its place in the queue, and what others see of it, whichever backend
//! keeps it.

use std::time::{Duration, SystemTime};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{Contends, Holder, Identity, Mode, Token, Waiter};

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
