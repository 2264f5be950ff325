//! Symlinks, hard links, pipes and devices that somebody has put where dlock opens files: none of them leads dlock to a
//! file it was not told to use, and none of them makes it hang.

use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown, symlink};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{geteuid, mkfifo};
use tempfile::TempDir;

use crate::support::{Bed, Dlock, FileBed, until};

/// A user who is neither root nor whoever runs the tests.
const SOMEBODY_ELSE: u32 = 12345;

/// A file and a directory that dlock must not touch.
struct Treasure {
    dir: TempDir,
    before: Vec<(PathBuf, SystemTime, u32)>,
}

impl Treasure {
    fn new() -> Treasure {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("directory")).unwrap();
        // As long as a last run, and a number as a fencing mark is.
        std::fs::write(dir.path().join("file"), format!("{:<511}\n", 5)).unwrap();
        let mut treasure = Treasure { dir, before: Vec::new() };
        treasure.before = treasure.look();
        treasure
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn look(&self) -> Vec<(PathBuf, SystemTime, u32)> {
        let all = ["", "file", "directory"].map(|name| self.at(name));
        all.map(|path| {
            let meta = std::fs::metadata(&path).unwrap();
            (path, meta.modified().unwrap(), meta.mode())
        })
        .into()
    }

    #[track_caller]
    fn assert_untouched(&self, case: &str) {
        assert_eq!(self.look(), self.before, "{case}");
    }
}

/// Puts a symlink in the place of whatever is there.
fn plant_link(at: &Path, target: &Path) {
    clear(at);
    symlink(target, at).unwrap();
    if geteuid().is_root() {
        lchown(at, Some(SOMEBODY_ELSE), None).unwrap();
    }
}

fn clear(at: &Path) {
    match std::fs::symlink_metadata(at) {
        Ok(meta) if meta.is_dir() => std::fs::remove_dir_all(at).unwrap(),
        Ok(_) => std::fs::remove_file(at).unwrap(),
        Err(_) => {}
    }
    std::fs::create_dir_all(at.parent().unwrap()).unwrap();
}

/// Every file that a run opens below a lock directory, with the options that make it do so, and the exit code when
/// something else is in its place. What a run can do without is not an error.
const FILES: [(&str, &[&str], i32); 10] = [
    ("x.lock", &[], 77),
    ("x.d", &[], 77),
    ("x.d/token", &[], 77),
    ("x.d/once", &["--once", "k"], 77),
    ("x.d/mutex", &["--shared"], 77),
    ("x.d/slot.0", &["--slots", "2"], 77),
    ("x.d/last-run", &[], 0),
    ("x.d/holder.them", &[], 0),
    ("x.d/waiting", &[], 0),
    ("x.d/waiting/waiter.them", &[], 0),
];

#[test]
fn no_symlink_below_a_lock_directory_is_followed() {
    for (file, options, code) in FILES {
        for target in ["file", "directory", "missing"] {
            let (bed, treasure) = (FileBed::new(), Treasure::new());
            bed.dlock().run("x").sh("exit 0").ended().expect(0);
            plant_link(&bed.dir().join(file), &treasure.at(target));
            bed.dlock().run("x").arg("-n").args(options).sh("exit 0").ended().expect(code);
            bed.dlock().args(["status", "x"]).ended();
            bed.dlock().args(["force-release", "x", "--yes", "--now"]).ended();
            treasure.assert_untouched(&format!("{file} -> {target}"));
        }
    }
}

#[test]
fn no_waiter_is_recorded_through_a_symlink() {
    let (bed, treasure) = (FileBed::new(), Treasure::new());
    let _holders = [0, 1].map(|_| bed.dlock().run("x").args(["--slots", "2"]).sh("sleep 600").spawn());
    until("both slots to be held", || bed.side("x").exists() && bed.beside("x", "holder.").len() == 2);
    let waiter = || bed.dlock().run("x").args(["--slots", "2", "--wait", "20s"]).sh("echo no");
    plant_link(&bed.side("x").join("waiting"), &treasure.at("directory"));
    waiter().ended().expect(77).saying("x.d/waiting");
    clear(&bed.side("x").join("waiting"));
    plant_link(&bed.side("x").join("turn"), &treasure.at("missing"));
    waiter().ended().expect(77).saying("x.d/turn");
    treasure.assert_untouched("waiting, turn");
}

