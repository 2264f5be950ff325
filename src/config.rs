//! From what was typed to what is meant. Every layer (flag, environment, profile, config file, default)
//! is looked up here, and every value a user can give is checked here, once.

mod file;
mod layers;
mod names;
mod values;
mod voice;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::backend::{Address, DEFAULT_HISTORY, Patience, file_default_address};
use crate::cli;
use crate::exit::{Exit, Fault};
use crate::lock::{LeaseTiming, LockName, Mode, OwnerId, Selector, Token, rounded};
pub use file::ConfigFile;
pub use layers::{Explained, Layers, SETTINGS, variable};
pub use values::{Color, Layout, Leftovers, OnLost, nearest, words};
pub use voice::{load, typed_format};

const DEFAULT_TTL: &str = "30s";

/// What every verb that talks to a backend needs.
#[derive(Debug)]
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

#[derive(Debug)]
pub struct StatusJob {
    pub service: Service,
    /// All there are, if nothing is selected.
    pub wanted: Vec<Selector>,
    /// `None`: a table, or the description of one lock on a terminal.
    pub layout: Option<Layout>,
    pub held: bool,
    pub color: Color,
    pub watch: Option<Duration>,
    pub exit_code: bool,
    /// What has to be typed to reach the same backend again.
    pub backend_flag: Option<String>,
}

#[derive(Debug)]
pub struct HistoryJob {
    pub service: Service,
    pub name: LockName,
    pub limit: usize,
    pub json: bool,
    pub forget_once: Option<String>,
}

#[derive(Debug)]
pub struct ForgetJob {
    pub service: Service,
    pub name: LockName,
}

#[derive(Debug)]
pub struct CheckJob {
    pub service: Service,
    pub wanted: Vec<Selector>,
    pub held_at_most: Option<Duration>,
    pub last_success_within: Option<Duration>,
    pub waiting_at_most: Option<Duration>,
    /// The part of a limit from which on there is a warning.
    pub warn: Option<f64>,
    pub json: bool,
}

#[derive(Debug)]
pub struct ForceReleaseJob {
    pub service: Service,
    pub name: LockName,
    pub now: bool,
    pub yes: bool,
    pub token: Option<Token>,
    pub reason: Option<String>,
}

/// A lock that no process of ours keeps, only its ttl.
#[derive(Debug)]
pub struct AcquireJob {
    pub job: RunJob,
    pub json: bool,
}

/// What is to become of such a lock.
#[derive(Debug)]
pub struct OwnedLockJob {
    pub service: Service,
    pub name: LockName,
    pub owner: OwnerId,
    pub extension: Extension,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// For so long from now on.
    To(Duration),
    /// For the ttl that it was taken or last renewed with or, if that is not known, for this.
    AsBefore(Duration),
    /// Not at all: let go.
    End,
}

#[derive(Debug)]
pub struct DoctorJob {
    pub service: Service,
    pub timing: LeaseTiming,
    pub json: bool,
    pub strict: bool,
    pub print_schema: bool,
}

#[derive(Debug)]
pub struct FenceJob {
    pub resource: PathBuf,
    pub token: Token,
    pub argv: Vec<OsString>,
}

