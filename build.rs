//! How the program is linked, so that it starts fast, and anywhere: statically, since the loader would take longer than
//! to lock a file, at a fixed address, since ten thousand relocations would, too, and with what every run goes through
//! side by side, since each part of the file that is touched for the first time has to be mapped.

use std::env::var;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |key: &str, value: &str| var(key).is_ok_and(|found| found == value);
    let target = var("TARGET").unwrap_or_default();
    if is("CARGO_CFG_TARGET_OS", "linux") && is("CARGO_CFG_TARGET_ENV", "gnu") && is("HOST", &target) {
        println!("cargo::rustc-link-arg-bins=-no-pie");
        if link_statically().is_none() {
            println!("cargo::warning=no static C library here: dlock will start a little slower");
        }
        if is("PROFILE", "release") {
            put_in_order();
        }
    }
}

/// Cargo can link everything statically, but then no procedural macro, or nothing, if not told so from outside. So that
/// nobody has to: what rustc asks the linker for by the name of a shared library is found to be the static one.
fn link_statically() -> Option<()> {
    let directory = PathBuf::from(var("OUT_DIR").ok()?).join("static");
    std::fs::create_dir_all(&directory).ok()?;
    for (shared, archive) in [("c", "libc.a"), ("gcc_s", "libgcc_eh.a"), ("m", "libm.a")] {
        let path = archive_of_cc(archive)?;
        std::fs::write(directory.join(format!("lib{shared}.so")), format!("INPUT({path})\n")).ok()?;
    }
    println!("cargo::rustc-link-arg-bins=-static");
    println!("cargo::rustc-link-arg-bins=-L{}", directory.to_str()?);
    Some(())
}

/// Where the C compiler has it, if it has.
fn archive_of_cc(name: &str) -> Option<String> {
    let found = Command::new("cc").arg(format!("-print-file-name={name}")).output().ok()?;
    let path = String::from_utf8(found.stdout).ok()?.trim().to_owned();
    path.starts_with('/').then_some(path)
}

/// `link/order.ld` says which functions belong together; `benches/run order` has found out. A linker that does not
/// understand it does without, and the program starts a little slower.
fn put_in_order() -> Option<()> {
    println!("cargo::rerun-if-changed=link/order.ld");
    println!("cargo::rerun-if-env-changed=DLOCK_LINK_MAP");
    let order = format!("-T{}/link/order.ld", var("CARGO_MANIFEST_DIR").ok()?);
    if is_understood(&order)? {
        println!("cargo::rustc-link-arg-bins={order}");
    }
    if let Ok(map) = var("DLOCK_LINK_MAP") {
        println!("cargo::rustc-link-arg-bins=-Wl,-Map={map}");
    }
    Some(())
}

/// Whether the linker that rustc is going to call can do something with this: it is tried.
fn is_understood(argument: &str) -> Option<bool> {
    let directory = PathBuf::from(var("OUT_DIR").ok()?);
    let program = directory.join("probe.rs");
    std::fs::write(&program, "fn main() {}\n").ok()?;
    let mut rustc = Command::new(var("RUSTC").ok()?);
    rustc.args(var("CARGO_ENCODED_RUSTFLAGS").unwrap_or_default().split('\x1f').filter(|flag| !flag.is_empty()));
    rustc.args(var("RUSTC_LINKER").ok().map(|linker| format!("-Clinker={linker}")));
    rustc.arg(format!("-Clink-arg={argument}")).arg("-o").arg(directory.join("probe")).arg(program);
    Some(rustc.output().ok()?.status.success())
}