#[test]
fn what_an_operator_leaves_for_a_holder_goes_through_no_symlink() {
    for (mark, how) in [("revoke", &["--yes"][..]), ("taken", &["--yes", "--now"])] {
        let (bed, treasure) = (FileBed::new(), Treasure::new());
        let holder = bed.dlock().run("x").sh("sleep 600").spawn();
        until("it to hold", || bed.side("x").exists() && bed.beside("x", "holder.").len() == 1);
        let owner = bed.beside("x", "holder.")[0].replace("holder.", "");
        plant_link(&bed.side("x").join(format!("{mark}.{owner}")), &treasure.at("file"));
        bed.dlock().args(["force-release", "x"]).args(how).ended().expect(0);
        holder.ended().expect(79);
        treasure.assert_untouched(mark);
    }
}

#[test]
fn no_hard_link_below_a_lock_directory_is_written_to() {
    for (file, options, code) in [("token", &[][..], 77), ("once", &["--once", "k"], 0), ("last-run", &[], 0)] {
        let (bed, treasure) = (FileBed::new(), Treasure::new());
        bed.dlock().run("x").sh("exit 0").ended().expect(0);
        clear(&bed.side("x").join(file));
        std::fs::hard_link(treasure.at("file"), bed.side("x").join(file)).unwrap();
        let ended = bed.dlock().run("x").arg("-n").args(options).sh("exit 0").ended().expect(code);
        // A last run is put in its place as a new file.
        assert_eq!(ended.stderr.contains("hard link"), file != "last-run", "{ended:#?}");
        treasure.assert_untouched(file);
    }
}

#[test]
fn pipes_and_devices_below_a_lock_directory_keep_nobody_waiting() {
    for (file, options, code) in FILES {
        let code = if code == 77 { 78 } else { code };
        let bed = FileBed::new();
        bed.dlock().run("x").sh("exit 0").ended().expect(0);
        let at = bed.dir().join(file);
        clear(&at);
        mkfifo(&at, Mode::S_IRWXU).unwrap();
        bed.dlock().run("x").arg("-n").args(options).sh("exit 0").ended().expect(code);
        bed.dlock().args(["status", "x"]).ended();
        clear(&at);
        if plant_device(&at) {
            bed.dlock().run("x").arg("-n").args(options).sh("exit 0").ended().expect(code);
        }
    }
}

/// One that is read without end. Only root can make it, and not everywhere.
fn plant_device(at: &Path) -> bool {
    let made = mknod(at, SFlag::S_IFCHR, Mode::S_IRWXU, makedev(1, 5)).is_ok();
    made && std::fs::File::open(at).is_ok()
}

#[test]
fn a_lock_directory_may_be_behind_a_symlink_of_root_or_our_own_and_of_nobody_else() {
    let bed = FileBed::new();
    let (real, link) = (bed.dir().join("real/locks"), bed.dir().join("link"));
    std::fs::create_dir_all(&real).unwrap();
    let run = |path: &str| {
        let url = format!("file://{}/{path}", bed.dir().display());
        Dlock::new().env("DLOCK_BACKEND", url).run("x").sh("exit 0").ended()
    };
    symlink("real", &link).unwrap();
    symlink("locks", bed.dir().join("real/itself")).unwrap();
    run("link/locks").expect(0).silently();
    run("link/itself").expect(0).silently();
    run("link/../real/./locks/").expect(0).silently();
    assert!(real.join("x.lock").exists());
    if !geteuid().is_root() {
        return eprintln!("played in part: only root can be two users");
    }
    lchown(&link, Some(SOMEBODY_ELSE), None).unwrap();
    run("link/locks").expect(77).saying("symbolic link of user 12345");
    run("real/locks").expect(0).silently();
}

