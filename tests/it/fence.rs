//! `dlock fence`: the resource's side of fencing tokens.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{Dlock, FileBed, lines, living_with, unique, until};

fn fence(resource: &std::path::Path, token: &str) -> Dlock {
    Dlock::new().env("DLOCK_FENCING_TOKEN", token).arg("fence").arg(resource)
}

#[test]
fn fence_lets_equal_and_newer_tokens_pass_and_refuses_older_ones() {
    let bed = FileBed::new();
    let resource = bed.dir().join("data");
    assert_eq!(fence(&resource, "7").sh("echo ran").ended().expect(0).silently().stdout, "ran\n");
    fence(&resource, "7").sh("exit 3").ended().expect(3);
    fence(&resource, "9").sh("exit 0").ended().expect(0);
    let stale = fence(&resource, "8").sh("echo no").ended().expect(79).saying("token 8 is older than 9");
    assert_eq!(stale.stdout, "");
    fence(&resource, "1").args(["--token", "10"]).sh("exit 0").ended().expect(0);

    Dlock::new().arg("fence").arg(&resource).sh("echo no").ended().expect(64).saying("which token?");
    fence(&resource, "11").args(["--", "/nonexistent/program"]).ended().expect(127);
    fence(&bed.dir().join("no/such/place"), "11").sh("echo no").ended().expect(78);
    // A directory has its mark beside it, too.
    fence(&bed.dir().join("directory/"), "5").sh("exit 0").ended().expect(0);
    fence(&bed.dir().join("directory"), "4").sh("echo no").ended().expect(79);
    std::fs::write(bed.dir().join("data.fence"), "garbage").unwrap();
    fence(&resource, "12").sh("echo no").ended().expect(78).saying("not a fencing mark");
}

#[test]
fn no_older_token_gets_by_through_a_link() {
    let bed = FileBed::new();
    let at = |name: &str| bed.dir().join(name);
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, at(name)).unwrap();
    std::fs::create_dir(at("releases")).unwrap();
    link("releases", "current");
    link("../data", "releases/data");
    fence(&at("releases"), "9").sh("exit 0").ended().expect(0);
    fence(&at("current"), "8").sh("echo no").ended().expect(79);
    fence(&at("current/"), "8").sh("echo no").ended().expect(79);
    fence(&at("current/."), "8").sh("echo no").ended().expect(79);
    // What a link leads to need not be there yet.
    fence(&at("current/data"), "5").sh("exit 0").ended().expect(0);
    fence(&at("data"), "4").sh("echo no").ended().expect(79);
    std::fs::write(at("data"), "").unwrap();
    fence(&at("releases/data"), "4").sh("echo no").ended().expect(79);
    assert!(at("data.fence").exists() && at("releases.fence").exists() && !at("current.fence").exists());
}

#[test]
fn a_fence_says_what_it_waits_for_and_speaks_json() {
    let bed = FileBed::new();
    let resource = bed.dir().join("data");
    let first = fence(&resource, "1").sh("echo up; exec sleep 1000").spawn();
    until("the first to run", || first.stdout().contains("up"));
    let waits = fence(&resource, "2").sh("exit 0").spawn();
    let json = fence(&resource, "2").env("DLOCK_LOG", "json").sh("exit 0").spawn();
    until("a word", || waits.stderr().contains("waiting for another fence") && json.stderr().ends_with("}\n"));
    let said: Value = serde_json::from_str(&json.stderr()).unwrap();
    assert_eq!((&said["event"], &said["resource"]), (&"fence-busy".into(), &resource.to_str().unwrap().into()));
    drop(first);
    waits.ended().expect(0);
    json.ended().expect(0);
    let stale = fence(&resource, "1").args(["--log", "json"]).sh("echo no").ended().expect(79).stderr;
    let stale: Value = serde_json::from_str(&stale).unwrap();
    assert_eq!((&stale["event"], &stale["exit_code"]), (&"failed".into(), &79.into()));
}

#[test]
fn no_older_token_acts_after_a_newer_one() {
    let bed = FileBed::new();
    let (resource, acts) = (bed.dir().join("data"), bed.dir().join("acts"));
    // A fixed shuffle of 1 to 50.
    let tokens = (0..50).map(|n| (n * 37) % 50 + 1);
    let running: Vec<_> = tokens
        .map(|token| fence(&resource, &token.to_string()).sh(&format!("echo {token} >>{}", acts.display())).spawn())
        .collect();
    let codes: Vec<_> = running.into_iter().map(|one| one.ended().code).collect();
    assert!(codes.iter().all(|code| matches!(code, Some(0 | 79))), "{codes:?}");
    let acted: Vec<u32> = lines(&acts).iter().map(|line| line.parse().unwrap()).collect();
    assert!(acted.is_sorted(), "{acted:?}");
    assert_eq!(acted.last(), Some(&50));
}

#[test]
fn a_fence_lasts_as_long_as_anything_of_its_command() {
    let bed = FileBed::new();
    let (resource, mark) = (bed.dir().join("data"), unique("mark"));
    let first = fence(&resource, "1").env("MARK", &mark).sh("sleep 1000 & echo $! >pid; wait").configure(|command| {
        command.current_dir(bed.dir());
    });
    let first = first.spawn();
    until("it to run", || !lines(&bed.dir().join("pid")).is_empty());
    first.signal(Signal::SIGKILL);
    let mut second = fence(&resource, "2").sh("exit 0").spawn();
    until("it to wait in flock", || {
        std::fs::read_to_string(format!("/proc/{}/wchan", second.pid())).is_ok_and(|place| place.contains("lock"))
            || std::fs::read_to_string("/proc/locks").is_ok_and(|all| all.contains(&format!("{}", second.pid())))
    });
    assert!(!second.has_ended(), "the killed one's child still acts");
    for pid in living_with(&mark) {
        crate::support::signal(pid, Signal::SIGKILL);
    }
    second.ended().expect(0);
}
