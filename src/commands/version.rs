//! `dlock --version`: which dlock this is and, with `--verbose`, what was built into it.

use crate::backend;

/// The provider of TLS, where a backend speaks to servers at all.
const CRYPTOGRAPHY: &str = if cfg!(feature = "net") { "ring" } else { "none" };

pub fn version() -> String {
    // Set by build.rs.
    let (commit, target) = (env!("DLOCK_COMMIT"), env!("DLOCK_TARGET"));
    let commit = if commit.is_empty() { String::new() } else { format!("commit {commit}, ") };
    format!("dlock {} ({commit}{target})\n", env!("CARGO_PKG_VERSION"))
}

pub fn verbose() -> String {
    let backends = backend::built_in().join(", ");
    format!("{}backends: {backends}\ncryptography: {CRYPTOGRAPHY}\n", version())
}
