//! Which lock is meant. A name may be given by `--name` or as a word; whoever forgot something else, and has it taken for
//! a name, is told about that.

use anyhow::{Context, Result};

use crate::cli::{Cli, Named, Names};
use crate::exit::Fault;
use crate::lock::{LockName, Selector};

/// The lock of a run.
pub fn of_run(typed: Named, has_command: bool) -> Result<LockName> {
    let mistake = match (&typed.name, typed.words.as_slice()) {
        (Some(_), [word, ..]) | (None, [_, word, ..]) => format!("put -- before the command: -- {word}"),
        (None, [word]) if !has_command && Cli::has_verb(word) => {
            format!("a command is missing; did you mean dlock {word}?")
        }
        (None, [word]) if !has_command => format!(
            "a command is missing: dlock run --name {word} -- CMD; or, if {word} is the command: dlock run --name NAME -- \
             {word}"
        ),
        (Some(name), []) if !has_command => format!("a command is missing: dlock run --name {name} -- CMD"),
        _ => return of("run", typed),
    };
    Err(Fault::Usage.because(format_args!("{mistake}; see dlock run --help")))
}

/// The lock of a verb that takes one.
pub fn of(verb: &str, typed: Named) -> Result<LockName> {
    let (name, place) = match (typed.name, typed.words.as_slice()) {
        (Some(name), []) => (name, "--name"),
        (None, [name]) => (name.clone(), "NAME"),
        (None, []) => {
            let mistake = format_args!("which lock? Name it with --name NAME; see dlock {verb} --help");
            return Err(Fault::Usage.because(mistake));
        }
        (Some(_), [word, ..]) | (None, [_, word, ..]) => {
            let mistake = format_args!("unexpected argument {word:?}: one lock at a time; see dlock {verb} --help");
            return Err(Fault::Usage.because(mistake));
        }
    };
    name.parse::<LockName>().context(place).context(Fault::Usage)
}

/// The locks of a verb that takes any number of them.
pub fn all(typed: &Names) -> Result<Vec<Selector>> {
    let words = typed.name.iter().chain(&typed.names);
    words.map(|word| word.parse()).collect::<Result<_>>().context(Fault::Usage)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(name: Option<&str>, words: &[&str]) -> Named {
        Named { name: name.map(str::to_owned), words: words.iter().map(|word| (*word).to_owned()).collect() }
    }

    #[test]
    fn a_name_is_a_flag_or_a_word() {
        assert_eq!(of_run(typed(Some("x"), &[]), true).unwrap().as_str(), "x");
        assert_eq!(of_run(typed(None, &["x"]), true).unwrap().as_str(), "x");
        assert_eq!(of("release", typed(None, &["x"])).unwrap().as_str(), "x");
    }

    #[test]
    fn what_was_forgotten_is_named() {
        for (name, words, has_command, says) in [
            (Some("x"), &["echo", "hi"][..], false, "put -- before the command: -- echo"),
            (None, &["x", "./job.sh"], false, "put -- before the command: -- ./job.sh"),
            (None, &["./job.sh"], false, "dlock run --name NAME -- ./job.sh"),
            (None, &["status"], false, "did you mean dlock status?"),
            (None, &[], true, "--name NAME"),
            (Some("x"), &[], false, "dlock run --name x -- CMD"),
        ] {
            let error = format!("{:#}", of_run(typed(name, words), has_command).unwrap_err());
            assert!(error.contains(says), "{error}");
        }
    }
}