impl RunJob {
    pub fn from_args(mut args: cli::RunArgs, mut layers: Layers) -> Result<RunJob> {
        let has_command = args.explain || args.command.is_some() || !args.argv.is_empty();
        let name = names::of_run(std::mem::take(&mut args.named), has_command)?;
        let ttl = layers.value("ttl", args.ttl.as_deref(), values::duration, DEFAULT_TTL)?;
        let usual = LeaseTiming::new(ttl, None).map(|timing| rounded(timing.kill_after));
        let usual = usual.unwrap_or_else(|_| "none".into());
        let kill_after = layers.option("kill-after", args.kill_after.as_deref(), values::duration, &usual)?;
        let timing = LeaseTiming::new(ttl, kill_after).context(Fault::Usage)?;
        let service = Service::from_layers(&mut layers, &args.common, Some(timing))?;
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

impl StatusJob {
    pub fn from_args(args: cli::StatusArgs, mut layers: Layers) -> Result<StatusJob> {
        let wanted = names::all(&args.locks)?;
        let watch = flag("--watch", args.watch.as_deref(), values::duration)?;
        let layout = if args.json { Some("json") } else { args.format.as_deref() };
        let layout = flag("--format", layout, values::choice)?;
        if args.exit_code && wanted.is_empty() {
            return Err(Fault::Usage.because("--exit-code is about locks that are named; see dlock status --help"));
        }
        if watch.is_some() && layout == Some(Layout::Prometheus) {
            return Err(Fault::Usage.because("--format prometheus is printed once, not with --watch"));
        }
        let color = flag("--color", args.color.as_deref(), values::choice)?;
        let service = Service::from_layers(&mut layers, &args.common, None)?;
        Ok(StatusJob {
            backend_flag: args.common.backend.map(|typed| match typed.contains("://") {
                true => format!("-b '{}' ", service.address),
                false => format!("-b {typed} "),
            }),
            service,
            wanted,
            layout,
            held: args.held,
            color: color.unwrap_or(Color::Auto),
            watch: watch.map(|every| every.max(Duration::from_millis(100))),
            exit_code: args.exit_code,
        })
    }
}

impl HistoryJob {
    pub fn from_args(args: cli::HistoryArgs, mut layers: Layers) -> Result<HistoryJob> {
        let forget_once = flag("--forget-once", args.forget_once.as_deref(), values::once_key)?;
        let limit = flag("--limit", args.limit.as_deref(), values::count)?;
        Ok(HistoryJob {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            name: names::of("history", args.named)?,
            limit: limit.unwrap_or(usize::MAX),
            json: args.json,
            forget_once,
        })
    }
}

impl ForgetJob {
    pub fn from_args(args: cli::ForgetArgs, mut layers: Layers) -> Result<ForgetJob> {
        let name = names::of("forget", args.named)?;
        Ok(ForgetJob { service: Service::from_layers(&mut layers, &args.common, None)?, name })
    }
}

impl CheckJob {
    pub fn from_args(args: cli::CheckArgs, mut layers: Layers) -> Result<CheckJob> {
        let wanted = names::all(&args.locks)?;
        if wanted.is_empty() {
            return Err(Fault::Usage.because("which lock? Name it, or all of them: dlock check '*'"));
        }
        Ok(CheckJob {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            wanted,
            held_at_most: flag("--held-at-most", args.held_at_most.as_deref(), values::duration)?,
            last_success_within: flag("--last-success-within", args.last_success_within.as_deref(), values::duration)?,
            waiting_at_most: flag("--waiting-at-most", args.waiting_at_most.as_deref(), values::duration)?,
            warn: flag("--warn", args.warn.as_deref(), values::part)?,
            json: args.json,
        })
    }
}

impl ForceReleaseJob {
    pub fn from_args(args: cli::ForceReleaseArgs, mut layers: Layers) -> Result<ForceReleaseJob> {
        let token = flag("--token", args.token.as_deref(), values::token)?;
        Ok(ForceReleaseJob {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            name: names::of("force-release", args.named)?,
            now: args.now,
            yes: args.yes,
            token,
            reason: args.reason,
        })
    }
}

impl AcquireJob {
    pub fn from_args(args: cli::AcquireArgs, layers: Layers) -> Result<AcquireJob> {
        let name = names::of("acquire", args.named)?.to_string();
        let as_run = cli::RunArgs {
            named: cli::Named { name: Some(name), words: Vec::new() },
            common: args.common,
            ttl: args.ttl,
            wait: args.wait,
            no_wait: args.no_wait,
            shared: args.shared,
            slots: args.slots,
            conflict_exit_code: args.conflict_exit_code,
            note: args.note,
            // Never started, only shown by `status`.
            argv: vec!["dlock".into(), "acquire".into()],
            ..cli::RunArgs::default()
        };
        Ok(AcquireJob { job: RunJob::from_args(as_run, layers)?, json: args.json })
    }
}

impl OwnedLockJob {
    pub fn to_renew(args: cli::RenewArgs, mut layers: Layers) -> Result<OwnedLockJob> {
        let ttl = layers.value("ttl", args.ttl.as_deref(), values::duration, DEFAULT_TTL)?;
        LeaseTiming::new(ttl, None).context(Fault::Usage)?;
        Ok(OwnedLockJob {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            name: names::of("renew", args.named)?,
            owner: owner(args.owner)?,
            extension: if args.ttl.is_some() { Extension::To(ttl) } else { Extension::AsBefore(ttl) },
        })
    }

    pub fn to_release(args: cli::ReleaseArgs, mut layers: Layers) -> Result<OwnedLockJob> {
        Ok(OwnedLockJob {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            name: names::of("release", args.named)?,
            owner: owner(args.owner)?,
            extension: Extension::End,
        })
    }
}

impl DoctorJob {
    pub fn from_args(args: cli::DoctorArgs, mut layers: Layers) -> Result<DoctorJob> {
        let ttl = layers.value("ttl", args.ttl.as_deref(), values::duration, DEFAULT_TTL)?;
        let kill_after = layers.option("kill-after", None, values::duration, "")?;
        let timing = LeaseTiming::new(ttl, kill_after).context(Fault::Usage)?;
        let service = Service::from_layers(&mut layers, &args.common, Some(timing))?;
        Ok(DoctorJob { service, timing, json: args.json, strict: args.strict, print_schema: args.print_schema })
    }
}

impl FenceJob {
    pub fn from_args(args: cli::FenceArgs) -> Result<FenceJob> {
        let from_environment = std::env::var("DLOCK_FENCING_TOKEN").ok();
        let token = args
            .token
            .or(from_environment)
            .ok_or_else(|| Fault::Usage.because("no fencing token: neither --token nor $DLOCK_FENCING_TOKEN is set"))?;
        let token = values::token(&token).context("--token or $DLOCK_FENCING_TOKEN").context(Fault::Usage)?;
        Ok(FenceJob { resource: args.resource, token, argv: args.argv })
    }
}

impl Service {
    pub fn from_layers(layers: &mut Layers, common: &cli::Common, timing: Option<LeaseTiming>) -> Result<Service> {
        const LATER_ANSWERS: Duration = Duration::from_secs(2);
        let address = match layers.address(common.backend.as_deref())? {
            Some(address) => address,
            None => file_default_address()?,
        };
        let connect = layers.value("connect-timeout", common.connect_timeout.as_deref(), values::duration, "5s")?;
        let connect = connect.max(Duration::from_millis(1));
        let attempt = timing.map_or(LATER_ANSWERS, LeaseTiming::attempt);
        Ok(Service { address, patience: Patience { connect, attempt } })
    }
}

/// What only a flag can set.
fn flag<T>(name: &'static str, typed: Option<&str>, parse: fn(&str) -> Result<T>) -> Result<Option<T>> {
    typed.map(parse).transpose().context(name).context(Fault::Usage)
}

fn owner(typed: Option<String>) -> Result<OwnerId> {
    let owner = typed.or_else(|| std::env::var("DLOCK_OWNER").ok()).unwrap_or_default();
    owner.parse::<OwnerId>().context("--owner or $DLOCK_OWNER").context(Fault::Usage)
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
