//! One file for each verb.

mod acquire;
mod check;
mod doctor;
mod explain;
mod fence;
mod force_release;
mod forget;
mod generate;
mod history;
mod run;
mod selected;
pub mod status;
pub mod table;

mod words;

use std::future::Future;

use anyhow::{Context, Result};
use clap::error::ErrorKind;

use crate::backend::DiskTrouble;
use crate::cli::{self, Cli, Common, Verb};
use crate::config::{
    self, AcquireJob, CheckJob, DoctorJob, FenceJob, ForceReleaseJob, ForgetJob, HistoryJob, Layers, OwnedLockJob,
    RunJob, StatusJob, load,
};
use crate::exit::{Exit, Fault};
use crate::report::{Loudness, NobodyReads, Voice};

/// Does what was typed. The one place where the verbs are told apart.
pub fn dispatch(verb: Verb) -> Exit {
    match verb {
        Verb::Run(args) => with(load(&args.common), |layers, voice| {
            let explain = args.explain;
            let job = RunJob::from_args(*args, layers)?;
            if explain { explain::explain(&job) } else { run::run(job, voice) }
        }),
        Verb::Status(args) => {
            with(load(&args.common), |layers, voice| status::status(&StatusJob::from_args(args, layers)?, voice))
        }
        Verb::History(args) => {
            with(load(&args.common), |layers, _| history::history(&HistoryJob::from_args(args, layers)?))
        }
        Verb::Check(args) => with(load(&args.common), |layers, _| check::check(&CheckJob::from_args(args, layers)?)),
        Verb::Forget(args) => {
            with(load(&args.common), |layers, _| forget::forget(&ForgetJob::from_args(args, layers)?))
        }
        Verb::ForceRelease(args) => with(load(&args.common), |layers, _| {
            force_release::force_release(&ForceReleaseJob::from_args(args, layers)?)
        }),
        Verb::Acquire(args) => {
            with(load(&args.common), |layers, voice| acquire::acquire(AcquireJob::from_args(args, layers)?, voice))
        }
        Verb::Renew(args) => {
            with(load(&args.common), |layers, _| acquire::change(&OwnedLockJob::to_renew(args, layers)?))
        }
        Verb::Release(args) => {
            with(load(&args.common), |layers, _| acquire::change(&OwnedLockJob::to_release(args, layers)?))
        }
        Verb::Doctor(args) => {
            with(load(&args.common), |layers, _| doctor::doctor(&DoctorJob::from_args(args, layers)?))
        }
        Verb::Fence(args) => {
            let common = Common { log: args.log.clone(), ..Common::default() };
            with(load(&common), |_, voice| fence::fence(&FenceJob::from_args(args)?, voice))
        }
        Verb::Completions { shell } => with(Ok(nothing()), |_, _| generate::completions(shell)),
        Verb::Man => with(Ok(nothing()), |_, _| generate::man()),
        Verb::Help { verb } => {
            let words = ["dlock".to_owned()].into_iter().chain(verb).chain(["--help".to_owned()]);
            Cli::read(words.map(Into::into)).map_or_else(|error| usage_error(&error), |_| Exit::OK)
        }
        Verb::Words(args) => with(load(&args.common), |layers, _| words::words(args, layers)),
    }
}

/// Does the work with the configuration, and reports on standard error why it failed.
fn with(loaded: Result<(Layers, Voice)>, work: impl FnOnce(Layers, Voice) -> Result<Exit>) -> Exit {
    let voice = loaded.as_ref().map_or_else(|_| plain_voice(), |(_, voice)| voice.clone());
    match loaded.and_then(|(layers, voice)| work(layers, voice)) {
        Ok(exit) => exit,
        Err(error) if error.is::<NobodyReads>() => Exit::OK,
        Err(error) => failed(&error, fault_of(&error), voice),
    }
}

/// For verbs that need no configuration.
fn nothing() -> (Layers, Voice) {
    (Layers::default(), plain_voice())
}

/// How to speak when the configuration is not known.
fn plain_voice() -> Voice {
    Voice::new(config::typed_format(typed()), Loudness::Normal)
}

/// What was typed is no call of dlock, or asks for help.
pub fn usage_error(error: &clap::Error) -> Exit {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let _ = error.print();
        return Exit::OK;
    }
    let mistake = Fault::Usage.because(cli::mistake(error, &typed().collect::<Vec<_>>()));
    failed(&mistake, Fault::Usage, plain_voice())
}

fn typed() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// A disk that fails puts the locks on it out of reach, though no server has to be looked after.
fn fault_of(error: &anyhow::Error) -> Fault {
    if error.root_cause().is::<DiskTrouble>() { Fault::Unreachable } else { Fault::of(error) }
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
