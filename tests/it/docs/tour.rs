//! A walk through one page: every block of it is run, in the order of the page, as a reader would.
//!
//! | language | what is done with it |
//! | --- | --- |
//! | `sh` | run by bash; has to succeed |
//! | `console` | `$ command` and what it prints, which has to be what the page says: see `transcript` |
//! | `crontab` | every line run as cron would; has to succeed and print nothing |
//! | `toml` | becomes the config file of what follows, and every profile in it is understood |
//! | `sql` | run on the database of the page |
//! | `yaml`, `ini`, … | what the page's own test does with it |
//! | `text` | a drawing or somebody else's file: no command of ours begins a line of it |

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use tempfile::TempDir;

use super::transcript::{self, Step};
use crate::support::until;

#[derive(Clone, Debug)]
enum Part {
    Heading(String),
    Block { language: String, text: String },
}

/// Runs SQL on the server of a page.
type Database = Box<dyn Fn(&str) -> String>;

pub struct Tour {
    page: String,
    parts: std::collections::VecDeque<Part>,
    home: TempDir,
    env: Vec<(String, String)>,
    /// What the page says, and what stands for it here.
    in_place_of: Vec<(String, String)>,
    database: Option<Database>,
    started: Vec<Child>,
}

pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

impl Tour {
    /// On local files, until the test says otherwise.
    pub fn of(page: &str) -> Tour {
        let text = std::fs::read_to_string(root().join(page)).unwrap();
        let home = tempfile::tempdir().unwrap();
        let mut tour = Tour {
            page: page.to_owned(),
            parts: parts(&text).into(),
            home,
            env: Vec::new(),
            in_place_of: Vec::new(),
            database: None,
            started: Vec::new(),
        };
        for directory in ["work", "bin", "locks", "config/dlock"] {
            std::fs::create_dir_all(tour.path(directory)).unwrap();
        }
        for name in ["docs", "man", "completions"] {
            std::os::unix::fs::symlink(root().join(name), tour.path("work").join(name)).unwrap();
        }
        for script in text.split(|c: char| !c.is_alphanumeric() && !"./-_".contains(c)) {
            if let Some(name) = script.strip_prefix("./").filter(|name| name.ends_with(".sh")) {
                tour.write_program(&tour.path("work").join(name), "[ -z \"${LASTS-}\" ] || exec sleep 600");
            }
        }
        tour.backend(&format!("file://{}", tour.path("locks").display()));
        tour.set("DLOCK_CONNECT_TIMEOUT", "30s");
        tour
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    pub fn work(&self) -> PathBuf {
        self.path("work")
    }

    pub fn set(&mut self, variable: &str, value: &str) {
        self.env.retain(|(known, _)| known != variable);
        self.env.push((variable.into(), value.into()));
    }

    pub fn backend(&mut self, url: &str) {
        self.set("DLOCK_BACKEND", url);
    }

    /// What runs the page's SQL.
    pub fn on(&mut self, database: impl Fn(&str) -> String + 'static) {
        self.database = Some(Box::new(database));
    }

    pub fn replace(&mut self, said: &str, meant: &str) {
        self.in_place_of.push((said.into(), meant.into()));
    }

    /// A program of the machine, played by a line of shell.
    pub fn stand_in(&self, program: &str, line: &str) {
        self.write_program(&self.path("bin").join(program), line);
    }

    fn write_program(&self, path: &Path, line: &str) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(path, format!("#!/bin/sh\n{line}\n")).unwrap();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// Somebody runs this script under the lock, and goes on doing so.
    pub fn hold(&mut self, name: &str, script: &str) {
        self.start(&format!("LASTS=1 exec dlock run -q --name {name} -- {script}"));
        until("it to be held", || self.output(&format!("dlock status --exit-code {name}")).status.code() == Some(75));
    }

    /// Somebody waits for a lock that is held.
    pub fn wait_for(&mut self, name: &str, script: &str) {
        self.start(&format!("LASTS=1 exec dlock run -q --name {name} -- {script}"));
        let waiters = format!("dlock status {name} --json | jq '.[0].waiters | length'");
        until("it to be waited for", || self.output(&waiters).stdout == b"1\n");
    }

    /// They are asked to stop, and do.
    pub fn end_holders(&mut self) {
        for child in &mut self.started {
            crate::support::signal(child.id(), nix::sys::signal::Signal::SIGTERM);
            child.wait().unwrap();
        }
        self.started.clear();
    }

    fn start(&mut self, script: &str) {
        let child = self.shell(script).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        self.started.push(child);
    }

    fn shell(&self, script: &str) -> Command {
        let dlock = assert_cmd::cargo::cargo_bin!("dlock").parent().unwrap().display();
        let path = format!("{}:{dlock}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        let mut shell = Command::new("bash");
        shell.args(["-uo", "pipefail", "-c", script]).current_dir(self.work()).env_clear();
        shell.env("PATH", path).env("HOME", self.home.path()).env("XDG_CONFIG_HOME", self.path("config"));
        // As the pages have it, whoever runs the tests.
        shell.env("USER", "root").envs(self.env.iter().cloned());
        shell
    }

    fn output(&self, script: &str) -> Output {
        self.shell(script).stdin(Stdio::null()).output().unwrap()
    }

    /// Runs a script as a block of the page; returns what it prints.
    #[track_caller]
    pub fn sh(&self, script: &str) -> String {
        let out = self.output(&format!("set -e\n{script}"));
        assert!(out.status.success(), "{}: this block fails:\n{script}\n{out:#?}", self.page);
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    pub fn succeeds(&self, script: &str) -> bool {
        self.output(&format!("set -e\n{script}")).status.success()
    }

    /// The blocks up to the heading.
    pub fn up_to(&mut self, heading: &str) {
        while let Some(part) = self.parts.pop_front() {
            match part {
                Part::Heading(found) if found == heading => return,
                Part::Heading(_) => {}
                Part::Block { language, text } => self.play(&language, &text),
            }
        }
        panic!("{}: no heading {heading:?} is left", self.page);
    }

    /// The next block, which has to be of this language, for what the page's own test does with it.
    pub fn block(&mut self, wanted: &str) -> String {
        while let Some(part) = self.parts.pop_front() {
            match part {
                Part::Heading(_) => {}
                Part::Block { language, text } if language == wanted => return self.meant(&text),
                Part::Block { language, text } => self.play(&language, &text),
            }
        }
        panic!("{}: no block of {wanted} is left", self.page);
    }

    /// The rest of the page.
    pub fn finish(mut self) {
        while let Some(part) = self.parts.pop_front() {
            if let Part::Block { language, text } = part {
                self.play(&language, &text);
            }
        }
    }

    fn meant(&self, text: &str) -> String {
        self.in_place_of.iter().fold(text.to_owned(), |text, (said, meant)| text.replace(said, meant))
    }

    fn play(&mut self, language: &str, text: &str) {
        let text = self.meant(text);
        match language {
            "sh" if is_set_up(&text) => flags_are_known(&text),
            "sh" => drop(self.sh(&text)),
            "console" => self.console(&text),
            "crontab" => self.crontab(&text),
            "toml" => self.config(&text),
            "sql" => drop(self.database.as_ref().expect("a database for the page")(&text)),
            "text" => {
                let is_ours = |rest: &str| rest.starts_with(|c: char| c.is_ascii_lowercase());
                let is_command =
                    |line: &&str| line.starts_with("$ ") || line.strip_prefix("dlock ").is_some_and(is_ours);
                let command = text.lines().find(is_command);
                assert_eq!(command, None, "{}: a command that nobody runs", self.page);
            }
            other => panic!("{}: nobody runs a block of {other:?}:\n{text}", self.page),
        }
    }

    pub fn console(&mut self, text: &str) {
        let steps = transcript::steps(text);
        let script: String = steps.iter().map(Step::script).collect();
        let out = self.output(&format!("exec 2>&1\n{script}"));
        let said = String::from_utf8_lossy(&out.stdout).into_owned();
        transcript::compare(&self.page, &steps, &said);
    }

    fn crontab(&mut self, text: &str) {
        let mut path = String::new();
        for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            let job =
                if line.starts_with('@') { line.split_once(' ').map(|(_, job)| job) } else { after_five_fields(line) };
            match (line.strip_prefix("PATH="), job) {
                (Some(value), _) => path = format!("PATH=$PATH:{value}; "),
                (None, Some(job)) => {
                    assert!(!job.replace("\\%", "").contains('%'), "{}: cron ends the line at %: {line}", self.page);
                    let job = job.replace("\\%", "%");
                    let out = self.output(&format!("set -e; {path}cd ~/work; {job}"));
                    assert!(out.status.success(), "{}: {line}\n{out:#?}", self.page);
                    let said = [out.stdout, out.stderr].concat();
                    assert_eq!(String::from_utf8_lossy(&said), "", "{}: cron would mail it: {line}", self.page);
                }
                (None, None) => panic!("{}: not a line of a crontab: {line}", self.page),
            }
        }
    }

    fn config(&mut self, text: &str) {
        use std::os::unix::fs::OpenOptionsExt;
        let path = self.path("config/dlock/config.toml");
        let mut options = std::fs::File::options();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&path).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        if text.lines().any(|line| line.starts_with("backend = ")) {
            self.env.retain(|(name, _)| name != "DLOCK_BACKEND");
        }
        self.sh("dlock run --name x --explain");
        for profile in text.lines().filter_map(|line| line.strip_prefix("[backends.")?.strip_suffix(']')) {
            self.sh(&format!("dlock run --backend {profile} --name x --explain"));
        }
    }
}

impl Drop for Tour {
    fn drop(&mut self) {
        for child in &mut self.started {
            let _ = child.kill();
            let _ = child.wait();
        }
        if !std::thread::panicking() {
            assert!(self.parts.is_empty(), "{}: not all of the page was played", self.page);
        }
    }
}

/// Set-up, tests and benchmarks are not run from inside a test.
fn is_set_up(block: &str) -> bool {
    ["cargo ", "tests/run", "benches/run"].iter().any(|start| block.starts_with(start))
}

fn flags_are_known(block: &str) {
    for line in block.lines() {
        let file = match line.split(' ').next().unwrap() {
            "tests/run" => "tests/run",
            "benches/run" => "benches/measure.py",
            _ => continue,
        };
        let known = std::fs::read_to_string(root().join(file)).unwrap();
        for flag in line.split(' ').filter(|word| word.starts_with("--")) {
            assert!(known.contains(flag), "{file} does not know {flag}");
        }
    }
}

fn after_five_fields(line: &str) -> Option<&str> {
    let mut rest = line;
    for _ in 0..5 {
        let (field, after) = rest.split_once(' ')?;
        if !field.chars().all(|c| c.is_ascii_digit() || "*/,-".contains(c)) {
            return None;
        }
        rest = after.trim_start();
    }
    Some(rest)
}

fn parts(text: &str) -> Vec<Part> {
    let (mut found, mut open) = (Vec::new(), None);
    for line in text.lines() {
        match (&mut open, line.strip_prefix("```")) {
            (None, Some(language)) => open = Some((language.to_owned(), String::new())),
            (None, None) => found.extend(line.starts_with('#').then(|| Part::Heading(line.to_owned()))),
            (Some(_), Some("")) => found.extend(open.take().map(|(language, text)| Part::Block { language, text })),
            (Some((_, text)), _) => *text += &format!("{line}\n"),
        }
    }
    assert!(open.is_none(), "a block that does not end");
    found
}
