//! Builds of dlock that are broken on purpose, one way each. The matrix must catch every one of them, or it
//! proves nothing about the build that it lets pass.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::expect::{Expect, expectation};
use super::fault::Fault;
use super::scene;
use super::site::Backend;
use super::tool::Tool;

/// A dlock that is broken as `DLOCK_MUTANT` says, apart from the one under test. tests/run has it built where
/// the dependencies are already; without it all of them are built once more.
pub fn binary() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        if let Some(built) = std::env::var_os("DLOCK_MUTANTS") {
            return built.into();
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let target = root.join("target/mutants");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(root).args(["build", "--quiet", "--locked", "--features", "mutants", "--bin", "dlock"]);
        let built = cargo.arg("--target-dir").arg(&target).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        // As the one under test, below its own target directory: TRIPLE/debug/dlock.
        let ours = assert_cmd::cargo::cargo_bin!("dlock");
        target.join(ours.strip_prefix(ours.ancestors().nth(3).unwrap()).unwrap())
    })
}

/// Where each of them shows.
const SHOWS: [(&str, Backend, Fault); 6] = [
    ("renewal-ignored", Backend::Redis, Fault::PathFrozen),
    ("deadline-from-reply", Backend::Redis, Fault::AnswersLate),
    ("no-sigkill", Backend::Redis, Fault::PathFrozen),
    ("release-before-dead", Backend::Redis, Fault::Revoked),
    ("naive-redlock-token", Backend::Redlock3, Fault::MajorityRotates),
    ("no-guardian", Backend::Redis, Fault::DlockStopped),
];

/// On a busy machine a fault may miss its moment; a checker that can see it sees it in one of these.
const TRIES: usize = 3;

#[test]
fn the_matrix_catches_every_mutant() {
    binary();
    std::thread::scope(|scope| {
        let caught =
            SHOWS.map(|(mutant, backend, fault)| (mutant, scope.spawn(move || is_caught(mutant, backend, fault))));
        for (mutant, caught) in caught {
            assert!(caught.join().unwrap(), "{mutant} was not caught");
        }
    });
}

fn is_caught(mutant: &'static str, backend: Backend, fault: Fault) -> bool {
    assert_eq!(expectation(backend, fault), Some(Expect::NoOverlap));
    (0..TRIES).any(|_| {
        let outcome = scene::play(Tool::Mutant(mutant), backend, fault);
        // Only a run that came to its end and was seen to break the promise counts.
        !outcome.unwrap_or_else(|failure| panic!("{mutant}: {failure}")).fulfils(Expect::NoOverlap)
    })
}
