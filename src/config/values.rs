//! How each kind of value is written, and which locks are meant.

use std::ffi::OsString;
use std::ops::RangeBounds;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum;
use nix::sys::signal::Signal;

use crate::cli::{self, Named, Names};
use crate::exit::Fault;
use crate::lock::{LONGEST_NOTE, LockName, Selector, Token};

/// What happens when the server says that the lock is already not ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnLost {
    Kill,
    Signal,
}

/// What happens to processes that the command left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Leftovers {
    Kill,
    Wait,
    Leave,
}

/// How `status` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    Table,
    Json,
    Prometheus,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    Auto,
    Always,
    Never,
}

pub fn lock_name(text: &str) -> Result<LockName> {
    text.parse().with_context(|| format!("{text:?}")).context(Fault::Usage)
}

/// The lock of a verb that takes one.
pub fn lock(verb: &str, typed: &Named) -> Result<LockName> {
    let mistake = || Fault::Usage.because(cli::no_single_lock(verb, typed));
    lock_name(typed.one().ok_or_else(mistake)?)
}

/// The locks of a verb that takes any number of them.
pub fn locks(typed: &Names) -> Result<Vec<Selector>> {
    let words = typed.name.iter().chain(&typed.names);
    words.map(|word| word.parse()).collect::<Result<_>>().context(Fault::Usage)
}

/// `30s`, `1h 5m`, or bare seconds as sleep(1) takes them.
pub fn duration(text: &str) -> Result<Duration> {
    const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    let text = text.trim();
    let span = match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => humantime::parse_duration(text).ok(),
    };
    let span = span.with_context(|| format!("{text:?} is not a duration like 500ms, 30s, 1h or 2.5"))?;
    ensure!(span <= LONGEST, "{text:?} is too long: the most is 10 years");
    Ok(span)
}

/// `TERM`, `SIGTERM` or `15`.
pub fn signal(text: &str) -> Result<i32> {
    let known = match text.parse::<i32>() {
        Ok(number) => Signal::try_from(number).ok(),
        Err(_) => {
            let name = text.to_ascii_uppercase();
            let name = if name.starts_with("SIG") { name } else { format!("SIG{name}") };
            name.parse::<Signal>().ok()
        }
    };
    known.map(|signal| signal as i32).with_context(|| format!("{text:?} is not a signal like TERM, SIGINT or 15"))
}

/// One of a few words.
pub fn choice<T: ValueEnum>(text: &str) -> Result<T> {
    T::from_str(text, false).map_err(|_| anyhow!("{text:?} is not one of {}", words::<T>().join(", ")))
}

/// The words of a [`choice`].
pub fn words<T: ValueEnum>() -> Vec<String> {
    let all = T::value_variants().iter().filter_map(T::to_possible_value);
    all.map(|word| word.get_name().to_owned()).collect()
}

fn number<N: FromStr + PartialOrd>(text: &str, range: impl RangeBounds<N>, what: &str) -> Result<N> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.with_context(|| format!("{text:?} is not {what}"))
}

pub fn count(text: &str) -> Result<usize> {
    number(text, 1.., "a number of 1 or more")
}

/// A part of something as a percentage: `80%`, or `80`.
pub fn part(text: &str) -> Result<f64> {
    let percent = text.strip_suffix('%').unwrap_or(text).parse::<f64>().ok().filter(|n| (0.0..=100.0).contains(n));
    percent.map(|percent| percent / 100.0).with_context(|| format!("{text:?} is not a percentage from 0% to 100%"))
}

pub fn path(text: &str) -> Result<PathBuf> {
    ensure!(!text.is_empty(), "the path of a file must not be empty");
    Ok(text.into())
}

/// What a shell is to run.
pub fn shell_command(text: &str) -> Result<String> {
    ensure!(!text.trim().is_empty(), "a command must not be empty");
    ensure!(!text.contains('\0'), "a command with a NUL in it");
    Ok(text.to_owned())
}

pub fn yes_or_no(text: &str) -> Result<bool> {
    match text {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        _ => bail!("{text:?} is not one of true, false, 1, 0"),
    }
}

