//! Flags and arguments, as `--help` lists them.

use std::ffi::OsString;

use super::{Row, USAGE, expect_refusal, not_utf8, row, with_value};
use crate::support::{Bed, Dlock, FileBed};

struct Flag {
    name: String,
    value: Value,
}

#[derive(Clone, Copy, PartialEq)]
enum Value {
    None,
    Optional,
    Required,
}

fn help(args: &[&str]) -> String {
    Dlock::new().args(args).arg("--help").ended().expect(0).silently().stdout
}

/// The verbs that are shown.
fn verbs() -> Vec<String> {
    let help = help(&[]);
    let section = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    // Descriptions that go on stand further to the right.
    let names = section.lines().filter(|line| !line.starts_with("    "));
    names.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

fn flags(help: &str) -> Vec<Flag> {
    let lines = help.lines().filter(|line| line.trim_start().starts_with('-') && !line.starts_with("          "));
    let flag = |line: &str| {
        let rest = line.split_once("--").unwrap().1;
        let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '-').collect();
        let value = match &rest[name.len()..] {
            rest if rest.starts_with("[=<") => Value::Optional,
            rest if rest.starts_with(" <") => Value::Required,
            _ => Value::None,
        };
        Flag { name, value }
    };
    lines.map(flag).filter(|flag| flag.name != "help").collect()
}

/// What stands between the angles or brackets, in lower case.
fn positionals(help: &str) -> Vec<String> {
    let section = help.split("Arguments:\n").nth(1).unwrap_or_default().split("\n\n").next().unwrap();
    let lines = section.lines().map(str::trim_start).filter(|line| line.starts_with(['<', '[']));
    let mut names: Vec<_> = lines.map(|line| line[1..].split(['>', ']']).next().unwrap().to_lowercase()).collect();
    let usage = help.split("Usage: ").nth(1).unwrap().lines().next().unwrap();
    // A name may be typed as a word, too, which is not shown again; or there may be several.
    if names.is_empty() && usage.contains("NAME") {
        names.push("name".to_owned());
    } else if usage.contains("NAME]...") || usage.contains("NAME>...") {
        names = vec!["names".to_owned()];
    } else if usage.contains("help [COMMAND]") {
        names = vec!["page".to_owned()];
    }
    names
}

/// A call of the verb that has all it needs, but for one flag or argument, and the command's place behind it.
fn call(verb: &str, without: &str, more: &[OsString]) -> Dlock {
    let (flags, arguments, command): (&[&str], &[&str], bool) = match verb {
        "run" => (&["--name=x"], &[], true),
        "acquire" => (&["--name=x"], &[], false),
        "renew" | "release" => (&["--name=x", "--owner=h.1.a"], &[], false),
        "status" | "force-release" | "history" | "forget" | "check" => (&[], &["x"], false),
        "fence" => (&["--token=1"], &["/dev/shm/nothing"], true),
        "completions" => (&[], &["bash"], false),
        "doctor" | "man" | "help" => (&[], &[], false),
        other => panic!("no row says how to call {other}"),
    };
    let flags = flags.iter().filter(|flag| !flag.starts_with(&format!("--{without}=")));
    let arguments = arguments.iter().filter(|_| without != "argument");
    let command: &[&str] = if command && without != "command" { &["--", "echo", "started"] } else { &[] };
    Dlock::new().arg(verb).args(flags).args(arguments).args(more).args(command)
}

#[test]
fn every_flag_refuses_nonsense() {
    let bed = FileBed::new();
    for verb in verbs() {
        for Flag { name, value } in flags(&help(&[&verb])) {
            let refuse = |more: &[OsString], code: i32| {
                let dlock = call(&verb, &name, more).env("DLOCK_BACKEND", bed.url());
                let shown: Vec<_> =
                    more.iter().map(|one| one.to_string_lossy().chars().take(60).collect::<String>()).collect();
                expect_refusal(dlock, &[code], &(&verb, shown));
            };
            let bare = OsString::from(format!("--{name}"));
            if value == Value::None {
                refuse(&[with_value(&name, "x".as_ref())], USAGE);
                refuse(&[bare.clone(), bare], USAGE);
                continue;
            }
            // Where several locks may be named, a pattern is one of the names.
            let kind = if name == "name" && ["status", "check"].contains(&verb.as_str()) { "names" } else { &name };
            let (code, values) = row(kind).refused();
            for value in &values {
                refuse(&[with_value(&name, value)], code);
            }
            if let Row::Refused(code, _) = row(kind) {
                // A path need not be UTF-8, and is not found; all else must be.
                refuse(&[with_value(&name, &not_utf8())], if name == "config" { code } else { USAGE });
            }
            if name == "config" {
                refuse(&[with_value(&name, "".as_ref())], USAGE);
            }
            refuse(&[with_value(&name, "1".as_ref()), with_value(&name, "1".as_ref())], USAGE);
            if value == Value::Required {
                expect_refusal(call(&verb, "command", &[bare]), &[USAGE], &(&verb, &name, "without a value"));
            }
        }
    }
    assert_eq!(std::fs::read_dir(bed.dir()).unwrap().count(), 0, "a lock was taken");
}

