//! dlock and its guardian: what each does when the other is stopped, killed or told too much, and whom they leave alone.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::unistd::geteuid;

use crate::support::{
    Bed, Dlock, FileBed, Log, Proxy, Redis, children_of, is_alive, lines, living_with, signal, unique, until,
};

fn number_in(path: &Path) -> u32 {
    let mut found = None;
    until("a process id to be written", || {
        found = lines(path).first().and_then(|line| line.trim().parse().ok());
        found.is_some()
    });
    found.unwrap()
}

#[test]
fn a_script_without_a_shebang_gets_all_of_its_many_arguments() {
    let bed = FileBed::new();
    let script = bed.dir().join("script");
    std::fs::write(&script, "echo $#\n").unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    for count in [17_000, 100_000] {
        let words = std::iter::repeat_n("x", count);
        let ended = bed.dlock().run("x").arg("--").arg(&script).args(words).ended().expect(0);
        assert_eq!(ended.stdout.trim(), count.to_string());
    }
}

#[test]
fn a_waiter_without_a_guardian_heeds_sigterm() {
    let (bed, log) = (FileBed::new(), Log::new());
    let _holder = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiter = bed.dlock().run("x").args(log.witness(&[])).spawn();
    let guardian = waiter.guardian();
    until("it to wait", || bed.dlock().args(["status", "--json", "x"]).ended().stdout.contains("waiting_since"));
    // Both come at once, so that the signal is heard first.
    waiter.signal(Signal::SIGSTOP);
    until("it to be stopped", || status_of(waiter.pid()).contains("State:\tT"));
    signal(guardian, Signal::SIGKILL);
    waiter.signal(Signal::SIGTERM);
    waiter.signal(Signal::SIGCONT);
    waiter.ended().expect(143);
    let status = bed.dlock().args(["status", "--json", "x"]).ended();
    assert!(!status.stdout.contains("waiting_since"), "it has given up its place: {status:?}");
}

#[test]
fn a_waiter_whose_guardian_is_killed_gives_up_its_place() {
    let (bed, log) = (FileBed::new(), Log::new());
    let _holder = bed.dlock().run("x").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiter = bed.dlock().run("x").args(log.witness(&[])).spawn();
    until("it to wait", || bed.dlock().args(["status", "--json", "x"]).ended().stdout.contains("waiting_since"));
    signal(waiter.guardian(), Signal::SIGKILL);
    waiter.ended().expect(125).saying("guardian");
    let status = bed.dlock().args(["status", "--json", "x"]).ended();
    assert!(!status.stdout.contains("waiting_since"), "{status:?}");
}

/// The socket between the two has room for a few hundred messages.
#[test]
fn a_dlock_that_was_stopped_for_long_hears_of_the_end_all_the_same() {
    let bed = FileBed::new();
    let running = bed.dlock().run("x").args(["--", "sleep", "1000"]).spawn();
    let mut command = 0;
    until("the command to run", || {
        command = children_of(running.guardian()).first().copied().unwrap_or(0);
        command != 0
    });
    running.signal(Signal::SIGSTOP);
    let state = |wanted: char| {
        let stat = std::fs::read_to_string(format!("/proc/{command}/stat")).unwrap();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with(wanted))
    };
    for _ in 0..600 {
        signal(command, Signal::SIGSTOP);
        until("the command to be stopped", || state('T'));
        // The guardian is told by SIGCHLD, and takes note before it sleeps again.
        until("the guardian to have seen it", || {
            let status = std::fs::read_to_string(format!("/proc/{}/wchan", running.guardian()));
            status.is_err() || is_asleep(running.guardian())
        });
        signal(command, Signal::SIGCONT);
    }
    signal(command, Signal::SIGKILL);
    until("the command to be gone", || !is_alive(command));
    running.signal(Signal::SIGCONT);
    running.ended().expect(137);
}

fn status_of(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default()
}

