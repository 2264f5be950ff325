//! Signals, terminals, and what becomes of the processes when any of them dies.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

use crate::support::{Bed, FileBed, Log, Terminal, lines, living_with, signal, unique, until};

const NOTE_ALL: &str = r#"
for s in TERM INT HUP QUIT USR1 USR2 WINCH CONT; do trap "echo $s >>$NOTES" $s; done
echo ready >>$NOTES
while [ ! -e "$NOTES.go" ]; do sleep 0.01; done
"#;

#[test]
fn every_forwarded_signal_reaches_the_command_and_dlock_stays_until_it_ends() {
    let bed = FileBed::new();
    let notes = bed.dir().join("notes");
    let mut running = bed.dlock().env("NOTES", &notes).run("x").sh(NOTE_ALL).spawn();
    until("the command to be ready", || lines(&notes) == ["ready"]);
    let all = [
        (Signal::SIGTERM, "TERM"),
        (Signal::SIGINT, "INT"),
        (Signal::SIGHUP, "HUP"),
        (Signal::SIGQUIT, "QUIT"),
        (Signal::SIGUSR1, "USR1"),
        (Signal::SIGUSR2, "USR2"),
        (Signal::SIGWINCH, "WINCH"),
        (Signal::SIGCONT, "CONT"),
    ];
    for (signal, name) in all {
        running.signal(signal);
        until(name, || lines(&notes).last().is_some_and(|last| last == name));
    }
    assert!(!running.has_ended());
    assert_eq!(lines(&notes).len(), 1 + all.len(), "each of them once");
    std::fs::write(bed.dir().join("notes.go"), "").unwrap();
    running.ended().expect(0);
}

#[test]
fn a_signal_reaches_the_real_job_behind_a_shell() {
    let (bed, log) = (FileBed::new(), Log::new());
    let job = log.witness(&[])[1..].join(" ");
    let running = bed.dlock().run("x").sh(&format!("{job}; true")).spawn();
    log.await_runs(1, 1);
    running.signal(Signal::SIGTERM);
    running.ended().expect(143);
}

#[test]
fn a_second_sigterm_starts_kill_after() {
    let (bed, log) = (FileBed::new(), Log::new());
    let mut running = bed.dlock().run("x").args(["-k", "100ms"]).args(log.witness(&["ignore-term"])).spawn();
    log.await_runs(1, 1);
    running.signal(Signal::SIGTERM);
    running.await_taken(Signal::SIGTERM);
    log.await_beat();
    assert!(!running.has_ended(), "the first is the command's own affair");
    running.signal(Signal::SIGTERM);
    running.ended().expect(137);
}

#[test]
fn what_nohup_ignores_stays_ignored() {
    let (bed, log) = (FileBed::new(), Log::new());
    let dlock = bed.dlock().run("x").args(log.witness(&[])).configure(|command| {
        #[allow(unsafe_code)]
        // SAFETY: sigaction(2) may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                nix::sys::signal::signal(Signal::SIGHUP, nix::sys::signal::SigHandler::SigIgn)?;
                Ok(())
            });
        }
    });
    let running = dlock.spawn();
    log.await_runs(1, 1);
    running.signal(Signal::SIGHUP);
    log.await_beat();
    running.signal(Signal::SIGTERM);
    running.ended().expect(143);
}

#[test]
fn the_command_has_the_signal_mask_dlock_was_given_and_dies_of_sigpipe() {
    let bed = FileBed::new();
    let dlock = bed.dlock().run("x").args(["--", "grep", "-E", "SigBlk|SigIgn", "/proc/self/status"]);
    let dlock = dlock.configure(|command| {
        #[allow(unsafe_code)]
        // SAFETY: sigprocmask(2) may be called between fork and exec.
        unsafe {
            command.pre_exec(|| {
                let blocked = SigSet::from_iter([Signal::SIGUSR2, Signal::SIGTERM]);
                sigprocmask(SigmaskHow::SIG_SETMASK, Some(&blocked), None)?;
                Ok(())
            });
        }
    });
    let ended = dlock.ended().expect(0);
    let mask = (1u64 << (Signal::SIGUSR2 as i32 - 1)) | (1 << (Signal::SIGTERM as i32 - 1));
    assert!(ended.stdout.contains(&format!("SigBlk:\t{mask:016x}")), "{ended:#?}");
    let ignored = ended.stdout.lines().find_map(|line| line.strip_prefix("SigIgn:\t")).unwrap();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    assert_eq!(ignored & (1 << (Signal::SIGPIPE as i32 - 1)), 0, "{ended:#?}");

    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let script = format!("{{ {dlock} run -b {} --name y -- yes; echo $? >&2; }} | head -n 1", bed.url());
    let out = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8(out.stderr).unwrap(), "141\n");
}

