//! What people type by mistake, and the sentence that each gets: which lock, which URL, what to type instead.

use super::{CONFIG, USAGE};
use crate::support::{Bed, FileBed};

/// A word with a space in it has a `_` there.
const MISTAKES: &[(&str, i32, &str)] = &[
    // Something is missing.
    ("run", USAGE, "which lock, and which command? dlock run --name NAME -- CMD"),
    ("run nightly", USAGE, "which command? dlock run --name nightly -- CMD"),
    ("run --name nightly", USAGE, "which command? dlock run --name nightly -- CMD"),
    ("run --name nightly --", USAGE, "which command? dlock run --name nightly -- CMD"),
    ("run -- ./job.sh", USAGE, "which lock? dlock run --name NAME -- ./job.sh"),
    ("run ./job.sh", USAGE, "which lock? dlock run --name NAME -- ./job.sh"),
    ("run --name", USAGE, "--name needs a value: --name NAME"),
    ("run -w -- ./job.sh", USAGE, "--wait needs a value: --wait DUR"),
    ("run --wait x -- ./job.sh", USAGE, "--wait: \"x\" is not a duration like 500ms, 30s, 1h or 2.5"),
    ("acquire", USAGE, "which lock? dlock acquire --name NAME; dlock status shows all locks"),
    ("force-release", USAGE, "which lock? dlock force-release --name NAME; dlock status shows all locks"),
    ("release x", USAGE, "whose lock? Pass what dlock acquire has printed: --owner \"$DLOCK_OWNER\""),
    ("check", USAGE, "which lock? dlock check NAME, or for all locks: dlock check '*'"),
    ("status --exit-code", USAGE, "which lock? dlock status NAME --exit-code"),
    ("fence", USAGE, "dlock fence needs a resource and a command: dlock fence RESOURCE -- CMD"),
    (
        "fence ./data -- ./job.sh",
        USAGE,
        "which token? Use dlock fence inside dlock run, which sets DLOCK_FENCING_TOKEN, or pass --token N",
    ),
    ("completions", USAGE, "which shell? dlock completions bash, fish or zsh"),
    // The dashes before the command are missing.
    ("run nightly ./job.sh", USAGE, "put -- before the command: dlock run --name nightly -- ./job.sh"),
    ("run --name x ./job.sh", USAGE, "put -- before the command: dlock run --name x -- ./job.sh"),
    ("run --name x ./job.sh --fast", USAGE, "put -- before the command: dlock run --name x -- ./job.sh --fast"),
    ("run x -n ./job.sh --fast", USAGE, "put -- before the command: dlock run --name x -- ./job.sh --fast"),
    ("run x --ttl 30s ./job.sh", USAGE, "put -- before the command: dlock run --name x -- ./job.sh"),
    ("fence ./data ./job.sh", USAGE, "put -- before the command: dlock fence ./data -- ./job.sh"),
    // A command that dlock does not have.
    ("stauts", USAGE, "\"stauts\" is not a command of dlock; did you mean dlock status?"),
    ("rum --name x -- ./job.sh", USAGE, "\"rum\" is not a command of dlock; did you mean dlock run?"),
    ("run status", USAGE, "did you mean dlock status?"),
    ("help stauts", USAGE, "\"stauts\" is not a command of dlock; did you mean dlock status?"),
    ("lock nightly -- ./job.sh", USAGE, "\"lock\" is not a command of dlock; did you mean dlock run?"),
    ("unlock nightly", USAGE, "\"unlock\" is not a command of dlock; did you mean dlock release?"),
    ("version", USAGE, "\"version\" is not a command of dlock; did you mean dlock --version?"),
    ("frobnicate", USAGE, "\"frobnicate\" is not a command of dlock; dlock help lists them"),
    (
        "nightly -- ./job.sh",
        USAGE,
        "\"nightly\" is not a command of dlock; to run a command under a lock of that name: dlock run --name nightly -- CMD",
    ),
    (
        "./job.sh",
        USAGE,
        "\"./job.sh\" is not a command of dlock; to run it under a lock: dlock run --name NAME -- ./job.sh",
    ),
    ("man stauts", USAGE, "there is no manual page \"stauts\"; did you mean dlock man status?"),
    ("-n run x -- ./job.sh", USAGE, "options stand after the command: dlock run -n ..."),
    ("--name x -- ./job.sh", USAGE, "which command? A command comes before its options: dlock run --name ..."),
    // An option that the command does not have.
    ("run --tll 30s x -- ./job.sh", USAGE, "dlock run has no option --tll; did you mean --ttl?"),
    ("run --lock x -- ./job.sh", USAGE, "dlock run has no option --lock; did you mean --name?"),
    ("run --nowait x -- ./job.sh", USAGE, "dlock run has no option --nowait; did you mean --no-wait?"),
    ("run --json x -- ./job.sh", USAGE, JSON),
    (
        "run --fast x -- ./job.sh",
        USAGE,
        "dlock run has no option --fast; an option of your command stands after --; see dlock run --help",
    ),
    ("status --jsn", USAGE, "dlock status has no option --jsn; did you mean --json?"),
    ("run \u{2014}name x -- ./job.sh", USAGE, LONG_DASH),
    // Words too many, or that do not go together.
    (
        "run --wait 5 minutes --name x -- ./job.sh",
        USAGE,
        "\"minutes\" is one word too many; put quotes around a duration of two words: '5 minutes'",
    ),
    (
        "run x y -- ./job.sh",
        USAGE,
        "\"y\" is one word too many; dlock run takes one lock, and all of the command after --",
    ),
    (
        "acquire x -- ./job.sh",
        USAGE,
        "acquire runs no command; to run one under the lock: dlock run --name x -- ./job.sh",
    ),
    ("history x y", USAGE, "\"y\" is one word too many; dlock history takes one lock"),
    ("doctor redis://h", USAGE, "name a backend with -b: dlock doctor -b redis://h"),
    ("run --name x --name y -- ./job.sh", USAGE, "--name is given twice; see dlock run -h"),
    ("run x -n -w 5s -- ./job.sh", USAGE, "--no-wait and --wait do not go together; see dlock run -h"),
    ("run x -c true -- ./job.sh", USAGE, "--command and a command after -- do not go together; see dlock run -h"),
    ("run x --quiet=yes -- ./job.sh", USAGE, "--quiet takes no value; see dlock run -h"),
    // Values.
    ("run my_job -- ./job.sh", USAGE, "\"my job\": a lock name has only A-Z a-z 0-9 . _ : @ + - and /, not ' '"),
    (
        "run /var/lock/x -- ./job.sh",
        USAGE,
        "\"/var/lock/x\": a lock name must not begin or end with a slash, or have //, /./ or /../ in it",
    ),
    ("run x --ttl 100ms -- ./job.sh", USAGE, "a ttl of 100ms is too short: the least is 1s"),
    ("run x --signal FOO -- ./job.sh", USAGE, "--signal: \"FOO\" is not a signal like TERM, SIGINT or 15"),
    ("run x -E 300 -- ./job.sh", USAGE, "--conflict-exit-code: \"300\" is not an exit code from 0 to 255"),
    ("run x --on-lost stop -- ./job.sh", USAGE, "--on-lost: \"stop\" is not one of kill, signal"),
    ("completions tcsh", USAGE, "\"tcsh\" is not one of bash, fish, zsh; see dlock completions -h"),
    // Backends.
    (
        "run -b redis://h:99999 x -- ./job.sh",
        CONFIG,
        "--backend: host \"h\" has the port 99999, but a port is a number from 1 to 65535",
    ),
    (
        "run -b redis://me:secret x -- ./job.sh",
        CONFIG,
        "--backend: what follows \"me:\" is not a port, a number from 1 to 65535; a password is followed by @HOST",
    ),
    (
        "status -b localhost:6379",
        CONFIG,
        "--backend: \"localhost:6379\" is not a URL; did you mean redis://localhost:6379?",
    ),
    ("status -b redis", CONFIG, "--backend: \"redis\" is not a URL; did you mean redis://HOST?"),
    ("status -b etcd:h1,h2", CONFIG, "--backend: \"etcd:h1,h2\" is not a URL; did you mean etcd://h1,h2?"),
    ("status -b /srv/locks", CONFIG, "--backend: \"/srv/locks\" is not a URL; did you mean file:///srv/locks?"),
    (
        "status -b prod",
        CONFIG,
        "--backend: \"prod\" is not a URL like redis://HOST, and the config file has no [backends.prod]",
    ),
    ("status -b http://h:2379", CONFIG, "dlock has no backend http://; did you mean etcd://?"),
    ("status -b postgre://h/db", CONFIG, "dlock has no backend postgre://; did you mean postgres://?"),
    ("status -b mysq://h/db", CONFIG, "dlock has no backend mysq://; did you mean mysql://?"),
    (
        "status -b consul://h",
        CONFIG,
        "dlock has no backend consul://; this dlock has file, redis, redlock, etcd, zookeeper, postgres, mysql",
    ),
    ("status -b REDIS://h", CONFIG, "--backend: a URL begins with its scheme in lowercase letters, like redis://"),
    ("status -b postgres://h?sslmod=x", CONFIG, "postgres:// has no parameter \"sslmod\"; did you mean \"sslmode\"?"),
    ("status -b zk://h?color=red", CONFIG, "zk:// has no parameter \"color\"; dlock man backends lists them"),
];

