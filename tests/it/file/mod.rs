//! The file backend: together with flock(1), and with files that are not where they should be.

mod disk;
mod users;

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Bed, Dlock, FileBed, Log, children_of, is_alive, living_with, signal, unique, until};

/// flock(1), holding the same file.
struct Flock(Child);

impl Flock {
    fn on(bed: &FileBed, name: &str, log: &Log) -> Flock {
        let mut command = Command::new("flock");
        command.arg("--no-fork").arg(bed.lock_file(name)).args(&log.witness(&[])[1..]);
        // So that the witness's beats can be told from those of dlock's commands.
        command.env("DLOCK_FENCING_TOKEN", "1").stdout(Stdio::null());
        let child = command.spawn().unwrap();
        log.await_runs(1, 1);
        Flock(child)
    }
}

impl Drop for Flock {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a command can be made to wait for.
struct Go(TempDir);

impl Go {
    fn new() -> Go {
        Go(tempfile::tempdir().unwrap())
    }

    fn awaited(&self) -> String {
        format!("until [ -e {}/go ]; do sleep 0.05; done", self.0.path().display())
    }

    fn say(&self) {
        std::fs::write(self.0.path().join("go"), "").unwrap();
    }
}

fn state(bed: &FileBed, name: &str) -> Value {
    let json = bed.dlock().args(["status", "--json", name]).ended().expect(0).stdout;
    serde_json::from_str::<Value>(&json).unwrap()[0].clone()
}

fn has_inotify(pid: u32) -> bool {
    let mut open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    open.any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target.ends_with("anon_inode:inotify")))
}

#[test]
fn flock_keeps_dlock_out_and_dlock_takes_over_when_it_ends() {
    let (bed, log) = (FileBed::new(), Log::new());
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    let foreign = Flock::on(&bed, "x", &log);
    bed.dlock().run("x").arg("-n").sh("echo no").ended().expect(75).saying(&format!("pid {}", foreign.0.id()));
    let seen = state(&bed, "x");
    assert_eq!((&seen["state"], &seen["holders"][0]["pid"]), (&"held".into(), &foreign.0.id().into()));
    assert_eq!(seen["holders"][0]["owner"], Value::Null);
    bed.dlock().args(["force-release", "x", "--yes"]).ended().expect(77).saying("its holder is not dlock");

    let waiter = bed.dlock().run("x").args(log.witness(&["for=20"])).spawn();
    until("dlock to wait", || state(&bed, "x")["waiters"].as_array().unwrap().len() == 1);
    drop(foreign);
    waiter.ended().expect(0).silently();
    log.assert_no_overlap();
}

#[test]
fn dlock_keeps_flock_out_in_every_mode() {
    for options in [&[][..], &["--shared"], &["--slots", "2"]] {
        let (bed, log) = (FileBed::new(), Log::new());
        let holder = bed.dlock().run("x").args(options).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        let flock = |how: &str| {
            Command::new("flock").args([how, "-n"]).arg(bed.lock_file("x")).arg("true").status().unwrap().code()
        };
        assert_eq!(flock("--exclusive"), Some(1), "{options:?}");
        assert_eq!(flock("--shared"), Some(i32::from(options.is_empty())), "{options:?}");
        holder.signal(Signal::SIGTERM);
        holder.ended().expect(143);
        assert_eq!(flock("--exclusive"), Some(0), "{options:?}");
    }
}

#[test]
fn a_deleted_or_replaced_lock_file_is_a_lost_lock() {
    type Harm = fn(&FileBed);
    let harms: [(&str, Harm); 4] = [
        ("deleted", |bed| std::fs::remove_file(bed.lock_file("x")).unwrap()),
        ("replaced", |bed| {
            std::fs::write(bed.dir().join("new"), "").unwrap();
            std::fs::rename(bed.dir().join("new"), bed.lock_file("x")).unwrap();
        }),
        ("moved", |bed| std::fs::rename(bed.lock_file("x"), bed.dir().join("old")).unwrap()),
        ("gone with all", |bed| std::fs::remove_dir_all(bed.dir()).unwrap()),
    ];
    for (harm, inflict) in harms {
        let (bed, log) = (FileBed::new(), Log::new());
        let holder = bed.dlock().run("x").args(["--ttl", "10m"]).args(log.witness(&["ignore-term"])).spawn();
        log.await_runs(1, 1);
        inflict(&bed);
        // With a ttl of ten minutes no renewal would notice within the minute that `ended` waits.
        holder.ended().expect(79).saying("deleted or replaced");
        assert!(bed.dir().exists() == (harm != "gone with all"));
    }
}

