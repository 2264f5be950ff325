//! The config file: that it may be trusted, and that it says only what dlock understands.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use toml::{Table, Value};

use super::nearest;
use crate::backend::{self, Address, KINDS};
use crate::cli::Cli;
use crate::exit::Fault;
use crate::openat;

/// Every setting that is not a matter of the single call, in flags, environment and config file alike.
pub const SETTINGS: [&str; 19] = [
    "backend",
    "conflict-exit-code",
    "connect-timeout",
    "history",
    "hold-at-least",
    "kill-after",
    "leftovers",
    "log",
    "metrics-file",
    "note",
    "on-event",
    "on-lost",
    "quiet",
    "signal",
    "timeout",
    "ttl",
    "verbose",
    "wait",
    "warn-after",
];

/// A config file with every value as text, checked later like the text of a flag.
#[derive(Debug, Default)]
pub struct ConfigFile {
    pub path: PathBuf,
    pub settings: BTreeMap<String, String>,
    pub profiles: BTreeMap<String, Profile>,
}

/// A `[backends.NAME]` table: an address and the settings that go with it.
#[derive(Clone, Debug)]
pub struct Profile {
    pub address: Address,
    pub settings: BTreeMap<String, String>,
}

impl ConfigFile {
    pub fn read(path: &Path) -> Result<ConfigFile> {
        let read = || -> Result<ConfigFile> {
            let opened = openat::open(path).context("cannot be read")?;
            let mode = opened.metadata().context("cannot be read")?.permissions().mode();
            let file = ConfigFile::parse(path, &std::io::read_to_string(opened).context("cannot be read")?)?;
            if mode & 0o007 != 0 && file.has_password() {
                bail!("holds a password and others can read it: chmod 600 {}", path.display());
            }
            Ok(file)
        };
        read().with_context(|| path.display().to_string()).context(Fault::Config)
    }

    pub fn parse(path: &Path, text: &str) -> Result<ConfigFile> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| one_line(&error, text))?;
        let mut file = ConfigFile { path: path.to_owned(), ..ConfigFile::default() };
        for (key, value) in table {
            match value {
                other if key == "backends" && !other.is_table() => {
                    bail!("backends must be tables like [backends.NAME], not {}", other.type_str())
                }
                Value::Table(profiles) if key == "backends" => {
                    for (name, profile) in profiles {
                        let Value::Table(profile) = profile else { bail!("backends.{name} must be a table") };
                        let profile = Profile::parse(profile).with_context(|| format!("[backends.{name}]"))?;
                        file.profiles.insert(name, profile);
                    }
                }
                value if SETTINGS.contains(&key.as_str()) => {
                    file.settings.insert(key.clone(), as_text(&key, value)?);
                }
                _ => {
                    bail!(only_a_flag(&key).unwrap_or_else(|| unknown(&key, SETTINGS.into_iter().chain(["backends"]))))
                }
            }
        }
        Ok(file)
    }

    fn has_password(&self) -> bool {
        let in_url = |url: &String| Address::parse(url).is_ok_and(|address| address.has_password());
        self.profiles.values().any(|profile| profile.address.has_password())
            || self.settings.get("backend").is_some_and(in_url)
    }
}

impl Profile {
    fn parse(table: Table) -> Result<Profile> {
        let mut url = None;
        let mut settings = BTreeMap::new();
        let mut params = BTreeMap::new();
        for (key, value) in table {
            let text = as_text(&key, value)?;
            match key.as_str() {
                "url" => url = Some(text),
                setting if setting != "backend" && SETTINGS.contains(&setting) => drop(settings.insert(key, text)),
                _ => drop(params.insert(key, text)),
            }
        }
        let mut address = Address::parse(&url.context("needs a url")?)?;
        for (key, value) in params {
            address.set_default(&key, value);
        }
        // Here, so that a mistake is found before the profile is used, and the file is named with it.
        let about = |error| address.params().find_map(only_a_flag).map_or(error, anyhow::Error::msg);
        backend::kind(&address).map_err(about)?;
        Ok(Profile { address, settings })
    }
}

fn as_text(key: &str, value: Value) -> Result<String> {
    match value {
        Value::String(text) => Ok(text),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(choice) => Ok(choice.to_string()),
        other => bail!("{key} must be a text or a number, not {}", other.type_str()),
    }
}

