//! Backend URLs: `scheme://[user[:password]@]host[:port][,host…][/path][?key=value&…]`.
//!
//! One parser for all backends, since the usual URL crates know only one host. A password never gets
//! out of here again but through [`Address::password`]; [`Display`](std::fmt::Display) shows none.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use anyhow::{Context, Result, anyhow, ensure};

use crate::config::{SETTINGS, nearest};
use crate::exit::Fault;
use crate::openat;

/// The parameters that every kind of backend takes, but for files.
pub const COMMON: [&str; 7] = ["prefix", "tls-ca", "tls-cert", "tls-key", "username", "password", "password-file"];

/// What cannot be told apart from a password that is not encoded, and so must not be repeated.
const ENCODE: &str = "the URL has an @ after its hosts. Write / ? # : and @ in a password as %2F %3F %23 %3A and %40, \
                      or put the password into a file and name it with ?password-file=PATH";

/// A DNS name is no longer, nor is the path of a socket.
const LONGEST_HOST: usize = 255;

#[derive(Clone)]
pub struct Address {
    scheme: String,
    username: Option<String>,
    password: Option<String>,
    hosts: Vec<Host>,
    path: String,
    params: BTreeMap<String, String>,
    /// Hosts and parameters may be parts of a password.
    unsure: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    pub name: String,
    pub port: Option<u16>,
}

impl Host {
    /// `host:port`, with the brackets an IPv6 address needs.
    pub fn with_port(&self, default: u16) -> String {
        let port = self.port.unwrap_or(default);
        if self.name.contains(':') { format!("[{}]:{port}", self.name) } else { format!("{}:{port}", self.name) }
    }
}

impl Address {
    pub fn parse(url: &str) -> Result<Address> {
        Address::split(url).map_err(|error| error.context(Fault::Config))
    }

    /// The text of a wrong URL is not repeated: it may hold a password.
    fn split(url: &str) -> Result<Address> {
        let (scheme, rest) = url.split_once("://").context("a backend is a URL like redis://HOST")?;
        ensure!(
            !scheme.is_empty() && scheme.chars().all(|c| c.is_ascii_lowercase() || c == '+'),
            "a URL begins with its scheme in lowercase letters, like redis://"
        );
        let (authority, rest) = rest.split_at(rest.find(['/', '?']).unwrap_or(rest.len()));
        let address = Address::of(scheme, authority, rest);
        // A password with a / or a ? in it has its @ in what looks like a path or a query.
        if rest.contains('@') { address.map_err(|_| anyhow!(ENCODE)) } else { address }
    }