#[test]
fn a_deleted_or_replaced_slot_is_a_lost_lock() {
    for replaced in [true, false] {
        let (bed, log) = (FileBed::new(), Log::new());
        let holder = bed.dlock().run("x").args(["--ttl", "10m", "--slots", "2"]).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        until("the first look to be over", || has_inotify(holder.pid()));
        let slot = bed.side("x").join("slot.0");
        if replaced {
            std::fs::write(bed.dir().join("new"), "").unwrap();
            std::fs::rename(bed.dir().join("new"), slot).unwrap();
        } else {
            std::fs::remove_file(slot).unwrap();
        }
        holder.ended().expect(79).saying("deleted or replaced");
    }
}

#[test]
fn a_lock_file_that_moved_away_with_a_directory_further_up_is_a_lost_lock() {
    let (bed, log) = (FileBed::new(), Log::new());
    let (above, locks) = (bed.dir().join("a/b"), bed.dir().join("a/b/locks"));
    std::fs::create_dir_all(&locks).unwrap();
    let dlock = || Dlock::new().env("DLOCK_BACKEND", format!("file://{}", locks.display())).run("x");
    let holder = dlock().args(["--ttl", "10m"]).args(log.witness(&["ignore-term"])).spawn();
    log.await_runs(1, 1);
    until("the first look to be over", || has_inotify(holder.pid()));
    std::fs::rename(&above, bed.dir().join("a/c")).unwrap();
    std::fs::create_dir_all(&locks).unwrap();
    holder.ended().expect(79).saying("deleted or replaced");
    dlock().arg("-n").sh("exit 0").ended().expect(0).silently();
}

#[test]
fn a_lock_file_that_a_link_does_not_lead_to_any_more_is_a_lost_lock() {
    let (bed, log) = (FileBed::new(), Log::new());
    let (link, locks) = (bed.dir().join("link"), ["one", "two"].map(|name| bed.dir().join(name)));
    for locks in &locks {
        std::fs::create_dir_all(locks.join("locks")).unwrap();
    }
    std::os::unix::fs::symlink(&locks[0], &link).unwrap();
    let dlock = Dlock::new().env("DLOCK_BACKEND", format!("file://{}/locks", link.display())).run("x");
    let holder = dlock.args(["--ttl", "10m"]).args(log.witness(&["ignore-term"])).spawn();
    log.await_runs(1, 1);
    until("the first look to be over", || has_inotify(holder.pid()));
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&locks[1], &link).unwrap();
    holder.ended().expect(79).saying("deleted or replaced");
}

#[test]
fn a_lock_file_that_something_is_mounted_over_is_a_lost_lock() {
    let (bed, log) = (FileBed::new(), Log::new());
    let (above, locks) = (bed.dir().join("a"), bed.dir().join("a/locks"));
    std::fs::create_dir_all(&locks).unwrap();
    let namespaces = ["--map-root-user", "--mount"];
    if !Command::new("unshare").args(namespaces).arg("true").status().unwrap().success() {
        eprintln!("skipped: no namespaces here");
        return;
    }
    let dlock = Dlock::played_by("unshare").args(namespaces).arg(assert_cmd::cargo::cargo_bin!("dlock"));
    let dlock = dlock.env("DLOCK_BACKEND", format!("file://{}", locks.display())).run("x");
    let holder = dlock.args(["--ttl", "10m"]).args(log.witness(&["ignore-term"])).spawn();
    log.await_runs(1, 1);
    until("the first look to be over", || has_inotify(holder.pid()));
    let mut mount = Command::new("nsenter");
    mount.args(["--target", &holder.pid().to_string(), "--user", "--preserve-credentials", "--mount"]);
    assert!(mount.args(["mount", "-t", "tmpfs", "none"]).arg(above).status().unwrap().success());
    holder.ended().expect(79).saying("deleted or replaced");
}

