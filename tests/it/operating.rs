//! What an operator sees on a terminal: a list of locks that is drawn again and again, and the question before
//! a lock is taken away.

use serde_json::Value;

use crate::support::{Bed, Daemon, Dlock, FileBed, Log, Redis, Running, Terminal, until};

/// Home, in a terminal that was cleared.
const DRAW: &str = "\u{1b}[2J\u{1b}[H";
/// The end of one picture and the beginning of the next. A terminal that is cleared again would scroll.
const REDRAW: &str = "\u{1b}[J\u{1b}[H";
const CTRL_C: u8 = 3;
const CTRL_D: &str = "\u{4}";

/// Holds the lock `x` until it is told to let go.
fn holder(bed: &FileBed, log: &Log) -> Running {
    let running = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    running
}

/// A shell that says `same` when the terminal is set as it was at the beginning.
fn terminal(bed: &FileBed) -> Terminal {
    let mut terminal = Terminal::with_shell(&bed.url());
    terminal
        .type_line("before=$(stty -g); is_same() { [ \"$(stty -g)\" = \"$before\" ] && echo sa''me; }; echo rea''dy");
    terminal.expect("ready");
    terminal
}

#[test]
fn status_is_drawn_again_in_its_place_until_interrupted() {
    let (bed, log) = (FileBed::new(), Log::new());
    let mut terminal = terminal(&bed);
    terminal.type_line("$DLOCK status --watch=100ms x");
    for start in [DRAW, REDRAW, REDRAW] {
        terminal.expect(&format!("{start}NAME"));
        terminal.expect("free");
    }
    let holder = holder(&bed, &log);
    terminal.expect("held");
    terminal.expect(&format!("{REDRAW}NAME"));
    terminal.expect("held");
    drop(holder);
    terminal.expect("free");
    terminal.press(CTRL_C);
    // Ctrl-C also throws away what is typed before the shell is back.
    terminal.expect("$ ");
    terminal.type_line("echo code=$?; is_same");
    terminal.expect("code=130");
    terminal.expect("same");
}

/// Eighty columns are enough for a name, a state, since when, and the beginning of a holder; held locks come first.
#[test]
fn a_narrow_terminal_gets_a_line_for_each_lock() {
    let (bed, name) = (FileBed::new(), "nightly-report-of-sales");
    let long = "--option ".repeat(20);
    let held = bed.dlock().run(name).args(["--", "sh", "-c", "echo up; exec sleep 1000", &long]).spawn();
    until("the command to run", || held.stdout().contains("up"));
    bed.dlock().run("a-free-one").sh("exit 3").ended().expect(3);
    let mut terminal = terminal(&bed);
    terminal.type_line("stty cols 80 rows 24; $DLOCK status");
    terminal.expect("HOLDER\r\n");
    terminal.expect(&format!("{name}  held   "));
    terminal.expect(&format!(":{} sh", held.pid()));
    terminal.expect("…\r\na-free-one ");
    terminal.expect("last run: exit 3");
    terminal.type_line("$DLOCK status --held; echo fi''ne");
    terminal.expect(&format!("{name}  held"));
    terminal.expect("…\r\nfine");
    terminal.type_line("$DLOCK status --color always a-*");
    terminal.expect("a-free-one  free");
    terminal.type_line("$DLOCK status --color always --held");
    terminal.expect("\u{1b}[32mheld\u{1b}[0m");
    terminal.type_line("$DLOCK status 'b*'");
    terminal.expect("no lock has such a name");
    let piped = bed.dlock().arg("status").ended().expect(0).stdout;
    assert!(piped.contains(long.trim_end()) && piped.contains("EXPIRES IN"), "{piped}");
}

/// More locks than lines: the head stays, and nothing scrolls.
#[test]
fn a_short_terminal_shows_what_fits() {
    let bed = FileBed::new();
    (0..9).for_each(|n| drop(bed.dlock().run(&format!("lock-{n}")).sh("exit 0").ended().expect(0)));
    let mut terminal = terminal(&bed);
    terminal.type_line("stty cols 60 rows 8; $DLOCK status --watch=100ms");
    for start in [DRAW, REDRAW, REDRAW] {
        terminal.expect(&format!("{start}NAME"));
        terminal.expect("lock-3");
        terminal.expect("\u{1b}[K\r\n… and 5 more\u{1b}[K\r\n");
    }
    terminal.press(CTRL_C);
}