    fn of(scheme: &str, authority: &str, rest: &str) -> Result<Address> {
        let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
        ensure!(authority.is_empty() || !path.contains('@'), ENCODE);
        let (login, hosts) = match authority.rsplit_once('@') {
            Some((login, hosts)) => (Some(login), hosts),
            None => (None, authority),
        };
        let (username, password) = match login.map(|login| login.split_once(':').unwrap_or((login, ""))) {
            Some((user, password)) => (non_empty(decode(user)?), non_empty(decode(password)?)),
            None => (None, None),
        };
        let hosts = hosts.split(',').filter(|host| !host.is_empty()).map(split_host).collect::<Result<Vec<_>>>()?;
        let mut params = BTreeMap::new();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            ensure!(!key.contains('@'), ENCODE);
            ensure!(params.insert(decode(key)?, decode(value)?).is_none(), "the URL has the parameter {key:?} twice");
        }
        let (scheme, path, unsure) = (scheme.to_owned(), decode(path)?, rest.contains('@'));
        Ok(Address { scheme, username, password, hosts, path, params, unsure })
    }

    /// Adds a parameter from a profile; one in the URL itself wins.
    pub fn set_default(&mut self, key: &str, value: String) {
        self.params.entry(key.to_owned()).or_insert(value);
    }

    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    pub fn path(&self) -> &str {
        &self.path
    }

    /// The keys of all parameters.
    pub fn params(&self) -> impl Iterator<Item = &str> {
        self.params.keys().map(String::as_str)
    }

    pub fn param(&self, key: &str) -> Option<&str> {
        self.params.get(key).map(String::as_str)
    }

    pub fn username(&self) -> Option<&str> {
        self.username.as_deref().or_else(|| self.param("username")).filter(|name| !name.is_empty())
    }

    /// From the URL, a `password` or `password-file` parameter, or `$DLOCK_PASSWORD`, in this order.
    pub fn password(&self) -> Result<Option<String>> {
        if let Some(password) = self.password.as_deref().or_else(|| self.param("password")) {
            return Ok(Some(password.to_owned()));
        }
        if let Some(password) = self.password_in("password-file")? {
            return Ok(Some(password));
        }
        let from_environment = std::env::var_os("DLOCK_PASSWORD").filter(|password| !password.is_empty());
        let as_text = |text: OsString| text.into_string().ok().context("DLOCK_PASSWORD is not UTF-8");
        from_environment.map(as_text).transpose().context(Fault::Config)
    }

    /// The password in the file that this parameter names.
    pub fn password_in(&self, key: &str) -> Result<Option<String>> {
        let Some(file) = self.param(key) else { return Ok(None) };
        let text = openat::read_to_string(file.as_ref())
            .with_context(|| format!("cannot read {key} {file}"))
            .context(Fault::Config)?;
        Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
    }

    /// Whether a password stands in the URL or beside it, rather than in a file of its own.
    pub fn has_password(&self) -> bool {
        self.password.is_some() || self.params.contains_key("password")
    }

    /// Fails on a parameter that this kind of backend does not know, naming the nearest that it does: or
    /// the nearest setting, since a misspelt one in a profile ends up here as well.
    pub fn expect_params(&self, known: &[&str]) -> Result<()> {
        let common = if self.scheme == "file" { &[][..] } else { &COMMON };
        let known = || known.iter().chain(common).copied();
        for key in self.params.keys() {
            if known().all(|one| one != key) {
                ensure!(!self.unsure, Fault::Config.because(ENCODE));
                let advice = match nearest(key, known().chain(SETTINGS)) {
                    Some(near) => format!("did you mean {near:?}?"),
                    None => "dlock man backends lists them".to_owned(),
                };
                return Err(
                    Fault::Config.because(format_args!("{}:// has no parameter {key:?}; {advice}", self.scheme))
                );
            }
        }
        Ok(())
    }
}

fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

fn split_host(text: &str) -> Result<Host> {
    let (name, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, "")) => (name, None),
        Some((name, port)) => {
            (name, Some(port.strip_prefix(':').context("only :PORT can follow the ] of an IPv6 address")?))
        }
        None => match text.split_once(':') {
            Some((name, port)) => (name, Some(port)),
            None => (text, None),
        },
    };
    let number = port.map(|port| port.parse::<u16>().ok().filter(|&port| port > 0)).map(|port| port.ok_or(()));
    let Ok(number) = number.transpose() else { return Err(no_port(name, port.unwrap_or_default())) };
    let name = decode(name)?;
    ensure!(!name.is_empty(), "the URL has a port, but no host before it");
    let odd = |c: char| c.is_control() || c.is_whitespace() || matches!(c, '[' | ']');
    ensure!(
        name.len() <= LONGEST_HOST && !name.contains(odd),
        "the URL has a host with a space, a bracket or a control character, or a very long one"
    );
    Ok(Host { name, port: number })
}

/// What is no number may be a password whose @ was forgotten.
fn no_port(host: &str, port: &str) -> anyhow::Error {
    match port {
        "" => anyhow!("the URL has a : without a port after host {host:?}"),
        port if port.len() <= 6 && port.bytes().all(|byte| byte.is_ascii_digit()) => {
            anyhow!("host {host:?} has the port {port}, but a port is a number from 1 to 65535")
        }
        _ => {
            anyhow!("what follows \"{host}:\" is not a port, a number from 1 to 65535; a password is followed by @HOST")
        }
    }
}