#[test]
fn a_dlock_that_is_stopped_while_it_lets_go_keeps_nobody_out_beyond_its_lease() {
    let bed = FileBed::new();
    bed.dlock().run("x").args(["--once", "k"]).sh("exit 0").ended().expect(0);
    // The release waits a moment for another writer of this file.
    let once = File::open(bed.side("x").join("once")).unwrap();
    once.lock().unwrap();
    let is_held = || !Command::new("flock").arg("-n").arg(bed.lock_file("x")).arg("true").status().unwrap().success();
    let holder = (0..100).find_map(|n| {
        let go = Go::new();
        let holder = bed.dlock().run("x").args(["--ttl", "13s", "--once", &n.to_string()]).sh(&go.awaited()).spawn();
        until("it to hold", is_held);
        let guardian = children_of(holder.pid())[0];
        until("its command to run", || !children_of(guardian).is_empty());
        go.say();
        until("its command to have ended", || children_of(guardian).is_empty());
        holder.signal(Signal::SIGSTOP);
        until("it to stand still", || matches!(state_of(holder.pid()), Some('T' | 'Z') | None));
        // One that was done with it by then has not been caught.
        is_held().then_some(holder)
    });
    let holder = holder.expect("a release that was stopped in the middle");
    bed.dlock().run("x").sh("exit 0").ended().expect(0).silently();
    assert_eq!(state_of(holder.pid()), Some('T'), "its guardian has let go of the lock");
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(0);
}

fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.trim_start().chars().next()
}

#[test]
fn a_waiter_for_a_slot_sleeps_and_gives_up_in_time() {
    let bed = FileBed::new();
    let slots = || bed.dlock().run("x").args(["--slots", "2"]);
    let holders = [0, 1].map(|_| slots().sh("sleep 600").spawn());
    until("both slots to be held", || bed.side("x").exists() && bed.beside("x", "holder.").len() == 2);
    // One that wakes itself over and over has no time to look at the clock.
    slots().args(["--wait", "1s"]).sh("echo no").ended().expect(75);
    let waiter = slots().sh("echo got it").spawn();
    until("the next to wait", || state(&bed, "x")["waiters"].as_array().unwrap().len() == 1);
    holders[0].signal(Signal::SIGTERM);
    assert_eq!(waiter.ended().expect(0).stdout, "got it\n");
}

#[test]
fn whoever_waits_for_a_replaced_file_waits_for_the_new_one() {
    let (bed, log) = (FileBed::new(), Log::new());
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    let _foreign = Flock::on(&bed, "x", &log);
    let waiter = bed.dlock().run("x").sh("echo got it").spawn();
    until("dlock to wait", || state(&bed, "x")["waiters"].as_array().unwrap().len() == 1);
    bed.dlock().args(["force-release", "x", "--yes", "--now"]).ended().expect(0);
    assert_eq!(waiter.ended().expect(0).stdout, "got it\n");
}

#[test]
fn tokens_grow_although_the_counter_is_lost_or_garbage() {
    let bed = FileBed::new();
    let token = || -> u64 {
        let dlock = bed.dlock().run("x").sh("echo $DLOCK_FENCING_TOKEN");
        dlock.ended().expect(0).stdout.trim().parse().unwrap()
    };
    let counter = bed.dir().join("x.d/token");
    let first = token();
    std::fs::remove_file(&counter).unwrap();
    let second = token();
    std::fs::write(&counter, "garbage").unwrap();
    let third = token();
    std::fs::write(&counter, format!("{:020}\n", third + 3_600_000_000)).unwrap();
    let fourth = token();
    assert!(first < second && second < third && fourth == third + 3_600_000_001, "{first} {second} {third} {fourth}");
}

#[test]
fn a_name_too_long_for_a_file_is_64() {
    let bed = FileBed::new();
    let name = "a/".repeat(99) + "a";
    bed.dlock().run(&name).sh("echo no").ended().expect(64).saying("too long");
}

#[test]
fn when_dlock_and_guardian_die_the_next_run_tells_what_became_of_the_last() {
    let (bed, log, mark) = (FileBed::new(), Log::new(), unique("both"));
    let holder = bed.dlock().env("MARK", &mark).run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let guardian = holder.guardian();
    signal(holder.pid(), Signal::SIGSTOP);
    signal(guardian, Signal::SIGSTOP);
    signal(guardian, Signal::SIGKILL);
    signal(holder.pid(), Signal::SIGKILL);
    until("both to be gone", || !is_alive(guardian));
    drop(holder);
    until("PR_SET_PDEATHSIG to have ended the command itself", || living_with(&mark).is_empty());
    let last = state(&bed, "x")["last_run"].clone();
    assert_eq!((&last["outcome"], &last["fencing_token"]), (&"vanished".into(), &log.runs()[0].token.into()));
    bed.dlock().run("x").sh("exit 0").ended().expect(0).silently();
    assert_eq!(state(&bed, "x")["last_run"]["outcome"], "exited");
}

