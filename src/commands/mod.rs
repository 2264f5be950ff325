//! One file for each verb.

mod doctor;
mod explain;
mod fence;
mod force_release;
mod generate;
mod run;
pub mod status;
mod tenure;
mod words;

use std::future::Future;

use anyhow::{Context, Result};
use clap::error::ErrorKind;

use crate::backend::DiskTrouble;
use crate::cli::{self, Common, Verb};
use crate::config::{self, Acquisition, Examination, Fence, Job, Layers, Loaded, StatusQuery, Takeaway, Tenure, load};
use crate::exit::{Exit, Fault};
use crate::report::{Loudness, NobodyReads, Voice};

/// Does what was typed. The one place where the verbs are told apart.
pub fn obey(verb: Verb) -> Exit {
    match verb {
        Verb::Run(args) => with(load(&args.common), |layers, voice| {
            let explain = args.explain;
            let job = Job::from_args(*args, layers)?;
            if explain { explain::explain(&job) } else { run::run(job, voice) }
        }),
        Verb::Status(args) => {
            with(load(&args.common), |layers, voice| status::status(&StatusQuery::from_args(args, layers)?, voice))
        }
        Verb::ForceRelease(args) => {
            with(load(&args.common), |layers, _| force_release::force_release(&Takeaway::from_args(args, layers)?))
        }
        Verb::Acquire(args) => {
            with(load(&args.common), |layers, voice| tenure::acquire(Acquisition::from_args(args, layers)?, voice))
        }
        Verb::Renew(args) => with(load(&args.common), |layers, _| tenure::change(&Tenure::to_renew(args, layers)?)),
        Verb::Release(args) => with(load(&args.common), |layers, _| tenure::change(&Tenure::to_release(args, layers)?)),
        Verb::Doctor(args) => {
            with(load(&args.common), |layers, _| doctor::doctor(&Examination::from_args(args, layers)?))
        }
        Verb::Fence(args) => {
            let common = Common { log: args.log.clone(), ..Common::default() };
            with(load(&common), |_, voice| fence::fence(&Fence::from_args(args)?, voice))
        }
        Verb::Completions { shell } => with(Ok(Loaded::nothing()), |_, _| generate::completions(shell)),
        Verb::Man => with(Ok(Loaded::nothing()), |_, _| generate::man()),
        Verb::Words(args) => with(load(&args.common), |layers, _| words::words(args, layers)),
    }
}

/// Does the work with the configuration, and reports on standard error why it failed.
fn with(loaded: Result<Loaded>, work: impl FnOnce(Layers, Voice) -> Result<Exit>) -> Exit {
    let (format, loudness) = match &loaded {
        Ok(loaded) => (loaded.format, loaded.loudness),
        Err(_) => (config::typed_format(typed()), Loudness::Normal),
    };
    match loaded.and_then(|loaded| work(loaded.layers, Voice::new(format, loudness))) {
        Ok(exit) => exit,
        Err(error) if error.is::<NobodyReads>() => Exit::OK,
        Err(error) => {
            Voice::new(format, loudness).error(&error);
            failed(fault_of(&error))
        }
    }
}

/// What was typed is no call of dlock, or asks for help.
pub fn misunderstood(error: &clap::Error) -> Exit {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let _ = error.print();
        return Exit::OK;
    }
    let mut voice = Voice::new(config::typed_format(typed()), Loudness::Normal);
    voice.error(&Fault::Usage.because(cli::mistake(error, typed().next().as_deref())));
    failed(Fault::Usage)
}

fn typed() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// A disk that fails puts the locks on it out of reach, though no server has to be looked after.
fn fault_of(error: &anyhow::Error) -> Fault {
    if error.root_cause().is::<DiskTrouble>() { Fault::Unreachable } else { Fault::of(error) }
}

/// What is left to do when dlock has failed, or was not understood.
fn failed(fault: Fault) -> Exit {
    let exit = fault.exit();
    match typed().next().as_deref() {
        Some("acquire") => tenure::fail_the_eval(exit),
        _ => exit,
    }
}

/// For verbs that ask a backend a question or two and need no keeper.
fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("tokio")?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}
