//! Records that somebody else, an older version or a bad disk has written: shown as far as they make
//! sense, never a reason to panic, and never one to lose or to release a lock.

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::support::{
    Bed, Dlock, FileBed, Log, Postgres, Redis, Redlock, Running, ZooKeeperBed, etcd, kazoo_at, unique, until,
};

/// What is no record at all, and what only looks like one.
const NONSENSE: [&str; 6] = ["", "{", "garbage \u{202e}\u{1b}[2J", "{\"owner\":7}", "[[[[[[[[[[", EXTREME];

/// What every backend takes for a contender, and for a last run, with numbers and dates that nobody has.
const EXTREME: &str = r#"{"owner":"x","host":"h","pid":4294967295,"user":"u","command":"c","mode":"exclusive",
    "token":18446744073709551615,"slot":null,"since":18446744073709551615,"ttl_ms":18446744073709551615,"inode":0,
    "acquired_ms":9223372036854775807,"waiting_since":"9999-12-31T23:59:59Z","fencing_token":18446744073709551615,
    "started_at":"9999-12-31T23:59:59Z","ended_at":null,"outcome":"signaled","exit_code":-2147483648,"once":null}"#;

fn holding(bed: &dyn Bed, name: &str, log: &Log) -> Running {
    let running = bed.dlock().run(name).args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    running
}

