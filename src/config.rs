//! From what was typed to what is meant. Every layer (flag, environment, profile, config file, default)
//! is looked up here, and every value a user can give is checked here, once.

mod file;
mod layers;
pub mod names;
pub mod values;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::backend::{self, Address, Backend, DEFAULT_HISTORY, Patience, file_default_address};
use crate::cli;
use crate::exit::{Exit, Fault};
use crate::lock::{LeaseTiming, LockName, Mode, rounded};
pub use file::ConfigFile;
pub use layers::{Explained, Layers, SETTINGS, variable};
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
    pub fn from_args(mut args: cli::RunArgs, mut layers: Layers) -> Result<RunJob> {
        let nothing_to_run = args.explain.then(|| "CMD".as_ref());
        let program = args.command.as_ref().or(args.argv.first()).map(AsRef::as_ref).or(nothing_to_run);
        // Whoever typed the lock for a duration did not forget the lock.
        flag("--wait", args.wait.as_deref(), values::duration)?;
        let name = names::of_run(std::mem::take(&mut args.named), program)?;
        let ttl = layers.ttl(args.ttl.as_deref())?;
        let usual = LeaseTiming::new(ttl, None).map(|timing| rounded(timing.kill_after));
        let usual = usual.unwrap_or_else(|_| "none".into());
        let kill_after = layers.option("kill-after", args.kill_after.as_deref(), values::duration, &usual)?;
        let timing = LeaseTiming::new(ttl, kill_after).context(Fault::Usage)?;
        let service = layers.service(Some(timing))?;
        let is_set = |limit: &Duration| !limit.is_zero();
        layers.note("slots", args.slots.clone(), "1");
        Ok(RunJob {
            name,
            service,
            timing,
            mode: mode(args.shared, args.slots.as_deref())?,
            numbered: args.slots.is_some(),
            wait: wait(&mut layers, &args)?,
            once: flag("--once", args.once.as_deref(), values::once_key)?,
            signal: layers.value("signal", args.signal.as_deref(), values::signal, "TERM")?,
            timeout: layers.option("timeout", args.timeout.as_deref(), values::duration, "none")?.filter(is_set),
            on_lost: layers.value("on-lost", args.on_lost.as_deref(), values::choice, "kill")?,
            leftovers: layers.value("leftovers", args.leftovers.as_deref(), values::choice, "kill")?,
            hold_at_least: layers.value("hold-at-least", args.hold_at_least.as_deref(), values::duration, "0")?,
            metrics_file: layers.option("metrics-file", args.metrics_file.as_deref(), values::path, "none")?,
            on_event: layers.option("on-event", args.on_event.as_deref(), values::shell_command, "none")?,
            warn_after: layers
                .option("warn-after", args.warn_after.as_deref(), values::duration, "none")?
                .filter(is_set),
            note: layers.option("note", args.note.as_deref(), values::note, "none")?,
            history: layers.value("history", args.history.as_deref(), values::history, &DEFAULT_HISTORY.to_string())?,
            conflict: Exit::Code(layers.value(
                "conflict-exit-code",
                args.conflict_exit_code.as_deref(),
                values::exit_code,
                &Exit::BUSY.to_string(),
            )?),
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

impl Layers {
    /// The backend that was chosen, else local files.
    pub fn service(&mut self, timing: Option<LeaseTiming>) -> Result<Service> {
        const LATER_ANSWERS: Duration = Duration::from_secs(2);
        let address = self.address().transpose().unwrap_or_else(file_default_address)?;
        let typed = self.typed.connect_timeout.clone();
        let connect = self.value("connect-timeout", typed.as_deref(), values::duration, "5s")?;
        let connect = connect.max(Duration::from_millis(1));
        let attempt = timing.map_or(LATER_ANSWERS, LeaseTiming::attempt);
        Ok(Service { address, patience: Patience { connect, attempt } })
    }

    /// How long a lease lasts, for verbs that take no `--kill-after`.
    pub fn ttl(&mut self, flag: Option<&str>) -> Result<Duration> {
        self.value("ttl", flag, values::duration, "30s")
    }
}

impl Service {
    pub fn open(&self) -> Result<Box<dyn Backend>> {
        backend::open(&self.address, self.patience)
    }
}

/// What only a flag can set.
pub fn flag<T>(name: &'static str, typed: Option<&str>, parse: fn(&str) -> Result<T>) -> Result<Option<T>> {
    typed.map(parse).transpose().context(name).context(Fault::Usage)
}

fn wait(layers: &mut Layers, args: &cli::RunArgs) -> Result<Wait> {
    let typed = if args.no_wait { Some("0") } else { args.wait.as_deref() };
    let limit = match args.keep_trying {
        false => layers.option("wait", typed, values::duration, "for ever")?,
        true => {
            // Whoever never gives up waits for ever, whatever is usual here.
            layers.note("wait", Some("for ever".into()), "");
            None
        }
    };
    Ok(match limit {
        None => Wait::Forever,
        Some(Duration::ZERO) => Wait::Never,
        Some(limit) => Wait::AtMost(limit),
    })
}

fn mode(shared: bool, slots: Option<&str>) -> Result<Mode> {
    let slots = flag("--slots", slots, values::slots)?;
    Ok(match slots {
        _ if shared => Mode::Shared,
        None | Some(1) => Mode::Exclusive,
        Some(n) => Mode::Slots(n),
    })
}
