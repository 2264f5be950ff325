//! The file backend among users: who may use a directory, and what an operator can do to its holders.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use nix::unistd::geteuid;

use super::state;
use crate::support::{Bed, Dlock, FileBed, Log, may_mount, until};

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
    dlock.ended().expect(77).saying("x.lock").saying("use a directory that this user may write to");
}

#[test]
fn a_read_only_directory_can_be_looked_at_and_is_refused_otherwise() {
    if !may_mount() {
        return eprintln!("not played: only root can mount a disk read-only");
    }
    let bed = FileBed::on_small_disk();
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    let remount = |how: &str| {
        let mut mount = std::process::Command::new("mount");
        assert!(mount.args(["-o", &format!("remount,{how}")]).arg(bed.dir()).status().unwrap().success());
    };
    remount("ro");
    let run = bed.dlock().run("x").sh("echo no").ended().expect(78).saying("use a directory that can be written to");
    assert_eq!((run.stdout.as_str(), &state(&bed, "x")["state"]), ("", &"free".into()));
    remount("rw");
    bed.dlock().run("x").sh("exit 0").ended().expect(0).silently();
}

/// Root holds one lock of its default directory, in a mount namespace of its own, while a user runs under the same name.
#[test]
fn a_user_is_told_that_roots_lock_of_the_same_name_is_another_one() {
    if !may_mount() {
        return eprintln!("not played: only root can be two users");
    }
    let script = "set -e; mount -t tmpfs none /var/lib; chown 12345 $HOME; chmod 755 $HOME
        $DLOCK run --name x -- sh -c 'echo > $HOME/held; until test -e $HOME/done; do sleep 0.01; done' &
        until test -e $HOME/held; do sleep 0.01; done
        setpriv --reuid 12345 --regid 12345 --clear-groups sh -c '$DLOCK run --name x -- echo ran
            $DLOCK status x >&2; $DLOCK run --name y -- echo ran; touch $HOME/done'
        wait";
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    let told = Dlock::played_by("unshare").args(["--mount", "sh", "-c", script]).env("DLOCK", dlock).ended().expect(0);
    assert_eq!(told.stdout, "ran\nran\n");
    let about_x = "dlock: x: root holds /var/lib/dlock/x.lock, which is another lock";
    assert_eq!((told.stderr.matches(about_x).count(), told.stderr.matches("root holds").count()), (2, 2), "{told:#?}");
}

#[test]
fn a_directory_that_a_group_shares_is_shared_by_all_of_it_whatever_their_umask() {
    if !geteuid().is_root() {
        return eprintln!("not played: only root can be two users");
    }
    for mode in [0o2770, 0o770] {
        let bed = FileBed::new();
        let dir = bed.dir().join("shared");
        std::fs::create_dir(&dir).unwrap();
        std::os::unix::fs::chown(&dir, None, Some(54321)).unwrap();
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::set_permissions(bed.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let dlock = |user: &str| {
            let umask = ["sh", "-c", "umask 022; exec \"$@\"", "sh"];
            Dlock::played_by("setpriv")
                .env("DLOCK_BACKEND", format!("file://{}", dir.display()))
                .args(["--reuid", user, "--regid", user, "--groups", "54321"])
                .args(umask)
                .arg(assert_cmd::cargo::cargo_bin!("dlock"))
        };
        for options in [&[][..], &["--shared"], &["--slots", "2"], &["--once", "k"]] {
            let name = format!("x{}", options.concat().replace("--", "."));
            dlock("12345").run(&name).args(options).sh("exit 0").ended().expect(0).silently();
            let mut holder = dlock("12345").run(&name).sh("sleep 600").spawn();
            until("it to hold", || dlock("12346").args(["status", "--exit-code", &name]).ended().code == Some(75));
            dlock("12346").run(&name).arg("-n").sh("echo no").ended().expect(75).saying("sleep 600");
            dlock("12346").args(["force-release", &name, "--yes"]).ended().expect(0);
            until("it to let go", || holder.has_ended());
            dlock("12346").run(&name).args(options).sh("exit 0").ended().expect(0).silently();
        }
    }
}

#[test]
fn what_nobody_shares_stays_ours() {
    let mode_of = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let bed = FileBed::new();
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    for (path, mode) in [(bed.lock_file("x"), 0o600), (bed.side("x"), 0o700), (bed.side("x").join("token"), 0o600)] {
        assert_eq!(mode_of(&path), mode, "{path:?}");
    }
    // Everybody who can write to the directory can put a file of ours there, for us to give away.
    std::fs::set_permissions(bed.dir(), std::fs::Permissions::from_mode(0o770)).unwrap();
    bed.dlock().run("x").sh("exit 0").ended().expect(0);
    assert_eq!((mode_of(&bed.lock_file("x")), mode_of(&bed.side("x").join("last-run"))), (0o600, 0o600));
    bed.dlock().run("y").sh("exit 0").ended().expect(0);
    assert_eq!((mode_of(&bed.lock_file("y")), mode_of(&bed.side("y"))), (0o660, 0o770));
}

#[test]
fn one_of_two_shared_holders_can_be_taken_out_on_the_spot() {
    let (bed, first, second) = (FileBed::new(), Log::new(), Log::new());
    let share = |log: &Log| bed.dlock().run("x").arg("--shared").args(log.witness(&[])).spawn();
    let (out, mut stays) = (share(&first), share(&second));
    first.await_runs(1, 1);
    second.await_runs(1, 1);
    let (gone, left) = (first.runs()[0].token, second.runs()[0].token);
    let now = ["force-release", "x", "--yes", "--now", "--reason", "one too many", "--token", &gone.to_string()];
    bed.dlock().args(now).ended().expect(0);
    out.ended().expect(79).saying("takes the lock away (one too many)");
    assert_eq!(bed.beside("x", "taken."), [""; 0]);
    let seen = state(&bed, "x");
    assert_eq!((seen["holders"].as_array().unwrap().len(), &seen["holders"][0]["fencing_token"]), (1, &left.into()));
    bed.dlock().run("x").arg("-n").sh("echo no").ended().expect(75);
    assert!(!stays.has_ended());
    bed.dlock().args(["force-release", "x", "--yes", "--now"]).ended().expect(0);
    stays.ended().expect(79).saying("force-release --now (no reason given)");
}

#[test]
fn what_is_only_held_on_to_is_let_go_of_when_an_operator_says_so() {
    let bed = FileBed::new();
    bed.dlock().run("x").args(["--hold-at-least", "10m"]).sh("exit 0").ended().expect(0);
    bed.dlock().run("x").arg("-n").sh("echo no").ended().expect(75);
    bed.dlock().args(["force-release", "x", "--yes"]).ended().expect(0);
    bed.dlock().run("x").arg("-n").sh("exit 0").ended().expect(0).silently();
    // Somebody may still be at work under what was acquired.
    bed.dlock().args(["acquire", "--name", "y", "--ttl", "10m"]).ended().expect(0);
    bed.dlock().args(["force-release", "y", "--yes"]).ended().expect(0);
    assert_eq!(state(&bed, "y")["state"], "revoked");
    bed.dlock().run("y").arg("-n").sh("echo no").ended().expect(75);
    bed.dlock().args(["force-release", "y", "--yes", "--now"]).ended().expect(0);
}
