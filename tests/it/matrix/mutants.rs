//! Builds of dlock that are broken on purpose, one way each. The matrix must catch every one of them, or it
//! proves nothing about the build that it lets pass.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::fault::Fault;
use super::scene;
use super::site::Backend;
use super::tool::Tool;
use crate::support::{Expect, redis, target};

/// Where each of them shows.
const SHOWS: [(&str, Backend, Fault); 6] = [
    ("renewal-ignored", &redis::REDIS, Fault::PathFrozen),
    ("deadline-from-reply", &redis::REDIS, Fault::AnswersLate),
    ("no-sigkill", &redis::REDIS, Fault::PathFrozen),
    ("release-before-dead", &redis::REDIS, Fault::Revoked),
    ("naive-redlock-token", &redis::REDLOCK_3, Fault::MajorityRotates),
    ("no-guardian", &redis::REDIS, Fault::DlockStopped),
];

/// On a busy machine a fault may miss its moment; a checker that can see it sees it in one of these.
const TRIES: usize = 3;

#[test]
fn the_matrix_catches_every_mutant() {
    let patches = std::fs::read_dir(root().join("tests/mutants")).unwrap();
    let patches = patches.map(|patch| patch.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned());
    let names = SHOWS.map(|(mutant, ..)| mutant.to_owned());
    assert_eq!(patches.collect::<BTreeSet<_>>(), BTreeSet::from(names), "tests/mutants, and where each of them shows");
    for (mutant, ..) in SHOWS {
        patch(mutant);
    }
    std::thread::scope(|scope| {
        let caught = SHOWS.map(|(mutant, backend, fault)| {
            build(mutant);
            (mutant, scope.spawn(move || is_caught(mutant, backend, fault)))
        });
        for (mutant, caught) in caught {
            assert!(caught.join().unwrap(), "{mutant} was not caught");
        }
    });
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Under the name that the tests look for among the processes.
pub fn binary(mutant: &str) -> PathBuf {
    target("mutants").join(mutant).join("dlock")
}

/// The copy that is patched. It is below our own .cargo/config.toml, which says how to build it.
fn tree() -> PathBuf {
    target("mutants/tree")
}

/// Makes the tree anew, with this one mistake.
fn patch(mutant: &str) {
    let _ = std::fs::remove_dir_all(tree());
    std::fs::create_dir_all(tree()).unwrap();
    copy(&["build.rs", "completions", "man", "src", "Cargo.lock", "Cargo.toml"].map(|file| root().join(file)), &tree());
    // Other names, so that it can be built beside the dlock under test, where all dependencies are. They have the
    // features that they have for tests.
    edit("Cargo.lock", &[("\"dlock-cli\"", "\"dlock-mutant\"")]);
    edit(
        "Cargo.toml",
        &[
            ("\"dlock-cli\"", "\"dlock-mutant\""),
            ("[[bin]]\nname = \"dlock\"", "[[bin]]\nname = \"dlock-mutant\""),
            ("[dev-dependencies]", "[target.'cfg(all())'.dependencies]"),
        ],
    );
    let patch = root().join("tests/mutants").join(mutant).with_extension("patch");
    let applied = Command::new("patch")
        .args(["-p1", "--batch", "--forward", "--fuzz=0", "--input"])
        .arg(patch)
        .current_dir(tree())
        .output()
        .expect("patch is installed");
    assert!(
        applied.status.success(),
        "tests/mutants/{mutant}.patch does not apply any more. Make the same mistake in the code as it is now, and \
         write the patch anew (git diff -U1).\n{}",
        String::from_utf8_lossy(&applied.stdout)
    );
}

/// In the tree. Each of these words is there.
fn edit(file: &str, words: &[(&str, &str)]) {
    let file = tree().join(file);
    let mut text = std::fs::read_to_string(&file).unwrap();
    for (from, to) in words {
        assert!(text.contains(from), "no {from} in {}", file.display());
        text = text.replace(from, to);
    }
    std::fs::write(&file, text).unwrap();
}

fn build(mutant: &str) {
    patch(mutant);
    // TRIPLE/debug/dlock in the target directory.
    let tested = assert_cmd::cargo::cargo_bin!("dlock");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--frozen", "--bin", "dlock-mutant", "--target-dir"]);
    cargo.arg(tested.ancestors().nth(3).unwrap()).current_dir(tree());
    if !tree().starts_with(root()) {
        cargo.arg("--config").arg(root().join(".cargo/config.toml"));
    }
    // What the cargo around us has set would make the dependencies look changed.
    for (key, _) in std::env::vars_os() {
        if ["CARGO_MANIFEST", "CARGO_PKG"].iter().any(|ours| key.as_encoded_bytes().starts_with(ours.as_bytes())) {
            cargo.env_remove(key);
        }
    }
    let built = cargo.output().unwrap();
    assert!(built.status.success(), "{mutant}: {}", String::from_utf8_lossy(&built.stderr));
    std::fs::create_dir_all(binary(mutant).parent().unwrap()).unwrap();
    copy(&[tested.with_file_name("dlock-mutant")], &binary(mutant));
}

/// By another process: a program that was open for writing in this one may not run yet (ETXTBSY), since a child that was
/// forked meanwhile may still have it open.
fn copy(from: &[PathBuf], to: &Path) {
    let copied = Command::new("cp").args(["-a", "--remove-destination"]).args(from).arg(to).status();
    assert!(copied.unwrap().success());
}

fn is_caught(mutant: &'static str, backend: Backend, fault: Fault) -> bool {
    assert_eq!(backend.expectation(fault), Some(Expect::NoOverlap));
    (0..TRIES).any(|_| {
        let outcome = scene::play(Tool::Mutant(mutant), backend, fault);
        // Only a run that came to its end and was seen to break the promise counts.
        !outcome.unwrap_or_else(|failure| panic!("{mutant}: {failure}")).fulfils(Expect::NoOverlap)
    })
}
