//! The binary: parse, dispatch, exit. The only place that ends the process.

use std::process::ExitCode;

use dlock::cli::Cli;
use dlock::exit::Exit;
use dlock::{commands, events};

fn main() -> ExitCode {
    let exit = match Cli::read(std::env::args_os()) {
        Ok(cli) => commands::dispatch(cli.verb),
        Err(error) => commands::usage_error(&error),
    };
    if let Exit::Reraise(signal) = exit {
        events::die_of(signal);
    }
    ExitCode::from(exit.code())
}
