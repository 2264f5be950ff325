//! `sslmode` as libpq has it, for the databases; and who is asked to log in where nobody is named.

use std::net::IpAddr;

use anyhow::{Result, bail};

/// When a connection is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encryption {
    Never,
    /// If the server refuses to go without.
    IfWanted,
    IfOffered,
    Always,
}

/// How much of the server's certificate is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    Nothing,
    /// Somebody we trust has signed it, for whatever name.
    Signer,
    SignerAndName,
}

/// By libpq's rules, but for the default: what leaves this machine is encrypted and verified, and what does not leave it is
/// not, unless the server insists. A socket has no TLS. `roots`: whom to trust was named.
pub fn sslmode(word: Option<&str>, host: &str, roots: bool) -> Result<(Encryption, Check)> {
    let default = if is_local(host) { "allow" } else { "verify-full" };
    let (encryption, check) = match word.unwrap_or(default) {
        "disable" => (Encryption::Never, Check::Nothing),
        "allow" => (Encryption::IfWanted, Check::Nothing),
        "prefer" => (Encryption::IfOffered, Check::Nothing),
        "require" if roots => (Encryption::Always, Check::Signer),
        "require" => (Encryption::Always, Check::Nothing),
        "verify-ca" => (Encryption::Always, Check::Signer),
        "verify-full" => (Encryption::Always, Check::SignerAndName),
        other => bail!("sslmode is disable, allow, prefer, require, verify-ca or verify-full, not {other:?}"),
    };
    Ok((if host.starts_with('/') { Encryption::Never } else { encryption }, check))
}

pub fn is_local(host: &str) -> bool {
    host.starts_with('/') || host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

pub fn os_user() -> Option<String> {
    nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name)
}
