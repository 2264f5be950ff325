//! While hosts are upgraded one after the other, the release before and this dlock meet at the same locks: they hold, wait
//! for, take away and release them in turns, on every backend.
//!
//! The release before is built from the history of the repository, once. Without that (a shallow clone, a packed crate) it
//! is not played.

use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Dlock, FileBed, Ground, Log, PLACES, Started, target, tokens_grow, unique, until};

/// The release before, 0.1.0: the commit or the tag it was built from.
const PREVIOUS: &str = "cd6a800";

/// A dlock of one of the two releases, and the backend where it meets the other.
#[derive(Clone, Copy)]
struct Version<'a> {
    program: &'a Path,
    url: &'a str,
}

impl Version<'_> {
    fn dlock(self) -> Dlock {
        Dlock::played_by(self.program).env("DLOCK_BACKEND", self.url).env("DLOCK_CONNECT_TIMEOUT", "30s")
    }

    fn knows_the_backend(self) -> bool {
        !self.dlock().args(["status", "x"]).ended().stderr.contains("no backend has the scheme")
    }

    fn says(self, args: &[&str]) -> Value {
        serde_json::from_str(&self.dlock().args(args).ended().expect(0).stdout).unwrap()
    }

    fn status(self, name: &str) -> Value {
        self.says(&["status", "--json", name])[0].clone()
    }
}

#[test]
fn the_release_before_and_this_one_share_every_lock() {
    let Some(previous) = previous() else {
        return eprintln!("not played: {PREVIOUS} is not in the history here");
    };
    let current: PathBuf = assert_cmd::cargo::cargo_bin!("dlock").into();
    for place in PLACES.into_iter().filter(|place| place.covered) {
        eprintln!("{}", place.name);
        let Started { servers, sentinel } = (place.start)(Ground::Plain);
        let ports: Vec<u16> = match &sentinel {
            Some(sentinel) => vec![sentinel.port()],
            None => servers.iter().map(|server| server.port()).collect(),
        };
        let files = FileBed::new();
        let url = place.url(&ports, files.dir());
        let [older, newer] = [&previous, &current].map(|program| Version { program, url: &url });
        if !older.knows_the_backend() {
            eprintln!("not played: {PREVIOUS} does not have it");
            continue;
        }
        // The older one comes first, as on a server that is in use: whatever it makes there, the newer one has to read.
        until("the first run", || older.dlock().run("first").sh("exit 0").ended().code == Some(0));
        for (one, other) in [(older, newer), (newer, older)] {
            hand_over(one, other);
            take_away(one, other);
            renew_and_release(one, other);
        }
    }
}

/// The other one is told that the lock is busy, waits, and gets it; both read what is left of it.
fn hand_over(one: Version, other: Version) {
    let (name, log) = (unique("hand-over"), Log::new());
    for (holder, waiter) in [(one, other), (other, one)] {
        let before = log.runs().len();
        let holding = holder.dlock().run(&name).args(log.witness(&[])).spawn();
        log.await_runs(before + 1, 1);
        waiter.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
        let waiting = waiter.dlock().run(&name).args(log.witness(&["for=20"])).spawn();
        for version in [one, other] {
            until("a waiter", || version.status(&name)["waiters"].as_array().unwrap().len() == 1);
            assert_eq!(version.status(&name)["holders"][0]["pid"], holding.pid());
        }
        holding.signal(Signal::SIGTERM);
        holding.ended().expect(143);
        waiting.ended().expect(0).silently();
    }
    log.assert_no_overlap();
    assert!(tokens_grow(&log.runs()), "{:#?}", log.runs());
    let [mine, theirs] = [one, other].map(|version| version.says(&["history", &name, "--json"]));
    assert_eq!(mine["runs"].as_array().unwrap().len(), 4, "{mine:#}");
    assert_eq!(tokens(&mine), tokens(&theirs));
}

fn tokens(history: &Value) -> Vec<Option<u64>> {
    history["runs"].as_array().unwrap().iter().map(|run| run["fencing_token"].as_u64()).collect()
}

fn take_away(holder: Version, operator: Version) {
    for how in [&[][..], &["--now"]] {
        let (name, log) = (unique("take-away"), Log::new());
        let holding = holder.dlock().run(&name).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        let order = ["force-release", &name, "--yes", "--reason", "an upgrade"];
        operator.dlock().args(order).args(how).ended().expect(0);
        holding.ended().expect(79).saying("an upgrade");
        operator.dlock().run(&name).arg("-n").args(log.witness(&["for=20"])).ended().expect(0);
        log.assert_no_overlap();
    }
}

fn renew_and_release(one: Version, other: Version) {
    let name = unique("acquired");
    let acquired = one.says(&["acquire", "--name", &name, "--ttl", "10m", "--json"]);
    let owner = acquired["owner"].as_str().unwrap();
    other.dlock().args(["renew", "--name", &name, "--owner", owner, "--ttl", "1h"]).ended().expect(0).silently();
    one.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    other.dlock().args(["release", "--name", &name, "--owner", owner]).ended().expect(0).silently();
    other.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

/// Builds the release before beside the dlock under test, where most of its dependencies are built already.
fn previous() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let known =
        Command::new("git").args(["cat-file", "-e", &format!("{PREVIOUS}^{{commit}}")]).current_dir(root).output();
    if !known.is_ok_and(|known| known.status.success()) {
        return None;
    }
    let home = target("previous").join(PREVIOUS);
    let built = home.join("dlock");
    if built.exists() {
        return Some(built);
    }
    let tree = home.join("tree");
    let _ = std::fs::remove_dir_all(&tree);
    std::fs::create_dir_all(&tree).unwrap();
    let unpack = format!("git archive {PREVIOUS} | tar -x -C '{}'", tree.display());
    assert!(Command::new("sh").args(["-c", &unpack]).current_dir(root).status().unwrap().success());
    // Another name, so that it is built beside the dlock under test; and its dependencies have the features that they
    // have there, so that they are the same.
    let name = "s/\"dlock-cli\"/\"dlock-previous\"/; /^\\[\\[bin\\]\\]/,/^$/s/\"dlock\"/\"dlock-previous\"/";
    let dependencies = "s/^\\[dev-dependencies\\]/[target.'cfg(all())'.dependencies]/";
    let mut sed = Command::new("sed");
    sed.args(["-i", "-e", name, "-e", dependencies, "Cargo.toml", "Cargo.lock"]);
    assert!(sed.current_dir(&tree).status().unwrap().success());
    // Flags come from our own .cargo/config.toml; the stand-in for protoc is the old tree's.
    let _ = std::fs::remove_dir_all(tree.join(".cargo"));
    let debug = assert_cmd::cargo::cargo_bin!("dlock").parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--locked", "--bin", "dlock-previous", "--target-dir"]).arg(target(""));
    if !tree.starts_with(root) {
        cargo.arg("--config").arg(root.join(".cargo/config.toml"));
    }
    cargo.env("PROTOC", tree.join("protoc/protoc")).current_dir(&tree);
    // What the cargo around us has set would make the dependencies look changed.
    for (key, _) in std::env::vars_os() {
        if ["CARGO_MANIFEST", "CARGO_PKG"].iter().any(|ours| key.as_encoded_bytes().starts_with(ours.as_bytes())) {
            cargo.env_remove(key);
        }
    }
    let done = cargo.output().unwrap();
    assert!(done.status.success(), "{PREVIOUS}: {}", String::from_utf8_lossy(&done.stderr));
    let copied = Command::new("cp").arg(debug.join("dlock-previous")).arg(&built).status();
    assert!(copied.unwrap().success());
    Some(built)
}
