//! From what was typed to what is meant. Flag beats environment beats profile beats config file beats default: every layer
//! is looked up here, once for every setting, and all that a run has to know is put together.

mod file;
pub mod values;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::backend::{self, Address, Backend, DEFAULT_HISTORY, Patience, file_default_address};
use crate::cli::{self, Common};
use crate::exit::{Exit, Fault};
use crate::lock::{LeaseTiming, LockName, Mode, rounded};
use crate::report::{Loudness, Voice};
pub use file::{ConfigFile, SETTINGS};
use file::{Profile, no_backend};
pub use values::{Color, Layout, Leftovers, OnLost, nearest, words};

/// What every verb that talks to a backend needs.
#[derive(Clone, Debug)]
pub struct Service {
    pub address: Address,
    pub patience: Patience,
}

/// Everything `dlock run` has to know.
#[derive(Debug)]
pub struct RunJob {
    pub name: LockName,
    pub service: Service,
    pub timing: LeaseTiming,
    pub wait: Wait,
    pub mode: Mode,
    /// Slots were asked for, were it only one: the command is told which it has.
    pub numbered: bool,
    pub once: Option<String>,
    pub signal: i32,
    pub timeout: Option<Duration>,
    pub on_lost: OnLost,
    pub leftovers: Leftovers,
    pub hold_at_least: Duration,
    pub conflict: Exit,
    pub argv: Vec<OsString>,
    pub reentrant: bool,
    pub keep_trying: bool,
    pub metrics_file: Option<PathBuf>,
    pub on_event: Option<String>,
    pub warn_after: Option<Duration>,
    pub note: Option<String>,
    /// How many runs the lock remembers.
    pub history: usize,
    /// Where each setting came from, for `--explain`.
    pub explained: Vec<Explained>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    Forever,
    AtMost(Duration),
    /// One try, no place in the queue.
    Never,
}

impl RunJob {
    pub fn from_args(args: cli::RunArgs, mut layers: Layers) -> Result<RunJob> {
        let nothing_to_run = args.explain.then(|| "CMD".as_ref());
        let program = args.command.as_ref().or(args.argv.first()).map(AsRef::as_ref).or(nothing_to_run);
        // Whoever typed the lock for a duration did not forget the lock.
        flag("--wait", &args.asking.wait, values::duration)?;
        let name = match args.asking.named.one().filter(|_| program.is_some()) {
            Some(name) => values::lock_name(name)?,
            None => return Err(Fault::Usage.because(cli::incomplete_run(&args.asking.named, program))),
        };
        let ttl = layers.ttl(&args.ttl)?;
        let usual = LeaseTiming::new(ttl, None).map(|timing| rounded(timing.kill_after));
        let usual = usual.unwrap_or_else(|_| "none".into());
        let kill_after = layers.option("kill-after", &args.kill_after, values::duration, &usual)?;
        let timing = LeaseTiming::new(ttl, kill_after).context(Fault::Usage)?;
        let service = layers.service(Some(timing))?;
        let is_set = |limit: &Duration| !limit.is_zero();
        layers.note("slots", args.asking.slots.clone(), "1");
        Ok(RunJob {
            name,
            service,
            timing,
            mode: mode(args.asking.shared, &args.asking.slots)?,
            numbered: args.asking.slots.is_some(),
            wait: wait(&mut layers, &args)?,
            once: flag("--once", &args.once, values::once_key)?,
            signal: layers.value("signal", &args.signal, values::signal, "TERM")?,
            timeout: layers.option("timeout", &args.timeout, values::duration, "none")?.filter(is_set),
            on_lost: layers.value("on-lost", &args.on_lost, values::choice, "kill")?,
            leftovers: layers.value("leftovers", &args.leftovers, values::choice, "kill")?,
            hold_at_least: layers.value("hold-at-least", &args.hold_at_least, values::duration, "0")?,
            metrics_file: layers.option("metrics-file", &args.metrics_file, values::path, "none")?,
            on_event: layers.option("on-event", &args.on_event, values::shell_command, "none")?,
            warn_after: layers.option("warn-after", &args.warn_after, values::duration, "none")?.filter(is_set),
            note: layers.option("note", &args.note, values::note, "none")?,
            history: layers.value("history", &args.history, values::history, &DEFAULT_HISTORY.to_string())?,
            conflict: {
                let (typed, usual) = (&args.asking.conflict_exit_code, Exit::BUSY.to_string());
                Exit::Code(layers.value("conflict-exit-code", typed, values::exit_code, &usual)?)
            },
            argv: match args.command {
                Some(line) => vec![values::shell(), "-c".into(), line],
                None => args.argv,
            },
            reentrant: args.reentrant,
            keep_trying: args.keep_trying,
            explained: layers.explained,
        })
    }
}

