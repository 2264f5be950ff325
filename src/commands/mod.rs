//! One file for each verb.

mod acquire;
mod check;
mod doctor;
mod explain;
mod fence;
mod force_release;
mod generate;
mod history;
pub mod run;
mod selected;
pub mod status;
pub mod table;
mod words;

use std::future::Future;

use anyhow::{Context, Result};
use clap::error::ErrorKind;

use crate::cli::{self, Cli, Common, Verb};
use crate::config::{Layers, RunJob, values, variable};
use crate::exit::{Exit, Fault};
use crate::report::{Format, Loudness, NobodyReads, Voice, print};
pub use generate::PAGES;

/// Does what was typed. The one place where the verbs are told apart.
pub fn dispatch(verb: Verb) -> Exit {
    match verb {
        Verb::Run(args) => with(args.common.clone(), |layers, voice| {
            let explain = args.explain;
            let job = RunJob::from_args(*args, layers)?;
            if explain { explain::explain(&job) } else { run::run(job, voice) }
        }),
        Verb::Status(args) => with(args.common.clone(), |layers, voice| status::status(args, layers, voice)),
        Verb::History(args) => with(args.common.clone(), |layers, _| history::history(args, layers)),
        Verb::Check(args) => with(args.common.clone(), |layers, _| check::check(&args, layers)),
        Verb::Forget(args) => with(args.common.clone(), |layers, _| history::forget(args, layers)),
        Verb::ForceRelease(args) => with(args.common.clone(), |layers, _| force_release::force_release(&args, layers)),
        Verb::Acquire(args) => with(args.common.clone(), |layers, voice| acquire::acquire(args, layers, voice)),
        Verb::Renew(args) => with(args.common.clone(), |layers, _| acquire::renew(args, layers)),
        Verb::Release(args) => with(args.common.clone(), |layers, _| acquire::release(args, layers)),
        Verb::Doctor(args) => with(args.common.clone(), |layers, _| doctor::doctor(&args, layers)),
        Verb::Words { line } => exit_of(words::words(&line), plain_voice()),
        Verb::Fence(args) => {
            let common = Common { log: args.log.clone(), ..Common::default() };
            with(common, |_, voice| fence::fence(&args, voice))
        }
        Verb::Completions { shell, .. } => exit_of(generate::completions(shell), plain_voice()),
        Verb::Man { page, .. } => exit_of(generate::man(page.as_deref()), plain_voice()),
        Verb::Help { verb, .. } => {
            let words = ["dlock".to_owned()].into_iter().chain(verb).chain(["--help".to_owned()]);
            Cli::read(words.map(Into::into)).map_or_else(|error| usage_error(&error), |_| Exit::OK)
        }
    }
}

/// Does the work of a verb with the configuration.
fn with(typed: Common, work: impl FnOnce(Layers, &mut Voice) -> Result<Exit>) -> Exit {
    let loaded = Layers::load(typed).and_then(|mut layers| Ok((layers.voice()?, layers)));
    match loaded {
        Ok((mut voice, layers)) => exit_of(work(layers, &mut voice), voice),
        Err(error) => exit_of(Err(error), plain_voice()),
    }
}

/// Reports on standard error why something failed.
fn exit_of(done: Result<Exit>, voice: Voice) -> Exit {
    match done {
        Ok(exit) => exit,
        Err(error) if error.is::<NobodyReads>() => Exit::OK,
        Err(error) => failed(&error, Fault::of(&error), voice),
    }
}

/// How to speak when what was typed makes no sense, or the config file none: as far as flag and variable tell.
fn plain_voice() -> Voice {
    let mut ours = typed().take_while(|word| word != "--");
    let flag = loop {
        match ours.next() {
            Some(word) if word == "--log" => break ours.next(),
            Some(word) if word.starts_with("--log=") => break word.strip_prefix("--log=").map(ToOwned::to_owned),
            Some(_) => {}
            None => break None,
        }
    };
    let wanted = flag.or_else(|| std::env::var(variable("log")).ok());
    let format = wanted.and_then(|format| values::choice(&format).ok()).unwrap_or(Format::Text);
    Voice::new(format, Loudness::Normal)
}

/// What was typed is no call of dlock, or asks for help.
pub fn usage_error(error: &clap::Error) -> Exit {
    if error.kind() == ErrorKind::DisplayHelp {
        let _ = error.print();
        return Exit::OK;
    }
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let _ = error.print();
        return Fault::Usage.exit();
    }
    if error.kind() == ErrorKind::DisplayVersion {
        let in_full = typed().any(|word| word == "--verbose" || word == "-v");
        let _ = print(if in_full { generate::verbose() } else { generate::version() });
        return Exit::OK;
    }
    let mistake = Fault::Usage.because(cli::mistake(error, &typed().collect::<Vec<_>>()));
    failed(&mistake, Fault::Usage, plain_voice())
}

fn typed() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// Reports that dlock has failed, or was not understood, in the way that whoever calls the verb expects.
fn failed(error: &anyhow::Error, fault: Fault, mut voice: Voice) -> Exit {
    let verb = typed().next();
    if verb.as_deref() == Some("check") {
        return check::unknown(error);
    }
    voice.error(error);
    match verb.as_deref() {
        Some("acquire") => acquire::fail_the_eval(fault.exit()),
        _ => fault.exit(),
    }
}

/// For verbs that ask a backend a question or two and need no keeper.
fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("tokio")?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}
