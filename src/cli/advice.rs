//! One line about what is wrong with the words behind `dlock`, and what to type instead.

use std::ffi::OsStr;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};

use super::read::{given, option};
use super::{Cli, Named};
use crate::config::{nearest, values};

/// What dlock calls it, and what other tools do.
const OTHER_VERBS: [(&str, &[&str]); 10] = [
    ("completions", &["completion"]),
    ("doctor", &["ping", "test"]),
    ("force-release", &["break", "kill", "steal"]),
    ("history", &["log", "logs"]),
    ("man", &["manual"]),
    ("release", &["free", "unlock"]),
    ("renew", &["extend", "refresh"]),
    ("run", &["exec", "flock", "lock", "start", "with"]),
    ("status", &["list", "ls", "ps", "show"]),
    ("--version", &["version"]),
];
const OTHER_OPTIONS: [(&str, &[&str]); 5] = [
    ("backend", &["host", "server", "url"]),
    ("keep-trying", &["retry"]),
    ("name", &["key", "lock"]),
    ("no-wait", &["non-blocking", "nowait"]),
    ("ttl", &["expiry", "lease"]),
];

/// What dlock calls what was typed.
fn own_word(words: &[(&'static str, &[&str])], typed: &str) -> Option<&'static str> {
    words.iter().find(|(_, others)| others.contains(&typed)).map(|(own, _)| *own)
}

pub fn mistake(error: &clap::Error, words: &[String]) -> String {
    let cli = Cli::complete();
    let (all, words) = (words, words.split(|word| word == "--").next().unwrap_or_default());
    let verb = words.first().and_then(|word| cli.find_subcommand(word));
    match (words.iter().find_map(|word| odd_dash(word)), verb) {
        (Some(advice), _) => advice,
        (None, None) => about_verb(&cli, all),
        (None, Some(_)) if error.kind() == ErrorKind::InvalidSubcommand => about_verb(&cli, &all[1..]),
        (None, Some(verb)) => about_words(&cli, verb, &words[1..], error),
    }
}

/// Word processors and chats make one long dash of two hyphens.
fn odd_dash(word: &str) -> Option<String> {
    let name = word.strip_prefix(['\u{2010}', '\u{2011}', '\u{2012}', '\u{2013}', '\u{2014}', '\u{2212}'])?;
    Some(format!("{word:?} does not begin with a hyphen but with another dash; type --{name}"))
}

/// What a call of `dlock run` lacks, or has too much of, before its `--`. The program is known unless it was forgotten.
pub fn incomplete_run(typed: &Named, program: Option<&OsStr>) -> String {
    let mistake = match (&typed.name, typed.words.as_slice(), program) {
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
        _ => "which lock, and which command? dlock run --name NAME -- CMD".to_owned(),
    };
    typed.words.iter().find_map(|word| odd_dash(word)).unwrap_or(mistake)
}

/// The same for other verbs that take one lock.
pub fn no_single_lock(verb: &str, typed: &Named) -> String {
    let mistake = match (&typed.name, typed.words.as_slice()) {
        (Some(name), [word, ..]) | (None, [name, word, ..]) if verb == "acquire" => {
            format!("acquire runs no command; to run one under the lock: dlock run --name {name} -- {word}")
        }
        (Some(_), [word, ..]) | (None, [_, word, ..]) => {
            format!("{word:?} is one word too many; dlock {verb} takes one lock")
        }
        _ => format!("which lock? dlock {verb} --name NAME; dlock status shows all locks"),
    };
    typed.words.iter().find_map(|word| odd_dash(word)).unwrap_or(mistake)
}

fn about_verb(cli: &Command, words: &[String]) -> String {
    let Some(word) = words.first() else { return "which command? dlock help lists them".to_owned() };
    if word.starts_with('-') {
        return match words.iter().find(|word| cli.find_subcommand(word).is_some()) {
            Some(verb) => format!("options stand after the command: dlock {verb} {word} ..."),
            None => format!("which command? A command comes before its options: dlock run {word} ..."),
        };
    }
    let wrong = format!("{word:?} is not a command of dlock");
    let verbs = cli.get_subcommands().filter(|verb| !verb.is_hide_set()).map(Command::get_name);
    if let Some(verb) = own_word(&OTHER_VERBS, word).or_else(|| nearest(word, verbs)) {
        return format!("{wrong}; did you mean dlock {verb}?");
    }
    if word.contains('/') || word.contains('.') {
        return format!("{wrong}; to run it under a lock: dlock run --name NAME -- {word}");
    }
    match words {
        [_] => format!("{wrong}; dlock help lists them"),
        _ => format!("{wrong}; to run a command under a lock of that name: dlock run --name {word} -- CMD"),
    }
}

fn about_words(cli: &Command, verb: &Command, words: &[String], error: &clap::Error) -> String {
    let name = verb.get_name();
    let wrong = text(error, ContextKind::InvalidArg);
    // `--wait <DUR>` without what it takes.
    let option_of = |text: &str| text.split([' ', '[', '=']).next().unwrap_or_default().to_owned();
    let see = format!("see dlock {name} -h");
    match error.kind() {
        ErrorKind::UnknownArgument if wrong.starts_with('-') => about_option(cli, verb, words, &wrong),
        ErrorKind::UnknownArgument if takes_command(verb) => {
            format!("put -- before the command: dlock {name} {} -- {wrong}", first_bare(verb, words))
        }
        ErrorKind::UnknownArgument if wrong.contains("://") => {
            format!("name a backend with -b: dlock {name} -b {wrong}")
        }
        ErrorKind::UnknownArgument => format!("{wrong:?} is one word too many; {see}"),
        ErrorKind::InvalidValue if text(error, ContextKind::InvalidValue).is_empty() => {
            let value = wrong.split_once('<').map_or("VALUE", |(_, value)| value.trim_end_matches('>'));
            format!("{0} needs a value: {0} {value}", option_of(&wrong))
        }
        ErrorKind::InvalidValue => {
            let value = text(error, ContextKind::InvalidValue);
            format!("{value:?} is not one of {}; {see}", text(error, ContextKind::ValidValue))
        }
        ErrorKind::TooManyValues => format!("{} takes no value; {see}", option_of(&wrong)),
        ErrorKind::ArgumentConflict => match option_of(&text(error, ContextKind::PriorArg)) {
            prior if prior == option_of(&wrong) => format!("{prior} is given twice; {see}"),
            // The command after `--` has no name.
            prior if prior.is_empty() || wrong.starts_with('[') => {
                format!("{} and a command after -- do not go together; {see}", option_of(&(prior + &wrong)))
            }
            prior => format!("{} and {prior} do not go together; {see}", option_of(&wrong)),
        },
        ErrorKind::MissingRequiredArgument if takes_command(verb) => {
            format!("dlock {name} needs a resource and a command: dlock {name} RESOURCE -- CMD")
        }
        // The only other verb that needs one.
        ErrorKind::MissingRequiredArgument => "which shell? dlock completions bash, fish or zsh".to_owned(),
        ErrorKind::InvalidUtf8 => format!("an argument is not UTF-8 text; {see}"),
        _ => format!("{}; {see}", error.kind()),
    }
}

fn about_option(cli: &Command, verb: &Command, words: &[String], wrong: &str) -> String {
    let (name, long) = (verb.get_name(), wrong.trim_start_matches('-'));
    let before: Vec<_> = words.iter().take_while(|word| !word.starts_with(wrong)).cloned().collect();
    let given = given(verb, &before);
    let named = given.values.iter().find(|(arg, _)| arg.get_id() == "name").map(|(_, name)| name);
    // A word too many before it: the option is one of a command that has no `--` before it.
    if let Some(command) = given.bare.get(usize::from(named.is_none())).filter(|_| takes_command(verb)) {
        let first = named.map_or_else(|| first_bare(verb, words), |name| format!("--name {name}"));
        return format!("put -- before the command: dlock {name} {first} -- {command} {wrong}");
    }
    let unknown = format!("dlock {name} has no option {wrong}");
    let options = verb.get_arguments().filter(|arg| !arg.is_hide_set());
    let options = options.flat_map(|arg| arg.get_all_aliases().into_iter().flatten().chain(arg.get_long()));
    let other = own_word(&OTHER_OPTIONS, long).filter(|name| option(verb, name).is_some());
    let near = other.or_else(|| nearest(long, options).filter(|_| wrong.starts_with("--")));
    if let Some(near) = near {
        return format!("{unknown}; did you mean --{near}?");
    }
    let others = cli.get_subcommands().filter(|verb| wrong.starts_with("--") && option(verb, long).is_some());
    match others.map(Command::get_name).collect::<Vec<_>>().as_slice() {
        [] if takes_command(verb) => {
            format!("{unknown}; an option of your command stands after --; see dlock {name} --help")
        }
        [] => format!("{unknown}; see dlock {name} --help"),
        verbs => format!("{unknown}; it is an option of dlock {}", verbs.join(", dlock ")),
    }
}

fn takes_command(verb: &Command) -> bool {
    verb.get_arguments().any(|arg| arg.get_id() == "argv")
}

/// The lock or the resource.
fn first_bare(verb: &Command, words: &[String]) -> String {
    let given = given(verb, words).bare;
    let dashes = if verb.get_name() == "run" { "--name " } else { "" };
    format!("{dashes}{}", given.first().map_or("NAME", String::as_str))
}

fn text(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(text)) => text.clone(),
        Some(ContextValue::Strings(texts)) => texts.join(", "),
        _ => String::new(),
    }
}
