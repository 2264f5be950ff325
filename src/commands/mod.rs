//! One file for each verb.

mod doctor;
mod explain;
mod fence;
mod force_release;
mod generate;
mod run;
mod status;
mod tenure;
mod words;

use std::future::Future;

use anyhow::{Context, Result};

use crate::cli::Verb;
use crate::config::{Acquisition, Examination, Fence, Job, StatusQuery, Takeaway, Tenure};
use crate::exit::{Exit, Fault};
use crate::report::{NobodyReads, Voice};

pub fn dispatch(verb: Verb, voice: Voice) -> Result<Exit> {
    match obey(verb, voice) {
        Err(error) if error.is::<NobodyReads>() => Ok(Exit::OK),
        done => done,
    }
}

fn obey(verb: Verb, voice: Voice) -> Result<Exit> {
    match verb {
        Verb::Run(args) if args.explain => explain::explain(&Job::from_args(*args)?),
        Verb::Run(args) => run::run(Job::from_args(*args)?, voice),
        Verb::Status(args) => status::status(&StatusQuery::from_args(args)?, voice),
        Verb::ForceRelease(args) => force_release::force_release(&Takeaway::from_args(args)?),
        Verb::Acquire(args) => tenure::acquire(Acquisition::from_args(args)?, voice),
        Verb::Renew(args) => tenure::change(&Tenure::to_renew(args)?),
        Verb::Release(args) => tenure::change(&Tenure::to_release(args)?),
        Verb::Doctor(args) => doctor::doctor(&Examination::from_args(args)?),
        Verb::Fence(args) => fence::fence(&Fence::from_args(args)?, voice),
        Verb::Completions { shell } => generate::completions(shell),
        Verb::Man => generate::man(),
        Verb::Words(args) => words::words(args),
    }
}

/// What is left to do when dlock has failed, or was not understood.
pub fn failed(fault: Fault) -> Exit {
    let exit = fault.exit();
    match std::env::args_os().nth(1) {
        Some(verb) if verb == "acquire" => tenure::fail_the_eval(exit),
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
