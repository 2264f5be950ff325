//! Flag beats environment beats profile beats config file beats default: one look-up for every setting.

use anyhow::{Context, Result};

use super::file::{ConfigFile, Profile, unknown};
use crate::backend::Address;
use crate::cli;
use crate::exit::Fault;

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
    file: ConfigFile,
    profile: Option<(String, Profile)>,
    pub explained: Vec<Explained>,
}

impl Layers {
    pub fn load(common: &cli::Common) -> Result<Layers> {
        let mut layers = Layers { file: ConfigFile::load(common.config.as_deref())?, ..Layers::default() };
        if let Some((backend, source)) = layers.find("backend", common.backend.as_deref())?
            && !backend.contains("://")
        {
            let profile =
                layers.file.profiles.get(&backend).cloned().with_context(|| match layers.file.profiles.len() {
                    0 => format!(
                        "{backend:?} is neither a URL nor a profile: the config file has no [backends.{backend}]"
                    ),
                    _ => unknown(&backend, layers.file.profiles.keys().map(String::as_str)).replace("key", "profile"),
                });
            layers.profile = Some((backend, profile.with_context(|| source.to_string()).context(Fault::Config)?));
        }
        Ok(layers)
    }

    /// The names of the profiles in the config file.
    pub fn profiles(&self) -> Vec<String> {
        self.file.profiles.keys().cloned().collect()
    }

    /// The backend that was chosen, if any was.
    pub fn address(&mut self, flag: Option<&str>) -> Result<Option<Address>> {
        let Some((text, source)) = self.find("backend", flag)? else { return Ok(None) };
        let address = match &self.profile {
            Some((_, profile)) => profile.address.clone(),
            None => Address::parse(&text).with_context(|| source.to_string())?,
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
        let value = parse(&text).map_err(|error| {
            let place = match &source {
                Source::Flag => format!("--{key}"),
                Source::Environment(variable) => variable.clone(),
                other => format!("{key} in {other}"),
            };
            error.context(place).context(source.fault())
        })?;
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
        let file = (&self.file.settings, Source::File(self.file.path.display().to_string()));
        let mut files = profile.into_iter().chain([file]);
        Ok(files.find_map(|(settings, source)| Some((settings.get(key)?.clone(), source))))
    }
}

/// The environment variable of a setting.
pub fn variable(key: &str) -> String {
    format!("DLOCK_{}", key.to_ascii_uppercase().replace('-', "_"))
}