#[test]
fn only_what_every_member_has_to_write_can_be_written_by_the_group() {
    let bed = FileBed::new();
    std::fs::set_permissions(bed.dir(), std::fs::Permissions::from_mode(0o2770)).unwrap();
    let modes = |holder: bool| {
        let files = ["lock", "d", "d/token", "d/once", "d/mutex", "d/slot.0", "d/last-run"]
            .map(|file| bed.dir().join(format!("x.{file}")));
        let records = bed.beside("x", "holder.").into_iter().map(|name| bed.side("x").join(name));
        let all = files.into_iter().chain(records.filter(|_| holder)).filter(|path| path.exists());
        all.map(|path| (path.clone(), std::fs::metadata(&path).unwrap().mode() & 0o7777)).collect::<Vec<_>>()
    };
    bed.dlock().run("x").args(["--slots", "2", "--once", "k"]).sh("exit 0").ended().expect(0);
    let _holder = bed.dlock().run("x").args(["--slots", "2"]).sh("sleep 600").spawn();
    until("it to hold", || bed.beside("x", "holder.").len() == 1);
    let seen = modes(true);
    assert_eq!(seen.len(), 8, "{seen:#?}");
    for (path, mode) in seen {
        let own =
            ["last-run", "holder."].iter().any(|name| path.file_name().unwrap().to_str().unwrap().starts_with(name));
        let wanted = if path.is_dir() {
            0o2770
        } else if own {
            0o640
        } else {
            0o660
        };
        assert_eq!(mode, wanted, "{path:?} has {mode:o}");
    }
}

/// A run with metrics, which never fails for them.
fn counted(bed: &FileBed, file: &Path) -> crate::support::Ended {
    bed.dlock().run("x").arg("--metrics-file").arg(file).sh("exit 0").ended().expect(0)
}

#[test]
fn metrics_go_through_no_link_and_wait_for_no_pipe() {
    for (planted, warns) in [("m.prom", true), ("m.prom.lock", true), ("m.prom.new", false)] {
        let check = |bed: &FileBed, case: &str| {
            let said = counted(bed, &bed.dir().join("m.prom")).stderr;
            assert_eq!(said.contains("no metrics"), warns, "{planted}, {case}: {said}");
        };
        for target in ["file", "missing"] {
            // As a link of our own, it is where we want them.
            if planted == "m.prom" && !geteuid().is_root() {
                continue;
            }
            let (bed, treasure) = (FileBed::new(), Treasure::new());
            plant_link(&bed.dir().join(planted), &treasure.at(target));
            check(&bed, target);
            treasure.assert_untouched(&format!("{planted} -> {target}"));
        }
        let (bed, treasure) = (FileBed::new(), Treasure::new());
        std::fs::hard_link(treasure.at("file"), bed.dir().join(planted)).unwrap();
        // As the file itself it is somebody else's, which is not written to.
        let code = if planted == "m.prom" { 78 } else { 0 };
        let dlock = bed.dlock().run("x").arg("--metrics-file").arg(bed.dir().join("m.prom"));
        dlock.sh("exit 0").ended().expect(code);
        treasure.assert_untouched(&format!("{planted}, a hard link"));

        let bed = FileBed::new();
        mkfifo(&bed.dir().join(planted), Mode::S_IRWXU).unwrap();
        check(&bed, "a pipe");
        clear(&bed.dir().join(planted));
        if plant_device(&bed.dir().join(planted)) {
            check(&bed, "a device");
        }
    }
}

