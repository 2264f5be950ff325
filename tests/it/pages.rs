//! The manual pages: clap knows names, synopses and options, `man/parts` has the rest.
//!
//! `DLOCK_PAGES=write cargo test --test it pages::` writes man/ anew.

use std::path::{Path, PathBuf};
use std::process::Command;

use clap_mangen::Man;
use dlock::backend;
use dlock::cli::Cli;
use dlock::commands::PAGES;
use dlock::commands::run::METRICS;
use dlock::commands::status::prometheus;
use dlock::config::{SETTINGS, variable};

use crate::support::Dlock;

const DATE: &str = "2026-11-18";

/// Explained in dlock(1), for all commands.
const COMMON: [&str; 7] = ["backend", "config", "connect_timeout", "verbose", "quiet", "log", "help"];

fn man() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("man")
}

/// A written part, or nothing.
fn part(name: &str) -> String {
    std::fs::read_to_string(man().join("parts").join(name)).unwrap_or_default()
}

fn file(name: &str) -> String {
    match name {
        "dlock" => "dlock.1".to_owned(),
        "backends" => "dlock-backends.7".to_owned(),
        "config" => "dlock-config.5".to_owned(),
        verb => format!("dlock-{verb}.1"),
    }
}

fn made(name: &str) -> String {
    let section = file(name).rsplit('.').next().unwrap().to_owned();
    let cli = Cli::complete();
    let title = match name {
        "dlock" => name.to_owned(),
        name => format!("dlock-{name}"),
    };
    let source = format!("dlock {}", cli.get_version().unwrap());
    let of =
        |cmd: clap::Command| Man::new(cmd).title(title.to_uppercase()).section(&section).date(DATE).source(&source);
    let manual = if section == "1" { "User Commands" } else { "dlock Manual" };
    let head = rendered(|out| of(cli.clone()).manual(manual).render_title(out));
    let body = match cli.find_subcommand(name) {
        None => part(&file(name)),
        Some(verb) => {
            let about = verb.get_about().unwrap().to_string();
            let more = verb.get_long_about().unwrap().to_string();
            let verb = verb.clone().long_about(more.strip_prefix(&about).unwrap().trim().to_owned());
            let verb = verb.about(about[..1].to_lowercase() + &about[1..]).mut_args(|arg| {
                let common = COMMON.contains(&arg.get_id().as_str()) && !(name == "fence" && arg.get_id() == "log");
                let hidden = common || arg.is_hide_set();
                in_sentences(arg).hide(hidden)
            });
            let man = of(verb);
            let name_and_more = rendered(|out| {
                man.render_name_section(out)?;
                man.render_synopsis_section(out)?;
                man.render_description_section(out)
            });
            let options = rendered(|out| man.render_options_section(out));
            [name_and_more, grouped(&options), part(&format!("{name}.roff")), see_also(name)].concat()
        }
    };
    // The first line tells man(1) that there is a table.
    let table = if body.contains("\n.TS\n") { "'\\\" t\n" } else { "" };
    wrapped(&with_lists(&[table, &head, &body].concat(), &cli))
}

/// The help of an option as a paragraph.
fn in_sentences(arg: clap::Arg) -> clap::Arg {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let help = help.replace("\n\n", ". ");
    arg.long_help(if help.ends_with('.') { help } else { help + "." })
}

/// What clap_mangen writes, without the preamble that it puts before everything.
fn rendered(render: impl Fn(&mut Vec<u8>) -> std::io::Result<()>) -> String {
    let mut text = Vec::new();
    render(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with(".ie ") && !line.starts_with(".el "));
    lines.map(|line| line.replace("\\*(Aq", "\\(aq") + "\n").collect()
}

/// Each group of options is a section for clap_mangen, and a subsection for us.
fn grouped(options: &str) -> String {
    let mut text = String::from(".SH OPTIONS\n");
    for line in options.lines().filter(|line| *line != ".SH OPTIONS") {
        text += &match line.strip_prefix(".SH ") {
            Some(group) => format!(".SS {}{}\n", &group[..1], group[1..].to_lowercase()),
            None => format!("{line}\n"),
        };
    }
    text + ".PP\nThe options of all commands, like \\fB\\-\\-backend\\fR, are in\n.BR dlock (1).\n"
}

