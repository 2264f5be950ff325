//! The promise under pressure: starved processors, large trees, fork bombs, a /proc that is taken away. In every scene a
//! holder's path to Redis freezes, its lease runs out, and a waiter's command begins. By then every process of the first
//! command is dead or has SIGKILL pending, so that none of them runs any more.
//!
//! The suite plays small scenes. `tests/run --pressure` plays the large ones, and prints the table of docs/faults.md.

use std::fmt;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use tempfile::TempDir;

use crate::support::{Bed, Dlock, Log, Proxy, Redis, Running, living_with, unique};

/// Its processes note their last beat, on CLOCK_BOOTTIME, in one shared file: thousands of them can.
const TREE: &str = r#"
import mmap, os, resource, signal, struct, sys, time
shape, size, ready, beats = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
SLOTS = 65536
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(beats, "w+b") as file:
    file.truncate(8 * SLOTS)
    memory = mmap.mmap(file.fileno(), 8 * SLOTS)
def beat(slot):
    struct.pack_into("=q", memory, 8 * (slot % SLOTS), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
def told():
    os.close(os.open(ready, os.O_CREAT | os.O_WRONLY))
def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except OSError:
        pass
if shape == "bomb":
    resource.setrlimit(resource.RLIMIT_NPROC, (size, size))
    told()
    while True:
        beat(os.getpid())
        try:
            child = os.fork() == 0
        except OSError:
            reap()
            time.sleep(0.0005)
            continue
        if child:
            os.setsid()
            if os.urandom(1)[0] < 40:
                os._exit(0)
for number in range(size):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            beat(number)
            if shape == "daemons":
                time.sleep(0.02)
    if number % 50 == 0:
        reap()
told()
time.sleep(1000)
"#;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// In sessions of their own, awake every 20 ms.
    Daemons,
    /// In sessions of their own, never asleep.
    Spinners,
    /// Forks whenever the limit of processes lets it, each child in a session of its own.
    Bomb,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Shape::Daemons => "daemons",
            Shape::Spinners => "spinners",
            Shape::Bomb => "fork bomb, at most",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    All,
    /// Of one processor, in percent, by a quota of a cgroup.
    Percent(u32),
    /// What others leave over (SCHED_IDLE).
    Idle,
    /// Beside real-time processes that never sleep, one for each processor.
    BesideRealTime,
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Share::All => f.write_str("all"),
            Share::Percent(percent) => write!(f, "{:.2} of a processor", f64::from(*percent) / 100.0),
            Share::Idle => f.write_str("what others leave (chrt -i)"),
            Share::BesideRealTime => f.write_str("beside real-time spinners"),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Scene {
    shape: Shape,
    size: usize,
    share: Share,
    ttl: u64,
    /// Not root, who may raise its guardian's priority.
    ordinary_user: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    /// The command ran until its lease could not be kept.
    Kept,
    /// The guardian found that it would need too much of the lease.
    EndedEarly,
    /// By so many milliseconds.
    Overlapped(u64),
}

/// An ordinary user of no other process.
const USER: u32 = 54_321;

struct Stage {
    redis: Redis,
    path: Proxy,
    log: Log,
    dir: TempDir,
    mark: String,
    group: Option<CpuGroup>,
}

impl Stage {
    fn new(share: Share) -> Option<Stage> {
        let redis = Redis::new();
        let path = Proxy::to(redis.port());
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let group = match share {
            Share::Percent(percent) => Some(CpuGroup::new(percent)?),
            _ => None,
        };
        Some(Stage { redis, path, log: Log::new(), dir, mark: unique("pressed"), group })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn holder(&self, scene: Scene) -> Running {
        let (group, share) = (self.group.as_ref().map(CpuGroup::members), scene.share);
        let user = scene.ordinary_user && geteuid().is_root();
        let dlock = Dlock::new().env("DLOCK_BACKEND", format!("redis://127.0.0.1:{}", self.path.port()));
        let shape = if scene.shape == Shape::Bomb { "bomb" } else { word(scene.shape) };
        dlock
            .env("MARK", &self.mark)
            .run("x")
            .args(["-v", "--ttl", &format!("{}s", scene.ttl), "--connect-timeout", "60s"])
            .args(["--", "python3", "-c", TREE, shape, &scene.size.to_string()])
            .args([self.file("ready"), self.file("beats")])
            .configure(move |command| {
                #[allow(unsafe_code)]
                // SAFETY: one write(2) and one system call between fork and exec.
                unsafe {
                    command.pre_exec(move || {
                        if let Some(members) = &group {
                            std::fs::write(members, "0")?;
                        }
                        if share == Share::Idle {
                            let none = nix::libc::sched_param { sched_priority: 0 };
                            nix::libc::sched_setscheduler(0, nix::libc::SCHED_IDLE, &raw const none);
                        }
                        // Last: only root may join the group.
                        if user {
                            nix::unistd::setgid(USER.into())?;
                            nix::unistd::setuid(USER.into())?;
                        }
                        Ok(())
                    });
                }
            })
            .spawn()
    }

    /// The last beat of any process of the first command.
    fn last_beat(&self) -> u64 {
        let beats = std::fs::read(self.file("beats")).unwrap_or_default();
        beats.chunks_exact(8).map(|beat| u64::from_ne_bytes(beat.try_into().unwrap())).max().unwrap_or(0)
    }
}

fn word(shape: Shape) -> &'static str {
    if shape == Shape::Daemons { "daemons" } else { "spinners" }
}

/// Everything on a starved machine takes its time.
#[track_caller]
fn patiently(what: &str, mut seen: impl FnMut() -> bool) {
    let limit = Instant::now() + Duration::from_secs(300);
    while !seen() {
        assert!(Instant::now() < limit, "waited five minutes in vain for: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// `meanwhile` happens to the holder when its path freezes. `None`: it cannot be played here.
fn play(scene: Scene, meanwhile: impl FnOnce(&Running)) -> Option<Outcome> {
    let stage = Stage::new(scene.share)?;
    let mut holder = stage.holder(scene);
    patiently("the tree to stand, or to be ended early", || stage.file("ready").exists() || holder.has_ended());
    let mut waiter = stage.redis.dlock().run("x").args(stage.log.witness(&["for=1000"])).spawn();
    patiently("the waiter", || {
        stage.redis.dlock().args(["status", "--json", "x"]).ended().stdout.contains("waiting_since")
            || waiter.has_ended()
    });
    let _spinners = (scene.share == Share::BesideRealTime).then(real_time_spinners);
    stage.path.freeze();
    meanwhile(&holder);
    patiently("the next command to end", || waiter.has_ended());
    let began = stage.log.runs()[0].first;
    let overlap = stage.last_beat().saturating_sub(began);
    patiently("the first dlock to end", || holder.has_ended());
    let ended = holder.ended();
    assert!(matches!(ended.code, Some(79 | 125)), "{ended:?}");
    assert!(!ended.stderr.contains("guardian process was killed"), "nobody did: {ended:?}");
    assert!(living_with(&stage.mark).is_empty(), "{scene:?}");
    Some(match overlap {
        0 if ended.stderr.contains("too short to kill") => Outcome::EndedEarly,
        0 => Outcome::Kept,
        nanos => Outcome::Overlapped(nanos.div_ceil(1_000_000)),
    })
}

#[track_caller]
fn expect_no_overlap(scene: Scene) {
    match play(scene, |_| ()) {
        Some(Outcome::Overlapped(millis)) => panic!("{millis} ms of overlap: {scene:?}"),
        Some(_) => {}
        None => eprintln!("not played: no cgroup with a quota can be made here"),
    }
}

/// A cgroup with a share of one processor, where root may make one: version 2, or the older cpu controller.
struct CpuGroup(PathBuf);

impl CpuGroup {
    fn new(percent: u32) -> Option<CpuGroup> {
        let quota = percent * 1000;
        let make = |base: &str, limits: &[(&str, String)]| {
            let path = Path::new(base).join(unique("pressure"));
            std::fs::create_dir(&path).ok()?;
            let group = CpuGroup(path);
            // Only what is there already: in an ordinary directory, a file would be made that limits nothing.
            let write = |file: &str, limit: &str| {
                File::options()
                    .write(true)
                    .open(group.0.join(file))
                    .and_then(|mut file| file.write_all(limit.as_bytes()))
            };
            limits.iter().all(|(file, limit)| write(file, limit).is_ok()).then_some(group)
        };
        let controllers = File::options().write(true).open("/sys/fs/cgroup/cgroup.subtree_control");
        let _ = controllers.and_then(|mut controllers| controllers.write_all(b"+cpu"));
        make("/sys/fs/cgroup", &[("cpu.max", format!("{quota} 100000"))]).or_else(|| {
            make(
                "/sys/fs/cgroup/cpu",
                &[("cpu.cfs_period_us", "100000".into()), ("cpu.cfs_quota_us", quota.to_string())],
            )
        })
    }

    fn members(&self) -> PathBuf {
        self.0.join("cgroup.procs")
    }
}

impl Drop for CpuGroup {
    fn drop(&mut self) {
        // Its last processes may still be on their way out.
        for _ in 0..1000 {
            if std::fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

struct Spinners(Vec<std::process::Child>);

/// The kernel ends each after 20 s of processor time: nothing else might get to run that could.
fn real_time_spinners() -> Spinners {
    let count = std::thread::available_parallelism().map_or(2, usize::from);
    let spin = |_| {
        let mut spinner = Command::new("prlimit");
        spinner.args(["--rttime=20000000:20000000", "chrt", "-f", "50", "sh", "-c", "while :; do :; done"]);
        spinner.spawn().unwrap()
    };
    Spinners((0..count).map(spin).collect())
}

impl Drop for Spinners {
    fn drop(&mut self) {
        for spinner in &mut self.0 {
            let _ = spinner.kill();
            let _ = spinner.wait();
        }
    }
}

const SMALL: Scene = Scene { shape: Shape::Daemons, size: 40, share: Share::All, ttl: 3, ordinary_user: true };

#[test]
fn hundreds_of_daemons_are_dead_in_time() {
    expect_no_overlap(Scene { size: 600, ..SMALL });
}

#[test]
fn a_fork_bomb_is_dead_in_time() {
    if !geteuid().is_root() {
        return eprintln!("not played: only root can be a user whose processes are not ours");
    }
    expect_no_overlap(Scene { shape: Shape::Bomb, size: 60, ..SMALL });
}

#[test]
fn spinners_with_a_tenth_of_a_processor_are_dead_in_time() {
    expect_no_overlap(Scene {
        shape: Shape::Spinners,
        size: 20,
        share: Share::Percent(10),
        ttl: 6,
        ordinary_user: false,
    });
}

#[test]
fn idle_spinners_are_dead_in_time() {
    expect_no_overlap(Scene { shape: Shape::Spinners, size: 10, share: Share::Idle, ..SMALL });
}

#[test]
fn a_limit_of_open_files_does_not_blind_the_guardian() {
    let lower = |holder: &Running| {
        for pid in [holder.guardian(), holder.pid()] {
            let done = Command::new("prlimit").args(["--nofile=8:8", "--pid", &pid.to_string()]).status().unwrap();
            assert!(done.success());
        }
    };
    let outcome = play(Scene { ordinary_user: false, ..SMALL }, lower);
    assert!(!matches!(outcome, Some(Outcome::Overlapped(_))), "{outcome:?}");
}

/// In a mount namespace of the holder's own: unmounted, and covered by something else.
#[test]
fn a_proc_that_is_taken_away_does_not_blind_the_guardian() {
    for how in ["umount -l /proc", "mount -t tmpfs tmpfs /proc"] {
        let stage = Stage::new(Share::All).unwrap();
        let dlock = assert_cmd::cargo::cargo_bin!("dlock");
        let mut holder = Dlock::played_by("unshare")
            .env("MARK", &stage.mark)
            .args(["--mount", "--propagation", "private", "--"])
            .arg(dlock)
            .args(["run", "--name", "x", "--ttl", "3s", "--connect-timeout", "30s", "-b"])
            .arg(format!("redis://127.0.0.1:{}", stage.path.port()))
            .args(["--", "python3", "-c", TREE, "daemons", "40"])
            .args([stage.file("ready"), stage.file("beats")])
            .spawn();
        patiently("the tree to stand", || stage.file("ready").exists() || holder.has_ended());
        if holder.has_ended() {
            return eprintln!("not played: no namespaces here: {}", holder.stderr());
        }
        let mut waiter = stage.redis.dlock().run("x").args(stage.log.witness(&["for=200"])).spawn();
        let pid = holder.pid().to_string();
        let done = Command::new("nsenter").args(["-t", &pid, "-m", "sh", "-c", how]).output().unwrap();
        assert!(done.status.success(), "{done:?}");
        stage.path.freeze();
        patiently("the next command to end", || waiter.has_ended());
        let began = stage.log.runs()[0].first;
        assert!(stage.last_beat() < began, "{how}: processes lived on");
        holder.ended().expect(79);
        assert!(living_with(&stage.mark).is_empty(), "{how}");
    }
}

/// The table of docs/faults.md.
#[test]
#[allow(clippy::print_stdout)]
fn the_whole_table() {
    let Ok(words) = std::env::var("DLOCK_PRESSURE") else { return };
    const BOTH: &[u64] = &[3, 30];
    const SHORT: &[u64] = &[3];
    let scenes = [
        (Shape::Daemons, 100, Share::All, SHORT),
        (Shape::Daemons, 1000, Share::All, BOTH),
        (Shape::Daemons, 3000, Share::All, BOTH),
        (Shape::Spinners, 60, Share::Percent(10), BOTH),
        (Shape::Spinners, 60, Share::Percent(5), BOTH),
        (Shape::Spinners, 20, Share::Idle, SHORT),
        (Shape::Spinners, 4, Share::BesideRealTime, SHORT),
        (Shape::Bomb, 150, Share::All, SHORT),
        (Shape::Bomb, 500, Share::All, BOTH),
    ];
    println!("| processes | processor | ttl | root | ordinary user |\n| --- | --- | --- | --- | --- |");
    let mut overlapped = 0;
    for (shape, size, share, ttls) in scenes {
        let row = format!("{shape} {size} | {share}");
        for &ttl in ttls.iter().filter(|_| row.contains(&words)) {
            let cells = [false, true].map(|ordinary_user| {
                // Root's processes are not limited, and only root may make real-time ones.
                let impossible = if ordinary_user { share == Share::BesideRealTime } else { shape == Shape::Bomb };
                if impossible {
                    return "-".to_owned();
                }
                match play(Scene { shape, size, share, ttl, ordinary_user }, |_| ()) {
                    Some(Outcome::Kept) => "kept".to_owned(),
                    Some(Outcome::EndedEarly) => "ended early".to_owned(),
                    Some(Outcome::Overlapped(millis)) => {
                        overlapped += 1;
                        format!("overlap {millis} ms")
                    }
                    None => "not played".to_owned(),
                }
            });
            println!("| {row} | {ttl}s | {} | {} |", cells[0], cells[1]);
        }
    }
    assert_eq!(overlapped, 0);
}