#[test]
fn metrics_may_be_behind_a_symlink_of_our_own() {
    let bed = FileBed::new();
    std::fs::create_dir(bed.dir().join("real")).unwrap();
    symlink("real/m.prom", bed.dir().join("m.prom")).unwrap();
    counted(&bed, &bed.dir().join("m.prom")).silently();
    let text = std::fs::read_to_string(bed.dir().join("real/m.prom")).unwrap();
    assert!(text.contains("dlock_acquisitions_total{name=\"x\"} 1\n"), "{text}");
}

#[test]
fn whoever_locks_the_metrics_keeps_no_run_waiting() {
    let bed = FileBed::new();
    let file = bed.dir().join("m.prom");
    counted(&bed, &file).silently();
    let guard = std::fs::File::open(bed.dir().join("m.prom.lock")).unwrap();
    guard.lock_shared().unwrap();
    counted(&bed, &file).saying("no metrics");
}

fn fence(resource: &Path, token: &str) -> Dlock {
    Dlock::new().args(["fence", "--token", token]).arg(resource).sh("echo ran")
}

#[test]
fn a_fence_writes_through_no_link_and_waits_for_no_pipe() {
    let (bed, treasure) = (FileBed::new(), Treasure::new());
    let mark = bed.dir().join("data.fence");
    let refused = |code: i32, case: &str| {
        let ended = fence(&bed.dir().join("data"), "9").ended().expect(code);
        assert_eq!(ended.stdout, "", "{case}");
        treasure.assert_untouched(case);
    };
    for target in ["file", "missing"] {
        plant_link(&mark, &treasure.at(target));
        refused(77, target);
    }
    clear(&mark);
    std::fs::hard_link(treasure.at("file"), &mark).unwrap();
    refused(77, "a hard link");
    clear(&mark);
    mkfifo(&mark, Mode::S_IRWXU).unwrap();
    refused(78, "a pipe");
    clear(&mark);
    if plant_device(&mark) {
        refused(78, "a device");
        clear(&mark);
    }
    if geteuid().is_root() {
        plant_link(&bed.dir().join("data"), &treasure.at("file"));
        refused(77, "a resource that somebody else's link leads to");
        plant_link(&bed.dir().join("above"), &treasure.at("directory"));
        fence(&bed.dir().join("above/data"), "9").ended().expect(77).saying("symbolic link of user 12345");
        treasure.assert_untouched("above");
    }
}

#[test]
fn config_and_password_files_are_read_through_links_of_root_or_our_own_only() {
    let bed = FileBed::new();
    let real = bed.dir().join("dotfiles/config.toml");
    std::fs::create_dir(bed.dir().join("dotfiles")).unwrap();
    std::fs::write(&real, "backend = 'nowhere'").unwrap();
    let link = bed.dir().join("config.toml");
    let configured = || Dlock::new().env("DLOCK_CONFIG", &link).run("x").sh("echo no").ended().expect(78);
    // Nobody listens there: 69 means that the password was read.
    let password = |file: &Path| {
        let url = format!("redis://127.0.0.1:1/?password-file={}", file.display());
        Dlock::new().env("DLOCK_BACKEND", url).run("x").args(["-n"]).sh("echo no").ended()
    };
    symlink(&real, &link).unwrap();
    configured().saying("nowhere");
    password(&link).expect(69);
    clear(&link);
    mkfifo(&link, Mode::S_IRWXU).unwrap();
    configured().saying("no regular file");
    password(&link).expect(78).saying("no regular file");
    let inherited = Dlock::new().env("DLOCK_CONFIG", "/dev/stdin").run("x").sh("echo no");
    let (read, mut write) = std::io::pipe().unwrap();
    std::io::Write::write_all(&mut write, b"backend = 'nowhere'").unwrap();
    drop(write);
    inherited.configure(|command| _ = command.stdin(read)).ended().expect(78).saying("nowhere");
    if !geteuid().is_root() {
        return eprintln!("played in part: only root can be two users");
    }
    plant_link(&link, &real);
    configured().saying("symbolic link of user 12345");
    password(&link).expect(78).saying("symbolic link of user 12345");
}