fn decode(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let hex = tail.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
        let byte = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(byte.context("a % in a URL is followed by two hexadecimal digits; the % itself is written %25")?);
        rest = &tail[2..];
    }
    ensure!(!bytes.contains(&0), "a URL must not contain %00");
    String::from_utf8(bytes).context("the URL is not UTF-8")
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.scheme)?;
        if self.unsure && !self.hosts.is_empty() {
            return f.write_str("…");
        }
        for (n, host) in self.hosts.iter().enumerate() {
            write!(f, "{}{}", if n > 0 { "," } else { "" }, host.name)?;
            if let Some(port) = host.port {
                write!(f, ":{port}")?;
            }
        }
        f.write_str(&self.path)
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_everything_a_url_can_have() {
        let address = Address::parse("redis://me:s%40fe@a:1,b,[::1]:3/2?prefix=x%2F&tls-ca=/ca.pem").unwrap();
        assert_eq!(address.username(), Some("me"));
        assert_eq!(address.password().unwrap().as_deref(), Some("s@fe"));
        let hosts: Vec<_> = address.hosts().iter().map(|host| host.with_port(9)).collect();
        assert_eq!(hosts, ["a:1", "b:9", "[::1]:3"]);
        assert_eq!((address.path(), address.param("prefix")), ("/2", Some("x/")));
    }

    #[test]
    fn never_shows_a_password() {
        let address = Address::parse("redis://me:secret@h/0?password=secret").unwrap();
        assert!(!format!("{address} {address:?}").contains("secret"));
        let error = Address::parse("redis://me:secret@h:port").unwrap_err();
        assert!(!format!("{error:#}").contains("secret"));
    }

    #[test]
    fn an_unknown_parameter_is_answered_with_the_nearest() {
        let error = |url: &str| format!("{:#}", Address::parse(url).unwrap().expect_params(&["recipe"]).unwrap_err());
        assert!(error("zk://h?recip=x").contains("\"recipe\""));
        assert!(error("zk://h?kil-after=3").contains("\"kill-after\""));
        assert!(Address::parse("zk://h?recipe=x&prefix=y").unwrap().expect_params(&["recipe"]).is_ok());
    }

    #[test]
    fn refuses_what_is_no_url() {
        for bad in [
            "",
            "redis",
            "://h",
            "Redis://h",
            "redis://h:0",
            "redis://h:99999",
            "redis://:6379",
            "redis://h/%zz",
            "redis://h?a=1&a=2",
        ] {
            assert!(Address::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_at_sign_behind_the_hosts_is_one_only_where_it_cannot_end_a_password() {
        for fine in
            ["file:///home/me@work", "redis+unix:///run/me@work.sock", "redis://h?username=me@work", "zk://h/me%40x"]
        {
            Address::parse(fine).unwrap();
        }
        for bad in ["redis://me:pass/word@h", "redis://me:12/34@h/0", "redis://me:pass?word@h", "redis://me:p@ss/w@h"] {
            assert!(format!("{:#}", Address::parse(bad).unwrap_err()).contains("%2F"), "{bad}");
        }
        let unknown = Address::parse("redis://me:12?pass=word@h").unwrap().expect_params(&[]).unwrap_err();
        assert!(!format!("{unknown:#}").contains("pass="), "{unknown:#}");
    }

    proptest::proptest! {
        #[test]
        fn no_url_makes_the_parser_panic(rest in "[a-z0-9:/@?&=%,.\\[\\]]{0,60}", wild in "\\PC{0,40}") {
            for url in [format!("redis://{rest}"), wild] {
                if let Ok(address) = Address::parse(&url) {
                    let _ = (address.to_string(), address.expect_params(&["x"]));
                }
            }
        }

        #[test]
        fn no_password_is_ever_shown(
            parts in proptest::collection::vec("[A-Z0-9]{4,9}", 1..4),
            between in "[]/?#@:&=%,\\[]",
            tail in "[a-z/?=&%:,]{0,20}",
        ) {
            let password = parts.join(&between);
            let shown = match Address::parse(&format!("redis://user:{password}@host{tail}")) {
                Ok(address) => match address.expect_params(&[]) {
                    Ok(()) => format!("{address} {address:?}"),
                    Err(error) => format!("{address} {error:#}"),
                },
                Err(error) => format!("{error:#}"),
            };
            assert!(!parts.iter().any(|part| shown.contains(part)), "{password}: {shown}");
        }
    }
}