#[test]
fn every_argument_refuses_nonsense() {
    let bed = FileBed::new();
    for verb in verbs() {
        let refuse = |more: &[OsString], code: i32| {
            let dlock = call(&verb, "argument", more).env("DLOCK_BACKEND", bed.url());
            expect_refusal(dlock, &[code], &(&verb, more.first().map(|word| word.len())));
        };
        let positionals = positionals(&help(&[&verb]));
        for name in &positionals {
            let (code, values) = row(name).refused();
            for value in values {
                refuse(&[value], code);
            }
            if let Row::Refused(..) = row(name) {
                refuse(&[not_utf8()], USAGE);
            }
            if name == "resource" {
                refuse(&["".into()], USAGE);
            }
        }
        if !positionals.iter().any(|name| name == "names") {
            refuse(&["x".into(), "y".into()], USAGE);
        }
        refuse(&["--nonsense".into()], USAGE);
        refuse(&["-\u{fc}".into()], USAGE);
    }
    for no_verb in ["", "ran", "--nonsense", "\u{1b}[2J"] {
        expect_refusal(Dlock::new().arg(no_verb), &[USAGE], &no_verb);
    }
    expect_refusal(Dlock::new().arg(not_utf8()), &[USAGE], &"no verb");
    expect_refusal(call("run", "command", &[]), &[USAGE], &"no command");
}

/// The line names the flag, and says what it takes or what it does not go with.
#[test]
fn the_line_helps() {
    let bed = FileBed::new();
    let cases: &[(&[&str], &str)] = &[
        (&["--ttl", "soon"], "--ttl: \"soon\" is not a duration like"),
        (&["--ttl", "500ms"], "too short: the least is 1s"),
        (&["--ttl", "8days"], "too long"),
        (&["--ttl", "6s", "--kill-after", "5s"], "cannot hold"),
        (&["--slots", "0"], "--slots"),
        (&["--signal", "FOO"], "signal"),
        (&["-E", "600"], "0 to 255"),
        (&["--on-lost", "pray"], "kill, signal"),
        (&["--leftovers", "eat"], "kill, wait, leave"),
        (&["--once", ""], "--once"),
        (&["--wait", "1s", "--no-wait"], "do not go together"),
        (&["--shared", "--slots", "3"], "do not go together"),
        (&["--verbose", "--quiet"], "do not go together"),
        (&["--keep-trying", "--no-wait"], "do not go together"),
        (&["--keep-trying", "--wait", "1s"], "do not go together"),
        (&["--command", "true"], "do not go together"),
        (&["--frobnicate"], "--frobnicate"),
    ];
    for (flags, says) in cases {
        bed.dlock().run("x").args(*flags).sh("echo no").ended().expect(USAGE).saying(says);
    }
    bed.dlock().env("DLOCK_TTL", "never").run("x").sh("echo no").ended().expect(USAGE).saying("DLOCK_TTL");
    bed.dlock().run("a b").sh("echo no").ended().expect(USAGE).saying("lock name");
    bed.dlock().args(["run", "--", "true"]).ended().expect(USAGE).saying("--name");
    expect_refusal(bed.dlock().args(["status", "--exit-code"]), &[USAGE], &"--exit-code without a name");
}

/// The name is a flag or a word, for every verb that takes one.
#[test]
fn names_go_anywhere() {
    let bed = FileBed::new();
    let says = |args: &[&str]| bed.dlock().args(args).ended().expect(0).silently().stdout;
    assert_eq!(says(&["run", "x", "--", "echo", "hi"]), "hi\n");
    assert_eq!(says(&["run", "--ttl", "9s", "x", "-c", "echo $DLOCK_NAME"]), "x\n");
    for verbs in [&["x"][..], &["--name", "x"]] {
        let json = |verb: &[&str]| says(&[verb, verbs].concat());
        let acquired: serde_json::Value = serde_json::from_str(&json(&["acquire", "--json"])).unwrap();
        let owner = acquired["owner"].as_str().unwrap();
        json(&["renew", "--owner", owner]);
        json(&["release", "--owner", owner]);
        for verb in ["status", "history", "check"] {
            assert!(json(&[verb]).contains("exit 0"), "{verb} {verbs:?}");
        }
        assert_eq!(json(&["force-release"]), "x: nobody holds it\n");
    }
    assert_eq!(says(&["help", "run"]), says(&["run", "--help"]));
    assert_eq!(says(&["help"]), says(&["--help"]));
}
