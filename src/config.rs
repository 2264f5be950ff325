//! From what was typed to what is meant. Every layer (flag, environment, profile, config file, default)
//! is looked up here, and every value a user can give is checked here, once.

mod file;
mod layers;
mod values;
mod voice;

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::backend::{Address, Patience, file_default_address};
use crate::cli;
use crate::exit::{Exit, Fault};
use crate::lock::{LockName, Mode, OwnerId, Terms, Token};
pub use file::ConfigFile;
pub use layers::{Explained, Layers, SETTINGS, variable};
pub use values::{Leftovers, OnLost, nearest};
pub use voice::{Loaded, load, typed_format};

const DEFAULT_TTL: Duration = Duration::from_secs(30);

/// What every verb that talks to a backend needs.
#[derive(Debug)]
pub struct Service {
    pub address: Address,
    pub patience: Patience,
}

/// Everything `dlock run` has to know.
#[derive(Debug)]
pub struct Job {
    pub name: LockName,
    pub service: Service,
    pub terms: Terms,
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
pub struct StatusQuery {
    pub service: Service,
    pub names: Vec<LockName>,
    pub json: bool,
    pub watch: Option<Duration>,
    pub exit_code: bool,
}

#[derive(Debug)]
pub struct Takeaway {
    pub service: Service,
    pub name: LockName,
    pub now: bool,
    pub yes: bool,
    pub token: Option<Token>,
    pub reason: Option<String>,
}

/// A lock that no process of ours keeps, only its ttl.
#[derive(Debug)]
pub struct Acquisition {
    pub job: Job,
    pub json: bool,
}

/// What is to become of such a lock.
#[derive(Debug)]
pub struct Tenure {
    pub service: Service,
    pub name: LockName,
    pub owner: OwnerId,
    pub term: Extension,
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
pub struct Examination {
    pub service: Service,
    pub terms: Terms,
    pub json: bool,
    pub strict: bool,
    pub print_schema: bool,
}

#[derive(Debug)]
pub struct Fence {
    pub resource: PathBuf,
    pub token: Token,
    pub argv: Vec<OsString>,
}

impl Job {
    pub fn from_args(args: cli::RunArgs, mut layers: Layers) -> Result<Job> {
        let ttl = layers.explain("ttl", args.ttl.as_deref(), values::duration, || "30s".into())?;
        let ttl = ttl.unwrap_or(DEFAULT_TTL);
        let usual = || Terms::new(ttl, None).map_or_else(|_| "none".into(), |terms| values::shown(terms.kill_after));
        let kill_after = layers.explain("kill-after", args.kill_after.as_deref(), values::duration, usual)?;
        let terms = Terms::new(ttl, kill_after).context(Fault::Usage)?;
        let service = Service::from_layers(&mut layers, &args.common, Some(terms))?;

        let mode = mode(args.shared, args.slots.as_deref())?;
        layers.note("slots", args.slots.clone(), "1");
        let wait = if args.keep_trying {
            // Whoever never gives up waits for ever, whatever is usual here.
            layers.note("wait", Some("for ever".into()), "");
            None
        } else {
            let typed = if args.no_wait { Some("0") } else { args.wait.as_deref() };
            layers.explain("wait", typed, values::duration, || "for ever".into())?
        };
        let signal = layers.explain("signal", args.signal.as_deref(), values::signal, || "TERM".into())?;
        let timeout = layers.explain("timeout", args.timeout.as_deref(), values::duration, || "none".into())?;
        let on_lost = layers.explain("on-lost", args.on_lost.as_deref(), values::on_lost, || "kill".into())?;
        let leftovers = layers.explain("leftovers", args.leftovers.as_deref(), values::leftovers, || "kill".into())?;
        let hold = layers.explain("hold-at-least", args.hold_at_least.as_deref(), values::duration, || "0".into())?;
        let metrics = layers.explain("metrics-file", args.metrics_file.as_deref(), values::path, || "none".into())?;
        let conflict =
            layers.explain("conflict-exit-code", args.conflict_exit_code.as_deref(), values::exit_code, || {
                Exit::BUSY.to_string()
            })?;

        Ok(Job {
            name: args.name.parse::<LockName>().context("--name").context(Fault::Usage)?,
            service,
            terms,
            wait: match wait {
                None => Wait::Forever,
                Some(Duration::ZERO) => Wait::Never,
                Some(limit) => Wait::AtMost(limit),
            },
            mode,
            numbered: args.slots.is_some(),
            once: args.once.map(|key| values::once_key(&key)).transpose().context("--once").context(Fault::Usage)?,
            signal: signal.unwrap_or(nix::libc::SIGTERM),
            timeout: timeout.filter(|limit| !limit.is_zero()),
            on_lost: on_lost.unwrap_or(OnLost::Kill),
            leftovers: leftovers.unwrap_or(Leftovers::Kill),
            hold_at_least: hold.unwrap_or(Duration::ZERO),
            conflict: Exit::Code(conflict.unwrap_or(Exit::BUSY)),
            argv: match args.command {
                Some(line) => vec![values::shell(), "-c".into(), line],
                None => args.argv,
            },
            reentrant: args.reentrant,
            keep_trying: args.keep_trying,
            metrics_file: metrics,
            explained: layers.explained,
        })
    }
}

impl StatusQuery {
    pub fn from_args(args: cli::StatusArgs, mut layers: Layers) -> Result<StatusQuery> {
        let names = args.names.iter().map(|name| name.parse()).collect::<Result<_>>().context(Fault::Usage)?;
        let watch = args.watch.as_deref().map(values::duration).transpose().context("--watch").context(Fault::Usage)?;
        Ok(StatusQuery {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            names,
            json: args.json,
            watch: watch.map(|every| every.max(Duration::from_millis(100))),
            exit_code: args.exit_code,
        })
    }
}

impl Takeaway {
    pub fn from_args(args: cli::ForceReleaseArgs, mut layers: Layers) -> Result<Takeaway> {
        let token = args.token.as_deref().map(values::token).transpose().context("--token").context(Fault::Usage)?;
        Ok(Takeaway {
            service: Service::from_layers(&mut layers, &args.common, None)?,
            name: args.name.parse().context(Fault::Usage)?,
            now: args.now,
            yes: args.yes,
            token,
            reason: args.reason,
        })
    }
}

impl Acquisition {
    pub fn from_args(args: cli::AcquireArgs, layers: Layers) -> Result<Acquisition> {
        let as_run = cli::RunArgs {
            name: args.name,
            common: args.common,
            ttl: args.ttl,
            wait: args.wait,
            no_wait: args.no_wait,
            shared: args.shared,
            slots: args.slots,
            conflict_exit_code: args.conflict_exit_code,
            // Never started, only shown by `status`.
            argv: vec!["dlock".into(), "acquire".into()],
            ..cli::RunArgs::default()
        };
        Ok(Acquisition { job: Job::from_args(as_run, layers)?, json: args.json })
    }
}

impl Tenure {
    pub fn to_renew(args: cli::RenewArgs, mut layers: Layers) -> Result<Tenure> {
        let ttl = layers.get("ttl", args.ttl.as_deref(), values::duration)?.unwrap_or(DEFAULT_TTL);
        Terms::new(ttl, None).context(Fault::Usage)?;
        let term = if args.ttl.is_some() { Extension::To(ttl) } else { Extension::AsBefore(ttl) };
        Tenure::new(&mut layers, &args.common, &args.name, args.owner.as_deref(), term)
    }

