//! kazoo's `Lock` and Curator's `InterProcessMutex` keep dlock out, and are kept out by it.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::{Bed, Daemon, Dlock, Log, ZooKeeperBed, kazoo, lines, unique, until};

/// Another program, by the command line that begins to run it.
type Program<'a> = dyn Fn() -> Command + 'a;

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/zookeeper").join(name)
}

fn curator(port: u16, name: &str) -> Command {
    let jars = ["curator-recipes", "curator-framework", "curator-client", "guava", "zookeeper", "slf4j-nop"];
    let path: Vec<String> = jars.iter().map(|jar| format!("/usr/share/java/{jar}.jar")).collect();
    let mut java = Command::new("java");
    java.args(["-Xmx64m", "-XX:TieredStopAtLevel=1", "-cp", &path.join(":")]);
    java.arg(source("CuratorLock.java")).args([&port.to_string(), &format!("/dlock/{name}")]);
    java
}

/// Exit 0 if it could be had at once, 75 if not.
fn tries(mut program: Command) -> Option<i32> {
    let output = program.arg("try").output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 75)), "{output:?}");
    output.status.code()
}

struct Foreign {
    _daemon: Daemon,
    home: TempDir,
}

impl Foreign {
    fn spawn(mut program: Command) -> Foreign {
        let home = tempfile::tempdir().unwrap();
        program.arg("hold").arg(home.path().join("started")).arg(home.path().join("go"));
        Foreign { _daemon: Daemon::spawn(program, &home.path().join("log")), home }
    }

    fn has_started(&self) -> bool {
        self.home.path().join("started").exists()
    }

    #[track_caller]
    fn await_start(&self) {
        let log = self.home.path().join("log");
        until(&format!("the other program to have the lock: {:?}", lines(&log)), || self.has_started());
    }

    fn go(&self) {
        std::fs::write(self.home.path().join("go"), "").unwrap();
    }
}

fn exclude_each_other(name: &str, dlock: &dyn Fn() -> Dlock, program: &Program) {
    // It holds, dlock waits, gets it.
    let foreign = Foreign::spawn(program());
    foreign.await_start();
    dlock().run(name).arg("-n").sh("echo no").ended().expect(75);
    let log = Log::new();
    let waiter = dlock().run(name).args(log.witness(&[])).spawn();
    until("dlock to wait", || waiting(dlock, name) == 1);
    assert!(log.runs().is_empty());
    foreign.go();
    log.await_runs(1, 1);

    // dlock holds, it waits, gets it.
    assert_eq!(tries(program()), Some(75));
    let foreign = Foreign::spawn(program());
    until("the other program to wait", || waiting(dlock, name) == 1);
    assert!(!foreign.has_started());
    waiter.signal(nix::sys::signal::Signal::SIGTERM);
    waiter.ended().expect(143);
    foreign.await_start();
    foreign.go();
    dlock().run(name).args(["-w", "60s"]).sh("exit 0").ended().expect(0);
    assert_eq!(tries(program()), Some(0));
}

fn waiting(dlock: &dyn Fn() -> Dlock, name: &str) -> usize {
    let status = dlock().args(["status", "--json", name]).ended().expect(0).stdout;
    serde_json::from_str::<serde_json::Value>(&status).unwrap()[0]["waiters"].as_array().unwrap().len()
}

#[test]
fn kazoo_that_knows_curators_spelling_and_dlock_exclude_each_other() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("kazoo"));
    exclude_each_other(&name, &|| bed.dlock(), &|| kazoo(bed.port, &name, "-lock-"));
}

#[test]
fn plain_kazoo_and_dlock_with_its_recipe_exclude_each_other() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("plain"));
    let url = format!("{}?recipe=kazoo", bed.url());
    exclude_each_other(&name, &|| Dlock::new().env("DLOCK_BACKEND", &url), &|| kazoo(bed.port, &name, "-"));
}

#[test]
fn curator_and_dlock_exclude_each_other() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("curator"));
    exclude_each_other(&name, &|| bed.dlock(), &|| curator(bed.port, &name));
}

#[test]
fn kazoo_stands_alone_between_holders_of_slots() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("slots"));
    let slots = |log: &Log| bed.dlock().run(&name).args(["--slots", "3"]).args(log.witness(&[])).spawn();
    let (before, after) = (Log::new(), Log::new());
    let first = slots(&before);
    before.await_runs(1, 1);
    let foreign = Foreign::spawn(kazoo(bed.port, &name, "-lock-"));
    until("kazoo to wait", || waiting(&|| bed.dlock(), &name) == 1);
    bed.dlock().run(&name).args(["-n", "--slots", "3"]).sh("echo no").ended().expect(75);
    let second = slots(&after);
    until("dlock to wait", || waiting(&|| bed.dlock(), &name) == 2);
    // Those who do have terms are still held to them.
    bed.dlock().run(&name).args(["-n", "--slots", "2"]).sh("echo no").ended().expect(65).saying("--slots 3");
    assert!(!foreign.has_started());
    first.signal(nix::sys::signal::Signal::SIGTERM);
    first.ended().expect(143);
    foreign.await_start();
    assert!(after.runs().is_empty());
    foreign.go();
    after.await_runs(1, 1);
    second.signal(nix::sys::signal::Signal::SIGTERM);
    second.ended().expect(143);
}

#[test]
fn a_hold_keeps_other_programs_out_too() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("hold"));
    bed.dlock().run(&name).args(["--hold-at-least", "1h"]).sh("exit 0").ended().expect(0);
    assert_eq!(tries(kazoo(bed.port, &name, "-lock-")), Some(75));
    bed.dlock().args(["force-release", &name, "--yes"]).ended().expect(0);
    assert_eq!(tries(kazoo(bed.port, &name, "-lock-")), Some(0));
}

#[test]
fn where_nodes_can_have_a_ttl_a_hold_ends_without_any_dlock() {
    let (bed, name) = (ZooKeeperBed::new("extendedTypesEnabled=true\n"), unique("expiring"));
    bed.dlock().run(&name).args(["--hold-at-least", "3s"]).sh("exit 0").ended().expect(0);
    Foreign::spawn(kazoo(bed.port, &name, "-lock-")).await_start();
}

#[test]
fn an_empty_parent_is_cleaned_up_and_the_next_token_is_greater_all_the_same() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("parent"));
    let token = || -> u64 {
        let ended = bed.dlock().run(&name).sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0);
        ended.stdout.trim().parse().unwrap()
    };
    let first = token();
    until("the server to remove the lock's node", || {
        kazoo(bed.port, &name, "-").arg("absent").status().unwrap().success()
    });
    assert!(token() > first);
}

#[test]
fn another_programs_lock_is_not_marked_but_can_be_freed() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("foreign"));
    let foreign = Foreign::spawn(kazoo(bed.port, &name, "-lock-"));
    foreign.await_start();
    let told = bed.dlock().args(["force-release", &name, "--yes"]).ended();
    assert!(told.code != Some(0) && told.stderr.contains("--now"), "{told:#?}");
    bed.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    bed.dlock().args(["force-release", &name, "--yes", "--now", "--reason", "stuck"]).ended().expect(0);
    let last = bed.dlock().args(["status", "--json", &name]).ended().stdout;
    assert!(last.contains(r#""outcome":"lost""#) && last.contains(r#""reason":"stuck""#), "{last}");
    bed.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0);
}