fn is_asleep(pid: u32) -> bool {
    let status = status_of(pid);
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap_or("0").trim();
    status.contains("State:\tS") && u64::from_str_radix(pending, 16) == Ok(0)
}

#[test]
fn a_job_that_was_there_before_dlock_is_left_alone() {
    let bed = FileBed::new();
    let job = bed.dir().join("job");
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let mark = unique("before");
    let script = format!(
        "sleep 1000 & echo $! >{}; exec {dlock} run -b {} --name x -- env MARK={mark} sh -c 'sleep 1000 & sleep 1000'",
        job.display(),
        bed.url()
    );
    let running = Dlock::played_by("sh").args(["-c", &script]).spawn();
    let job = number_in(&job);
    until("the command to run", || living_with(&mark).len() >= 3);
    let guardian = children_of(running.pid()).into_iter().find(|child| *child != job).unwrap();
    signal(guardian, Signal::SIGKILL);
    running.ended().expect(125);
    assert!(living_with(&mark).is_empty());
    assert!(is_alive(job), "it has nothing to do with the lock");
    signal(job, Signal::SIGKILL);
}

#[test]
fn reentrant_is_only_for_what_the_outer_run_has_started() {
    let bed = FileBed::new();
    let environment = bed.dir().join("environment");
    let script = format!("env | grep ^DLOCK_ >{0}.new; mv {0}.new {0}; sleep 1000", environment.display());
    let _outer = bed.dlock().run("x").sh(&script).spawn();
    until("the outer run", || environment.exists());
    let variables = lines(&environment);
    let inner = variables.iter().filter_map(|line| line.split_once('='));
    let inner = inner.fold(bed.dlock(), |dlock, (key, value)| dlock.env(key, value));
    let ended = inner.run("x").arg("--reentrant").sh("echo ran").ended().expect(64).saying("ancestor");
    assert_eq!(ended.stdout, "");
}

/// The number of a process that has been reaped may be given to somebody else, who then leads a group of that number.
#[test]
fn a_signal_never_reaches_a_group_that_has_got_the_commands_number() {
    let bed = FileBed::new();
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display();
    let script = format!(
        r#"cd {dir}
        {dlock} run -b {url} --name x --leftovers wait -- sh -c 'echo $$ >leader; exec setsid -f sleep 1000' & dlock=$!
        while ! [ -s leader ] || [ -d /proc/$(cat leader) ]; do sleep 0.01; done
        echo $(($(cat leader) - 1)) >/proc/sys/kernel/ns_last_pid
        setsid sleep 1000 & innocent=$!
        echo $innocent $(cat leader) >numbers
        while [ "$(ps -o comm= -p $innocent)" != sleep ]; do sleep 0.01; done
        kill -USR1 $dlock
        sleep 0.5
        [ -d /proc/$innocent ] && echo spared >outcome || echo hit >outcome
        "#,
        dir = bed.dir().display(),
        url = bed.url()
    );
    let out = Command::new("unshare").args(["--pid", "--fork", "--mount-proc", "sh", "-c", &script]).output().unwrap();
    let numbers = lines(&bed.dir().join("numbers"));
    match numbers.first().and_then(|line| line.split_once(' ')) {
        Some((innocent, leader)) if innocent == leader => {
            assert_eq!(lines(&bed.dir().join("outcome")), ["spared"], "{out:?}");
        }
        _ => eprintln!("not played: process ids cannot be chosen here: {}", String::from_utf8_lossy(&out.stderr)),
    }
}