/// One lock on a terminal is described, with what to do about it.
#[test]
fn one_lock_is_described() {
    let (bed, log) = (FileBed::new(), Log::new());
    let mut terminal = terminal(&bed);
    terminal.type_line("$DLOCK status x");
    terminal.expect("free, no run on record under this name");
    bed.dlock().run("x").sh("exit 3").ended().expect(3);
    let held = bed.dlock().run("x").args(["--note", "see \u{1b}[2J"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiter = bed.dlock().run("x").sh("exit 0").spawn();
    until("a waiter", || bed.dlock().args(["status", "--json", "x"]).ended().stdout.contains("waiting_since\":\"2"));
    let mut lines = vec![format!("x on {}\r\n", bed.url()), "state      held\r\n".into()];
    lines.push(format!(":{} ", held.pid()));
    lines.extend(["note       see \\u{1b}[2J", "since      20", "lease      30s", "token  "].map(String::from));
    lines.push(format!(":{} sh", waiter.pid()));
    lines.extend(["last runs  20", "exit 3 after ", "next       dlock force-release x --reason"].map(String::from));
    terminal.type_line("$DLOCK status x");
    lines.iter().for_each(|line| terminal.expect(line));
    terminal.type_line("$DLOCK status -b $DLOCK_BACKEND --name x");
    terminal.expect(&format!("dlock history -b '{}' x", bed.url()));
    // Said how, or piped, it is a table.
    terminal.type_line("$DLOCK status --format table x");
    terminal.expect("NAME");
    assert!(bed.dlock().args(["status", "x"]).ended().stdout.starts_with("NAME"));
}

#[test]
fn history_is_a_table_with_bars_on_a_terminal() {
    let bed = FileBed::new();
    bed.dlock().run("x").args(["--once", "today"]).sh("exit 4").ended().expect(4);
    let piped = bed.dlock().args(["history", "x"]).ended().expect(0).silently().stdout;
    assert!(piped.starts_with("STARTED (UTC)") && piped.contains("exit 4") && piped.contains("once: today"), "{piped}");
    assert!(piped.contains("1 run: median ") && piped.ends_with("none succeeded\n") && !piped.contains('█'), "{piped}");
    let mut terminal = terminal(&bed);
    for columns in [60, 80, 120] {
        terminal.type_line(&format!("stty cols {columns}; $DLOCK history x"));
        terminal.expect("████████");
        terminal.expect("exit 4");
    }
    let unused = bed.dlock().args(["history", "unused"]).ended().expect(0).stdout;
    assert_eq!(unused, "unused: no run on record\n");
}

#[test]
fn status_that_goes_on_in_a_pipe_draws_nothing() {
    let bed = FileBed::new();
    for (flag, second) in [("--json", "]\n["), ("-v", "NAME")] {
        let watching = bed.dlock().args(["status", "--watch=100ms", flag, "x"]).spawn();
        until("the second round", || watching.stdout().matches(second).count() >= 2);
        assert!(!watching.stdout().contains('\u{1b}'), "{:?}", watching.stdout());
    }
}

/// The picture stays while the server is away; what is wrong is said once.
#[test]
fn watching_outlives_a_server_that_goes_away() {
    let server = Redis::new();
    server.dlock().run("x").sh("exit 0").ended().expect(0);
    let mut watching = server.dlock().args(["status", "--watch", "0.1", "--connect-timeout", "200ms"]).spawn();
    until("the first picture", || watching.stdout().contains("exit 0"));
    server.kill();
    until("a word about it", || watching.stderr().contains("still waiting for it"));
    server.restart();
    let pictures = watching.stdout().matches("no locks").count();
    until("a new picture", || watching.stdout().matches("no locks").count() > pictures);
    assert!(!watching.has_ended());
    let said = watching.stderr();
    assert!(said.contains("the backend answers again") && said.lines().count() <= 4, "{said}");

    let nobody = Dlock::new().env("DLOCK_BACKEND", "redis://127.0.0.1:1").args(["status", "--watch"]);
    nobody.ended().expect(69).saying("cannot be reached");
}

#[test]
fn a_reader_who_has_seen_enough_is_no_failure() {
    let bed = FileBed::new();
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    for verb in [
        &["status"][..],
        &["status", "--json"],
        &["status", "--watch", "0.1"],
        &["doctor"],
        &["man"],
        &["completions", "bash"],
        &["run", "--name", "x", "--explain"],
        &["words", "--", "status", ""],
        &["force-release", "x"],
        &["history", "x"],
        &["check", "x"],
        &["status", "--format", "prometheus"],
    ] {
        let (reader, writer) = nix::unistd::pipe().unwrap();
        drop(reader);
        bed.dlock().args(verb).ended_writing_to(writer).expect(0).silently();
    }
}

#[test]
fn force_release_shows_whose_lock_it_is_and_takes_it_only_after_a_yes() {
    let (bed, log) = (FileBed::new(), Log::new());
    let mut held = holder(&bed, &log);
    let pid = held.pid();
    let waiter = bed.dlock().run("x").sh("exit 0").spawn();
    until("a waiter", || bed.dlock().args(["status", "--json", "x"]).ended().stdout.contains("waiting_since"));
    let mut terminal = terminal(&bed);
    // What it prints may go elsewhere; the question and what one has to know for it do not.
    let asked = |terminal: &mut Terminal| {
        terminal.type_line("$DLOCK force-release x --reason tests >/dev/null; echo code=$?");
        terminal.expect("x: held by ");
        terminal.expect(&format!("pid {pid}"));
        terminal.expect(") for ");
        terminal.expect(", token ");
        terminal.expect("1 waiting. Ask the holder to stop and release it? [y/N] ");
    };
    for no in ["n\n", "\n", "yess\n", CTRL_D] {
        asked(&mut terminal);
        terminal.press_all(no);
        terminal.expect("code=0");
    }
    asked(&mut terminal);
    terminal.press(CTRL_C);
    // Ctrl-C also throws away what is typed before the shell is back.
    terminal.expect("$ ");
    terminal.type_line("echo after=$?; is_same");
    terminal.expect("after=130");
    terminal.expect("same");
    let state = bed.dlock().args(["status", "--json", "x"]).ended().expect(0).stdout;
    assert!(state.contains("\"state\":\"held\"") && !held.has_ended(), "{state}");
    log.await_beat();

    asked(&mut terminal);
    terminal.press_all("y\n");
    terminal.expect("code=0");
    held.ended().expect(79).saying("tests");
    waiter.ended().expect(0).silently();
}

#[test]
fn force_release_now_says_who_is_not_told() {
    let (bed, log) = (FileBed::new(), Log::new());
    let now = || bed.dlock().args(["force-release", "x", "--yes", "--now", "--reason", "stuck"]).ended().expect(0);
    let held = holder(&bed, &log);
    let said = now().stdout;
    assert!(said.contains("may still run for a moment") && !said.contains("reason"), "{said}");
    held.ended().expect(79).saying("force-release --now (stuck)");
    // flock(1) lives on under the old file.
    let mut flock = std::process::Command::new("flock");
    flock.arg("--no-fork").arg(bed.lock_file("x")).args(["sleep", "1000"]);
    let _flock = Daemon::spawn(flock, &bed.dir().join("flock.log"));
    until("flock to hold it", || bed.dlock().args(["status", "--exit-code", "x"]).ended().code == Some(75));
    let said = now().stdout;
    assert!(said.contains("is not told: it runs on") && said.contains("only kept for status"), "{said}");
    let state: Value = serde_json::from_str(&bed.dlock().args(["status", "--json", "x"]).ended().stdout).unwrap();
    let last = &state[0]["last_run"];
    assert_eq!((&last["outcome"], &last["reason"]), (&"lost".into(), &"stuck".into()), "{last}");
    assert!(last["command"].as_str().unwrap().contains("sleep 1000"), "{last}");
}

#[test]
fn force_release_without_a_terminal_needs_yes() {
    let (bed, log) = (FileBed::new(), Log::new());
    let held = holder(&bed, &log);
    let asked = bed.dlock().args(["force-release", "x"]).ended().expect(64).saying("--yes");
    assert_eq!((asked.stdout.as_str(), asked.stderr.lines().count()), ("", 1));
    log.await_beat();
    let taken = bed.dlock().args(["force-release", "x", "--yes"]).ended().expect(0).silently();
    assert!(taken.stdout.contains(&format!("pid {}", held.pid())), "{taken:?}");
    held.ended().expect(79);
    let free = bed.dlock().args(["force-release", "x"]).ended().expect(0).silently();
    assert_eq!(free.stdout, "x: nobody holds it\n");
}
