//! Nonsense wherever dlock takes something from its users: every flag of every verb, every variable, every key
//! of the config file and every part of every URL. Each time one line says what is wrong, the exit code says
//! whose mistake it is, and nothing is started.
//!
//! What there is to be fed is asked of dlock itself (`--help` and the manual page), so that whatever is added
//! without a row here is a failure.

mod flags;
mod mistakes;
mod settings;
mod urls;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;

use crate::support::{Dlock, Ended};

pub const USAGE: i32 = 64;
pub const CONFIG: i32 = 78;

/// What is nonsense for a flag, and for the variable and the key of the same name.
pub enum Row {
    /// These and [`any_nonsense`] are refused, with this code.
    Refused(i32, &'static [&'static str]),
    /// Only these are: anything else may be meant.
    Only(i32, &'static [&'static str]),
    Anything,
}

use Row::{Anything, Only, Refused};

const DURATIONS: &[&str] = &["", " ", "x", "-1", "NaN", "inf", "1e300", "99999999999999999999h", "5 parsecs", "1,5"];

pub fn row(name: &str) -> Row {
    match name {
        "name" => Refused(USAGE, &["", " ", "a b", "/", "a//b", "../a", "a/.", "ü", "a*"]),
        // Not a name that has a pattern's signs: that may be meant.
        "names" => Refused(USAGE, &["", " ", "a b", "/", "a//b", "../a", "a/.", "ü", "a*//"]),
        "backend" => Refused(CONFIG, &["", "nowhere", ":", "://", "://h", "Redis://h", "gopher://h", "redisx://h"]),
        "config" => Refused(CONFIG, &["/nonexistent", "/dev/null/x", "/"]),
        "ttl"
        | "wait"
        | "kill-after"
        | "timeout"
        | "hold-at-least"
        | "connect-timeout"
        | "watch"
        | "warn-after"
        | "held-at-most"
        | "last-success-within"
        | "waiting-at-most" => Refused(USAGE, DURATIONS),
        "slots" => Refused(USAGE, &["", "0", "-1", "1.5", "1001", "99999999999999999999"]),
        "token" => Refused(USAGE, &["", "-1", "1.5", "0x10", "9223372036854775808"]),
        "signal" => Refused(USAGE, &["", "0", "-9", "99", "TERMINATE"]),
        "on-lost" | "leftovers" | "log" | "format" | "color" => Refused(USAGE, &["", "Kill", "both", "text "]),
        "verbose" | "quiet" => Refused(USAGE, &["yes", "2", "TRUE"]),
        "conflict-exit-code" => Refused(USAGE, &["", "-1", "256", "7.5"]),
        "owner" => Refused(USAGE, &["", "../../etc", "a b", ".hidden"]),
        "once" | "forget-once" => Only(USAGE, &["", "a\nb", "\u{1b}[2J"]),
        "limit" => Refused(USAGE, &["", "-1", "1.5", "99999999999999999999"]),
        "warn" => Refused(USAGE, &["", "-1", "101%", "NaN", "80 %"]),
        "shell" | "page" => Refused(USAGE, &["", "klingon"]),
        "resource" => Only(CONFIG, &["/nonexistent/x", "/dev/null/x"]),
        "metrics-file" | "on-event" => Only(USAGE, &[""]),
        "history" => Refused(USAGE, &["", "-1", "1.5", "101"]),
        "command" | "reason" | "cmd" | "note" => Anything,
        other => panic!("no row says what is nonsense for {other}"),
    }
}

pub fn not_utf8() -> OsString {
    OsString::from_vec(b"\xff\xfe".to_vec())
}

/// What makes sense for nothing.
fn any_nonsense() -> [OsString; 3] {
    ["a\nb".into(), "x".repeat(100_000).into(), "\u{202e}\u{1b}[2J".into()]
}

impl Row {
    /// All values that are refused, and the code for it; what is not UTF-8 comes by itself, since it does not
    /// get as far as to be looked at.
    pub fn refused(&self) -> (i32, Vec<OsString>) {
        match self {
            Refused(code, own) => (*code, own.iter().map(OsString::from).chain(any_nonsense()).collect()),
            Only(code, own) => (*code, own.iter().map(OsString::from).collect()),
            Anything => (0, Vec::new()),
        }
    }
}

/// One line, the right code, and no command; nothing on standard output but what makes the eval of an acquire fail. A
/// monitoring plugin speaks on standard output, and has a code of its own for all that is wrong.
#[track_caller]
pub fn expect_refusal(dlock: Dlock, codes: &[i32], what: &dyn std::fmt::Debug) {
    let Ended { mut code, mut stdout, mut stderr } = dlock.ended();
    let unknown = stdout.strip_prefix("DLOCK UNKNOWN - ").or(stdout.strip_prefix("{\"exit_code\":3,"));
    if let (Some(3), Some(line)) = (code, unknown) {
        assert_eq!(stderr, "", "{what:?}");
        (code, stderr) = (codes.first().copied(), format!("dlock: unknown: {line}"));
        stdout.clear();
    }
    let line = stderr.strip_suffix('\n').unwrap_or_default();
    let is_line = line.starts_with("dlock: ") && line.len() > 20 && line.len() < 3000;
    let clean = !line.contains(|c: char| c.is_control() || c == '\u{202e}');
    let failing = code.map(|code| format!("DLOCK_OWNER=\nDLOCK_FENCING_TOKEN=$(exit {code})\n")).unwrap_or_default();
    let refused = code.is_some_and(|code| codes.contains(&code)) && (stdout.is_empty() || stdout == failing);
    assert!(refused && is_line && clean, "{what:?} should be {codes:?}: {code:?} {stdout:?} {stderr:?}");
}

/// `--flag=value`, whatever the value.
fn with_value(flag: &str, value: &OsStr) -> OsString {
    let mut word = OsString::from(format!("--{flag}="));
    word.push(value);
    word
}

fn manual() -> String {
    let page = |name| Dlock::new().args(["man", name]).ended().expect(0).stdout.replace("\\-", "-");
    ["dlock", "run", "config", "backends"].map(page).concat()
}

/// What stands in the manual between these two.
fn between<'a>(manual: &'a str, from: &str, to: &str) -> &'a str {
    let start = manual.find(from).unwrap_or_else(|| panic!("the manual has no {from:?}")) + from.len();
    &manual[start..start + manual[start..].find(to).unwrap()]
}

/// The words of a list in the manual, which may be broken into lines.
fn list(text: &str) -> Vec<String> {
    text.split(',').map(|word| word.trim().to_owned()).collect()
}