/// The lock is still held by whoever held it, `status` answers, and nobody gets in.
#[track_caller]
fn still_held(bed: &dyn Bed, name: &str, log: &Log) {
    let json = bed.dlock().args(["status", "--json", name]).ended().expect(0).silently().stdout;
    let state: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(state[0]["state"], "held", "{state}");
    let table = bed.dlock().args(["status", name]).ended().expect(0).stdout;
    assert!(!table.contains(['\u{1b}', '\u{202e}']), "{table:?}");
    bed.dlock().args(["status"]).ended().expect(0);
    bed.dlock().run(name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
    log.await_beat();
}

/// Whoever held it all the time ends as always, and the next one gets the lock.
#[track_caller]
fn is_let_go(bed: &dyn Bed, name: &str, holder: Running) {
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();
    bed.dlock().run(name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

/// One line that says what is wrong, and nothing was started.
#[track_caller]
fn refused(dlock: Dlock, code: i32, saying: &str) {
    let ended = dlock.ended().expect(code).saying(saying);
    assert_eq!((ended.stdout.as_str(), ended.stderr.lines().count()), ("", 1), "{ended:#?}");
}

#[test]
fn in_files() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = holding(&bed, "x", &log);
    std::fs::create_dir(bed.dir().join("x.d/waiting")).unwrap();
    for nonsense in NONSENSE {
        for file in ["last-run", "once", "holder.other.1.2", "waiting/waiter.other.1.2", "revoke.other.1.2"] {
            std::fs::write(bed.dir().join("x.d").join(file), nonsense).unwrap();
        }
        still_held(&bed, "x", &log);
    }
    is_let_go(&bed, "x", holder);
    tokens_grow_over_nonsense(&bed, |nonsense| std::fs::write(bed.dir().join("x.d/token"), nonsense).unwrap());
}

/// In a directory that several share, one of them could have others delete what is not its own.
#[test]
fn an_owner_in_a_file_is_no_path() {
    let (bed, log) = (FileBed::new(), Log::new());
    let holder = holding(&bed, "x", &log);
    let side = bed.dir().join("x.d");
    let mut records = std::fs::read_dir(&side).unwrap().flatten();
    let record = records.find(|entry| entry.file_name().to_string_lossy().starts_with("holder.")).unwrap();
    let text = std::fs::read_to_string(record.path()).unwrap();
    is_let_go(&bed, "x", holder);

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

#[test]
fn in_redis() {
    let (server, log) = (Redis::new(), Log::new());
    let holder = holding(&server, "x", &log);
    let owner = server.does(&["GET", "dlock:x"]);
    for nonsense in NONSENSE {
        server.does(&["SET", "{dlock:x}:last", nonsense]);
        server.does(&["HSET", "{dlock:x}:details", &owner, nonsense]);
        server.does(&["HSET", "{dlock:x}:details", "somebody", nonsense]);
        server.does(&["SET", &format!("{{dlock:x}}:note:{owner}"), nonsense]);
        still_held(&server, "x", &log);
    }
    for number in ["exclusive 1 18446744073709551615 1 1 {}", "exclusive nan inf -1 99999999999 {}"] {
        server.does(&["HSET", "{dlock:x}:details", &owner, number]);
        still_held(&server, "x", &log);
    }
    for part in ["last", "token", "slots", &format!("note:{owner}")] {
        make_a_list(&server, &format!("{{dlock:x}}:{part}"));
        still_held(&server, "x", &log);
    }
    is_let_go(&server, "x", holder);
    tokens_grow_over_nonsense(&server, |nonsense| drop(server.does(&["SET", "{dlock:x}:token", nonsense])));

    make_a_list(&server, "{dlock:x}:once");
    refused(server.dlock().run("x").args(["--once", "k"]).sh("echo no"), 125, "overwritten");
    make_a_list(&server, "dlock:x");
    refused(server.dlock().run("x").sh("echo no"), 125, "overwritten");
    refused(server.dlock().args(["status", "x"]), 125, "overwritten");
    refused(server.dlock().args(["force-release", "--yes", "x"]), 125, "overwritten");
}

/// What no dlock ever puts there.
fn make_a_list(server: &Redis, key: &str) {
    server.does(&["DEL", key]);
    server.does(&["RPUSH", key, "nonsense"]);
}

/// A counter that makes no sense starts again from the server's clock, and never goes back or stands still.
fn tokens_grow_over_nonsense(bed: &dyn Bed, scrawl: impl Fn(&str)) {
    let token = || {
        let shown = bed.dlock().run("x").arg("-n").sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0).stdout;
        shown.trim().parse::<i64>().unwrap()
    };
    let mut before = token();
    for nonsense in ["garbage", "", "nan", "inf", "-1", "1e300", "9223372036854775807", "99999999999999999999"] {
        scrawl(nonsense);
        for _ in 0..2 {
            let now = token();
            assert!(now > before, "{nonsense}: {now} after {before}");
            before = now;
        }
    }
}

#[test]
fn on_one_node_of_a_redlock() {
    nonsense_on_so_many_nodes_of_a_redlock(1);
}

#[test]
fn on_all_nodes_of_a_redlock() {
    nonsense_on_so_many_nodes_of_a_redlock(3);
}

fn nonsense_on_so_many_nodes_of_a_redlock(bad: usize) {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("x").args(["--ttl", "12s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let owner = bed.nodes[0].does(&["GET", "dlock:x"]);
    let nodes: Vec<&Redis> = bed.nodes.iter().take(bad).collect();
    let own_note = format!("note:{owner}");
    for nonsense in NONSENSE {
        for node in &nodes {
            for part in ["last", "held", &own_note] {
                node.does(&["SET", &format!("{{dlock:x}}:{part}"), nonsense]);
            }
            node.does(&["HSET", "{dlock:x}:details", &owner, nonsense, "somebody", nonsense]);
        }
        still_held(&bed, "x", &log);
    }
    for node in &nodes {
        for part in ["last", "held", "taken", "token", "details", "queue", "places", &own_note] {
            make_a_list(node, &format!("{{dlock:x}}:{part}"));
        }
    }
    still_held(&bed, "x", &log);
    for node in &nodes {
        let ends = || node.does(&["PEXPIRETIME", "dlock:x"]).parse::<i64>().unwrap();
        let before = ends();
        until("a renewal", || ends() > before);
    }
    is_let_go(&bed, "x", holder);
    tokens_grow_over_nonsense(&bed, |nonsense| {
        nodes.iter().for_each(|node| drop(node.does(&["SET", "{dlock:x}:token", nonsense])));
    });

    // Neither what was done once nor the lock itself can be made out: a majority that can be is enough.
    let run = || bed.dlock().run("x").args(["-n", "--once", "k"]);
    for key in ["{dlock:x}:once", "dlock:x"] {
        nodes.iter().for_each(|node| make_a_list(node, key));
        if bad == 1 {
            run().sh("exit 3").ended().expect(3).silently();
            bed.dlock().args(["status", "x"]).ended().expect(0).silently();
        } else {
            refused(run().sh("echo no"), 125, "overwritten");
        }
    }
}

#[test]
fn in_zookeeper() {
    let (server, name, log) = (ZooKeeperBed::shared(), unique("nonsense"), Log::new());
    let holder = holding(&server, &name, &log);
    let meta = format!("/dlock-meta/{name}");
    let does = |path: &str, what: &[&str]| {
        let out = kazoo_at(server.port, path, "-").args(what).output().unwrap();
        assert!(out.status.success(), "{out:?}");
    };
    for beside in ["once-", "once-%zz", "slot-x", "slot-99999999999999999999", "slot-0"] {
        does(&format!("{meta}/{beside}"), &["add"]);
    }
    for stranger in ["no-number", "_c_short-lock-0000000099", "__lock__99999999999999999999999"] {
        does(&format!("/dlock/{name}/{stranger}"), &["add"]);
    }
    for nonsense in NONSENSE {
        does(&format!("/dlock/{name}"), &["scrawl", nonsense]);
        does(&meta, &["scrawl", nonsense]);
        still_held(&server, &name, &log);
    }
    // Whatever ends in a number holds the lock for Curator, so it does for us.
    does(&format!("/dlock/{name}/_c_short-lock-0000000099"), &["remove"]);
    is_let_go(&server, &name, holder);
    // A slot's node stays, whoever left it there: somebody may be at work.
    let slots = server.dlock().run(&name).args(["-n", "--slots", "2"]).sh("echo $DLOCK_SLOT").ended();
    assert_eq!(slots.expect(0).silently().stdout, "1\n");
}

/// Nobody keeps a lock alive that was acquired, so that its record is all there is to know of its end. It stays
/// held, and its owner is not told that it was renewed.
fn an_acquired_lock_survives(bed: &dyn Bed, name: &str, scrawl: impl Fn(&str, &str)) {
    let json = bed.dlock().args(["acquire", "--name", name, "--ttl", "10m", "--json"]).ended().expect(0).stdout;
    let acquired: Value = serde_json::from_str(&json).unwrap();
    let owner = acquired["owner"].as_str().unwrap();
    for nonsense in NONSENSE.into_iter().filter(|nonsense| *nonsense != EXTREME) {
        scrawl(owner, nonsense);
        let state = bed.dlock().args(["status", "--json", name]).ended().expect(0).silently().stdout;
        assert_eq!(serde_json::from_str::<Value>(&state).unwrap()[0]["state"], "held", "{state}");
        bed.dlock().run(name).args(["-n", "-q"]).sh("echo no").ended().expect(75);
        for verb in ["renew", "release"] {
            let ended = bed.dlock().args([verb, "--name", name, "--owner", owner]).ended();
            let refused = matches!(ended.code, Some(64 | 79 | 125)) && ended.stderr.lines().count() == 1;
            assert!(refused, "{nonsense:?}: {ended:?}");
        }
    }
    bed.dlock().args(["force-release", name, "--yes", "--now"]).ended().expect(0).silently();
    bed.dlock().run(name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

#[test]
fn in_what_an_acquire_has_left_in_files() {
    let bed = FileBed::new();
    an_acquired_lock_survives(&bed, "x", |owner, nonsense| {
        std::fs::write(bed.dir().join("x.d").join(format!("holder.{owner}")), nonsense).unwrap();
    });
}

#[test]
fn in_what_an_acquire_has_left_on_redis() {
    let (server, bed) = (Redis::new(), Redlock::of(3));
    an_acquired_lock_survives(&server, "x", |owner, nonsense| {
        server.does(&["DEL", "{dlock:x}:held"]);
        server.does(&["HSET", "{dlock:x}:details", owner, nonsense]);
    });
    an_acquired_lock_survives(&bed, "x", |owner, nonsense| {
        for node in &bed.nodes {
            node.does(&["SET", "{dlock:x}:held", nonsense]);
            node.does(&["HSET", "{dlock:x}:details", owner, nonsense]);
        }
    });
}

#[test]
fn in_what_an_acquire_has_left_on_etcd() {
    let (server, name) = (etcd::shared(), unique("nonsense"));
    an_acquired_lock_survives(server, &name, |_, nonsense| {
        let key = server.contenders(&name).remove(0);
        let out = server.etcdctl().args(["put", "--ignore-lease", "--", &key, nonsense]).output().unwrap();
        assert!(out.status.success(), "{out:?}");
    });
}

#[test]
fn in_what_an_acquire_has_left_on_zookeeper() {
    let (server, name) = (ZooKeeperBed::shared(), unique("nonsense"));
    an_acquired_lock_survives(&server, &name, |_, nonsense| {
        let out = kazoo_at(server.port, &format!("/dlock/{name}"), "-").args(["scrawl", nonsense]).output().unwrap();
        assert!(out.status.success(), "{out:?}");
    });
}

#[test]
fn in_etcd() {
    let (server, name, log) = (etcd::shared(), unique("nonsense"), Log::new());
    let holder = holding(server, &name, &log);
    let put = |key: &str, value: &str| {
        let out = server.etcdctl().args(["put", "--", key, value]).output().unwrap();
        assert!(out.status.success(), "{out:?}");
    };
    for (n, nonsense) in NONSENSE.iter().enumerate() {
        // A contender of another program that says what it likes, and a last run of nobody's.
        put(&format!("dlock/{name}/{:x}", 0x7000 + n), nonsense);
        put(&format!("dlock-meta/runs/{name}/last"), nonsense);
        still_held(server, &name, &log);
    }
    // Foreign mutexes hold the lock for as long as their keys are there.
    server.ctl(&["del", "--prefix", &format!("dlock/{name}/70")]);
    is_let_go(server, &name, holder);
}

#[test]
fn in_postgres() {
    let (server, name, log) = (Postgres::shared(), unique("nonsense"), Log::new());
    let holder = holding(&server, &name, &log);
    for nonsense in ["null", "7", "[]", "{\"owner\": 7}", "{\"host\": \"\\u202e\\u001b[2J\"}", EXTREME] {
        let sql = format!(
            "BEGIN; SET LOCAL dlock.inside = 'on';
             UPDATE dlock.contenders SET who = '{nonsense}' WHERE name = '{name}';
             UPDATE dlock.locks SET last_run = '{nonsense}' WHERE name = '{name}'; COMMIT"
        );
        server.sql(&sql);
        still_held(&server, &name, &log);
    }
    is_let_go(&server, &name, holder);
}
