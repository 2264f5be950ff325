//! The nodes on the servers.
//!
//! ```text
//! /dlock/NAME                    a container, which the server removes some time after its last child
//! /dlock/NAME/_c_<uuid>-lock-N   a contender; its data is a [`Details`](super::queue::Details), with the mark of a revoke
//! /dlock/NAME/_c_<uuid>-hold-…   a place kept without a session: see [`release`](super::release)
//! /dlock-meta/NAME               how the last runs ended; kept
//! /dlock-meta/NAME/once-KEY      a successful run with this key; kept
//! /dlock-meta/NAME/taken         whose lock was freed at once recently, and why: see [`status`](super::status); kept
//! /dlock-meta/NAME/slot-K        ephemeral: the slot is taken
//! /dlock-meta/~noted/NAME/…      a run that lasts: see [`status`](super::status)
//! /dlock-meta/~alive/NAME/…      ephemeral: a contender's sign of life: see [`recipe`](super::recipe)
//! ```

use anyhow::Result;

use super::queue::sign_of;
use crate::backend::Address;
use crate::exit::Fault;
use crate::lock::LockName;

pub struct Paths {
    /// Where all our paths lie; must exist.
    pub chroot: String,
    pub root: String,
    pub meta: String,
}

impl Paths {
    pub fn at(address: &Address) -> Result<Paths> {
        let chroot = address.path().trim_end_matches('/').to_owned();
        let root = format!("{chroot}/{}", address.param("prefix").unwrap_or("dlock").trim_matches('/'));
        if root.split('/').skip(1).any(|part| matches!(part, "" | "." | "..")) {
            return Err(Fault::Config.because(format_args!("{root:?} is not the path of a node")));
        }
        Ok(Paths { chroot, meta: format!("{root}-meta"), root })
    }

    pub fn queue(&self, name: &LockName) -> String {
        format!("{}/{}", self.root, name.encoded())
    }

    pub fn place(&self, name: &LockName, node: &str) -> String {
        format!("{}/{node}", self.queue(name))
    }

    pub fn history(&self, name: &LockName) -> String {
        format!("{}/{}", self.meta, name.encoded())
    }

    /// Whose lock was freed at once recently, and why.
    pub fn taken(&self, name: &LockName) -> String {
        format!("{}/taken", self.history(name))
    }

    pub fn slot(&self, name: &LockName, number: u32) -> String {
        format!("{}/slot-{number}", self.history(name))
    }

    pub fn once(&self, name: &LockName, key: &str) -> String {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let escape = |byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
        format!("{}/once-{}", self.history(name), key.bytes().map(escape).collect::<String>())
    }

    /// Where the signs of life of a lock's contenders are. No lock is named so.
    pub fn signs(&self, name: &LockName) -> String {
        format!("{}/~alive/{}", self.meta, name.encoded())
    }

    /// The sign of the contender that has, or is about to get, the place of this name.
    pub fn sign(&self, name: &LockName, node: &str) -> String {
        format!("{}/{}", self.signs(name), sign_of(node))
    }

    /// Where the notes of a lock's runs are. No lock is named so.
    pub fn notes(&self, name: &LockName) -> String {
        format!("{}/~noted/{}", self.meta, name.encoded())
    }

    pub fn note(&self, name: &LockName, node: &str) -> String {
        format!("{}/{node}", self.notes(name))
    }
}
