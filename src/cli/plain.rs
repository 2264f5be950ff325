//! `dlock run` and `dlock status` as they are mostly typed, understood without clap: to set clap up takes a sixth of the
//! time that a whole run under flock(1) takes. Options are spelled in full, values stand for themselves; whatever is not
//! as plain as that, every mistake above all, is left for clap to judge.

use std::ffi::OsString;

use super::{Common, RunArgs, StatusArgs, Verb};

/// What was typed behind `dlock`; `None`: ask clap.
pub fn read(mut words: impl Iterator<Item = OsString>) -> Option<Verb> {
    match words.next()?.to_str()? {
        "run" => run(words).map(|args| Verb::Run(Box::new(args))),
        "status" => status(words).map(Verb::Status),
        _ => None,
    }
}

/// `status --watch 5s` means `--watch=5s`, unlike `status --watch nightly`: clap would take both for names, or neither.
pub fn with_watch_joined(words: impl Iterator<Item = OsString>) -> Vec<OsString> {
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

fn run(mut words: impl Iterator<Item = OsString>) -> Option<RunArgs> {
    let mut args = RunArgs::default();
    let mut command = None;
    while let Some(word) = words.next() {
        if word == "--" {
            command = Some(words.by_ref().collect::<Vec<_>>());
        } else {
            option(&mut args, word.to_str()?, &mut words)?;
        }
    }
    let complete = match &command {
        Some(argv) => !argv.is_empty() && args.command.is_none(),
        None => args.command.is_some(),
    };
    let waits = u8::from(args.no_wait) + u8::from(args.wait.is_some()) + u8::from(args.keep_trying);
    let at_odds = args.shared && args.slots.is_some() || waits > 1 || args.common.at_odds();
    args.argv = command.unwrap_or_default();
    (complete && !args.name.is_empty() && !at_odds).then_some(args)
}

fn status(mut words: impl Iterator<Item = OsString>) -> Option<StatusArgs> {
    let mut args = StatusArgs::default();
    while let Some(word) = words.next() {
        let word = word.into_string().ok()?;
        if word.is_empty() || word.starts_with('-') {
            option(&mut args, &word, &mut words)?;
        } else {
            args.names.push(word);
        }
    }
    let nothing_to_judge = args.exit_code && args.names.is_empty();
    (!nothing_to_judge && !args.common.at_odds()).then_some(args)
}

/// Where what an option says is kept.
enum Place<'a> {
    Flag(&'a mut bool),
    Value(&'a mut Option<String>),
    Name(&'a mut String),
    Script(&'a mut Option<OsString>),
}

trait Options {
    fn place(&mut self, option: &str) -> Option<Place<'_>>;
}

/// Reads one option, and its value if it has one. What is said twice, or not at all, is for clap.
fn option(args: &mut impl Options, word: &str, words: &mut impl Iterator<Item = OsString>) -> Option<()> {
    let (option, attached) = match word.split_once('=') {
        Some((option, value)) if option.starts_with("--") => (option, Some(value.to_owned())),
        _ => (word, None),
    };
    let mut value = || {
        let next = || words.next()?.into_string().ok().filter(|value| !value.starts_with('-'));
        attached.clone().or_else(next).filter(|value| !value.is_empty())
    };
    let first = match args.place(option)? {
        Place::Flag(flag) => attached.is_none() && !std::mem::replace(flag, true),
        Place::Value(place) => place.replace(value()?).is_none(),
        Place::Name(place) => std::mem::replace(place, value()?).is_empty(),
        Place::Script(place) => place.replace(value()?.into()).is_none(),
    };
    first.then_some(())
}

impl Common {
    fn at_odds(&self) -> bool {
        self.verbose && self.quiet
    }
}

impl Options for Common {
    fn place(&mut self, option: &str) -> Option<Place<'_>> {
        Some(match option {
            "-b" | "--backend" => Place::Value(&mut self.backend),
            "--connect-timeout" => Place::Value(&mut self.connect_timeout),
            "--log" => Place::Value(&mut self.log),
            "-q" | "--quiet" => Place::Flag(&mut self.quiet),
            "-v" | "--verbose" => Place::Flag(&mut self.verbose),
            _ => return None,
        })
    }
}

impl Options for RunArgs {
    fn place(&mut self, option: &str) -> Option<Place<'_>> {
        Some(match option {
            "--name" => Place::Name(&mut self.name),
            "-c" | "--command" => Place::Script(&mut self.command),
            "-n" | "--no-wait" | "--nb" | "--nonblock" => Place::Flag(&mut self.no_wait),
            "-s" | "--shared" => Place::Flag(&mut self.shared),
            "--reentrant" => Place::Flag(&mut self.reentrant),
            "--keep-trying" => Place::Flag(&mut self.keep_trying),
            "--ttl" => Place::Value(&mut self.ttl),
            "-w" | "--wait" => Place::Value(&mut self.wait),
            "--slots" => Place::Value(&mut self.slots),
            "--signal" => Place::Value(&mut self.signal),
            "-k" | "--kill-after" => Place::Value(&mut self.kill_after),
            "--timeout" => Place::Value(&mut self.timeout),
            "--on-lost" => Place::Value(&mut self.on_lost),
            "--leftovers" => Place::Value(&mut self.leftovers),
            "--hold-at-least" => Place::Value(&mut self.hold_at_least),
            "--once" => Place::Value(&mut self.once),
            "-E" | "--conflict-exit-code" => Place::Value(&mut self.conflict_exit_code),
            "--metrics-file" => Place::Value(&mut self.metrics_file),
            _ => return self.common.place(option),
        })
    }
}

impl Options for StatusArgs {
    fn place(&mut self, option: &str) -> Option<Place<'_>> {
        Some(match option {
            "--json" => Place::Flag(&mut self.json),
            "--exit-code" => Place::Flag(&mut self.exit_code),
            _ => return self.common.place(option),
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};
    use proptest::prelude::*;

    use super::super::Cli;
    use super::*;

    fn by_clap(words: &[String]) -> Option<String> {
        let typed = ["dlock"].into_iter().chain(words.iter().map(String::as_str));
        Cli::try_parse_from(typed).ok().map(|cli| format!("{:?}", cli.verb))
    }

    fn plainly(words: &[String]) -> Option<String> {
        read(words.iter().map(OsString::from)).map(|verb| format!("{verb:?}"))
    }

    fn owned(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    /// Every spelling that clap knows of an option, and what could be taken for a value or for one.
    fn vocabulary() -> Vec<String> {
        let mut words = owned(&[
            "", "x", "y", "-", "--", "---", "-1", "5s", "a=b", "=", "-nq", "-w5s", "--name=", "--na", "run", "-h",
        ]);
        let dlock = Cli::command();
        for arg in ["run", "status"].iter().flat_map(|verb| dlock.find_subcommand(verb).unwrap().get_arguments()) {
            let long = arg.get_long_and_visible_aliases().unwrap_or_default();
            words.extend(long.iter().flat_map(|long| [format!("--{long}"), format!("--{long}=7")]));
            words.extend(arg.get_short().iter().map(|short| format!("-{short}")));
        }
        words
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_understood_is_what_clap_understands(
            before in prop::collection::vec(prop::sample::select(vocabulary()), 0..5),
            behind in prop::collection::vec(prop::sample::select(vocabulary()), 0..3),
        ) {
            let lines = [(&["run"][..], &["--"][..]), (&["run", "--name", "x"], &["--"]), (&["run"], &["--name", "x"])];
            for (begin, middle) in lines.into_iter().chain([(&["status"][..], &[][..])]) {
                let words = [owned(begin), before.clone(), owned(middle), behind.clone()].concat();
                if let Some(plain) = plainly(&words) {
                    prop_assert_eq!(Some(plain), by_clap(&words), "{:?}", words);
                }
            }
        }
    }

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
    fn an_option_is_understood_or_left_to_clap_on_purpose() {
        let left = ["argv", "config", "explain", "help", "names", "watch"];
        for (verb, rest) in [("run", ["--name", "x", "--", "true"]), ("status", ["x", "y", "z", "u"])] {
            for arg in Cli::command().find_subcommand(verb).unwrap().get_arguments() {
                let (id, long) = (arg.get_id().as_str(), format!("--{}", arg.get_long().unwrap_or_default()));
                let value = if arg.get_action().takes_values() { &["7"][..] } else { &[] };
                let rest = match id {
                    "name" => &rest[2..],
                    "command" => &rest[..2],
                    _ => &rest,
                };
                let words = [owned(&[verb, &long]), owned(value), owned(rest)].concat();
                assert_eq!(plainly(&words).is_none(), left.contains(&id), "{words:?}");
            }
        }
    }
}