type Key = &'static str;
type Parse<T> = fn(&str) -> Result<T>;

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
        if let Some((backend, source)) = layers.find("backend", &layers.typed.backend)?
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
        let format = self.value("log", &log, values::choice, "text")?;
        let verbose = (!quiet && self.value("verbose", &None, values::yes_or_no, "false")?) || verbose;
        let quiet = quiet || self.value("quiet", &None, values::yes_or_no, "false")?;
        self.explained.clear();
        let loudness = match () {
            () if verbose => Loudness::Verbose,
            () if quiet => Loudness::Quiet,
            () => Loudness::Normal,
        };
        Ok(Voice::new(format, loudness))
    }

    /// The names of the profiles in the config file.
    pub fn profiles(&self) -> Vec<String> {
        self.file.iter().flat_map(|file| file.profiles.keys().cloned()).collect()
    }

    /// A setting's value from the strongest layer that has it, or its default; noted down for `--explain`.
    pub fn value<T>(&mut self, key: Key, flag: &Option<String>, parse: Parse<T>, default: &str) -> Result<T> {
        self.option(key, flag, parse, default)?.map_or_else(|| parse(default), Ok)
    }

    /// The same where nothing need be set; `unset` says what that means.
    pub fn option<T>(&mut self, key: Key, flag: &Option<String>, parse: Parse<T>, unset: &str) -> Result<Option<T>> {
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

    /// The backend that was chosen, else local files.
    pub fn service(&mut self, timing: Option<LeaseTiming>) -> Result<Service> {
        const LATER_ANSWERS: Duration = Duration::from_secs(2);
        let address = match (self.find("backend", &self.typed.backend)?, &self.profile) {
            (None, _) => file_default_address()?,
            (Some((text, source)), profile) => {
                let address = match profile {
                    Some((_, profile)) => profile.address.clone(),
                    None => Address::parse(&text).with_context(|| source.place("backend"))?,
                };
                self.explained.push(Explained { key: "backend", value: address.to_string(), source });
                address
            }
        };
        let typed = self.typed.connect_timeout.clone();
        let connect = self.value("connect-timeout", &typed, values::duration, "5s")?;
        let connect = connect.max(Duration::from_millis(1));
        let attempt = timing.map_or(LATER_ANSWERS, LeaseTiming::attempt);
        Ok(Service { address, patience: Patience { connect, attempt } })
    }

    /// How long a lease lasts, for verbs that take no `--kill-after`.
    pub fn ttl(&mut self, flag: &Option<String>) -> Result<Duration> {
        self.value("ttl", flag, values::duration, "30s")
    }

    fn find(&self, key: &str, flag: &Option<String>) -> Result<Option<(String, Source)>> {
        if let Some(text) = flag {
            return Ok(Some((text.clone(), Source::Flag)));
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

impl Service {
    pub fn open(&self) -> Result<Box<dyn Backend>> {
        backend::open(&self.address, self.patience)
    }
}

/// What only a flag can set.
pub fn flag<T>(name: &'static str, typed: &Option<String>, parse: fn(&str) -> Result<T>) -> Result<Option<T>> {
    typed.as_deref().map(parse).transpose().context(name).context(Fault::Usage)
}

fn wait(layers: &mut Layers, args: &cli::RunArgs) -> Result<Wait> {
    if args.keep_trying {
        // Whoever never gives up waits for ever, whatever is usual here.
        layers.note("wait", Some("for ever".into()), "");
        return Ok(Wait::Forever);
    }
    let typed = if args.asking.no_wait { &Some("0".to_owned()) } else { &args.asking.wait };
    Ok(match layers.option("wait", typed, values::duration, "for ever")? {
        None => Wait::Forever,
        Some(Duration::ZERO) => Wait::Never,
        Some(limit) => Wait::AtMost(limit),
    })
}

fn mode(shared: bool, slots: &Option<String>) -> Result<Mode> {
    let slots = flag("--slots", slots, values::slots)?;
    Ok(match slots {
        _ if shared => Mode::Shared,
        None | Some(1) => Mode::Exclusive,
        Some(n) => Mode::Slots(n),
    })
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