/// 0 to 255, unlike flock's `-E 600` of old, which became 88.
pub fn exit_code(text: &str) -> Result<u8> {
    number(text, .., "an exit code from 0 to 255")
}

pub fn slots(text: &str) -> Result<u32> {
    number(text, 1..=1000, "a number of slots from 1 to 1000")
}

pub fn token(text: &str) -> Result<Token> {
    number(text, ..=i64::MAX.unsigned_abs(), "a fencing token").map(Token)
}

/// Any text that fits in a line.
pub fn once_key(text: &str) -> Result<String> {
    ensure!(
        (1..=200).contains(&text.len()) && !text.chars().any(char::is_control),
        "a key has 1 to 200 bytes and no control characters"
    );
    Ok(text.to_owned())
}

pub fn note(text: &str) -> Result<String> {
    ensure!(text.chars().count() <= LONGEST_NOTE, "a note has at most {LONGEST_NOTE} characters");
    Ok(text.to_owned())
}

/// How many runs to remember. More would not fit in what some backends store in one piece.
pub fn history(text: &str) -> Result<usize> {
    number(text, ..=100, "a number of runs from 0 to 100")
}

/// What runs the text of `-c`.
pub fn shell() -> OsString {
    std::env::var_os("SHELL").filter(|shell| !shell.is_empty()).unwrap_or_else(|| "/bin/sh".into())
}

/// The known word that `wrong` was probably meant to be: every fourth letter may be wrong.
pub fn nearest<'a>(wrong: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let (mistakes, near) = known.map(|word| (strsim::osa_distance(wrong, word), word)).min_by_key(|(n, _)| *n)?;
    (mistakes <= (wrong.chars().count() / 4).max(1)).then_some(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_humantime_or_bare_seconds() {
        assert_eq!(duration("2.5").unwrap(), Duration::from_millis(2500));
        assert_eq!(duration("0").unwrap(), Duration::ZERO);
        assert_eq!(duration("1h 5m").unwrap(), Duration::from_secs(3900));
        assert_eq!(duration("500ms").unwrap(), Duration::from_millis(500));
        for bad in ["", "x", "-1", "5 parsecs", "NaN", "inf", "1e300", "99999999h"] {
            assert!(duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_name_is_a_flag_or_a_word() {
        let typed = |name: Option<&str>, words: &[&str]| Named {
            name: name.map(str::to_owned),
            words: words.iter().map(|word| (*word).to_owned()).collect(),
        };
        assert_eq!(lock("release", &typed(Some("x"), &[])).unwrap().as_str(), "x");
        assert_eq!(lock("release", &typed(None, &["x"])).unwrap().as_str(), "x");
        assert!(lock("release", &typed(Some("x"), &["y"])).is_err() && lock("release", &typed(None, &[])).is_err());
    }

    #[test]
    fn signals_have_names_and_numbers() {
        for same in ["TERM", "term", "SIGTERM", "15"] {
            assert_eq!(signal(same).unwrap(), 15, "{same}");
        }
        for bad in ["", "0", "99", "TERMINATE", "-9"] {
            assert!(signal(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_exit_code_is_never_cut_to_a_byte() {
        assert_eq!(exit_code("255").unwrap(), 255);
        assert!(exit_code("256").is_err() && exit_code("-1").is_err());
    }

    #[test]
    fn the_nearest_word_is_found() {
        assert_eq!(nearest("tll", ["ttl", "wait", "log"].into_iter()), Some("ttl"));
        assert_eq!(nearest("kil-after", ["ttl", "kill-after", "on-lost"].into_iter()), Some("kill-after"));
        assert_eq!(nearest("mysql", ["redis", "etcd", "postgres"].into_iter()), None);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_a_value_panic(text in "(\\PC{0,40}|[0-9.eE+-]{0,30}|[0-9]{1,20}(ns|us|ms|s|m|h|d|y)?)") {
            if let Ok(span) = duration(&text) {
                assert!(span <= Duration::from_secs(10 * 366 * 24 * 3600));
            }
            let _ = (signal(&text), exit_code(&text), slots(&text), token(&text), once_key(&text), choice::<Leftovers>(&text));
        }
    }
}