#[test]
fn a_killed_guardian_ends_the_command_and_is_125() {
    let (bed, log, mark) = (FileBed::new(), Log::new(), unique("mark"));
    let running = bed.dlock().env("MARK", &mark).run("x").args(log.witness(&["ignore-term", "daemons=5"])).spawn();
    log.await_runs(1, 6);
    signal(running.guardian(), Signal::SIGKILL);
    running.ended().expect(125).saying("guardian");
    assert!(living_with(&mark).is_empty());
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
}

#[test]
fn a_standard_error_that_nobody_reads_delays_no_ending() {
    for lost in [false, true] {
        let (bed, log, mark) = (FileBed::new(), Log::new(), unique("mark"));
        let (_unread, full) = std::io::pipe().unwrap();
        // Full: there is no room for a single word more.
        nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK)).unwrap();
        while std::io::Write::write(&mut &full, &[b'x'; 4096]).is_ok() {}
        nix::fcntl::fcntl(&full, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty())).unwrap();
        let mut dlock = Command::new(assert_cmd::cargo::cargo_bin!("dlock"));
        dlock.args(["run", "--ttl", "10m", "--name", "x", "--backend", &bed.url()]).args(log.witness(&["ignore-term"]));
        let mut running = dlock.env("MARK", &mark).stderr(full).spawn().unwrap();
        log.await_runs(1, 1);
        if lost {
            std::fs::remove_file(bed.lock_file("x")).unwrap();
        } else {
            running.kill().unwrap();
        }
        // Neither waits for somebody to read what it has to say: the ttl is ten minutes.
        running.wait().unwrap();
        until("every process of it to be gone", || living_with(&mark).is_empty());
        log.assert_no_overlap();
    }
}

#[test]
fn a_stopped_guardian_does_not_keep_a_lost_lock() {
    let (bed, log, mark) = (FileBed::new(), Log::new(), unique("mark"));
    let dlock = bed.dlock().env("MARK", &mark).run("x").args(["--ttl", "2s"]);
    let running = dlock.args(log.witness(&["daemons=2"])).spawn();
    log.await_runs(1, 3);
    signal(running.guardian(), Signal::SIGSTOP);
    std::fs::remove_file(bed.lock_file("x")).unwrap();
    running.ended();
    assert!(living_with(&mark).is_empty());
}

#[test]
fn a_kill_of_the_whole_process_group_or_by_name_leaves_nothing_behind() {
    let by_group = |pid: u32| Command::new("kill").args(["-KILL", "--", &format!("-{pid}")]).status().unwrap();
    let by_name =
        |pid: u32| Command::new("pkill").args(["-KILL", "--pgroup", &pid.to_string(), "dlock"]).status().unwrap();
    for kill in [&by_group as &dyn Fn(u32) -> _, &by_name] {
        let (bed, log, mark) = (FileBed::new(), Log::new(), unique("mark"));
        let dlock = bed.dlock().env("MARK", &mark).run("x").configure(|command| {
            command.process_group(0);
        });
        let running = dlock.args(log.witness(&["daemons=2"])).spawn();
        log.await_runs(1, 3);
        let next = bed.dlock().run("x").args(log.witness(&["for=20"])).spawn();
        assert!(kill(running.pid()).success());
        next.ended().expect(0);
        assert!(living_with(&mark).is_empty());
        log.assert_no_overlap();
    }
}

#[test]
fn the_guardian_is_not_called_dlock() {
    let (bed, log) = (FileBed::new(), Log::new());
    let running = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let name = std::fs::read_to_string(format!("/proc/{}/comm", running.guardian())).unwrap();
    assert_eq!(name.trim(), "guardian", "`pkill -9 dlock` must not take it away");
}

