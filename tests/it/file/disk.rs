//! The file backend when a disk is full, a file is not what it should be, or somebody has left one behind.

use std::path::Path;
use std::time::Duration;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::{Go, state};
use crate::support::{Bed, FileBed, Log, may_mount, until};

#[test]
fn a_full_disk_starts_nothing_and_is_called_one() {
    if !may_mount() {
        return eprintln!("not played: only root can mount a small disk to fill");
    }
    let bed = FileBed::on_small_disk();
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    bed.fill();
    let ended = bed.dlock().run("x").sh("echo no").ended().expect(69).saying("No space left");
    assert!(ended.stderr.contains("free some space on") && !ended.stderr.contains("server"), "{ended:#?}");
    assert_eq!(ended.stdout, "");
    assert_eq!(bed.beside("x", "tmp."), [""; 0]);
    bed.dlock().args(["status", "--exit-code", "x"]).ended().expect(0);
}

#[test]
fn what_cannot_be_recorded_is_said_and_keeps_nobody_waiting() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = bed.dlock().run("x").args(["--once", "k"]).args(log.witness(&["for=20"])).spawn();
    log.await_runs(1, 1);
    std::fs::create_dir(bed.side("x").join("once")).unwrap();
    let waiter = bed.dlock().run("x").args(log.witness(&["for=5"])).spawn();
    holder.ended().expect(0).saying("x: released, but --once k is not on record");
    waiter.ended().expect(0).silently();
    log.assert_no_overlap();
    let pause = Duration::from_nanos(log.runs()[1].first - log.runs()[0].last);
    assert!(pause < Duration::from_secs(4), "{pause:?} until the next one had it");
    bed.dlock().run("x").args(["--once", "k"]).sh("echo no").ended().expect(78).saying("once");
}

#[test]
fn a_full_disk_does_not_keep_the_lock_when_the_command_has_ended() {
    if !may_mount() {
        return eprintln!("not played: only root can mount a small disk to fill");
    }
    let bed = FileBed::on_small_disk();
    let go = Go::new();
    let holder = bed.dlock().run("x").args(["--once", "k"]).sh(&go.awaited()).spawn();
    until("it to hold", || state(&bed, "x")["state"] == "held");
    bed.fill();
    go.say();
    holder.ended().expect(0).saying("--once k is not on record").saying("No space left");
    assert_eq!(state(&bed, "x")["state"], "free");
    assert_eq!(bed.beside("x", "tmp."), [""; 0]);
}

#[test]
fn a_key_that_does_not_fit_on_the_disk_is_not_half_on_record() {
    if !may_mount() {
        return eprintln!("not played: only root can mount a small disk to fill");
    }
    let (bed, go) = (FileBed::on_small_disk(), Go::new());
    let key = "monday-and-all-the-rest-of-the-week";
    let holder = bed.dlock().run("x").args(["--once", key]).sh(&go.awaited()).spawn();
    until("it to hold", || state(&bed, "x")["state"] == "held");
    // There is room for so much on the page that the file has already.
    let once = bed.side("x").join("once");
    let before = "x".repeat(4096 - 1 - "monday".len()) + "\n";
    std::fs::write(&once, &before).unwrap();
    bed.fill();
    go.say();
    holder.ended().expect(0).saying(&format!("--once {key} is not on record"));
    assert!(std::fs::read_to_string(&once).unwrap() == before, "half of it is there");
}

#[test]
fn half_a_key_is_none_and_spoils_no_other() {
    let bed = FileBed::new();
    let run = |key: &str| bed.dlock().run("x").args(["--once", key]).sh("echo ran").ended().expect(0).silently().stdout;
    assert_eq!(run("monday"), "ran\n");
    let once = bed.side("x").join("once");
    std::fs::write(&once, "monday\ntues").unwrap();
    assert_eq!((run("monday"), run("wednesday")), ("".into(), "ran\n".into()));
    assert_eq!((run("wednesday"), run("tues")), ("".into(), "ran\n".into()));
    assert_eq!((run("tues"), run("monday")), ("".into(), "".into()));
}

#[test]
fn nobody_who_stops_waiting_stays_on_record() {
    let (bed, go) = (FileBed::new(), Go::new());
    let once = ["--once", "k"];
    let holder = bed.dlock().run("x").args(once).sh(&go.awaited()).spawn();
    until("it to hold", || state(&bed, "x")["state"] == "held");
    let too_late = bed.dlock().run("x").args(once).sh("echo no").spawn();
    let mut killed = bed.dlock().run("x").sh("echo no").spawn();
    until("two to wait", || state(&bed, "x")["waiters"].as_array().unwrap().len() == 2);
    killed.kill();
    assert_eq!(bed.beside("x", "waiting/waiter.").len(), 2);
    go.say();
    holder.ended().expect(0);
    assert_eq!(too_late.ended().expect(0).silently().stdout, "");
    bed.dlock().run("x").sh("exit 0").ended().expect(0).silently();
    assert_eq!(bed.beside("x", "waiting/waiter."), [""; 0]);
}

#[test]
fn a_pipe_in_the_place_of_a_file_keeps_nobody_waiting() {
    let bed = FileBed::new();
    let with_pipe = |name: &str, pipe: &Path, options: &[&str], code: i32| {
        bed.dlock().run(name).sh("exit 0").ended().expect(0);
        let _ = std::fs::remove_file(pipe);
        std::fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        mkfifo(pipe, Mode::S_IRWXU).unwrap();
        bed.dlock().run(name).arg("-n").args(options).sh("exit 0").ended().expect(code);
        bed.dlock().args(["status", name]).ended().expect(0);
    };
    with_pipe("lock", &bed.lock_file("lock"), &[], 78);
    let cases: [(&str, &[&str], i32); 8] = [
        ("token", &[], 78),
        ("once", &["--once", "k"], 78),
        ("mutex", &["--shared"], 78),
        ("slot.0", &["--slots", "2"], 78),
        ("last-run", &[], 0),
        ("holder.them", &[], 0),
        ("waiting/waiter.them", &[], 0),
        ("turn", &[], 0),
    ];
    for (file, options, code) in cases {
        let name = file.replace('/', ".");
        with_pipe(&name, &bed.side(&name).join(file), options, code);
    }
}