    pub fn to_release(args: cli::ReleaseArgs, mut layers: Layers) -> Result<Tenure> {
        Tenure::new(&mut layers, &args.common, &args.name, args.owner.as_deref(), Extension::End)
    }

    fn new(
        layers: &mut Layers,
        common: &cli::Common,
        name: &str,
        owner: Option<&str>,
        term: Extension,
    ) -> Result<Tenure> {
        let from_environment = std::env::var("DLOCK_OWNER").unwrap_or_default();
        let owner = owner.unwrap_or(&from_environment);
        Ok(Tenure {
            service: Service::from_layers(layers, common, None)?,
            name: name.parse::<LockName>().context("--name").context(Fault::Usage)?,
            owner: owner.parse::<OwnerId>().context("--owner or $DLOCK_OWNER").context(Fault::Usage)?,
            term,
        })
    }
}

impl Examination {
    pub fn from_args(args: cli::DoctorArgs, mut layers: Layers) -> Result<Examination> {
        let ttl = layers.get("ttl", args.ttl.as_deref(), values::duration)?.unwrap_or(DEFAULT_TTL);
        let kill_after = layers.get("kill-after", None, values::duration)?;
        let terms = Terms::new(ttl, kill_after).context(Fault::Usage)?;
        let service = Service::from_layers(&mut layers, &args.common, Some(terms))?;
        Ok(Examination { service, terms, json: args.json, strict: args.strict, print_schema: args.print_schema })
    }
}

impl Fence {
    pub fn from_args(args: cli::FenceArgs) -> Result<Fence> {
        let from_environment = std::env::var("DLOCK_FENCING_TOKEN").ok();
        let token = args
            .token
            .or(from_environment)
            .ok_or_else(|| Fault::Usage.because("no fencing token: neither --token nor $DLOCK_FENCING_TOKEN is set"))?;
        let token = values::token(&token).context("--token or $DLOCK_FENCING_TOKEN").context(Fault::Usage)?;
        Ok(Fence { resource: args.resource, token, argv: args.argv })
    }
}

impl Service {
    fn from_layers(layers: &mut Layers, common: &cli::Common, terms: Option<Terms>) -> Result<Service> {
        const FIRST_ANSWER: Duration = Duration::from_secs(5);
        const LATER_ANSWERS: Duration = Duration::from_secs(2);
        let address = match layers.address(common.backend.as_deref())? {
            Some(address) => address,
            None => file_default_address()?,
        };
        let connect =
            layers.explain("connect-timeout", common.connect_timeout.as_deref(), values::duration, || "5s".into())?;
        let connect = connect.unwrap_or(FIRST_ANSWER).max(Duration::from_millis(1));
        let attempt = terms.map_or(LATER_ANSWERS, Terms::attempt);
        Ok(Service { address, patience: Patience { connect, attempt } })
    }
}

fn mode(shared: bool, slots: Option<&str>) -> Result<Mode> {
    let slots = slots.map(values::slots).transpose().context("--slots").context(Fault::Usage)?;
    Ok(match slots {
        _ if shared => Mode::Shared,
        None | Some(1) => Mode::Exclusive,
        Some(n) => Mode::Slots(n),
    })
}
