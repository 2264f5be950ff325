//! Every part of every kind of URL. Nobody listens where these lead, so what is accepted ends with 69.

use std::path::Path;
use std::process::Command;

use super::{CONFIG, between, expect_refusal, list, manual};
use crate::support::{Dlock, FileBed, PLACES, Urls};

const UNREACHABLE: i32 = 69;

/// Every scheme, with all the parameters that it takes.
pub fn parameters(manual: &str) -> Vec<(String, Vec<String>)> {
    let mut groups = between(manual, ".SH PARAMETERS\n", ".SH ").split(".TP\n.I ").skip(1).map(|group| {
        let (schemes, own) = group.split_once('\n').unwrap();
        (list(schemes), list(own))
    });
    let common = groups.next().unwrap().1;
    let mut all = Vec::new();
    for (schemes, own) in groups {
        for scheme in schemes {
            let takes = match own[0].as_str() {
                "none" => Vec::new(),
                "no others" => common.clone(),
                _ => [common.clone(), own.clone()].concat(),
            };
            all.push((scheme, takes));
        }
    }
    all
}

/// A URL in its parts.
#[derive(Clone)]
struct Url {
    /// What the launcher of its backend says about such URLs.
    row: &'static Urls,
    scheme: String,
    login: String,
    host: String,
    port: String,
    path: String,
    query: Vec<String>,
}

impl Url {
    /// One that makes sense.
    fn of(scheme: &str, files: &Path) -> Url {
        let mut rows = PLACES.iter().flat_map(|place| place.urls);
        let row =
            rows.find(|row| row.schemes.contains(&scheme)).unwrap_or_else(|| panic!("no launcher has {scheme}://"));
        let ca = row.encrypted.contains(&scheme).then(|| format!("tls-ca={}/ca.pem", files.display()));
        let port = if row.host.is_empty() { "" } else { "1" };
        Url {
            row,
            scheme: scheme.to_owned(),
            login: String::new(),
            host: row.host.to_owned(),
            port: port.to_owned(),
            path: row.path.replace("DIR", files.to_str().unwrap()),
            query: ca.into_iter().collect(),
        }
    }

    fn text(&self) -> String {
        let Url { scheme, login, host, port, path, query, .. } = self;
        let colon = if port.is_empty() { "" } else { ":" };
        format!("{scheme}://{login}{host}{colon}{port}{path}?{}", query.join("&"))
    }

    fn run(&self) -> Dlock {
        Dlock::new().run("x").args(["--connect-timeout", "5s", "-b", &self.text()]).sh("echo started")
    }

    #[track_caller]
    fn refused(&self, what: &str) {
        expect_refusal(self.run(), &[CONFIG], &(&self.scheme, what));
    }

    /// With this parameter instead of one that stands there already.
    fn with(&self, parameter: &str, value: &str) -> Url {
        let mut url = self.clone();
        url.query.retain(|pair| !pair.starts_with(&format!("{parameter}=")));
        url.query.push(format!("{parameter}={value}"));
        url
    }

    /// Values that a parameter refuses; any that can be decoded is right for the others.
    fn wrong_values(&self, parameter: &str) -> &'static [&'static str] {
        let mut rows = self.row.wrong_values.iter().chain(&WRONG_VALUES);
        let row = rows.find(|row| row.0 == parameter);
        row.unwrap_or_else(|| panic!("no row says what is nonsense for {parameter} of {}", self.scheme)).1
    }
}

/// Of the parameters that are the same everywhere.
const WRONG_VALUES: [(&str, &[&str]); 6] = [
    ("tls-ca", &["/nonexistent", "/dev", "/dev/null"]),
    ("tls-cert", &["/nonexistent", "/dev", "/dev/null"]),
    ("tls-key", &["/nonexistent", "/dev", "/dev/null"]),
    ("password-file", &["", "/nonexistent", "/dev"]),
    ("username", &[]),
    ("password", &[]),
];

/// What is not an encoding of anything.
const UNDECODABLE: [&str; 4] = ["%", "%zz", "%ff", "%00"];

/// A directory for locks that has a certificate in it.
fn files() -> FileBed {
    let bed = FileBed::new();
    let made = Command::new("openssl")
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "ca.pem", "-subj", "/CN=x",
        ])
        .current_dir(bed.dir())
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    bed
}