#[test]
fn a_command_that_stops_itself_keeps_the_lock_and_can_be_ended() {
    let (bed, log, mark) = (FileBed::new(), Log::new(), unique("mark"));
    let dlock = bed.dlock().env("MARK", &mark).run("x").args(["--ttl", "1s", "--timeout", "4s"]);
    let running = dlock.args(log.witness(&["stop"])).spawn();
    log.await_runs(1, 1);
    let next = bed.dlock().run("x").args(log.witness(&["for=20"])).spawn();
    // It is renewed for several ttls, and ended by the timeout alone.
    running.ended().expect(124);
    next.ended().expect(0);
    assert!(living_with(&mark).is_empty());
    log.assert_no_overlap();
}

#[test]
fn ctrl_c_reaches_the_command_once_and_the_shell_is_told() {
    let bed = FileBed::new();
    let notes = bed.dir().join("notes");
    let mut terminal = Terminal::with_shell(&bed.url());
    let script = "trap \"echo INT >>$NOTES; exit 5\" INT; echo ready >>$NOTES; while :; do sleep 0.01; done";
    std::fs::write(bed.dir().join("job"), script).unwrap();
    terminal.type_line(&format!("export NOTES={}; cd {}", notes.display(), bed.dir().display()));
    terminal.type_line("$DLOCK run --name x -- sh job; echo code=$?");
    until("the command to be ready", || lines(&notes) == ["ready"]);
    terminal.press(b'\x03');
    terminal.expect("code=5");
    assert_eq!(lines(&notes), ["ready", "INT"]);

    // Died of it, and so does dlock: the shell gives up the rest of the line.
    terminal.type_line(
        "for i in 1 2 3; do $DLOCK run --name x -- sh -c 'echo up >>$NOTES; exec sleep 1000'; done; echo not reached",
    );
    until("the command to run", || lines(&notes).last().is_some_and(|last| last == "up"));
    terminal.press(b'\x03');
    terminal.type_line("echo status=$?");
    terminal.expect("status=130");
    assert_eq!(lines(&notes).iter().filter(|line| *line == "up").count(), 1, "the loop has ended");
}

#[test]
fn ctrl_z_stops_and_fg_resumes() {
    let (bed, log) = (FileBed::new(), Log::new());
    let mut terminal = Terminal::with_shell(&bed.url());
    let witness = log.witness(&[]).join(" ");
    terminal.type_line(&format!("$DLOCK run --name x {witness}; echo code=$?"));
    log.await_runs(1, 1);
    terminal.press(b'\x1a');
    terminal.expect("Stopped");
    until("the command to stop", || {
        let before = log.runs();
        std::thread::sleep(std::time::Duration::from_millis(50));
        log.runs() == before
    });
    terminal.type_line("fg");
    log.await_beat();
    terminal.press(b'\x03');
    terminal.type_line("echo over=$?");
    terminal.expect("over=130");
}

#[test]
fn the_command_can_read_the_terminal_and_gives_it_back() {
    let bed = FileBed::new();
    let mut terminal = Terminal::with_shell(&bed.url());
    terminal.type_line("$DLOCK run --name x -- sh -c 'read line; echo \"got <$line>\"'");
    terminal.type_line("typed");
    terminal.expect("got <typed>");
    // An interactive shell takes the terminal for itself; killed, it cannot give it back.
    terminal.type_line("$DLOCK run --name x --timeout 1s -k 50ms -- bash --norc -i; echo after=$?");
    terminal.expect("after=124");
    terminal.type_line("read line; echo \"still <$line>\"");
    terminal.type_line("mine");
    terminal.expect("still <mine>");
}

#[test]
fn waiting_shows_a_live_line_and_takes_it_away() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let mut terminal = Terminal::with_shell(&bed.url());
    terminal.type_line("$DLOCK run --name x -- echo mine at last");
    terminal.expect(&format!("pid {}", holder.pid()));
    holder.signal(Signal::SIGTERM);
    terminal.expect("\x1b[Kmine at last");
    holder.ended().expect(143);
}
