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
use clap::Args;
use clap::error::ErrorKind;

use crate::cli::{self, Cli, Common, Flags, Verb};
use crate::config::{Layers, RunJob, values, variable};
use crate::exit::{Exit, Fault};
use crate::report::{Format, Loudness, NobodyReads, Voice, print};
pub use generate::PAGES;

/// Does what was typed. The one place where the verbs are told apart.
pub fn dispatch(verb: Verb) -> Exit {
    match verb {
        Verb::Run(flags) => with(*flags, |args, layers, voice| {
            let explain = args.explain;
            let job = RunJob::from_args(args, layers)?;
            if explain { explain::explain(&job) } else { run::run(job, voice) }
        }),
        Verb::Status(flags) => with(flags, status::status),
        Verb::History(flags) => with(flags, history::history),
        Verb::Check(flags) => with(flags, check::check),
        Verb::Forget(flags) => with(flags, history::forget),
        Verb::ForceRelease(flags) => with(flags, force_release::force_release),
        Verb::Acquire(flags) => with(flags, acquire::acquire),
        Verb::Renew(flags) => with(flags, acquire::renew),
        Verb::Release(flags) => with(flags, acquire::release),
        Verb::Doctor(flags) => with(flags, doctor::doctor),
        Verb::Words { line } => exit_of(words::words(&line), plain_voice()),
        Verb::Fence(own) => {
            let common = Common { log: own.log.clone(), ..Common::default() };
            with(Flags { own, common }, fence::fence)
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
fn with<A: Args>(typed: Flags<A>, work: impl FnOnce(A, Layers, &mut Voice) -> Result<Exit>) -> Exit {
    let loaded = Layers::load(typed.common).and_then(|mut layers| Ok((layers.voice()?, layers)));
    match loaded {
        Ok((mut voice, layers)) => exit_of(work(typed.own, layers, &mut voice), voice),
        Err(error) => exit_of(Err(error), plain_voice()),
    }
}

/// Reports why something failed, or was not understood, in the way that whoever calls the verb expects.
fn exit_of(done: Result<Exit>, mut voice: Voice) -> Exit {
    let error = match done {
        Ok(exit) => return exit,
        Err(error) if error.is::<NobodyReads>() => return Exit::OK,
        Err(error) => error,
    };
    let (verb, exit) = (typed().next(), Fault::of(&error).exit());
    if verb.as_deref() == Some("check") {
        return check::unknown(&error);
    }
    voice.error(&error);
    if verb.as_deref() == Some("acquire") { acquire::fail_the_eval(exit) } else { exit }
}

/// How to speak when what was typed makes no sense, or the config file none: as far as flag and variable tell.
fn plain_voice() -> Voice {
    let mut ours = typed().take_while(|word| word != "--");
    let flag = ours.find(|word| word == "--log" || word.starts_with("--log="));
    let flag = flag.and_then(|word| word.strip_prefix("--log=").map(ToOwned::to_owned).or_else(|| ours.next()));
    let wanted = flag.or_else(|| std::env::var(variable("log")).ok());
    let format = wanted.and_then(|format| values::choice(&format).ok()).unwrap_or(Format::Text);
    Voice::new(format, Loudness::Normal)
}

/// What was typed is no call of dlock, or asks for help.
pub fn usage_error(error: &clap::Error) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp => {
            let _ = error.print();
            Exit::OK
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let _ = error.print();
            Fault::Usage.exit()
        }
        ErrorKind::DisplayVersion => {
            let in_full = typed().any(|word| word == "--verbose" || word == "-v");
            let _ = print(if in_full { generate::verbose() } else { generate::version() });
            Exit::OK
        }
        _ => {
            let mistake = cli::mistake(error, &typed().collect::<Vec<_>>());
            exit_of(Err(Fault::Usage.because(mistake)), plain_voice())
        }
    }
}

fn typed() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}

/// For verbs that ask a backend a question or two and need no keeper.
fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("tokio")?;
    let done = runtime.block_on(work);
    runtime.shutdown_background();
    done
}
