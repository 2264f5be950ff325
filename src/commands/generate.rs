//! `dlock man` and `dlock completions`: what stands under man/ and completions/. tests/it/pages.rs writes most of it.

use std::io::{IsTerminal, Write};
use std::process::{Command, Stdio};

use anyhow::Result;

use crate::cli::Shell;
use crate::config::nearest;
use crate::exit::{Exit, Fault};
use crate::report::print;

macro_rules! pages {
    ($($name:literal $file:literal,)*) => {
        /// Every manual page, by the word that `dlock man` takes.
        pub const PAGES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../man/", $file)))),*];
    };
}

pages! {
    "dlock" "dlock.1",
    "run" "dlock-run.1",
    "status" "dlock-status.1",
    "history" "dlock-history.1",
    "check" "dlock-check.1",
    "force-release" "dlock-force-release.1",
    "forget" "dlock-forget.1",
    "acquire" "dlock-acquire.1",
    "renew" "dlock-renew.1",
    "release" "dlock-release.1",
    "fence" "dlock-fence.1",
    "doctor" "dlock-doctor.1",
    "backends" "dlock-backends.7",
    "config" "dlock-config.5",
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
