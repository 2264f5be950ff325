//! What dlock prints about itself. `dlock man` and `dlock completions`: what stands under man/ and completions/, most of it
//! written by tests/it/pages.rs. `dlock --version`: which dlock this is and, with `--verbose`, what was built into it.

use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::backend;
use crate::cli::Shell;
use crate::config::nearest;
use crate::exit::{Exit, Fault};
use crate::report::print;

macro_rules! pages {
    ($($name:literal $section:literal)*) => {
        /// Every manual page, by the word that `dlock man` takes.
        pub const PAGES: &[(&str, &str)] = &[
            ("dlock", include_str!("../../man/dlock.1")),
            $(($name, include_str!(concat!("../../man/dlock-", $name, ".", $section)))),*
        ];
    };
}

pages! {
    "run" 1 "status" 1 "history" 1 "check" 1 "force-release" 1 "forget" 1
    "acquire" 1 "renew" 1 "release" 1 "fence" 1 "doctor" 1 "backends" 7 "config" 5
}

pub fn completions(shell: Shell) -> Result<Exit> {
    print(match shell {
        Shell::Bash => include_str!("../../completions/dlock.bash"),
        Shell::Fish => include_str!("../../completions/dlock.fish"),
        Shell::Zsh => include_str!("../../completions/_dlock"),
    })?;
    Ok(Exit::OK)
}

pub fn man(wanted: Option<&str>) -> Result<Exit> {
    let wanted = wanted.unwrap_or("dlock");
    let Some((_, page)) = PAGES.iter().find(|(name, _)| *name == wanted.trim_start_matches("dlock-")) else {
        let advice = match nearest(wanted, PAGES.iter().map(|(name, _)| *name)) {
            Some(near) => format!("did you mean dlock man {near}?"),
            None => "dlock man lists the pages under SEE ALSO".to_owned(),
        };
        return Err(Fault::Usage.because(format_args!("there is no manual page {wanted:?}; {advice}")));
    };
    if !(std::io::stdout().is_terminal() && shown(page)) {
        print(*page)?;
    }
    Ok(Exit::OK)
}

/// Whether man(1) has shown the page.
fn shown(page: &str) -> bool {
    let Ok(mut man) = Command::new("man").args(["-l", "-"]).stdin(Stdio::piped()).spawn() else { return false };
    let written = man.stdin.take().is_some_and(|mut input| input.write_all(page.as_bytes()).is_ok());
    man.wait().is_ok_and(|ended| ended.success()) && written
}

/// The provider of TLS, where a backend speaks to servers at all.
const CRYPTOGRAPHY: &str = if cfg!(feature = "net") { "ring" } else { "none" };

pub fn version() -> String {
    // Set by build.rs.
    let (commit, target) = (env!("DLOCK_COMMIT"), env!("DLOCK_TARGET"));
    let commit = if commit.is_empty() { String::new() } else { format!("commit {commit}, ") };
    format!("dlock {} ({commit}{target})\n", env!("CARGO_PKG_VERSION"))
}

pub fn verbose() -> String {
    let backends = backend::built_in().join(", ");
    format!("{}backends: {backends}\ncryptography: {CRYPTOGRAPHY}\n", version())
}
