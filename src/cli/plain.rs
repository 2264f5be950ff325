//! `dlock run` as it is mostly typed, understood without clap: to set clap up takes a sixth of the time that a whole run
//! under flock(1) takes. Options are spelled in full, values stand for themselves; whatever is not as plain as that,
//! every mistake above all, is left for clap to judge.

use std::ffi::OsString;

use super::RunArgs;

/// The options behind `run`; `None`: ask clap.
pub fn run(mut words: impl Iterator<Item = OsString>) -> Option<RunArgs> {
    let (mut args, mut name, mut command) = (RunArgs::default(), None, None);
    while let Some(word) = words.next() {
        let word = word.into_string().ok()?;
        if word == "--" {
            args.argv = words.by_ref().collect();
            if args.argv.is_empty() {
                return None;
            }
            break;
        }
        if let Some(flag) = flag(&mut args, &word) {
            if std::mem::replace(flag, true) {
                return None;
            }
            continue;
        }
        let (option, value) = match word.split_once('=') {
            Some((option, value)) if option.starts_with("--") => (option, value.to_owned()),
            _ => (word.as_str(), words.next()?.into_string().ok().filter(|value| !value.starts_with('-'))?),
        };
        let place = match option {
            "--name" => &mut name,
            "-c" | "--command" => &mut command,
            _ => option_of(&mut args, option)?,
        };
        if value.is_empty() || place.replace(value).is_some() {
            return None;
        }
    }
    args.name = name?;
    args.command = command.map(OsString::from);
    let waits = u8::from(args.no_wait) + u8::from(args.wait.is_some()) + u8::from(args.keep_trying);
    let at_odds = args.common.verbose && args.common.quiet || args.shared && args.slots.is_some() || waits > 1;
    (!at_odds && args.command.is_some() == args.argv.is_empty()).then_some(args)
}

fn flag<'a>(args: &'a mut RunArgs, word: &str) -> Option<&'a mut bool> {
    Some(match word {
        "-n" | "--no-wait" | "--nb" | "--nonblock" => &mut args.no_wait,
        "-s" | "--shared" => &mut args.shared,
        "-q" | "--quiet" => &mut args.common.quiet,
        "-v" | "--verbose" => &mut args.common.verbose,
        "--reentrant" => &mut args.reentrant,
        "--keep-trying" => &mut args.keep_trying,
        _ => return None,
    })
}

fn option_of<'a>(args: &'a mut RunArgs, word: &str) -> Option<&'a mut Option<String>> {
    Some(match word {
        "-b" | "--backend" => &mut args.common.backend,
        "--connect-timeout" => &mut args.common.connect_timeout,
        "--log" => &mut args.common.log,
        "--ttl" => &mut args.ttl,
        "-w" | "--wait" => &mut args.wait,
        "--slots" => &mut args.slots,
        "--signal" => &mut args.signal,
        "-k" | "--kill-after" => &mut args.kill_after,
        "--timeout" => &mut args.timeout,
        "--on-lost" => &mut args.on_lost,
        "--leftovers" => &mut args.leftovers,
        "--hold-at-least" => &mut args.hold_at_least,
        "--once" => &mut args.once,
        "-E" | "--conflict-exit-code" => &mut args.conflict_exit_code,
        "--metrics-file" => &mut args.metrics_file,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use proptest::prelude::*;

    use super::super::{Cli, Verb};
    use super::*;

    fn by_clap(words: &[String]) -> Option<RunArgs> {
        let typed = ["dlock", "run"].into_iter().chain(words.iter().map(String::as_str));
        match Cli::try_parse_from(typed).ok()?.verb {
            Verb::Run(args) => Some(*args),
            _ => None,
        }
    }

    fn plainly(words: &[String]) -> Option<RunArgs> {
        run(words.iter().map(OsString::from))
    }

    /// Every spelling that clap knows of an option of `run`, and what could be taken for a value or for one.
    fn vocabulary() -> Vec<String> {
        use clap::CommandFactory;
        let mut words: Vec<String> =
            ["", "x", "-", "--", "---", "-1", "5s", "a=b", "=", "-nq", "-w5s", "--name=", "--na", "run", "-h"]
                .map(str::to_owned)
                .into();
        let dlock = Cli::command();
        for arg in dlock.find_subcommand("run").unwrap().get_arguments() {
            let long = arg.get_long_and_visible_aliases().unwrap_or_default();
            words.extend(long.iter().flat_map(|long| [format!("--{long}"), format!("--{long}=7")]));
            words.extend(arg.get_short().iter().map(|short| format!("-{short}")));
        }
        words
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn what_is_understood_is_what_clap_understands(
            before in prop::collection::vec(prop::sample::select(vocabulary()), 0..5),
            behind in prop::collection::vec(prop::sample::select(vocabulary()), 0..3),
        ) {
            for middle in [&["--name", "x"][..], &[]] {
                let middle = middle.iter().map(|&word| word.to_owned());
                let words: Vec<_> =
                    before.iter().cloned().chain(middle).chain(["--".to_owned()]).chain(behind.clone()).collect();
                if let Some(args) = plainly(&words) {
                    let clap = by_clap(&words);
                    prop_assert_eq!(Some(format!("{args:?}")), clap.map(|args| format!("{args:?}")), "{:?}", words);
                }
            }
        }
    }

    #[test]
    fn an_option_is_understood_or_left_to_clap_on_purpose() {
        use clap::CommandFactory;
        let left = ["config", "explain", "argv", "help"];
        let dlock = Cli::command();
        for arg in dlock.find_subcommand("run").unwrap().get_arguments() {
            let id = arg.get_id().as_str();
            let long = format!("--{}", arg.get_long().unwrap_or_default());
            let takes_value = arg.get_action().takes_values();
            let option = [long].into_iter().chain(takes_value.then(|| "7".to_owned()));
            let rest = if id == "name" { &[][..] } else { &["--name", "x"][..] };
            let behind = if id == "command" { &[][..] } else { &["--", "true"] };
            let rest = rest.iter().chain(behind).map(|&word| word.to_owned());
            let words: Vec<_> = option.chain(rest).collect();
            assert_eq!(plainly(&words).is_none(), left.contains(&id), "{words:?}");
        }
    }
}