/// A frozen path, many processes, a guardian that takes long: dlock helps it, and does not put itself in its place.
#[test]
fn a_guardian_that_is_stopped_when_the_lease_ends_is_woken_and_not_killed() {
    let (redis, log, mark) = (Redis::new(), Log::new(), unique("woken"));
    let path = Proxy::to(redis.port());
    let holder = Dlock::new()
        .env("DLOCK_BACKEND", format!("redis://127.0.0.1:{}", path.port()))
        .env("MARK", &mark)
        .run("x")
        .args(["--ttl", "3s", "--connect-timeout", "30s"])
        .args(log.witness(&["daemons=5"]))
        .spawn();
    log.await_runs(1, 6);
    let waiter = redis.dlock().run("x").args(log.witness(&["for=50"])).spawn();
    signal(holder.guardian(), Signal::SIGSTOP);
    path.freeze();
    waiter.ended().expect(0);
    log.assert_no_overlap();
    // Not 125: the guardian said itself how it ended.
    let ended = holder.ended().expect(79);
    assert!(living_with(&mark).is_empty());
    assert!(!ended.stderr.contains("guardian"), "{ended:?}");
}

#[test]
fn processes_that_may_not_be_killed_are_named() {
    if !geteuid().is_root() {
        return eprintln!("not played: only root can make a setuid program");
    }
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let (source, program) = (dir.path().join("immune.c"), dir.path().join("immune"));
    std::fs::write(&source, "#include <unistd.h>\nint main(void) { return setuid(0) || sleep(4); }\n").unwrap();
    let made = Command::new("cc").arg("-o").arg(&program).arg(&source).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let ended = Dlock::played_by("setpriv")
        .env("DLOCK_BACKEND", format!("file://{}/locks", dir.path().display()))
        .args(["--reuid", "12321", "--regid", "12321", "--clear-groups", "--"])
        .args(["sh", "-c", "mkdir -m 700 \"$1\" && shift && exec \"$@\"", "sh"])
        .arg(dir.path().join("locks"))
        .arg(assert_cmd::cargo::cargo_bin!("dlock"))
        .run("x")
        .args(["--timeout", "500ms", "--kill-after", "100ms", "--"])
        .arg(&program)
        .ended();
    if ended.code == Some(1) {
        return eprintln!("not played: setuid programs have no effect here: {ended:?}");
    }
    ended.expect(124).saying("not permitted to kill immune (");
}

/// What it finds when it wakes is old; that the lease was renewed meanwhile is behind it in the same queue.
#[test]
fn a_guardian_that_was_stopped_while_the_lease_was_renewed_goes_on() {
    let (redis, log) = (Redis::new(), Log::new());
    let holder = redis.dlock().run("x").args(["--ttl", "2s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    signal(holder.guardian(), Signal::SIGSTOP);
    // Four renewals are more than one lease.
    let (mut renewals, mut left) = (0, i64::MAX);
    until("the lease to be renewed four times", || {
        let now: i64 = redis.does(&["PTTL", "dlock:x"]).trim().parse().unwrap();
        renewals += usize::from(now > left);
        left = now;
        renewals == 4
    });
    signal(holder.guardian(), Signal::SIGCONT);
    log.await_beat();
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
}

/// As by `pkill -STOP -f 'dlock run'`: the guardian has the same command line.
#[test]
fn a_guardian_that_is_stopped_together_with_dlock_wakes_in_time() {
    let (redis, log) = (Redis::new(), Log::new());
    let holder = redis.dlock().run("x").args(["--ttl", "3s"]).args(log.witness(&["daemons=3"])).spawn();
    log.await_runs(1, 4);
    let waiter = redis.dlock().run("x").args(log.witness(&["for=50"])).spawn();
    holder.signal(Signal::SIGSTOP);
    signal(holder.guardian(), Signal::SIGSTOP);
    waiter.ended().expect(0);
    log.assert_no_overlap();
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(79);
}

#[test]
fn reentrant_is_refused_inside_a_run_that_leaves_processes_behind() {
    let bed = FileBed::new();
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let inner = format!("{dlock} run -b {} --name x --reentrant -- echo ran", bed.url());
    let ended = bed.dlock().run("x").args(["--leftovers", "leave"]).sh(&inner).ended().expect(64);
    assert_eq!(ended.stdout, "");
    bed.dlock().run("x").args(["--leftovers", "wait"]).sh(&inner).ended().expect(0);
}