fn see_also(name: &str) -> String {
    let others: &[&str] = match name {
        "run" => &["status", "fence"],
        "acquire" => &["renew", "release", "fence"],
        "renew" | "release" => &["acquire"],
        "status" | "history" | "check" => &["status", "history", "check"],
        "force-release" => &["status", "history"],
        "forget" => &["history"],
        _ => &["run"],
    };
    let others = others.iter().filter(|other| **other != name).map(|other| reference(other));
    let status = if part(&format!("{name}.roff")).contains(".SH EXIT STATUS") {
        String::new()
    } else {
        ".SH EXIT STATUS\nSee\n.BR dlock (1).\n".to_owned()
    };
    let pages = [reference("dlock")].into_iter().chain(others).chain(["backends", "config"].map(reference));
    format!("{status}.SH SEE ALSO\n{}\n", pages.collect::<Vec<_>>().join(",\n"))
}

/// `.BR dlock\-run (1)`
fn reference(page: &str) -> String {
    let (name, section) = file(page).rsplit_once('.').map(|(name, section)| (roff(name), section.to_owned())).unwrap();
    format!(".BR {name} ({section})")
}

/// Puts in what the program knows by itself.
fn with_lists(text: &str, cli: &clap::Command) -> String {
    let joined = |words: &[String]| roff(&words.join(", "));
    let commands = PAGES.iter().filter_map(|(name, _)| {
        let about = cli.find_subcommand(name)?.get_about()?.to_string();
        Some(format!(".TP\n{}\n{}.", reference(name), roff(&about)))
    });
    let common = cli.find_subcommand("doctor").unwrap().clone();
    let common = common.mut_args(|arg| {
        let hidden = !COMMON.contains(&arg.get_id().as_str()) || arg.get_id() == "help";
        in_sentences(arg).hide(hidden).help_heading(None::<&str>)
    });
    let common = rendered(|out| Man::new(common.clone()).render_options_section(out)).replace(".SH OPTIONS\n", "");
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
    let pages = PAGES.iter().filter(|(name, _)| *name != "dlock").map(|(name, _)| reference(name));
    let variables: Vec<_> = SETTINGS.iter().copied().map(variable).collect();
    text.replace("@COMMANDS@", &commands.collect::<Vec<_>>().join("\n"))
        .replace("@COMMON@\n", &common)
        .replace("@PAGES@", &pages.collect::<Vec<_>>().join(",\n"))
        .replace("@LOCK_METRICS@", &of_locks.join("\n"))
        .replace("@VARIABLES@", &joined(&variables))
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
        as_it_stands = (as_it_stands || line == ".nf" || line == ".TS") && line != ".fi" && line != ".TE";
        if as_it_stands || line.starts_with('.') {
            text += line;
        } else {
            let mut column = 0;
            for (n, word) in line.split(' ').enumerate() {
                let fits = column + 1 + word.len() <= WIDTH;
                text += match (n, fits) {
                    (0, _) => "",
                    (_, true) => " ",
                    (_, false) => "\n",
                };
                column = if fits && n > 0 { column + 1 + word.len() } else { word.len() };
                text += word;
            }
        }
        text.push('\n');
    }
    text
}

fn roff(text: &str) -> String {
    text.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\(aq").replace("\n.", "\n\\&.")
}

#[test]
fn the_manual_pages_are_up_to_date() {
    for (name, shown) in PAGES {
        let (path, made) = (man().join(file(name)), made(name));
        if std::env::var_os("DLOCK_PAGES").is_some() {
            std::fs::write(path, made).unwrap();
        } else {
            assert!(made == *shown, "stale: DLOCK_PAGES=write cargo test --test it pages::");
        }
    }
    let checked_in = std::fs::read_dir(man()).unwrap().filter(|entry| entry.as_ref().unwrap().path().is_file()).count();
    assert_eq!(checked_in, PAGES.len(), "man/ has pages that `dlock man` does not know");
}

/// Every command has one, but for those that dlock(1) describes in a line.
#[test]
fn every_command_has_a_page() {
    let cli = Cli::complete();
    for verb in cli.get_subcommands().filter(|verb| !verb.is_hide_set()) {
        let name = verb.get_name();
        let in_overview = ["completions", "man", "help"].contains(&name);
        assert!(in_overview != PAGES.iter().any(|(page, _)| *page == name), "{name}");
        Dlock::new().args(["man", if in_overview { "dlock" } else { name }]).ended().expect(0);
    }
}

#[test]
fn the_manual_pages_are_clean() {
    let pages = PAGES.iter().map(|(name, _)| man().join(file(name)));
    let lint = Command::new("mandoc").args(["-T", "lint"]).args(pages).output().unwrap();
    let complaints = String::from_utf8_lossy(&lint.stdout);
    assert!(lint.status.success() && complaints.is_empty(), "{complaints}");
}
