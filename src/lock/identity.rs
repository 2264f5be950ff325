//! Who contends for a lock: an id that is unique among all runs everywhere, and what helps people to
//! find the process behind it.

use std::fmt;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

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
