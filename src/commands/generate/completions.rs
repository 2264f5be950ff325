//! The completions of a shell: what clap makes, and the names of locks and profiles, for which the shells ask dlock
//! itself, on the backend that the line names.

use anyhow::Result;
use clap_complete::Shell;

use crate::cli::Cli;

const BASH: &str = include_str!("live.bash");
const ZSH: &str = include_str!("live.zsh");
const FISH: &str = include_str!("live.fish");

/// What a flag takes that takes one of a few words; `config` has the last say.
const CHOICES: [(&str, &[&str]); 3] =
    [("log", &["text", "json"]), ("on_lost", &["kill", "signal"]), ("leftovers", &["kill", "wait", "leave"])];

pub fn script(shell: Shell) -> Result<String> {
    let mut cli = Cli::complete();
    let verbs: Vec<String> = cli.get_subcommands().map(|verb| verb.get_name().to_owned()).collect();
    for verb in &verbs {
        cli = cli.mut_subcommand(verb, |verb| {
            verb.mut_args(|arg| match CHOICES.iter().find(|(id, _)| arg.get_id() == id) {
                Some((_, words)) => arg.value_parser(words.to_vec()),
                None => arg,
            })
        });
    }
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut cli, "dlock", &mut text);
    let text = String::from_utf8(text)?;
    Ok(match shell {
        Shell::Bash => text + &BASH.replace("@CHOICES@", &choices_of_bash()),
        Shell::Zsh => text
            .replacen("_dlock() {", &format!("{ZSH}\n_dlock() {{"), 1)
            .replace(":NAME:_default", ":NAME:_dlock_names")
            .replace(":URL|PROFILE:_default", ":URL|PROFILE:_dlock_profiles")
            .replace("every lock of the backend:_default", "every lock of the backend:_dlock_names")
            .replace(":name -- The lock:_default", ":name -- The lock:_dlock_names"),
        Shell::Fish => text + FISH,
        _ => text,
    })
}

/// `--log) found="text json" ;;`, one a line.
fn choices_of_bash() -> String {
    let line = |(id, words): &(&str, &[&str])| format!("--{}) found=\"{}\" ;;", id.replace('_', "-"), words.join(" "));
    CHOICES.iter().map(line).collect::<Vec<_>>().join("\n        ")
}
