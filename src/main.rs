//! dlock: run a command under a named lock, and never beside another holder of it.
//!
//! `start` parses, runs, reports and exits; it is the only place that ends the process.
#![cfg_attr(not(test), no_main)]

mod backend;
mod cli;
mod clock;
mod commands;
mod config;
mod events;
mod exit;
#[allow(unsafe_code)]
mod guardian;
mod keeper;
mod lock;
mod metrics;
#[cfg(test)]
mod model;
mod mutant;
mod openat;
mod random;
mod report;

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::backend::DiskTrouble;
use crate::cli::{Cli, Common, Verb};
use crate::exit::{Exit, Fault};
use crate::report::{Format, Loudness, Voice};

/// Called by the C library. What Rust would do before is a tenth of a millisecond's work, most of it for a message about
/// overflowing stacks; what we need of it, [`events::settle`] does.
#[allow(unsafe_code, clippy::exit)]
// SAFETY: nothing else in the program has this name.
#[cfg_attr(not(test), unsafe(export_name = "main"))]
#[cfg_attr(test, allow(dead_code))]
extern "C" fn start() -> ! {
    events::settle();
    let exit = match Cli::read() {
        Ok(cli) => obey(cli),
        Err(error) => misunderstood(&error),
    };
    if let Exit::Reraise(signal) = exit {
        events::die_of(signal);
    }
    std::process::exit(exit.code().into())
}

fn obey(cli: Cli) -> Exit {
    let voice = match &cli.verb {
        Verb::Run(args) => config::voice(&args.common),
        Verb::Status(args) => config::voice(&args.common),
        Verb::ForceRelease(args) => config::voice(&args.common),
        Verb::Acquire(args) => config::voice(&args.common),
        Verb::Renew(args) => config::voice(&args.common),
        Verb::Release(args) => config::voice(&args.common),
        Verb::Doctor(args) => config::voice(&args.common),
        Verb::Words(args) => config::voice(&args.common),
        Verb::Fence(args) => config::voice(&Common { log: args.log.clone(), ..Common::default() }),
        Verb::Completions { .. } | Verb::Man => Ok((Format::Text, Loudness::Normal)),
    };
    let (format, loudness) = match &voice {
        Ok(voice) => *voice,
        Err(_) => (config::typed_format(typed()), Loudness::Normal),
    };
    let mut voice_of_errors = Voice::new(format, loudness);
    let result = voice.and_then(|_| commands::dispatch(cli.verb, Voice::new(format, loudness)));
    result.unwrap_or_else(|error| {
        voice_of_errors.error(&error);
        commands::failed(fault_of(&error))
    })
}

/// A disk that fails puts the locks on it out of reach, though no server has to be looked after.
fn fault_of(error: &anyhow::Error) -> Fault {
    if error.root_cause().is::<DiskTrouble>() { Fault::Unreachable } else { Fault::of(error) }
}

/// clap explains over several lines and exits with 2; we have one line, and 64.
fn misunderstood(error: &clap::Error) -> Exit {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        let _ = error.print();
        return Exit::OK;
    }
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let worth_saying = |line: &&str| !line.is_empty() && !line.starts_with("tip: to pass");
    let sentence = lines.filter(worth_saying).collect::<Vec<_>>().join(" ").replacen("error: ", "", 1);
    let sentence = sentence.replace(" tip: ", "; ");
    let verb = typed().next().filter(|verb| Cli::has_verb(verb));
    let help = verb.as_ref().map_or_else(|| "dlock --help".to_owned(), |verb| format!("dlock {verb} --help"));
    let runs = matches!(verb.as_deref(), Some("run" | "fence"));
    let sentence = match (error.kind(), bare_word(error).filter(|_| runs)) {
        (ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, _) => "a command is missing, like run or status".into(),
        (_, Some(word)) => format!("put -- before the command: -- {word}"),
        _ => sentence.split(" For more information").next().unwrap_or_default().trim_end_matches('.').to_owned(),
    };
    let mut voice = Voice::new(config::typed_format(typed()), Loudness::Normal);
    voice.error(&Fault::Usage.because(format_args!("{sentence}; see {help}")));
    commands::failed(Fault::Usage)
}

/// The first word that clap took for an argument too many.
fn bare_word(error: &clap::Error) -> Option<&str> {
    match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(word)) if error.kind() == ErrorKind::UnknownArgument => {
            Some(word.as_str()).filter(|word| !word.starts_with('-'))
        }
        _ => None,
    }
}

fn typed() -> impl Iterator<Item = String> {
    std::env::args_os().skip(1).map(|word| word.to_string_lossy().into_owned())
}
