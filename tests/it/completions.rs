//! The completions, in the shells they are for.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Bed, FileBed, Terminal};

/// A directory with three locks, one of which is held, and a config file with two profiles, one of which is the default.
fn bed() -> (FileBed, PathBuf) {
    let bed = FileBed::new();
    for name in ["nightly-report", "nightly-sync", "web:deploy@eu"] {
        bed.dlock().run(name).sh("exit 0").ended().expect(0);
    }
    bed.dlock().args(["acquire", "web:deploy@eu", "--ttl", "2m"]).ended().expect(0);
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

/// Another backend, with one lock.
fn elsewhere() -> FileBed {
    let bed = FileBed::new();
    bed.dlock().run("only-there").sh("exit 0").ended().expect(0);
    bed
}

/// What becomes of a line when the tab key is pressed behind it.
#[track_caller]
fn completes(terminal: &mut Terminal, typed: &str, completed: &str) {
    terminal.press_all(&format!("{typed}\t"));
    terminal.expect(completed);
    // Ctrl-U: Ctrl-C would also throw away what is typed next.
    terminal.press(b'\x15');
    terminal.type_line("echo fi''ne");
    terminal.expect("fine");
}

#[test]
fn bash_completes_names_and_profiles() {
    let ((bed, config), other) = (bed(), elsewhere());
    let mut terminal = Terminal::with_shell(&bed.url());
    let script = script("dlock.bash");
    terminal.type_line(&format!(
        "export PATH={} DLOCK_CONFIG={}; source {script}; bind 'set bell-style none'; echo rea''dy",
        path(),
        config.display()
    ));
    terminal.expect("ready");
    let there = format!("dlock run -b {} --name o", other.url());
    let file = format!("dlock run --name x -- cat {}/config.t", bed.dir().display());
    let config_file = format!("dlock run --config {}/config.t", bed.dir().display());
    for (typed, completed) in [
        ("dlock force-r", "dlock force-release "),
        ("dlock he", "dlock help "),
        ("dlock help force-r", "help force-release "),
        ("dlock man back", "man backends "),
        ("dlock completions z", "completions zsh "),
        ("dlock run --name nightly-s", "--name nightly-sync "),
        ("dlock run --name=nightly-s", "--name=nightly-sync "),
        ("dlock run --name web:d", "--name web:deploy@eu "),
        ("dlock run --name=web:d", "--name=web:deploy@eu "),
        ("dlock run --name=web:deploy@", "--name=web:deploy@eu "),
        ("dlock run --name web:deploy@e", "--name web:deploy@eu "),
        ("dlock status nightly-s", "status nightly-sync "),
        ("dlock history nightly-s", "history nightly-sync "),
        ("dlock run -n nightly-s", "run -n nightly-sync "),
        ("dlock status --format pro", "--format prometheus "),
        ("dlock status --json web:", "--json web:deploy@eu "),
        // The only one that is held.
        ("dlock force-release --yes ", "--yes web:deploy@eu "),
        ("dlock status --backend oth", "--backend other "),
        ("dlock run --log j", "--log json "),
        ("dlock run --leftovers=le", "--leftovers=leave "),
        ("dlock run --on-lost s", "--on-lost signal "),
        ("dlock run --signal US", "--signal USR"),
        ("dlock run --hold-at", "--hold-at-least "),
        (&there, "--name only-there "),
        (&file, "config.toml "),
        (&config_file, "config.toml "),
        ("dlock run --name x -- promtoo", "promtool "),
    ] {
        completes(&mut terminal, typed, completed);
    }
    // No file is a format, no lock that is free can be taken away, and nobody calls `dlock words`.
    for (typed, left) in [("--log /etc/pass", "--log /etc/pass!"), ("nightly-", "nightly-!"), ("wor", "dlock wor!")] {
        let verb = ["run", "force-release", ""][usize::from(typed == "nightly-") + 2 * usize::from(typed == "wor")];
        terminal.press_all(&format!("dlock {verb} {typed}\t!").replace("  ", " "));
        terminal.expect(left);
        terminal.press(b'\x15');
    }
}

#[test]
fn fish_completes_names_and_profiles() {
    let (bed, config) = bed();
    let complete =
        |line: &str| words("fish", &format!("source {}; complete -C '{line}'", script("dlock.fish")), &config);
    assert_eq!(complete("dlock run --name "), ["nightly-report", "nightly-sync", "web:deploy@eu"]);
    assert_eq!(complete("dlock run --name=web:"), ["--name=web:deploy@eu"]);
    assert_eq!(complete("dlock run --log "), ["json", "text"]);
    let other = elsewhere();
    assert_eq!(complete(&format!("dlock run -b {} --name ", other.url())), ["only-there"]);
    assert_eq!(complete("dlock acquire --name nightly-s"), ["nightly-sync"]);
    assert_eq!(complete("dlock acquire nightly-s"), ["nightly-sync"]);
    assert_eq!(complete("dlock status --backend "), ["local", "other"]);
    assert_eq!(complete("dlock status nightly-r"), ["nightly-report"]);
    assert_eq!(complete("dlock force-release "), ["web:deploy@eu"]);
    assert_eq!(complete("dlock run --signal US"), ["USR1", "USR2"]);
    assert_eq!(complete("dlock run --signal=US"), ["--signal=USR1", "--signal=USR2"]);
    assert_eq!(complete("dlock wor"), [""; 0]);
    assert!(complete("dlock f").contains(&"force-release".to_owned()));
    assert!(complete("dlock run --name x -- promtoo").contains(&"promtool".to_owned()));
    let file = format!("{}/config.toml", bed.dir().display());
    let part = &file[..file.len() - 2];
    assert_eq!(complete(&format!("dlock run --config {part}")), [file.as_str()]);
    assert_eq!(complete(&format!("dlock run --config={part}")), [format!("--config={file}")]);
    assert_eq!(complete(&format!("dlock run x -- cat {part}")), [file.as_str()]);
}

#[test]
fn zsh_completes_names_and_profiles() {
    let (bed, config) = bed();
    let mut terminal = Terminal::with_shell(&bed.url());
    let directory = Path::new(&script("_dlock")).parent().unwrap().display().to_string();
    terminal.type_line(&format!("export PATH={} DLOCK_CONFIG={}; exec zsh -f -i", path(), config.display()));
    terminal.type_line(&format!("PS1='z> '; unset DLOCK_BACKEND; fpath=({directory} $fpath); autoload -Uz compinit; compinit -u -D; echo rea''dy"));
    terminal.expect("ready");
    let other = elsewhere();
    let there = format!("dlock run -b {} --name o", other.url());
    let file = format!("dlock run x -- cat {}/config.t", bed.dir().display());
    for (typed, completed) in [
        ("dlock run --name nightly-s", "nightly-sync"),
        ("dlock run --name=web:d", "web:deploy@eu"),
        ("dlock force-release ", "web:deploy@eu"),
        ("dlock run --signal US", "USR"),
        ("dlock run --hold-a", "hold-at-least"),
        ("dlock run x -- promtoo", "promtool "),
        (&file, "config.toml"),
        ("dlock run nightly-s", "nightly-sync"),
        ("dlock check nightly-s", "nightly-sync"),
        ("dlock status --backend ot", "other"),
        ("dlock run --log j", "json"),
        (&there, "only-there"),
    ] {
        completes(&mut terminal, typed, completed);
    }
}
