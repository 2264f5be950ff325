//! What the README tells people to type works.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use crate::support::{Bed, FileBed, Postgres, lines, until};

/// The blocks of a language, in order.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        match (&mut open, line) {
            (None, line) if line == format!("```{language}") => open = Some(String::new()),
            (Some(_), "```") => found.extend(open.take()),
            (Some(block), line) => *block += &format!("{line}\n"),
            (None, _) => {}
        }
    }
    found
}

fn readme() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap()
}

/// Set-up and this very test are not run from inside a test.
fn is_set_up(block: &str) -> bool {
    ["cargo ", "tests/run", "benches/run"].iter().any(|start| block.starts_with(start))
}

#[test]
fn every_command_block_works() {
    let blocks: Vec<_> = blocks(&readme(), "sh").into_iter().filter(|block| !is_set_up(block)).collect();
    assert!(blocks.len() >= 8, "the README has its examples");
    // Whatever script an example runs is there, and does nothing.
    let scripts: Vec<_> = blocks
        .iter()
        .flat_map(|block| block.split_whitespace())
        .filter_map(|word| word.trim_end_matches('\'').strip_prefix("./"))
        .collect();
    let shop = Workshop::new(&scripts);
    blocks.iter().for_each(|block| shop.sh(block));
}

/// On a server of its own, with what the examples write to.
#[test]
fn the_sql_examples_and_the_command_beside_them_work() {
    let server = Postgres::with(&[]);
    let url = server.url();
    let text = readme();
    let command = blocks(&text, "text").into_iter().find(|block| block.starts_with("dlock run --backend postgres"));
    let command = command.unwrap().replace("postgres://app@db.example/jobs", &url);
    Workshop::new(&["report.sh"]).sh(&command);
    assert!(server.sql("SELECT dlock.status('nightly-report')").contains("./report.sh"));
    server.sql("CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (7, 100)");
    let examples = [blocks(&text, "sql"), blocks(&page("postgresql.md"), "sql")].concat();
    assert_eq!(examples.len(), 5);
    for block in examples.iter().filter(|block| !block.starts_with("CREATE SCHEMA")) {
        server.sql(&block.replace("SET …", "SET balance = balance - 10"));
    }
    assert_eq!(server.sql("SELECT balance FROM accounts"), "80");
    // What the last of them made refuses an older token, as the first refuses it by itself.
    let write = |token: u32| server.try_sql(&format!("SET app.token = {token}; UPDATE accounts SET balance = 0"));
    assert!(write(41).unwrap_err().contains("stale fencing token") && write(43).is_ok());
    assert!(server.try_sql("SELECT dlock.fence('accounts', 42)").unwrap_err().contains("stale"));
}

#[test]
fn the_config_examples_are_understood() {
    let dir = tempfile::tempdir().unwrap();
    for (n, block) in blocks(&readme(), "toml").iter().enumerate() {
        let path = dir.path().join(format!("{n}.toml"));
        std::fs::write(&path, block).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let dlock = crate::support::Dlock::new().run("x").arg("--explain").arg("--config").arg(&path);
        dlock.ended().expect(0);
    }
}

#[test]
fn the_table_of_exit_codes_is_the_contract() {
    let text = readme();
    for code in ["128+N", "64", "65", "69", "75", "77", "78", "79", "124", "125, 126, 127"] {
        assert!(text.contains(&format!("| {code} |")), "{code} is missing");
    }
}

fn page(name: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs").join(name)).unwrap()
}

/// A directory to work in, with the scripts of the examples and a shell that has dlock on its path.
struct Workshop {
    bed: FileBed,
}

