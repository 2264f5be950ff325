//! From the words that were typed to clap's structs, and from clap's errors to one line.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

use super::Cli;

impl Cli {
    pub fn read(words: impl Iterator<Item = OsString>) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(with_watch_joined(words))
    }

    pub fn has_verb(word: &str) -> bool {
        Cli::command().find_subcommand(word).is_some()
    }

    /// Whether some verb has a flag of this name, without the dashes.
    pub fn has_flag(word: &str) -> bool {
        let is_it = |arg: &clap::Arg| arg.get_long_and_visible_aliases().is_some_and(|names| names.contains(&word));
        Cli::complete().get_subcommands().any(|verb| verb.get_arguments().any(is_it))
    }

    /// With the flags of all verbs; clap by itself looks only at the verb that was typed.
    pub fn complete() -> clap::Command {
        let mut cli = Cli::command();
        cli.build();
        cli
    }
}

/// `status --watch 5s` means `--watch=5s`, unlike `status --watch nightly`: clap would take both for names, or neither.
fn with_watch_joined(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    let is_duration = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_digit())
            && (word.parse::<f64>().is_ok() || humantime::parse_duration(word).is_ok())
    };
    for word in words {
        let of_status = joined.get(1).is_some_and(|verb| verb == "status") && !joined.iter().any(|word| word == "--");
        match (joined.last_mut(), word.to_str()) {
            (Some(option), Some(every)) if of_status && option == "--watch" && is_duration(every) => {
                option.push(format!("={every}"));
            }
            _ => joined.push(word),
        }
    }
    joined
}

/// What is wrong with the words behind `dlock`, in one line; clap explains it over several.
pub fn mistake(error: &clap::Error, words: &[String]) -> String {
    let verb = words.first().map(String::as_str);
    if let (ErrorKind::InvalidSubcommand, Some(word)) = (error.kind(), verb)
        && error.get(ContextKind::SuggestedSubcommand).is_none()
        && words.iter().any(|word| word == "--")
    {
        return format!("{word} is no verb of dlock; under a lock of that name: dlock run --name {word} -- CMD");
    }
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let worth_saying = |line: &&str| !line.is_empty() && !line.starts_with("tip: to pass");
    let sentence = lines.filter(worth_saying).collect::<Vec<_>>().join(" ").replacen("error: ", "", 1);
    let sentence = sentence.replace(" tip: ", "; ");
    let verb = verb.filter(|verb| Cli::has_verb(verb));
    let takes_command = matches!(verb, Some("run" | "fence"));
    let sentence = match (error.kind(), bare_word(error).filter(|_| takes_command)) {
        (ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, _) => "a command is missing, like run or status".into(),
        (_, Some(word)) => format!("put -- before the command: -- {word}"),
        _ => sentence.split(" For more information").next().unwrap_or_default().trim_end_matches('.').to_owned(),
    };
    match verb {
        Some(verb) => format!("{sentence}; see dlock {verb} --help"),
        None => format!("{sentence}; see dlock --help"),
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_behind_watch_is_its_own_and_any_other_word_a_lock() {
        for (typed, meant) in [
            ("status --watch 5 x", "status --watch=5 x"),
            ("status --watch 1m", "status --watch=1m"),
            ("status x --watch", "status x --watch"),
            ("status --watch nan", "status --watch nan"),
            ("status --watch x 5", "status --watch x 5"),
            ("status --watch=1s 5", "status --watch=1s 5"),
            ("status -- --watch 5", "status -- --watch 5"),
            ("run --watch 5", "run --watch 5"),
        ] {
            let words = ["dlock"].into_iter().chain(typed.split(' ')).map(OsString::from);
            assert_eq!(with_watch_joined(words).join(" ".as_ref()), OsString::from(format!("dlock {meant}")));
        }
    }

    #[test]
    fn the_flags_of_every_verb_are_known() {
        assert!(["ttl", "nonblock", "reason", "print-schema"].into_iter().all(Cli::has_flag));
        assert!(!Cli::has_flag("nonsense") && Cli::has_verb("fence") && !Cli::has_verb("ttl"));
    }

    /// clap checks only the verb that it sets up.
    #[test]
    fn all_verbs_make_sense_to_clap() {
        Cli::complete().debug_assert();
    }
}