/// dlock in a time namespace of its own, whose machine seems to have been up for longer.
fn in_time_namespace(bed: &FileBed) -> Option<Dlock> {
    let namespace = ["--time", "--boottime", "1000000"];
    if !Command::new("unshare").args(namespace).arg("true").status().unwrap().success() {
        return None;
    }
    let dlock = Dlock::played_by("unshare").args(namespace).arg(assert_cmd::cargo::cargo_bin!("dlock"));
    Some(dlock.env("DLOCK_BACKEND", bed.url()))
}

#[test]
fn what_is_held_on_to_ends_at_the_same_time_in_every_time_namespace() {
    const HOLD: [&str; 2] = ["--hold-at-least", "10m"];
    let bed = FileBed::new();
    if in_time_namespace(&bed).is_none() {
        return eprintln!("not played: only root can make a time namespace");
    }
    let (inside, outside) = (|| in_time_namespace(&bed).unwrap(), || bed.dlock());
    let left = |dlock: Dlock, name: &str| {
        let json = dlock.args(["status", "--json", name]).ended().expect(0).stdout;
        serde_json::from_str::<Value>(&json).unwrap()[0]["holders"][0]["expires_in_ms"].as_u64()
    };
    let is_right = |left: Option<u64>| left.is_some_and(|left| (300_000..=600_000).contains(&left));
    inside().run("in").args(HOLD).sh("exit 0").ended().expect(0);
    outside().run("out").args(HOLD).sh("exit 0").ended().expect(0);
    for name in ["in", "out"] {
        for dlock in [inside(), outside()] {
            let left = left(dlock, name);
            assert!(is_right(left), "{name}: {left:?}");
        }
        // Nobody but the record keeps it now.
        kill_keepers(&bed.lock_file(name));
        for dlock in [inside(), outside()] {
            dlock.run(name).arg("-n").sh("echo no").ended().expect(75);
        }
    }
    // The process that keeps it learns of a renewal, whichever process renews.
    let acquired = inside().args(["acquire", "--name", "lease", "--ttl", "3s", "--json"]).ended().expect(0).stdout;
    let owner = serde_json::from_str::<Value>(&acquired).unwrap()["owner"].as_str().unwrap().to_owned();
    outside().args(["renew", "--name", "lease", "--owner", &owner, "--ttl", "10m"]).ended().expect(0);
    let is_held =
        || !Command::new("flock").arg("-n").arg(bed.lock_file("lease")).arg("true").status().unwrap().success();
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert!(is_held() && is_right(left(inside(), "lease")) && is_right(left(outside(), "lease")));
    kill_keepers(&bed.lock_file("lease"));
}

/// Ends all processes that have this file open.
fn kill_keepers(file: &Path) {
    let has_open = |pid: u32| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        open.into_iter().any(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == file))
    };
    let pids =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let keepers: Vec<u32> = pids.filter(|pid| has_open(*pid)).collect();
    assert!(!keepers.is_empty(), "nobody keeps {file:?}");
    for pid in keepers {
        signal(pid, Signal::SIGKILL);
        until("it to be gone", || !is_alive(pid));
    }
}

/// In a directory that several share, one of them could have others delete what is not its own.
#[test]
fn an_owner_in_a_file_is_no_path() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = bed.dlock().run("x").args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let side = bed.dir().join("x.d");
    let mut records = std::fs::read_dir(&side).unwrap().flatten();
    let record = records.find(|entry| entry.file_name().to_string_lossy().starts_with("holder.")).unwrap();
    let text = std::fs::read_to_string(record.path()).unwrap();
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();

    let (owner, precious) = ("../../../precious", bed.dir().join("precious"));
    let mut record: Value = serde_json::from_str(&text).unwrap();
    record["owner"] = owner.into();
    std::fs::write(side.join("holder.other.1.2"), record.to_string()).unwrap();
    std::fs::create_dir(side.join("revoke...")).unwrap();
    std::fs::write(&precious, "").unwrap();
    assert!(side.join(format!("revoke.{owner}")).exists());
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0);
    bed.dlock().args(["force-release", "x", "--yes"]).ended();
    assert_eq!(std::fs::read_to_string(precious).unwrap(), "");
}
