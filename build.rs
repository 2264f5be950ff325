//! Tells the program what `--version` says of it: for which target it was built, and from which commit, where that is
//! known. Debug builds do not ask git, or every commit would build all of them again. And says what the etcd backend needs
//! to be built, unless cargo has tried to build etcd-client before, which then says it less well.

use std::env::var;
use std::fs::read_to_string;
use std::process::Command;

fn main() {
    if var("CARGO_FEATURE_ETCD").is_ok() && var("PROTOC").is_err() && !on_path("protoc") {
        println!(
            "cargo::error=the etcd backend needs protoc to be built: install protobuf-compiler and libprotobuf-dev (Debian, \
             Ubuntu), or build dlock without it: --no-default-features --features mysql,postgres,redis,zookeeper"
        );
    }
    println!("cargo::rerun-if-env-changed=PROTOC");
    let commit = var("DLOCK_COMMIT").ok().filter(|commit| !commit.is_empty()).or_else(packaged).or_else(checked_out);
    println!("cargo::rustc-env=DLOCK_COMMIT={}", commit.unwrap_or_default());
    println!("cargo::rustc-env=DLOCK_TARGET={}", var("TARGET").unwrap_or_default());
    println!("cargo::rerun-if-env-changed=DLOCK_COMMIT");
    for changed in ["Cargo.toml", "build.rs", "src"] {
        println!("cargo::rerun-if-changed={changed}");
    }
}

fn on_path(program: &str) -> bool {
    var("PATH").is_ok_and(|path| std::env::split_paths(&path).any(|directory| directory.join(program).exists()))
}

/// `cargo package` writes down what it packs.
fn packaged() -> Option<String> {
    let info = read_to_string(".cargo_vcs_info.json").ok()?;
    let commit = info.split_once("\"sha1\": \"")?.1.get(..12)?;
    Some(commit.to_owned())
}

fn checked_out() -> Option<String> {
    if var("PROFILE").is_ok_and(|profile| profile != "release") || !std::path::Path::new(".git").exists() {
        return None;
    }
    let words = ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"];
    let output = Command::new("git").args(words).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
