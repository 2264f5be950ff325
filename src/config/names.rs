//! Which lock is meant. A name may be given by `--name` or as a word; whoever forgot something else, and has it taken for
//! a name, is told about that.

use std::ffi::OsStr;

use anyhow::{Context, Result};

use super::values;
use crate::cli::{Cli, Named, Names, odd_dash};
use crate::exit::Fault;
use crate::lock::{LockName, Selector};

/// The lock of a run, of which the program is known unless it was forgotten.
pub fn of_run(typed: Named, program: Option<&OsStr>) -> Result<LockName> {
    let mistake = match (&typed.name, typed.words.as_slice(), program) {
        (None, [], None) => "which lock, and which command? dlock run --name NAME -- CMD".to_owned(),
        (None, [], Some(program)) => format!("which lock? dlock run --name NAME -- {}", program.display()),
        (Some(name), [], None) => format!("which command? dlock run --name {name} -- CMD"),
        (None, [word], None) if Cli::has_verb(word) => format!("did you mean dlock {word}?"),
        (None, [word], None) if word.contains(['/', ' ']) => format!("which lock? dlock run --name NAME -- {word}"),
        (None, [word], None) => format!("which command? dlock run --name {word} -- CMD"),
        (Some(name), [word, ..], None) | (None, [name, word, ..], None) => {
            format!("put -- before the command: dlock run --name {name} -- {word}")
        }
        (Some(_), [word, ..], Some(_)) | (None, [_, word, ..], Some(_)) => {
            let is_unit = |word: &&String| word.len() > 1 && values::duration(&format!("1 {word}")).is_ok();
            match typed.words.iter().find(is_unit) {
                Some(unit) => {
                    format!("{unit:?} is one word too many; put quotes around a duration of two words: '5 {unit}'")
                }
                None => {
                    format!("{word:?} is one word too many; dlock run takes one lock, and all of the command after --")
                }
            }
        }
        (Some(_), [], Some(_)) | (None, [_], Some(_)) => return of("run", typed),
    };
    Err(Fault::Usage.because(typed.words.iter().find_map(|word| odd_dash(word)).unwrap_or(mistake)))
}

/// The lock of a verb that takes one.
pub fn of(verb: &str, typed: Named) -> Result<LockName> {
    let mistake = match (&typed.name, typed.words.as_slice()) {
        (Some(name), []) | (None, [name]) => {
            return name.parse().with_context(|| format!("{name:?}")).context(Fault::Usage);
        }
        (None, []) => format!("which lock? dlock {verb} --name NAME; dlock status shows all locks"),
        (Some(name), [word, ..]) | (None, [name, word, ..]) if verb == "acquire" => {
            format!("acquire runs no command; to run one under the lock: dlock run --name {name} -- {word}")
        }
        (Some(_), [word, ..]) | (None, [_, word, ..]) => {
            format!("{word:?} is one word too many; dlock {verb} takes one lock")
        }
    };
    Err(Fault::Usage.because(typed.words.iter().find_map(|word| odd_dash(word)).unwrap_or(mistake)))
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
        let program = Some(OsStr::new("true"));
        assert_eq!(of_run(typed(Some("x"), &[]), program).unwrap().as_str(), "x");
        assert_eq!(of_run(typed(None, &["x"]), program).unwrap().as_str(), "x");
        assert_eq!(of("release", typed(None, &["x"])).unwrap().as_str(), "x");
    }
}
