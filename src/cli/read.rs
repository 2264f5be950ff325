//! Words on their way to clap, and what they mean where clap does not get as far: in advice and completions.

use std::ffi::OsString;

use clap::{Arg, Command, CommandFactory};

use super::Cli;

impl Cli {
    pub fn has_verb(word: &str) -> bool {
        Cli::command().find_subcommand(word).is_some()
    }

    /// Whether some verb has a flag of this name, without the dashes.
    pub fn has_flag(word: &str) -> bool {
        Cli::complete().get_subcommands().any(|verb| option(verb, word).is_some())
    }

    /// With the flags of all verbs; clap by itself looks only at the verb that was typed.
    pub fn complete() -> clap::Command {
        let mut cli = Cli::command();
        cli.build();
        cli
    }
}

/// `status --watch 5s` means `--watch=5s`, unlike `status --watch nightly`: clap would take both for names, or neither.
pub fn with_watch_joined(words: Vec<OsString>) -> Vec<OsString> {
    let mut joined: Vec<OsString> = Vec::new();
    let is_duration = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_digit())
            && (word.parse::<f64>().is_ok() || humantime::parse_duration(word).is_ok())
    };
    for word in words {
        let is_name = joined.iter().any(|word| word == "--");
        match (joined.last_mut(), word.to_str()) {
            (Some(option), Some(every)) if !is_name && option == "--watch" && is_duration(every) => {
                option.push(format!("={every}"));
            }
            _ => joined.push(word),
        }
    }
    joined
}

/// The option of this name, without the dashes.
pub fn option<'a>(verb: &'a Command, name: &str) -> Option<&'a Arg> {
    let is_it = |arg: &&Arg| {
        arg.get_long() == Some(name) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&name))
    };
    verb.get_arguments().find(is_it)
}

/// What stands behind a verb, before any `--`.
#[derive(Default)]
pub struct Given<'a> {
    pub values: Vec<(&'a Arg, String)>,
    /// Words that belong to no option.
    pub bare: Vec<String>,
    /// The last word is an option that needs a value.
    pub waits_for_value: Option<&'a Arg>,
}

pub fn given<'a>(verb: &'a Command, words: &[String]) -> Given<'a> {
    let mut given = Given::default();
    let takes_next = |arg: &Arg| arg.get_action().takes_values() && !arg.is_require_equals_set();
    for word in words.iter().take_while(|word| *word != "--") {
        if let Some(arg) = given.waits_for_value.take() {
            given.values.push((arg, word.clone()));
        } else if let Some(long) = word.strip_prefix("--") {
            match long.split_once('=') {
                Some((name, value)) => given.values.extend(option(verb, name).map(|arg| (arg, value.to_owned()))),
                None => given.waits_for_value = option(verb, long).filter(|arg| takes_next(arg)),
            }
        } else if let Some(shorts) = word.strip_prefix('-').filter(|shorts| !shorts.is_empty()) {
            // -nq is -n -q, and -b redis://h can be written -bredis://h.
            for (at, short) in shorts.char_indices() {
                let arg = verb.get_arguments().find(|arg| arg.get_short() == Some(short) && takes_next(arg));
                let Some(arg) = arg else { continue };
                match &shorts[at + short.len_utf8()..] {
                    "" => given.waits_for_value = Some(arg),
                    value => given.values.push((arg, value.to_owned())),
                }
                break;
            }
        } else {
            given.bare.push(word.clone());
        }
    }
    given
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
        ] {
            let words = ["dlock"].into_iter().chain(typed.split(' ')).map(OsString::from);
            assert_eq!(with_watch_joined(words.collect()).join(" ".as_ref()), OsString::from(format!("dlock {meant}")));
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
