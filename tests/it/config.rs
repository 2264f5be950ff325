//! Where settings come from, and which one wins.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::unistd::geteuid;

use crate::support::{Bed, Dlock, FileBed};

/// dlock with a config file of this text.
fn with_config(bed: &FileBed, text: &str) -> Dlock {
    let path = write_config(bed, text, 0o600);
    Dlock::new().env("DLOCK_CONFIG", path)
}

fn write_config(bed: &FileBed, text: &str, mode: u32) -> PathBuf {
    let path = bed.dir().join("config.toml");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

/// The value and the origin that `--explain` shows for a setting.
fn explained(dlock: Dlock, args: &[&str], key: &str) -> (String, String) {
    let shown = dlock.run("x").arg("--explain").args(args).ended().expect(0).stdout;
    let line = shown.lines().find(|line| line.trim_start().starts_with(&format!("{key} "))).unwrap().to_owned();
    let mut words = line.split_whitespace().skip(1);
    let value = words.next().unwrap().to_owned();
    (value, words.collect::<Vec<_>>().join(" "))
}

#[test]
fn flag_beats_environment_beats_profile_beats_file_beats_default() {
    let bed = FileBed::new();
    let file = "ttl = 11\n";
    let profile = format!("{file}[backends.lan]\nurl = '{}'\nttl = '12s'\n", bed.url());
    let ttl = |dlock: Dlock, args: &[&str]| explained(dlock, args, "ttl");

    assert_eq!(ttl(with_config(&bed, ""), &[]), ("30s".into(), "default".into()));
    let (value, from) = ttl(with_config(&bed, file), &[]);
    assert!(value == "11" && from.ends_with("config.toml"), "{from}");
    assert_eq!(ttl(with_config(&bed, &profile), &["-b", "lan"]), ("12s".into(), "profile lan".into()));
    let environment = with_config(&bed, &profile).env("DLOCK_TTL", "13s").env("DLOCK_BACKEND", "lan");
    assert_eq!(ttl(environment, &[]), ("13s".into(), "$DLOCK_TTL".into()));
    let flag = with_config(&bed, &profile).env("DLOCK_TTL", "13s");
    assert_eq!(ttl(flag, &["--ttl", "14s"]), ("14s".into(), "flag".into()));
}

#[test]
fn a_profile_is_a_backend_with_a_name() {
    let bed = FileBed::new();
    let config = format!("backend = 'lan'\n[backends.lan]\nurl = '{}'\n", bed.url());
    with_config(&bed, &config).run("x").sh("exit 0").ended().expect(0).silently();
    assert!(bed.lock_file("x").exists());
    let wrong = with_config(&bed, &config).run("x").args(["-b", "wan"]).sh("echo no");
    wrong.ended().expect(78).saying("did you mean \"lan\"?");
}

#[test]
fn the_usual_places_are_looked_at_in_order() {
    let bed = FileBed::new();
    let dlock = Dlock::new();
    let dir = dlock.home().join(".config/dlock");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("config.toml"), "ttl = 21").unwrap();
    let (value, _) = explained(dlock.env("DLOCK_BACKEND", bed.url()), &[], "ttl");
    assert_eq!(value, "21");

    let other = bed.dir().join("dlock");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("config.toml"), "ttl = 22").unwrap();
    let dlock = Dlock::new().env("XDG_CONFIG_HOME", bed.dir()).env("DLOCK_BACKEND", bed.url());
    assert_eq!(explained(dlock, &[], "ttl").0, "22");
}

#[test]
fn what_is_wrong_with_a_config_file_is_said_in_a_line() {
    let bed = FileBed::new();
    let cases = [
        ("tll = '1s'", "did you mean \"ttl\"?"),
        ("ttl = '1s'\nwait = = 3", "line 2"),
        ("ttl = 'soon'", "ttl in"),
        ("ttl = [1]", "must be a text or a number"),
        ("[backends.lan]\nttl = 3", "needs a url"),
        ("backends = 3", "tables like [backends.NAME], not integer"),
        ("slots = 3", "only an option of the command line: --slots"),
        ("no-wait = true", "only an option of the command line: --no-wait"),
        ("[backends.lan]\nurl = 'redis://h'\nslots = 3", "only an option of the command line: --slots"),
        ("[backends.lan]\nurl = 'nowhere'", "a URL like redis://HOST"),
        ("backend = 'lan'\n[backends.lan]\nurl = 'file:///tmp/x'\nkil-after = 3", "did you mean \"kill-after\"?"),
        ("backend = 'gopher://x'", "gopher"),
    ];
    for (text, says) in cases {
        let ended = with_config(&bed, text).run("x").sh("echo no").ended().expect(78).saying(says);
        assert_eq!((ended.stdout.as_str(), ended.stderr.lines().count()), ("", 1), "{ended:#?}");
    }
    Dlock::new().env("DLOCK_CONFIG", "/nonexistent").run("x").sh("echo no").ended().expect(78).saying("/nonexistent");
}

