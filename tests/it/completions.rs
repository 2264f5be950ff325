//! The completions, in the shells they are for.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Bed, FileBed, Terminal};

/// A directory with two locks and a config file with two profiles, one of which is the default.
fn bed() -> (FileBed, PathBuf) {
    let bed = FileBed::new();
    for name in ["nightly-report", "nightly-sync"] {
        bed.dlock().run(name).sh("exit 0").ended().expect(0);
    }
    let config = bed.dir().join("config.toml");
    let text = format!("backend = 'local'\n[backends.local]\nurl = '{0}'\n[backends.other]\nurl = '{0}'\n", bed.url());
    std::fs::write(&config, text).unwrap();
    (bed, config)
}

fn script(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("completions").join(name).display().to_string()
}

fn path() -> String {
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    format!("{}:{}", dlock.parent().unwrap().display(), std::env::var("PATH").unwrap())
}

fn words(shell: &str, program: &str, config: &Path) -> Vec<String> {
    let out =
        Command::new(shell).args(["-c", program]).env("PATH", path()).env("DLOCK_CONFIG", config).output().unwrap();
    let mut words: Vec<_> = String::from_utf8(out.stdout).unwrap().split_whitespace().map(ToOwned::to_owned).collect();
    words.sort();
    words
}

#[test]
fn bash_completes_names_and_profiles() {
    let (_bed, config) = bed();
    let complete = |line: &str| {
        let program = format!(
            "source {}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); \
             _dlock dlock \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; echo \"${{COMPREPLY[@]}}\"",
            script("dlock.bash")
        );
        words("bash", &program, &config)
    };
    assert_eq!(complete("dlock run --name ''"), ["nightly-report", "nightly-sync"]);
    assert_eq!(complete("dlock run --name nightly-s"), ["nightly-sync"]);
    assert_eq!(complete("dlock status --backend ''"), ["local", "other"]);
    assert_eq!(complete("dlock force-r"), ["force-release"]);
}

#[test]
fn fish_completes_names_and_profiles() {
    let (_bed, config) = bed();
    let complete =
        |line: &str| words("fish", &format!("source {}; complete -C '{line}'", script("dlock.fish")), &config);
    assert_eq!(complete("dlock run --name "), ["nightly-report", "nightly-sync"]);
    assert_eq!(complete("dlock acquire --name nightly-s"), ["nightly-sync"]);
    assert_eq!(complete("dlock status --backend "), ["local", "other"]);
    assert!(complete("dlock status nightly-r").contains(&"nightly-report".to_owned()));
}

#[test]
fn zsh_completes_names_and_profiles() {
    let (bed, config) = bed();
    let mut terminal = Terminal::with_shell(&bed.url());
    let directory = Path::new(&script("_dlock")).parent().unwrap().display().to_string();
    terminal.type_line(&format!("export PATH={} DLOCK_CONFIG={}; exec zsh -f -i", path(), config.display()));
    terminal.type_line(&format!("PS1='z> '; unset DLOCK_BACKEND; fpath=({directory} $fpath); autoload -Uz compinit; compinit -u -D; echo rea''dy"));
    terminal.expect("ready");
    terminal.type_line("echo");
    terminal.press_all("dlock run --name nightly-s\t");
    terminal.expect("nightly-sync");
    // Ctrl-U: Ctrl-C would also throw away what is typed next.
    terminal.press(b'\x15');
    terminal.press_all("dlock status --backend ot\t");
    terminal.expect("other");
}