#[test]
fn every_part_of_a_url_refuses_nonsense() {
    let bed = files();
    for (scheme, _) in parameters(&manual()) {
        let url = Url::of(&scheme, bed.dir());
        match scheme.as_str() {
            "file" => assert_eq!(url.run().ended().expect(0).silently().stdout, "started\n"),
            _ => expect_refusal(url.run(), &[UNREACHABLE], &scheme),
        }
        for path in url.row.wrong_paths {
            Url { path: (*path).to_owned(), ..url.clone() }.refused(path);
        }
        for bad in UNDECODABLE {
            Url { path: format!("/{bad}"), ..url.clone() }.refused(bad);
            Url { login: format!("{bad}@"), ..url.clone() }.refused(bad);
            Url { login: format!("user:{bad}@"), ..url.clone() }.refused(bad);
            Url { host: format!("h{bad}"), ..url.clone() }.refused(bad);
            Url { query: vec![format!("{bad}=1")], ..url.clone() }.refused(bad);
        }
        for host in ["%20", "a%20b", "a%0Ab", "[::1", "[", "]", "[]", "[::1]x", "h".repeat(256).as_str()] {
            Url { host: host.to_owned(), port: "1".to_owned(), ..url.clone() }.refused(host);
        }
        for port in ["0", "65536", "-1", "x", "1x", "%31"] {
            Url { host: "127.0.0.1".to_owned(), port: port.to_owned(), ..url.clone() }.refused(port);
        }
        if !url.row.hostless {
            Url { host: String::new(), port: String::new(), ..url.clone() }.refused("no host");
        }
        Url { scheme: scheme.to_uppercase(), ..url.clone() }.refused("upper case");
        Url { scheme: format!("{scheme}x"), ..url.clone() }.refused("another scheme");
    }
}

#[test]
fn every_parameter_of_a_url_refuses_nonsense() {
    let bed = files();
    for (scheme, takes) in parameters(&manual()) {
        let url = Url::of(&scheme, bed.dir());
        url.with("nonsense", "1").refused("an unknown parameter");
        url.with("", "1").refused("a parameter without a name");
        for parameter in &takes {
            for value in url.wrong_values(parameter).iter().chain(&UNDECODABLE) {
                url.with(parameter, value).refused(&format!("{parameter}={value}"));
            }
            let mut twice = url.with(parameter, "1");
            twice.query.push(format!("{parameter}=1"));
            twice.refused(&format!("{parameter} twice"));
            if url.wrong_values(parameter).is_empty() {
                // Not even what means nothing leads to more than a line.
                for value in ["", "%0A", "%1B%5B2J", "\u{1f980}", &"x".repeat(50_000)] {
                    let what = format!("{parameter}={}", value.chars().take(20).collect::<String>());
                    expect_refusal(url.with(parameter, value).run(), &[CONFIG, UNREACHABLE], &(&scheme, what));
                }
            }
        }
    }
}

/// Each part of a password begins with one of these, and nothing else that dlock prints has them.
const SECRETS: [&str; 3] = ["zqx", "jvk", "7041"];

const PASSWORDS: [&str; 18] = [
    "zqx/jvk",
    "zqx?jvk",
    "zqx#jvk",
    "zqx@jvk",
    "zqx:jvk",
    "zqx%jvk",
    "zqx&jvk",
    "zqx,jvk",
    "zqx jvk",
    "[zqx]jvk",
    "7041/zqx",
    "7041?zqx",
    "7041?zqx=jvk",
    "7041?zqx=1&zqx=jvk",
    "7041/?prefix=zqx&jvk",
    "zqx@7041/jvk",
    "zqx@7041?jvk=1",
    "zqx://jvk",
];

/// A wrong URL is not repeated, and one that only looks right leads nowhere.
#[test]
fn no_part_of_a_password_is_shown_however_it_is_written() {
    let files = files();
    for (scheme, _) in parameters(&manual()) {
        for password in PASSWORDS {
            let url = Url { login: format!("me:{password}@"), ..Url::of(&scheme, files.dir()) };
            for dlock in [url.run(), Dlock::new().env("DLOCK_BACKEND", url.text()).args(["status", "x"])] {
                let ended = dlock.env("DLOCK_CONNECT_TIMEOUT", "1s").ended();
                let said = format!("{}{}", ended.stdout, ended.stderr);
                assert!(!SECRETS.iter().any(|secret| said.contains(secret)), "{scheme} {password}: {said}");
            }
        }
    }
}