/// For a key that is none, although the command line has a flag of that name.
fn only_a_flag(key: &str) -> Option<String> {
    Cli::has_flag(key)
        .then(|| format!("{key:?} is not a key of the config file, only an option of the command line: --{key}"))
}

fn unknown<'a>(key: &str, known: impl Iterator<Item = &'a str>) -> String {
    match nearest(key, known) {
        Some(near) => format!("unknown key {key:?}; did you mean {near:?}?"),
        None => format!("unknown key {key:?}; dlock man config lists the keys"),
    }
}

/// What to write instead of what is neither a URL nor a profile.
pub fn no_backend(text: &str, profiles: &[String]) -> String {
    const PORTS: [(&str, &str); 5] =
        [("2181", "zookeeper"), ("2379", "etcd"), ("3306", "mysql"), ("5432", "postgres"), ("6379", "redis")];
    let is_scheme = |text: &str| KINDS.iter().any(|kind| kind.schemes.contains(&text));
    let (start, end) = text.split_once(':').unwrap_or((text, ""));
    let by_port = PORTS.iter().find(|(port, _)| *port == end).map(|(_, scheme)| scheme);
    let guess = match by_port {
        // It may hold a password.
        _ if text.contains('@') => {
            return "a backend is a URL like redis://HOST, or a profile of the config file".into();
        }
        Some(scheme) => format!("{scheme}://{text}"),
        None if text.starts_with('/') => format!("file://{text}"),
        None if text.starts_with(['.', '~']) => "file:///DIR, with the whole path of the directory".into(),
        None if is_scheme(start) => match end.trim_start_matches('/') {
            "" => format!("{start}://HOST"),
            host => format!("{start}://{host}"),
        },
        None => match (nearest(text, profiles.iter().map(String::as_str)), profiles) {
            (Some(near), _) => return format!("the config file has no profile {text:?}; did you mean {near:?}?"),
            (None, []) => {
                return format!(
                    "{text:?} is not a URL like redis://HOST, and the config file has no [backends.{text}]"
                );
            }
            (None, _) => return format!("the config file has no profile {text:?}; it has {}", profiles.join(", ")),
        },
    };
    format!("{text:?} is not a URL; did you mean {guess}?")
}

/// toml's errors draw a picture over several lines; we have one.
fn one_line(error: &toml::de::Error, text: &str) -> anyhow::Error {
    let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
    anyhow!("line {line}: {}", error.message().replace('\n', ", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ConfigFile> {
        ConfigFile::parse(Path::new("config.toml"), text)
    }

    #[test]
    fn reads_settings_and_profiles() {
        let file = parse("ttl = 60\nwait = '5m'\n[backends.lan]\nurl = 'file:///x'\nttl = '9s'\n").unwrap();
        assert_eq!(file.settings["ttl"], "60");
        assert_eq!(file.profiles["lan"].settings["ttl"], "9s");
        assert_eq!(file.profiles["lan"].address.to_string(), "file:///x");
    }

    #[test]
    fn names_the_nearest_key() {
        for (text, near) in [
            ("tttl = 1", "\"ttl\""),
            ("backend_ = 1", "\"backend\""),
            ("[backends.a]\nurll='file:///x'", "needs a url"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(near), "{text}: {error}");
        }
    }

    #[test]
    fn says_the_line_of_a_syntax_error_in_one_line() {
        let error = format!("{:#}", parse("ttl = 1\nwait = = 2\n").unwrap_err());
        assert!(error.contains("line 2") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn finds_a_password_wherever_it_stands() {
        assert!(parse("backend = 'file://u:pw@h/x'").unwrap().has_password());
        assert!(parse("[backends.a]\nurl = 'redis://h'\npassword = 'pw'").unwrap().has_password());
        assert!(!parse("[backends.a]\nurl = 'redis://h'\npassword-file = '/pw'").unwrap().has_password());
    }

    proptest::proptest! {
        #[test]
        fn no_config_file_makes_the_reader_panic(text in "([a-z\\[\\].='\"0-9\\n -]{0,80}|\\PC{0,80})") {
            if let Err(error) = parse(&text) {
                assert!(!format!("{error:#}").contains('\n'));
            }
        }
    }
}
