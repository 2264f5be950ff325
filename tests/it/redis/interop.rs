//! The same locks as everybody else's: redis-py's `Lock` and a plain `SET … NX PX`.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};

use super::python;
use crate::support::{Bed, Log, Redis, await_waiters, status};

/// redis-py, holding the lock until it is told to let go, or saying that it could not get it.
const REDIS_PY: &str = "
import redis, sys
lock = redis.Redis(port=int(sys.argv[1])).lock(sys.argv[2], timeout=60, blocking=False)
print('got it' if lock.acquire() else 'busy', flush=True)
if sys.stdin.readline() and lock.owned():
    lock.release()
    print('released', flush=True)
";

pub struct Foreign {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

impl Foreign {
    pub fn start(script: &str, args: &[&str]) -> Foreign {
        let mut child = python(script, args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        Foreign { child, said }
    }

    pub fn says(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// Lets it go on.
    pub fn release(&mut self) -> String {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
        self.says()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn redis_py(bed: &Redis, name: &str) -> Foreign {
    Foreign::start(REDIS_PY, &[&bed.port().to_string(), &format!("dlock:{name}")])
}

#[test]
fn redis_py_keeps_dlock_out_and_its_release_is_seen_at_once() {
    let (bed, log) = (Redis::new(), Log::new());
    let mut foreign = redis_py(&bed, "job");
    assert_eq!(foreign.says(), "got it");
    bed.dlock().run("job").arg("-n").sh("echo no").ended().expect(75);
    let seen = status(&bed, "job");
    assert_eq!((&seen["state"], &seen["holders"][0]["host"]), (&"held".into(), &serde_json::Value::Null));
    assert!(seen["holders"][0]["expires_in_ms"].as_u64().unwrap() <= 60_000);
    bed.dlock().args(["force-release", "job", "--yes"]).ended().expect(77).saying("--now");

    let waiter = bed.dlock().run("job").args(log.witness(&["for=20"])).spawn();
    await_waiters(&bed, "job", 1);
    assert_eq!(foreign.release(), "released");
    waiter.ended().expect(0).silently();
    assert_eq!(log.runs().len(), 1);
}

#[test]
fn dlock_keeps_redis_py_out_in_every_mode() {
    for options in [&[][..], &["--shared"], &["--slots", "2"]] {
        let (bed, log) = (Redis::new(), Log::new());
        let holder = bed.dlock().run("job").args(options).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        assert_eq!(redis_py(&bed, "job").says(), "busy", "{options:?}");
        drop(holder);
    }
    let bed = Redis::new();
    bed.dlock().run("job").sh("exit 0").ended().expect(0);
    assert_eq!(redis_py(&bed, "job").says(), "got it");
}

#[test]
fn a_foreign_lock_can_be_taken_away_on_the_spot_and_only_if_it_is_still_the_same() {
    let bed = Redis::new();
    let mut foreign = redis_py(&bed, "job");
    assert_eq!(foreign.says(), "got it");
    let told = bed.dlock().args(["force-release", "job", "--yes", "--now", "--reason", "stuck"]).ended().expect(0);
    assert!(told.stdout.contains("only kept for status"), "{told:#?}");
    let last = status(&bed, "job")["last_run"].clone();
    assert_eq!((&last["outcome"], &last["reason"]), (&"lost".into(), &"stuck".into()), "{last}");
    bed.dlock().run("job").arg("-n").sh("exit 0").ended().expect(0);
    assert_eq!(foreign.release(), "", "redis-py must see that its lock is gone");
}

#[test]
fn a_lock_taken_by_hand_is_waited_for_until_it_expires() {
    let bed = Redis::new();
    assert_eq!(bed.does(&["SET", "dlock:job", "by-hand", "NX", "PX", "1500"]), "OK");
    let waiter = bed.dlock().run("job").sh("exit 0").spawn();
    waiter.ended().expect(0).silently();
    assert_eq!(bed.does(&["SET", "dlock:job", "by-hand", "NX", "PX", "600000"]), "OK");
    bed.dlock().run("job").args(["-w", "100ms"]).sh("exit 0").ended().expect(75).saying("by-hand");
}

#[test]
fn a_key_that_is_no_lock_is_an_error_that_says_so() {
    let bed = Redis::new();
    bed.does(&["HSET", "dlock:job", "a", "b"]);
    let ended = bed.dlock().run("job").sh("echo no").ended();
    assert!(ended.code != Some(0) && ended.stdout.is_empty() && ended.stderr.contains("WRONGTYPE"), "{ended:#?}");
    assert_eq!(bed.does(&["HGET", "dlock:job", "a"]), "b");
}
