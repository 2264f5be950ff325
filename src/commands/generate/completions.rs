//! The completions of a shell: what clap makes, and the names of locks and profiles, for which the shells ask dlock
//! itself, on the backend that the line names.

use std::collections::BTreeSet;

use anyhow::Result;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Arg, ArgAction, Command};
use clap_complete::Shell;

use crate::cli::Cli;
use crate::config::{Color, Layout, Leftovers, OnLost, words};
use crate::report::Format;

const BASH: &str = include_str!("live.bash");
const ZSH: &str = include_str!("live.zsh");
const FISH: &str = include_str!("live.fish");

/// What a flag takes that takes one of a few words.
fn choices() -> [(&'static str, Vec<PossibleValue>); 5] {
    [
        ("log", words::<Format>()),
        ("on_lost", words::<OnLost>()),
        ("leftovers", words::<Leftovers>()),
        ("format", words::<Layout>()),
        ("color", words::<Color>()),
    ]
}

pub fn script(shell: Shell) -> Result<String> {
    let mut cli = Cli::complete();
    let verbs: Vec<String> = cli.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    for verb in &verbs {
        cli = cli.mut_subcommand(verb, |verb| {
            verb.mut_args(|arg| match choices().into_iter().find(|(id, _)| arg.get_id() == id) {
                Some((_, words)) => arg.value_parser(PossibleValuesParser::new(words)),
                // More are taken only to tell people what is wrong.
                None if arg.get_id() == "words" => arg.action(ArgAction::Set).num_args(1),
                None => arg,
            })
        });
    }
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut cli, "dlock", &mut text);
    let text = String::from_utf8(text)?;
    Ok(match shell {
        Shell::Bash => text + &BASH.replace("@CHOICES@", &choices_of_bash()).replace("@VALUED@", &valued_of_bash()),
        Shell::Zsh => text
            .replacen("_dlock() {", &format!("{ZSH}\n_dlock() {{"), 1)
            .replace(":NAME:_default", ":NAME:_dlock_names")
            .replace(":URL|PROFILE:_default", ":URL|PROFILE:_dlock_profiles")
            .replace("'\\'':_default", "'\\'':_dlock_names")
            .replace("without --name:_default", "without --name:_dlock_names"),
        Shell::Fish => text + FISH,
        _ => text,
    })
}

/// `--log) found="text json" ;;`, one a line.
fn choices_of_bash() -> String {
    let line = |(id, words): (&str, Vec<PossibleValue>)| {
        let words: Vec<_> = words.iter().map(PossibleValue::get_name).collect();
        format!("--{}) found=\"{}\" ;;", id.replace('_', "-"), words.join(" "))
    };
    choices().map(line).join("\n        ")
}

/// The other flags that take a value: what follows them is no name. `-n` takes one for `history` only.
fn valued_of_bash() -> String {
    let cli = Cli::complete();
    let has_own = |arg: &Arg| ["name", "backend"].contains(&arg.get_id().as_str()) || is_choice(arg);
    let valued = cli.get_subcommands().flat_map(Command::get_arguments);
    let valued = valued.filter(|arg| arg.get_action().takes_values() && !has_own(arg) && arg.get_id() != "watch");
    let names = |arg: &Arg| {
        let short = arg.get_short().filter(|short| *short != 'n').map(|short| format!("-{short}"));
        [arg.get_long().map(|long| format!("--{long}")), short].into_iter().flatten().collect::<Vec<_>>()
    };
    valued.flat_map(names).collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" | ")
}

fn is_choice(arg: &Arg) -> bool {
    choices().iter().any(|(id, _)| arg.get_id() == id)
}
