//! Commands that are hard to end, or whose end is hard to see: what the guardian must cope with before it may say that
//! nothing is left.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::sys::signal::{SigHandler, Signal};

use crate::support::{Bed, Dlock, FileBed, Log, is_alive, lines, living_with, signal, unique, until};

/// Dies of the first real-time signal, of which nobody has heard.
const DIE_OF_34: &str = "kill -34 $$; sleep 1000";

fn ignoring(which: Signal, dlock: Dlock) -> Dlock {
    dlock.configure(|command| {
        #[allow(unsafe_code)]
        // SAFETY: sigaction(2) may be called between fork and exec.
        unsafe {
            command.pre_exec(move || {
                nix::sys::signal::signal(which, SigHandler::SigIgn)?;
                Ok(())
            });
        }
    })
}

#[test]
fn a_death_of_a_real_time_signal_is_128_and_its_number() {
    let bed = FileBed::new();
    bed.dlock().run("x").sh(DIE_OF_34).ended().expect(162);
}

#[test]
fn an_orphan_that_dies_of_a_real_time_signal_is_not_the_last() {
    let (bed, log) = (FileBed::new(), Log::new());
    let done = bed.dir().join("done");
    let script =
        format!("(exec sh -c '{DIE_OF_34}'; ) & (while [ ! -e {} ]; do sleep 0.01; done) & true", done.display());
    let mut running = bed.dlock().run("x").args(["--leftovers", "wait"]).sh(&script).spawn();
    until("the command itself to be gone", || {
        let guardian = running.guardian();
        crate::support::children_of(guardian).len() == 1
    });
    bed.dlock().run("x").arg("-n").args(log.witness(&["for=20"])).ended().expect(75);
    assert!(!running.has_ended());
    std::fs::write(&done, "").unwrap();
    running.ended().expect(0);
}

#[test]
fn an_inherited_disregard_for_children_is_the_commands_alone() {
    let bed = FileBed::new();
    let dlock = || ignoring(Signal::SIGCHLD, bed.dlock().run("x"));
    dlock().sh("exit 3").ended().expect(3);
    let ended = dlock().args(["--", "grep", "SigIgn", "/proc/self/status"]).ended().expect(0);
    let ignored = u64::from_str_radix(ended.stdout.trim().rsplit('\t').next().unwrap(), 16).unwrap();
    assert_ne!(ignored & (1 << (Signal::SIGCHLD as i32 - 1)), 0, "{ended:?}");
}

#[test]
fn the_first_signal_reaches_a_job_whose_shell_dies_of_it() {
    let bed = FileBed::new();
    let job = bed.dir().join("job");
    std::fs::write(&job, "trap 'echo told >>$NOTES; exit' TERM; echo up >>$NOTES; while :; do sleep 0.01; done")
        .unwrap();
    for setsid in ["", "setsid "] {
        for round in 0..5 {
            let notes = bed.dir().join(format!("notes.{setsid}{round}"));
            let script = format!("{setsid}sh {}; :", job.display());
            let running = bed.dlock().env("NOTES", &notes).run("x").args(["--ttl", "10m"]).sh(&script).spawn();
            until("the job to run", || lines(&notes) == ["up"]);
            bed.dlock().args(["force-release", "--yes", "x"]).ended().expect(0);
            running.ended().expect(79);
            assert_eq!(lines(&notes), ["up", "told"], "round {round} {setsid}");
        }
    }
}

/// Processes that do nothing but fork and die, each child in its parent's place, in sessions of their own.
const CHAINS: &str = r#"
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end = time.monotonic() + 30
for chain in range(int(sys.argv[1])):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            if sys.argv[2] == "each":
                os.setsid()
        os._exit(0)
open(sys.argv[3], "w").close()
time.sleep(1000)
"#;

#[test]
fn a_command_that_forks_without_end_is_ended_all_the_same() {
    for which in ["first", "each"] {
        let (bed, mark) = (FileBed::new(), unique("chains"));
        let up = bed.dir().join("up");
        let dlock = bed.dlock().env("MARK", &mark).run("x").args(["--ttl", "2s"]);
        let running = dlock.args(["--", "python3", "-c", CHAINS, "4", which]).arg(&up).spawn();
        until("the chains to run", || up.exists());
        running.signal(Signal::SIGSTOP);
        // Granted only when the guardian has let go, which it does only when nothing is left.
        bed.dlock().run("x").sh("exit 0").ended().expect(0);
        assert_eq!(living_with(&mark), [running.pid(), running.guardian()], "chains of {which}");
        running.signal(Signal::SIGCONT);
        running.ended().expect(79);
    }
}

#[test]
fn a_dlock_that_hears_nothing_any_more_leaves_nothing_running() {
    let (bed, log, mark) = (FileBed::new(), Log::new(), unique("deaf"));
    let running = bed.dlock().env("MARK", &mark).run("x").args(log.witness(&["daemons=2"])).spawn();
    log.await_runs(1, 3);
    // With so few descriptors allowed, poll(2) refuses to wait for three.
    let limited = Command::new("prlimit").args(["--nofile=2:2", "--pid", &running.pid().to_string()]).status();
    assert!(limited.unwrap().success());
    running.signal(Signal::SIGWINCH);
    running.ended().expect(125);
    assert!(living_with(&mark).is_empty());
}

#[test]
fn without_a_proc_of_its_own_namespace_nothing_is_started() {
    let bed = FileBed::new();
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    let unshare = |more: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--pid", "--fork"]).args(more).arg(dlock);
        command.args(["run", "--name", "x", "-b", &bed.url(), "--", "echo", "ran"]).output().unwrap()
    };
    let apart = unshare(&["--mount-proc"]);
    if !apart.status.success() {
        eprintln!("skipped: no namespaces here: {}", String::from_utf8_lossy(&apart.stderr));
        return;
    }
    let out = unshare(&[]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(125), "{said}");
    assert!(said.contains("/proc") && out.stdout.is_empty(), "{said}");
}

#[test]
fn the_guardian_may_be_spared_when_memory_runs_out_but_never_the_command() {
    let (bed, log) = (FileBed::new(), Log::new());
    let readiness = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    let running = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let (guardian, ours) = (running.guardian(), readiness(std::process::id()));
    assert_eq!(readiness(crate::support::children_of(guardian)[0]), ours);
    // Not even root may do that everywhere.
    let may_be_spared = {
        let us = "/proc/self/oom_score_adj";
        std::fs::write(us, "-1").is_ok() && std::fs::write(us, &ours).is_ok()
    };
    if may_be_spared {
        until("the guardian to be spared", || readiness(guardian).trim() == "-999");
    }
}

#[test]
fn what_keeps_a_lock_after_its_run_keeps_nothing_else() {
    let bed = FileBed::new();
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let run = format!("{dlock} run -b {} --name x --hold-at-least 1h -- true", bed.url());
    let script = format!("{{ {run} 3>&1 >/dev/null 2>&1; }} | cat");
    let out = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(out.status.success(), "cat sees the end of a pipe that was descriptor 3: {out:?}");
    let mut keeper = Vec::new();
    until("one process to keep the lock", || {
        keeper = living_with(&bed.url());
        keeper.len() == 1
    });
    let session = nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(keeper[0].try_into().unwrap()))).unwrap();
    assert_eq!(session.as_raw().unsigned_abs(), keeper[0], "it has a session of its own");
    signal(keeper[0], Signal::SIGKILL);
    until("it to be gone", || !is_alive(keeper[0]));
}
