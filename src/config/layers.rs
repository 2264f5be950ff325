//! Flag beats environment beats profile beats config file beats default: one look-up for every setting.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::file::{ConfigFile, Profile};
use super::{nearest, values};
use crate::backend::{Address, KINDS};
use crate::cli::Common;
use crate::exit::Fault;
use crate::report::{Loudness, Voice};

type Key = &'static str;
type Parse<T> = fn(&str) -> Result<T>;

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

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Flag,
    Environment(String),
    Profile(String),
    File(String),
    Default,
}

impl Source {
    /// A wrong flag or variable is the caller's mistake, a wrong file the configuration's.
    fn fault(&self) -> Fault {
        match self {
            Source::Profile(_) | Source::File(_) => Fault::Config,
            _ => Fault::Usage,
        }
    }

    /// Where a user has to look for a wrong value.
    fn place(&self, key: &str) -> String {
        match self {
            Source::Flag => format!("--{key}"),
            Source::Environment(variable) => variable.clone(),
            other => format!("{key} in {other}"),
        }
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Flag => f.write_str("flag"),
            Source::Environment(variable) => write!(f, "${variable}"),
            Source::Profile(name) => write!(f, "profile {name}"),
            Source::File(path) => f.write_str(path),
            Source::Default => f.write_str("default"),
        }
    }
}

/// A setting as `--explain` shows it.
#[derive(Clone, Debug)]
pub struct Explained {
    pub key: Key,
    pub value: String,
    pub source: Source,
}

#[derive(Default)]
pub struct Layers {
    /// The flags that most verbs have.
    pub typed: Common,
    file: Option<ConfigFile>,
    profile: Option<(String, Profile)>,
    pub explained: Vec<Explained>,
}

impl Layers {
    /// The configuration is read once.
    pub fn load(typed: Common) -> Result<Layers> {
        let file = config_path(&typed).map(|path| ConfigFile::read(&path)).transpose()?;
        let mut layers = Layers { typed, file, ..Layers::default() };
        if let Some((backend, source)) = layers.find("backend", layers.typed.backend.as_deref())?
            && !backend.contains("://")
        {
            let profile = layers.file.as_ref().and_then(|file| file.profiles.get(&backend)).cloned();
            let profile = profile.with_context(|| no_backend(&backend, &layers.profiles()));
            let profile = profile.with_context(|| source.place("backend")).context(Fault::Config)?;
            layers.profile = Some((backend, profile));
        }
        Ok(layers)
    }

    /// How dlock is to speak. Nothing that `--explain` has to show.
    pub fn voice(&mut self) -> Result<Voice> {
        let Common { log, verbose, quiet, .. } = self.typed.clone();
        let format = self.value("log", log.as_deref(), values::choice, "text")?;
        let may_be_verbose = !quiet && self.value("verbose", None, values::yes_or_no, "false")?;
        let may_be_quiet = quiet || self.value("quiet", None, values::yes_or_no, "false")?;
        self.explained.clear();
        let loudness = match () {
            () if verbose || may_be_verbose => Loudness::Verbose,
            () if may_be_quiet => Loudness::Quiet,
            () => Loudness::Normal,
        };
        Ok(Voice::new(format, loudness))
    }

    /// The names of the profiles in the config file.
    pub fn profiles(&self) -> Vec<String> {
        self.file.iter().flat_map(|file| file.profiles.keys().cloned()).collect()
    }

    /// The backend that was chosen, if any was.
    pub fn address(&mut self) -> Result<Option<Address>> {
        let Some((text, source)) = self.find("backend", self.typed.backend.as_deref())? else { return Ok(None) };
        let address = match &self.profile {
            Some((_, profile)) => profile.address.clone(),
            None => Address::parse(&text).with_context(|| source.place("backend"))?,
        };
        self.explained.push(Explained { key: "backend", value: address.to_string(), source });
        Ok(Some(address))
    }

    /// A setting's value from the strongest layer that has it, or its default; noted down for `--explain`.
    pub fn value<T>(&mut self, key: Key, flag: Option<&str>, parse: Parse<T>, default: &str) -> Result<T> {
        self.option(key, flag, parse, default)?.map_or_else(|| parse(default), Ok)
    }

    /// The same where nothing need be set; `unset` says what that means.
    pub fn option<T>(&mut self, key: Key, flag: Option<&str>, parse: Parse<T>, unset: &str) -> Result<Option<T>> {
        let Some((text, source)) = self.find(key, flag)? else {
            self.note(key, None, unset);
            return Ok(None);
        };
        let value = parse(&text).map_err(|error| error.context(source.place(key)).context(source.fault()))?;
        self.explained.push(Explained { key, value: text, source });
        Ok(Some(value))
    }

    /// Notes down for `--explain` what only a flag can set.
    pub fn note(&mut self, key: Key, flag: Option<String>, default: &str) {
        let (value, source) = flag.map_or_else(|| (default.to_owned(), Source::Default), |text| (text, Source::Flag));
        self.explained.push(Explained { key, value, source });
    }

    fn find(&self, key: &str, flag: Option<&str>) -> Result<Option<(String, Source)>> {
        if let Some(text) = flag {
            return Ok(Some((text.to_owned(), Source::Flag)));
        }
        let variable = variable(key);
        if let Some(text) = std::env::var_os(&variable).filter(|text| !text.is_empty()) {
            let text = text.into_string().ok().with_context(|| format!("{variable} is not UTF-8"));
            return Ok(Some((text.context(Fault::Usage)?, Source::Environment(variable))));
        }
        let profile = self.profile.as_ref().map(|(name, profile)| (&profile.settings, Source::Profile(name.clone())));
        let file = self.file.as_ref().map(|file| (&file.settings, Source::File(file.path.display().to_string())));
        let mut files = profile.into_iter().chain(file);
        Ok(files.find_map(|(settings, source)| Some((settings.get(key)?.clone(), source))))
    }
}

/// What to write instead of what is neither a URL nor a profile.
fn no_backend(text: &str, profiles: &[String]) -> String {
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

/// The config file that was asked for, else the first of the usual ones that is there.
fn config_path(typed: &Common) -> Option<PathBuf> {
    let set = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
    let user = || set("XDG_CONFIG_HOME").or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".config")));
    let usual = || {
        let user = user().map(|dir| dir.join("dlock/config.toml"));
        user.into_iter().chain([PathBuf::from("/etc/dlock/config.toml")]).find(|path| path.exists())
    };
    typed.config.clone().or_else(|| set("DLOCK_CONFIG")).or_else(usual)
}

/// The environment variable of a setting.
pub fn variable(key: &str) -> String {
    format!("DLOCK_{}", key.to_ascii_uppercase().replace('-', "_"))
}
