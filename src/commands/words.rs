//! `dlock words -- WORD…`: what can stand in the place of the last word, one a line, with what it means after a tab. The
//! completions of all shells ask this. A `/` stands for the name of any file. Whoever presses the tab key is not made to
//! wait for a backend that does not answer.

use std::time::Duration;

use anyhow::Result;
use clap::{Arg, Command};
use nix::sys::signal::Signal;

use super::doctor::is_spent_probe;
use super::{PAGES, block_on};
use crate::backend::within;
use crate::cli::{Cli, Common, Shell, given};
use crate::config::{Color, Layers, Layout, Leftovers, OnLost, words as choices};
use crate::exit::Exit;
use crate::report::{Format, print};

const PATIENCE: Duration = Duration::from_secs(1);
const MOST: usize = 1000;
const FILES: &str = "/";

/// A word, and what it means.
type Word = (String, String);

pub fn words(line: &[String]) -> Result<Exit> {
    let cli = Cli::complete();
    let found = match line {
        [] => Vec::new(),
        [start] => starting_with(start, verbs(&cli)),
        [verb, before @ .., start] => match cli.find_subcommand(verb) {
            Some(verb) => of_verb(&cli, verb, before, start)?,
            None => Vec::new(),
        },
    };
    let text: String = found.iter().map(|(word, help)| format!("{word}\t{help}\n").replace("\t\n", "\n")).collect();
    print(text)?;
    Ok(Exit::OK)
}

fn of_verb(cli: &Command, verb: &Command, before: &[String], start: &str) -> Result<Vec<Word>> {
    let given = given(verb, before);
    let value_of = |id: &str| given.values.iter().rfind(|(arg, _)| arg.get_id() == id).map(|(_, value)| value.clone());
    let common =
        Common { backend: value_of("backend"), config: value_of("config").map(Into::into), ..Common::default() };
    let values = |arg: &Arg| values(cli, verb, arg, &common);
    if let Some(arg) = given.waits_for_value {
        return Ok(starting_with(start, values(arg)?));
    }
    if let Some((option, _)) = start.split_once('=').filter(|_| start.starts_with("--")) {
        let arg = verb.get_arguments().find(|arg| arg.get_long() == option.strip_prefix("--"));
        let words = arg.map(values).transpose()?.unwrap_or_default();
        let joined = words.into_iter().map(|(word, help)| match word.as_str() {
            FILES => (word, help),
            _ => (format!("{option}={word}"), help),
        });
        return Ok(starting_with(start, joined.collect()));
    }
    if start.starts_with('-') {
        let options = verb.get_arguments().filter(|arg| !arg.is_hide_set());
        let help = |arg: &Arg| arg.get_help().map(ToString::to_string).unwrap_or_default();
        let named = options.filter_map(|arg| Some((format!("--{}", arg.get_long()?), help(arg))));
        return Ok(starting_with(start, named.collect()));
    }
    let positional = verb.get_positionals().next().map(values).transpose()?;
    Ok(starting_with(start, positional.unwrap_or_default()))
}

/// What an option or argument can be, where dlock knows.
fn values(cli: &Command, verb: &Command, arg: &Arg, common: &Common) -> Result<Vec<Word>> {
    let plain = |words: Vec<String>| words.into_iter().map(|word| (word, String::new())).collect();
    Ok(match arg.get_id().as_str() {
        "name" | "names" | "words" => plain(names(verb.get_name() == "force-release", common)?),
        "backend" => plain(Layers::load(Common { backend: None, ..common.clone() })?.profiles()),
        "config" | "metrics_file" | "resource" => plain(vec![FILES.to_owned()]),
        "signal" => plain(Signal::iterator().map(|signal| signal.as_str()["SIG".len()..].to_owned()).collect()),
        "log" => plain(choices::<Format>()),
        "on_lost" => plain(choices::<OnLost>()),
        "leftovers" => plain(choices::<Leftovers>()),
        "format" => plain(choices::<Layout>()),
        "color" => plain(choices::<Color>()),
        "shell" => plain(choices::<Shell>()),
        "page" => plain(PAGES.iter().map(|(name, _)| (*name).to_owned()).collect()),
        "verb" => verbs(cli),
        _ => Vec::new(),
    })
}

fn verbs(cli: &Command) -> Vec<Word> {
    let shown = cli.get_subcommands().filter(|verb| !verb.is_hide_set());
    shown
        .map(|verb| (verb.get_name().to_owned(), verb.get_about().map(ToString::to_string).unwrap_or_default()))
        .collect()
}

fn starting_with(start: &str, mut words: Vec<Word>) -> Vec<Word> {
    words.retain(|(word, _)| word == FILES || word.starts_with(start));
    words
}

/// The locks of the backend that the line names.
fn names(held: bool, common: &Common) -> Result<Vec<String>> {
    let mut backend = Layers::load(common.clone())?.service(None)?.open()?;
    block_on(within(PATIENCE, async {
        let mut names: Vec<String> = Vec::new();
        let mut next = None;
        loop {
            let page = backend.list(next).await?;
            let locks = page.locks.iter().filter(|lock| !(is_spent_probe(lock) || held && lock.holders.is_empty()));
            names.extend(locks.map(|lock| lock.name.to_string()));
            next = page.next;
            if next.is_none() || names.len() >= MOST {
                return Ok(names);
            }
        }
    }))
}