#[test]
fn a_mistake_in_a_profile_is_found_before_it_is_used_and_the_file_is_named() {
    let bed = FileBed::new();
    let profiles = format!("[backends.lan]\nurl = '{}'\n[backends.wan]\nurl = 'redis://h'\nprefx = 'x'\n", bed.url());
    for chosen in ["lan", "wan"] {
        let dlock = with_config(&bed, &profiles).run("x").args(["-b", chosen]).sh("echo no");
        dlock.ended().expect(78).saying("config.toml: [backends.wan]: redis:// has no parameter \"prefx\"");
    }
}

#[test]
fn explain_shows_what_holds_when_nothing_was_said() {
    let bed = FileBed::new();
    let plain = || with_config(&bed, "");
    assert_eq!(explained(plain(), &[], "kill-after"), ("5s".into(), "default".into()));
    assert_eq!(explained(plain(), &["--ttl", "12s"], "kill-after"), ("2s".into(), "default".into()));
    assert_eq!(explained(plain(), &[], "slots"), ("1".into(), "default".into()));
    assert_eq!(explained(plain(), &["--slots", "3"], "slots"), ("3".into(), "flag".into()));
}

#[test]
fn whoever_keeps_trying_waits_for_ever_whatever_is_usual() {
    let bed = FileBed::new();
    let dlock = || with_config(&bed, "wait = '3s'").env("DLOCK_WAIT", "2s");
    assert_eq!(explained(dlock(), &[], "wait").0, "2s");
    assert_eq!(explained(dlock(), &["--keep-trying"], "wait"), ("for".into(), "ever flag".into()));
}

#[test]
fn the_default_directory_may_have_any_name() {
    use std::os::unix::process::CommandExt;
    let bed = FileBed::new();
    let state = bed.dir().join("100%?x=y");
    std::fs::create_dir(&state).unwrap();
    let mut dlock = Dlock::new().env("XDG_STATE_HOME", &state).run("x").sh("exit 0");
    if geteuid().is_root() {
        // Root's locks live elsewhere.
        std::fs::set_permissions(bed.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::os::unix::fs::chown(&state, Some(65534), Some(65534)).unwrap();
        dlock = dlock.configure(|command| _ = command.uid(65534).gid(65534));
    }
    dlock.ended().expect(0).silently();
    assert!(state.join("dlock/x.lock").exists());
}

#[test]
fn a_usage_error_is_json_where_that_was_asked_for() {
    let wrong = |flags: &[&str]| Dlock::new().run("x").args(flags).args(["--bogus", "--", "true"]);
    let json = |dlock: Dlock| {
        let said = dlock.ended().expect(64).stderr;
        serde_json::from_str::<serde_json::Value>(&said).ok()
    };
    for asked in [wrong(&["--log", "json"]), wrong(&["--log=json"]), wrong(&[]).env("DLOCK_LOG", "json")] {
        assert_eq!(json(asked).unwrap()["event"], "failed");
    }
    assert_eq!(json(wrong(&["--log", "text"]).env("DLOCK_LOG", "json")), None);
    assert_eq!(json(wrong(&[]).arg("--log=json")), None, "behind -- it is the command's");
    let no_config = Dlock::new().env("DLOCK_CONFIG", "/nonexistent").run("x").args(["--log", "json"]).sh("exit 0");
    assert!(no_config.ended().expect(78).stderr.starts_with('{'));
}

#[test]
fn a_password_that_others_can_read_is_refused() {
    let bed = FileBed::new();
    let config =
        format!("[backends.lan]\nurl = '{}'\n[backends.wan]\nurl = 'redis://h'\npassword = 'sesame'\n", bed.url());
    let run = |mode: u32| {
        let path = write_config(&bed, &config, mode);
        Dlock::new().env("DLOCK_CONFIG", path).run("x").args(["-b", "lan"]).sh("exit 0").ended()
    };
    run(0o600).expect(0);
    let refused = run(0o644).expect(78).saying("chmod 600");
    assert!(!refused.stderr.contains("sesame"));
}