impl Workshop {
    fn new(scripts: &[&str]) -> Workshop {
        let bed = FileBed::new();
        for name in scripts {
            let script = bed.dir().join(name);
            std::fs::write(&script, "#!/bin/sh\nexit 0\n").unwrap();
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        Workshop { bed }
    }

    #[track_caller]
    fn sh(&self, script: &str) {
        let dlock = assert_cmd::cargo::cargo_bin!("dlock");
        let programs = [&self.bed.dir().join("bin"), dlock.parent().unwrap()].map(|dir| dir.display().to_string());
        let path = format!("{}:{}", programs.join(":"), std::env::var("PATH").unwrap());
        let mut shell = Command::new("bash");
        shell.args(["-euo", "pipefail", "-c", script]).current_dir(self.bed.dir()).env("PATH", path);
        shell.env("DLOCK_BACKEND", self.bed.url()).env("GITHUB_ENV", self.bed.dir().join("github.env"));
        let out = shell.output().unwrap();
        assert!(out.status.success(), "{script}\n{out:?}");
    }

    fn is_free(&self) {
        self.bed.dlock().args(["status", "--exit-code", "deploy"]).ended().expect(0);
    }
}

/// Runs each step as the service does: in a shell of its own, with the variables that earlier steps left.
#[test]
fn the_ci_examples_work_step_by_step() {
    let page = page("ci.md");
    let yaml = blocks(&page, "yaml");
    let shop = Workshop::new(&["deploy.sh", "smoke-test.sh"]);
    let steps: Vec<_> = yaml[0].lines().filter_map(|line| line.trim().strip_prefix("run: ")).collect();
    assert_eq!(steps.len(), 5);
    for step in steps {
        shop.sh(&format!("touch $GITHUB_ENV; set -a; . $GITHUB_ENV; set +a; {step}"));
    }
    shop.is_free();

    let shop = Workshop::new(&["deploy.sh"]);
    let (script, after) = yaml[1].split_once("after_script:").unwrap();
    for part in [script, after] {
        let lines: Vec<_> = part.lines().filter_map(|line| line.trim().strip_prefix("- ")).collect();
        shop.sh(&lines.join("\n"));
    }
    shop.is_free();

    let shop = Workshop::new(&["deploy.sh"]);
    blocks(&page, "sh").iter().for_each(|block| shop.sh(block));
    shop.is_free();
}

/// With stand-ins for what it takes a network, a cluster or a repository to run.
#[test]
fn the_monitoring_examples_work() {
    let page = page("monitoring.md");
    let shop = Workshop::new(&["report.sh", "migrate.sh"]);
    let (dir, called) = (shop.bed.dir(), shop.bed.dir().join("called"));
    std::fs::create_dir(dir.join("bin")).unwrap();
    std::os::unix::fs::symlink(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs"), dir.join("docs")).unwrap();
    for name in ["curl", "terraform", "git"] {
        let path = dir.join("bin").join(name);
        std::fs::write(&path, format!("#!/bin/sh\necho {name} \"$*\" | tee -a {}\n", called.display())).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let blocks = [blocks(&page, "sh"), blocks(&page, "text")].concat();
    let mut run = 0;
    for block in &blocks {
        let cron = block.strip_prefix("* * * * * cd /var/lib/node_exporter && ");
        if block.starts_with("$ ") || block.starts_with("object ") {
            continue;
        }
        shop.sh(&format!("CI_JOB_URL=https://ci/7 DB=sales\n{}", cron.unwrap_or(block)));
        run += 1;
    }
    assert_eq!(run, 7, "{blocks:#?}");
    until("both hooks to call", || lines(&called).len() == 4);
    let mut calls = lines(&called);
    calls.sort();
    let at = |what: &str| format!("curl -fsS -m 8 https://hc-ping.com/UUID/{what}");
    assert_eq!(
        calls,
        [at("0"), at("start"), "git rev-parse HEAD".into(), "terraform apply -auto-approve -lock=false".into()]
    );
    assert!(std::fs::read_to_string(dir.join("dlock-locks.prom")).unwrap().contains("name=\"migrate/sales\""));
    let history = |name: &str| shop.bed.dlock().args(["history", name]).ended().expect(0).stdout;
    assert!(history("terraform/production").contains("note: https://ci/7"));
    // Once for a commit.
    assert!(history("migrate/sales").contains("once: git rev-parse HEAD"));
    // The plugin understands every argument that Icinga may give it.
    let icinga = blocks.iter().find(|block| block.starts_with("object ")).unwrap();
    let options: Vec<_> = icinga.split('"').filter(|word| word.starts_with("--")).collect();
    assert_eq!(options.len(), 6);
    let url = shop.bed.url();
    let value = |option: &&str| match *option {
        "--name" => "nightly-report",
        "--backend" => url.as_str(),
        "--warn" => "80%",
        _ => "26h",
    };
    let check = options.iter().flat_map(|option| [*option, value(option)]);
    shop.bed.dlock().arg("check").args(check.collect::<Vec<_>>()).ended().expect(0);
}

/// systemd itself says so, where it is installed.
#[test]
fn the_systemd_unit_is_valid() {
    let unit = blocks(&page("leader-election.md"), "ini").remove(0);
    let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
    let words: Vec<_> =
        line.split_whitespace().skip(1).map(|word| if word == "prod" { "file:///tmp" } else { word }).collect();
    let explained = crate::support::Dlock::new().args(["run", "--explain"]).args(&words[1..]).ended();
    explained.expect(0);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("scheduler.service");
    std::fs::write(&path, unit.replace("/usr/bin/dlock", "/bin/true").replace("/usr/bin/scheduler", "/bin/true"))
        .unwrap();
    if let Ok(out) = Command::new("systemd-analyze").arg("verify").arg(&path).output() {
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!said.contains("scheduler.service"), "{said}");
    }
}
