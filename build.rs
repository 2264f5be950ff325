//! How the program is linked, so that it starts fast: at a fixed address, since ten thousand relocations would take
//! longer than to lock a file, and with the unwinder inside, since nothing else is wanted of libgcc_s.

use std::env::var;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| var(key).is_ok_and(|found| found == value);
    if !is("CARGO_CFG_TARGET_OS", "linux") || !is("CARGO_CFG_TARGET_ENV", "gnu") || !is("HOST", &target()) {
        return;
    }
    println!("cargo::rustc-link-arg-bins=-no-pie");
    if let Some(directory) = unwinder() {
        println!("cargo::rustc-link-search=native={directory}");
        println!("cargo::rustc-link-lib=static:+whole-archive=gcc_eh");
    }
}

fn target() -> String {
    var("TARGET").unwrap_or_default()
}

/// Where gcc has the static unwinder, if it has one.
fn unwinder() -> Option<String> {
    let found = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output().ok()?;
    let path = String::from_utf8(found.stdout).ok()?;
    let path = Path::new(path.trim());
    (path.is_absolute() && path.exists()).then(|| path.parent()?.to_str().map(str::to_owned))?
}
