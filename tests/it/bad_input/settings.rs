//! Environment variables and keys of the config file, as the manual page lists them.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::{CONFIG, Row, USAGE, between, expect_refusal, list, manual, not_utf8, row};
use crate::support::{Bed, Dlock, FileBed};

fn keys(manual: &str) -> Vec<String> {
    list(between(manual, "Its keys are ", "."))
}

/// Every `DLOCK_…` that the manual speaks of.
fn variables(manual: &str) -> BTreeSet<String> {
    let words = manual.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
    words.filter(|word| word.starts_with("DLOCK_")).map(ToOwned::to_owned).collect()
}

#[test]
fn every_variable_refuses_nonsense() {
    let (bed, manual) = (FileBed::new(), manual());
    let keys = keys(&manual);
    for variable in variables(&manual) {
        let run = |value: &OsStr| bed.dlock().env(&variable, value).run("x").sh("echo started");
        let key = variable["DLOCK_".len()..].to_lowercase().replace('_', "-");
        let (name, verb): (&str, &dyn Fn(&OsStr) -> Dlock) = match key.as_str() {
            setting if keys.iter().any(|key| key == setting) => (setting, &run),
            "config" => ("config", &run),
            "owner" => ("owner", &|value| bed.dlock().env(&variable, value).args(["release", "--name", "x"])),
            "fencing-token" => ("token", &|value| {
                let resource = bed.dir().join("resource");
                bed.dlock().env(&variable, value).arg("fence").arg(resource).sh("echo started")
            }),
            "password" => {
                let redis = |value: &OsStr| run(value).env("DLOCK_BACKEND", "redis://127.0.0.1:1");
                expect_refusal(redis(&not_utf8()), &[CONFIG], &variable);
                continue;
            }
            // Told by dlock to its command or hook, over whatever stands there.
            "name" | "slot" | "held" | "event" => {
                for value in ["", "=", "x=y z", "\u{1b}"].map(OsString::from).into_iter().chain([not_utf8()]) {
                    assert_eq!(run(&value).ended().expect(0).silently().stdout, "started\n");
                }
                continue;
            }
            other => panic!("no row says what is nonsense for DLOCK_{other}"),
        };
        let (code, values) = row(name).refused();
        // An empty variable is as good as none, except where there has to be one.
        let must_be = matches!(name, "owner" | "token");
        for value in values.iter().filter(|value| must_be || !value.is_empty()) {
            expect_refusal(verb(value), &[code], &(&variable, &value.to_string_lossy()[..value.len().min(40)]));
        }
        if !must_be {
            assert_eq!(verb("".as_ref()).ended().expect(0).silently().stdout, "started\n", "{variable}");
        }
        if let Row::Refused(..) = row(name) {
            expect_refusal(
                verb(&not_utf8()),
                &[if name == "config" { CONFIG } else { USAGE }],
                &(&variable, "not UTF-8"),
            );
        }
    }
}

fn config_file(bed: &FileBed, text: &[u8]) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = bed.dir().join("config.toml");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

fn refuse(bed: &FileBed, text: &str, backend: Option<&str>) {
    let dlock = Dlock::new().env("DLOCK_CONFIG", config_file(bed, text.as_bytes())).run("x");
    let dlock = dlock.args(backend.iter().flat_map(|backend| ["-b", backend])).sh("echo started");
    expect_refusal(dlock, &[CONFIG], &text.chars().take(200).collect::<String>());
}

/// What no key can be, by its type or its syntax.
fn of_wrong_type(key: &str) -> [String; 7] {
    ["[1]", "{ a = 1 }", "1979-05-27", "99999999999999999999", "", "'a", &format!("1\n{key} = 1")]
        .map(|value| format!("{key} = {value}\n"))
}

/// A text as TOML writes it.
fn quoted(text: &OsStr) -> String {
    serde_json::to_string(text.to_str().unwrap()).unwrap()
}

#[test]
fn every_key_refuses_nonsense() {
    let (bed, manual) = (FileBed::new(), manual());
    let home = format!("[backends.p]\nurl = '{}'\n", bed.url());
    for key in keys(&manual) {
        let by_value = row(&key).refused().1.into_iter().map(|value| format!("{key} = {}\n", quoted(&value)));
        for line in by_value.chain(of_wrong_type(&key)) {
            if key != "backend" {
                refuse(&bed, &format!("{line}{home}"), Some("p"));
            }
            refuse(&bed, &line, None);
            refuse(&bed, &format!("{home}{line}"), Some("p"));
        }
    }
}

#[test]
fn every_key_of_a_profile_refuses_nonsense() {
    let (bed, manual) = (FileBed::new(), manual());
    let parameters = super::urls::parameters(&manual);
    let keys: BTreeSet<&String> = parameters.iter().flat_map(|(_, own)| own).collect();
    for key in keys.into_iter().map(String::as_str).chain(["url", "backend", "nonsense"]) {
        for line in of_wrong_type(key) {
            refuse(&bed, &format!("[backends.p]\nurl = 'redis://127.0.0.1:1'\n{line}"), Some("p"));
        }
    }
    for url in ["", "nowhere", "gopher://h", "redis://h:0", "\u{1b}"] {
        refuse(&bed, &format!("[backends.p]\nurl = {}\n", quoted(url.as_ref())), Some("p"));
    }
    for whole in ["[backends.p]\n", "[backends]\np = 1\n", "backends = 1\n", "[[backends]]\n", "tll = 1\n", "[ttl]\n"] {
        refuse(&bed, whole, Some("p"));
    }
}

#[test]
fn a_config_file_that_is_none_is_refused() {
    let bed = FileBed::new();
    for bytes in [&b"\xff\xfe"[..], b"\0", b"ttl", b"=", b"[", &b"[".repeat(100_000)] {
        let path = config_file(&bed, bytes);
        let dlock = bed.dlock().env("DLOCK_CONFIG", path).run("x").sh("echo started");
        expect_refusal(dlock, &[CONFIG], &bytes.len());
    }
}
