//! The file backend: together with flock(1), and with a directory that is not as it should be.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use serde_json::Value;

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
    bed.dlock().args(["force-release", "x", "--yes"]).ended().expect(77).saying("other than dlock");

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
fn a_dlock_that_is_stopped_while_it_lets_go_is_ended_with_its_lease() {
    let bed = FileBed::new();
    // Whoever writes into a pipe that nobody reads waits, and so does the release.
    let stuck = format!("mkfifo {}", bed.lock_file("x").with_extension("d").join("once").display());
    let holder = bed.dlock().run("x").args(["--once", "k", "--ttl", "13s"]).sh(&stuck).spawn();
    until("its guardian to have gone", || {
        let children = children_of(holder.pid());
        !children.is_empty() && children.into_iter().all(|child| !is_alive(child))
    });
    holder.signal(Signal::SIGSTOP);
    bed.dlock().run("x").sh("exit 0").ended().expect(0).silently();
    assert!(!is_alive(holder.pid()), "stopped, and yet the lock is free?");
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
fn directories_that_others_could_tamper_with_are_refused() {
    let bed = FileBed::new();
    let at = |path: &str, code: i32, says: &str| {
        let url = format!("file://{}/{path}", bed.dir().display());
        let run = Dlock::new().env("DLOCK_BACKEND", &url).run("x").sh("echo no").ended().expect(code);
        assert_eq!(run.saying(says).stdout, "");
    };
    at("missing", 78, "does not exist");
    std::fs::create_dir(bed.dir().join("real")).unwrap();
    symlink(bed.dir().join("real"), bed.dir().join("link")).unwrap();
    at("link", 77, "symbolic link");
    std::fs::write(bed.dir().join("plain"), "").unwrap();
    at("plain", 78, "not a directory");
    let open = bed.dir().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o1777)).unwrap();
    at("open", 77, "written by everybody");
    symlink("/etc/passwd", bed.dir().join("real/x.lock")).unwrap();
    at("real", 77, "x.lock");
    if geteuid().is_root() {
        let foreign = bed.dir().join("foreign");
        std::fs::create_dir(&foreign).unwrap();
        std::os::unix::fs::chown(&foreign, Some(12345), None).unwrap();
        at("foreign", 77, "belongs to user 12345");
    }
}

#[test]
fn a_directory_we_may_not_write_to_is_77_for_an_ordinary_user() {
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o555)).unwrap();
    let url = format!("file://{}", dir.path().display());
    let dlock = Dlock::new().env("DLOCK_BACKEND", &url).run("x").sh("echo no");
    let dlock = dlock.configure(|command| {
        use std::os::unix::process::CommandExt;
        if geteuid().is_root() {
            command.uid(65534).gid(65534);
        }
    });
    dlock.ended().expect(77).saying("x.lock");
}

#[test]
fn a_full_disk_starts_nothing() {
    // /dev/full takes every open and refuses every write, as a full disk does.
    let bed = FileBed::new();
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    let counter = bed.dir().join("x.d/token");
    std::fs::remove_file(&counter).unwrap();
    if !geteuid().is_root() {
        return;
    }
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    mknod(&counter, SFlag::S_IFCHR, Mode::from_bits_truncate(0o600), makedev(1, 7)).unwrap();
    let ended = bed.dlock().run("x").sh("echo no").ended().expect(69).saying("No space left");
    assert_eq!(ended.stdout, "");
    bed.dlock().args(["status", "--exit-code", "x"]).ended().expect(0);
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
    assert_eq!((&last["outcome"], &last["fencing_token"]), (&"lost".into(), &log.runs()[0].token.into()));
    bed.dlock().run("x").sh("exit 0").ended().expect(0).silently();
    assert_eq!(state(&bed, "x")["last_run"]["outcome"], "exited");
}
