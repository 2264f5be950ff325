//! Records that somebody else, an older version or a bad disk has written: shown as far as they make sense, never a reason
//! to panic, and never one to lose or to release a lock.

use nix::sys::signal::Signal;

use super::{holding, status};
use crate::support::{Bed, Log, unique};

/// What is no record at all, and what only looks like one.
const NONSENSE: [&str; 8] = [
    "",
    "{",
    "garbage \u{202e}\u{1b}[2J",
    "{\"owner\":7}",
    "[[[[[[[[[[",
    "null",
    r#"{"host":"\u202e\u001b[2J"}"#,
    EXTREME,
];

/// What every backend takes for a contender, and for a last run, with numbers and dates that nobody has.
const EXTREME: &str = r#"{"owner":"x","host":"h","pid":4294967295,"user":"u","command":"c","mode":"exclusive",
    "token":18446744073709551615,"slot":null,"since":18446744073709551615,"ttl_ms":18446744073709551615,"inode":0,
    "acquired_ms":9223372036854775807,"waiting_since":"9999-12-31T23:59:59Z","fencing_token":18446744073709551615,
    "started_at":"9999-12-31T23:59:59Z","ended_at":null,"outcome":"signaled","exit_code":-2147483648,"once":null}"#;

/// `status` answers, the lock is held, and nobody gets in.
#[track_caller]
fn assert_held(bed: &dyn Bed, name: &str) {
    assert_eq!(status(bed, name)["state"], "held");
    let table = bed.dlock().args(["status", name]).ended().expect(0).stdout;
    assert!(!table.contains(['\u{1b}', '\u{202e}']), "{table:?}");
    bed.dlock().arg("status").ended().expect(0);
    bed.dlock().run(name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
}

pub fn nonsense_in_its_records_neither_loses_nor_frees_a_lock(bed: &dyn Bed) {
    let (name, log) = (unique("nonsense"), Log::new());
    let holder = holding(bed, &name, &["--ttl", "60s"], &log);
    let owner = status(bed, &name)["holders"][0]["owner"].as_str().unwrap().to_owned();
    for nonsense in NONSENSE {
        bed.scrawl(&name, &owner, nonsense);
        assert_held(bed, &name);
        log.await_beat();
    }
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();
    bed.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

/// Nobody keeps a lock alive that was acquired, so its record may be all there is to know of its end. Then it stays held,
/// and its owner is not told that it was renewed or released.
pub fn an_acquired_lock_survives_nonsense_in_its_records(bed: &dyn Bed) {
    let name = unique("acquired");
    let json = bed.dlock().args(["acquire", "--name", &name, "--ttl", "10m", "--json"]).ended().expect(0).stdout;
    let owner = serde_json::from_str::<serde_json::Value>(&json).unwrap()["owner"].as_str().unwrap().to_owned();
    let told = |verb: &str| {
        let ended = bed.dlock().args([verb, "--name", &name, "--owner", &owner]).ended();
        let refused = matches!(ended.code, Some(64 | 79 | 125)) && ended.stderr.lines().count() == 1;
        assert!(ended.code == Some(0) || refused, "{verb}: {ended:?}");
        ended.code
    };
    for nonsense in NONSENSE.into_iter().filter(|nonsense| *nonsense != EXTREME) {
        bed.scrawl(&name, &owner, nonsense);
        assert_held(bed, &name);
        let renewed = told("renew");
        assert_held(bed, &name);
        // Where the lease does not depend on the record, the owner can do both.
        if renewed != Some(0) {
            assert_ne!(told("release"), Some(0), "{nonsense:?}");
            assert_held(bed, &name);
        }
    }
    bed.dlock().args(["force-release", &name, "--yes", "--now"]).ended().expect(0).silently();
    bed.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

/// A counter that makes no sense starts again from the server's clock, and never goes back or stands still.
pub fn tokens_grow_over_nonsense(bed: &dyn Bed) {
    let name = unique("counter");
    let mut before = super::token(bed, &name);
    for nonsense in ["garbage", "", "nan", "inf", "-1", "1e300", "9223372036854775807", "99999999999999999999"] {
        bed.scrawl_token(&name, nonsense);
        for _ in 0..2 {
            let now = super::token(bed, &name);
            assert!(now > before, "{nonsense}: {now} after {before}");
            before = now;
        }
    }
}
