//! `dlock completions` and `dlock man`: what also stands, checked in, under completions/ and man/.

mod completions;

use anyhow::Result;
use clap::{Arg, Command};
use clap_complete::Shell;

use crate::backend;
use crate::cli::Cli;
use crate::commands::status::prometheus;
use crate::config::{SETTINGS, variable};
use crate::exit::Exit;
use crate::metrics::METRICS;
use crate::report::print;

/// What the options do not say: exit codes, signals, limits, examples.
const MAN_TAIL: &str = include_str!("man.roff");

pub fn completions(shell: Shell) -> Result<Exit> {
    print(completions::script(shell)?)?;
    Ok(Exit::OK)
}

pub fn man() -> Result<Exit> {
    print(man_page())?;
    Ok(Exit::OK)
}

fn man_page() -> String {
    let cli = Cli::complete();
    let version = cli.get_version().unwrap_or_default();
    let mut page = format!(".TH DLOCK 1 2026-11-16 \"dlock {version}\" \"User Commands\"\n.SH NAME\n");
    page += &format!(
        "dlock \\- {}\n.SH SYNOPSIS\n.nf\n",
        roff(&cli.get_about().map(ToString::to_string).unwrap_or_default())
    );
    page += "dlock run \\-\\-name NAME [OPTION...] \\-\\- COMMAND [ARG...]\n";
    for verb in cli.get_subcommands().filter(|verb| verb.get_name() != "run" && !verb.is_hide_set()) {
        let usage = verb.clone().render_usage().to_string().replacen("Usage: ", "", 1);
        page += &format!("{}\n", roff(&usage));
    }
    page += ".fi\n.SH COMMANDS\n";
    for verb in cli.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        page += &section(verb);
    }
    wrapped(&(page + &with_lists(MAN_TAIL)))
}

/// Puts in what the program knows by itself.
fn with_lists(text: &str) -> String {
    let joined = |words: &[String]| roff(&words.join(", "));
    let mut parameters = format!(".TP\n.I all but file\n{}", roff(&backend::COMMON.join(", ")));
    for kind in backend::KINDS {
        let own = match kind.parameters {
            _ if kind.schemes == ["file"] => "none".to_owned(),
            [] => "no others".to_owned(),
            own => own.join(", "),
        };
        parameters += &format!("\n.TP\n.I {}\n{}", roff(&kind.schemes.join(", ")), roff(&own));
    }
    let metrics = METRICS.map(|(name, kind, help)| format!(".TP\n.I {name}\n{} A {kind}.", roff(help)));
    let of_locks = prometheus::METRICS.map(|(name, help)| format!(".TP\n.I {name}\n{}", roff(help)));
    text.replace("@LOCK_METRICS@", &of_locks.join("\n"))
        .replace("@VARIABLES@", &joined(&SETTINGS.map(variable)))
        .replace("@KEYS@", &joined(&SETTINGS.map(str::to_owned)))
        .replace("@PARAMETERS@", &parameters)
        .replace("@METRICS@", &metrics.join("\n"))
}

/// Manual pages have short lines; what is shown as it stands is left as it is.
fn wrapped(page: &str) -> String {
    const WIDTH: usize = 78;
    let mut text = String::new();
    let mut as_it_stands = false;
    for line in page.lines() {
        as_it_stands = (as_it_stands || line == ".nf") && line != ".fi";
        if as_it_stands || line.starts_with('.') {
            text += line;
        } else {
            let mut column = 0;
            for (n, word) in line.split(' ').enumerate() {
                let fits = column + 1 + word.len() <= WIDTH;
                text += if n == 0 {
                    ""
                } else if fits {
                    " "
                } else {
                    "\n"
                };
                column = if fits && n > 0 { column + 1 + word.len() } else { word.len() };
                text += word;
            }
        }
        text.push('\n');
    }
    text
}

fn section(verb: &Command) -> String {
    let about = verb.get_about().map(ToString::to_string).unwrap_or_default();
    let mut text = format!(".SS dlock {}\n{}.\n", roff(verb.get_name()), roff(&about));
    for arg in verb.get_arguments().filter(|arg| arg.get_id() != "help" && !arg.is_hide_set()) {
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        text += &format!(".TP\n{}\n{}.\n", tag(arg), roff(&help));
    }
    text
}

/// `\fB\-w\fR, \fB\-\-wait\fR \fIDUR\fR`
fn tag(arg: &Arg) -> String {
    let short = arg.get_short().map(|short| format!("\\fB\\-{short}\\fR"));
    let long = arg.get_long().map(|long| format!("\\fB\\-\\-{}\\fR", roff(long)));
    let names: Vec<_> = short.into_iter().chain(long).collect();
    let takes_value = arg.get_action().takes_values();
    let value = arg.get_value_names().and_then(|names| names.first()).map(|name| format!("\\fI{}\\fR", roff(name)));
    match (names.is_empty(), value.filter(|_| takes_value)) {
        (true, value) => value.unwrap_or_else(|| format!("\\fI{}\\fR", roff(arg.get_id().as_str()))),
        (false, Some(value)) if may_be_left_out(arg) => format!("{} [{value}]", names.join(", ")),
        (false, Some(value)) => format!("{} {value}", names.join(", ")),
        (false, None) => names.join(", "),
    }
}

fn may_be_left_out(arg: &Arg) -> bool {
    arg.get_num_args().is_some_and(|count| count.min_values() == 0)
}

fn roff(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq").replace("\n.", "\n\\&.")
}