const JSON: &str = "dlock run has no option --json; it is an option of dlock status, dlock history, dlock check, dlock \
                    acquire, dlock doctor";
const LONG_DASH: &str = "\"\u{2014}name\" does not begin with a hyphen but with another dash; type --name";

#[test]
fn every_mistake_gets_the_advice_that_fits_it() {
    let bed = FileBed::new();
    let mut wrong = Vec::new();
    for (line, code, sentence) in MISTAKES {
        let ended = bed.dlock().args(line.split(' ').map(|word| word.replace('_', " "))).ended();
        let said = format!("{}{}", ended.stderr, ended.stdout);
        let (code, said) = match said.strip_prefix("DLOCK UNKNOWN - ") {
            Some(said) => (3, said),
            None => (*code, said.strip_prefix("dlock: ").unwrap_or_default()),
        };
        let said = said.lines().next().unwrap_or_default();
        if ended.code != Some(code) || said != *sentence {
            wrong.push(format!("dlock {line}\n  wanted {code}: {sentence}\n  got {:?}: {said}\n", ended.code));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.concat());
    assert!(MISTAKES.len() >= 50);
    assert_eq!(std::fs::read_dir(bed.dir()).unwrap().count(), 0, "a lock was taken");
}

/// Whoever types nothing wants to know what there is.
#[test]
fn dlock_alone_shows_the_help() {
    let help = FileBed::new().dlock().ended().expect(USAGE).stderr;
    assert!(help.contains("Usage: dlock") && help.contains("dlock run --name nightly"), "{help}");
}

/// The short help of every command fits on a small screen, and its lines on one of 80 columns.
#[test]
fn short_help_fits_on_one_screen() {
    let cli = dlock::cli::Cli::complete();
    let verbs = cli.get_subcommands().filter(|verb| !verb.is_hide_set()).map(|verb| verb.get_name().to_owned());
    for verb in verbs.chain([String::new()]) {
        let words: Vec<_> = [verb.as_str(), "-h"].into_iter().filter(|word| !word.is_empty()).collect();
        let help = FileBed::new().dlock().env("COLUMNS", "80").args(words).ended().expect(0).stdout;
        let widest = help.lines().map(|line| line.chars().count()).max().unwrap();
        assert!(help.lines().count() <= 32 && widest <= 80, "{verb}: {widest} columns\n{help}");
        assert!(verb.is_empty() || help.contains(&format!("Usage: dlock {verb}")), "{help}");
    }
}
