//! SQL clients take part in the same locks, and a table can refuse a late write.

use super::{holding, on, used};
use crate::databases;
use crate::support::postgres::PostgreSql;
use crate::support::{Bed, Log, Postgres, unique, until};

#[test]
fn a_python_program_takes_renews_and_releases_the_same_lock() {
    let (server, name) = (Postgres::shared(), unique("python"));
    used(server);
    let python = crate::support::target("test-python/bin/python");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/postgres/client.py");
    let dlock = assert_cmd::cargo::cargo_bin!("dlock");
    let done = std::process::Command::new(python)
        .args([script, &server.url(), &name])
        .env("DLOCK", dlock)
        .output()
        .expect("a Python with psycopg; see tests/run");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn a_late_write_of_a_paused_holder_is_refused_by_the_table() {
    databases::a_late_write_of_a_paused_holder_is_refused::<PostgreSql>();
}

#[test]
fn a_lock_outlives_the_dlock_that_acquired_it() {
    let (server, name) = (Postgres::shared(), unique("tenure"));
    let json = server.dlock().args(["acquire", "--name", &name, "--ttl", "10m", "--json"]).ended().expect(0).stdout;
    let acquired: serde_json::Value = serde_json::from_str(&json).unwrap();
    let owner = acquired["owner"].as_str().unwrap();
    let busy = || server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    let with_owner = |verb: &str| server.dlock().args([verb, "--name", &name, "--owner", owner]).ended();
    busy();
    let expires = format!("SELECT expires FROM dlock.contenders WHERE name = '{name}'");
    let before = server.sql(&expires);
    with_owner("renew").expect(0).silently();
    assert_ne!(server.sql(&expires), before);
    server.dlock().args(["force-release", &name, "--yes", "--reason", "maintenance"]).ended().expect(0);
    with_owner("renew").expect(79).saying("maintenance");
    busy();
    with_owner("release").expect(0).silently();
    with_owner("release").expect(79);
    server.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

#[test]
fn why_the_lock_of_an_sql_client_was_taken_away_is_on_record_and_told_to_it() {
    let (server, name) = (Postgres::shared(), unique("why"));
    used(server);
    let granted = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql')"));
    server.dlock().args(["force-release", &name, "--yes", "--now", "--reason", "it's stuck"]).ended().expect(0);
    let renew = format!("SELECT outcome, reason FROM dlock.renew('{name}', 'psql', {granted})");
    let told = server.sql(&renew);
    assert!(told.starts_with("force released|it's stuck (") && told.contains('@'), "{told}");
    let last = server.sql(&format!("SELECT last_run->>'reason' FROM dlock.locks WHERE name = '{name}'"));
    assert_eq!(last, "it's stuck");
    // What it is granted later has nothing to do with it.
    let granted = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql')"));
    let renew = || server.sql(&format!("SELECT outcome FROM dlock.renew('{name}', 'psql', {granted})"));
    assert_eq!(renew(), "held");
    server.sql(&format!("SELECT dlock.release('{name}', 'psql', {granted})"));
    assert_eq!(renew(), "lost");
}

#[test]
fn a_run_is_not_released_behind_its_back() {
    let (server, name) = (Postgres::shared(), unique("behind"));
    let dlock = assert_cmd::cargo::cargo_bin!("dlock").display().to_string();
    let script = format!("{dlock} renew --name {name} && {dlock} release --name {name}");
    server.dlock().run(&name).sh(&script).ended().expect(64).saying("releases it by itself");
}

#[test]
fn tables_are_not_changed_by_hand() {
    let tokens = ["TRUNCATE dlock.locks", "TRUNCATE dlock.fences"].map(|wrong| (wrong, "never goes"));
    let rows = ["TRUNCATE dlock.contenders", "TRUNCATE dlock.successes"].map(|wrong| (wrong, "not by hand"));
    databases::tables_are_not_changed_by_hand::<PostgreSql>("'epoch'", &[tokens, rows].concat());
}

#[test]
fn a_callers_own_commit_stays_as_durable_as_it_was() {
    let (server, name) = (Postgres::shared(), unique("durable"));
    used(server);
    let token = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql-1')"));
    let wait = format!("SELECT outcome FROM dlock.acquire('{name}', 'psql-2', queue => true, again => true)");
    assert_eq!(server.sql(&wait), "busy");
    let release = format!("SELECT dlock.release('{name}', 'psql-1', {token})");
    let commit_after = |statements: &str| {
        server
            .sql(&format!("BEGIN; {statements}; SHOW synchronous_commit; ROLLBACK"))
            .lines()
            .last()
            .unwrap()
            .to_owned()
    };
    for call in [&wait, &release] {
        assert_eq!(commit_after(call), "off", "nothing is in it but {call}");
        assert_eq!(commit_after(&format!("CREATE TABLE mine (); {call}")), "on", "{call}");
    }
}

#[test]
fn whoever_let_go_or_is_to_let_go_does_not_get_more_by_asking_again() {
    let (server, name) = (Postgres::shared(), unique("again"));
    used(server);
    let expires = || server.sql(&format!("SELECT expires FROM dlock.contenders WHERE name = '{name}'"));
    let acquire = |owner: &str| server.sql(&format!("SELECT outcome FROM dlock.acquire('{name}', '{owner}')"));
    let token = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql-1')"));
    server.sql(&format!("SELECT dlock.release('{name}', 'psql-1', {token}, keep => '1 h')"));
    let kept = expires();
    assert_eq!((acquire("psql-1").as_str(), expires()), ("busy", kept.clone()), "kept");
    server.sql(&format!("SELECT dlock.rehold('{name}', 'psql-1', '0 s')"));

    let token = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql-1', '10 s')"));
    assert_eq!(acquire("psql-1"), "granted");
    server.sql(&format!("SELECT dlock.renew('{name}', 'psql-1', {token}, '10 s')"));
    server.sql(&format!("SELECT dlock.revoke('{name}', 'psql-1', {token}, 'maintenance')"));
    let revoked = expires();
    assert_eq!((acquire("psql-1").as_str(), expires()), ("busy", revoked), "revoked");
    until("its lease to be over", || acquire("psql-1") == "granted");
    assert_ne!(server.sql(&format!("SELECT token FROM dlock.contenders WHERE name = '{name}'")), token);
}

#[test]
fn sql_clients_wait_for_the_one_in_front_of_them() {
    let (server, name) = (Postgres::shared(), unique("sql-queue"));
    used(server);
    let acquire = |owner: &str, more: &str| format!("FROM dlock.acquire('{name}', '{owner}', session => {more})");
    // Each in a session of its own: one holds the lock until its session ends, the other waits for that.
    let hold = format!("SELECT outcome {}; SELECT pg_sleep(1)", acquire("psql-1", "pg_backend_pid()"));
    let holder = std::thread::spawn(move || server.sql(&hold));
    until("it to be held", || {
        server.sql(&format!("SELECT count(*) FROM dlock.contenders WHERE name = '{name}'")) == "1"
    });
    let queued = acquire("psql-2", "pg_backend_pid(), queue => true");
    let waited = server.sql(&format!("SELECT dlock.await(behind, '1 min') {queued}"));
    assert_eq!(waited, "t", "a session that ends wakes the next");
    assert!(holder.join().unwrap().starts_with("granted"));
    // Whoever does not say that the session is its own is told of none, and is none to wait for.
    assert_eq!(server.sql(&format!("SELECT behind {}", acquire("psql-3", "NULL, queue => true"))), "");
    assert_eq!(server.sql(&format!("SELECT behind {}", acquire("psql-4", "pg_backend_pid(), queue => true"))), "");
}

#[test]
fn what_cannot_contend_cannot_take_a_lock_either() {
    let (server, name) = (Postgres::shared(), unique("sane"));
    used(server);
    for wrong in [
        "NULL",
        "''",
        "repeat('x', 201)",
        "'psql', NULL",
        "'psql', '0'",
        "'psql', mode => 'mine'",
        "'psql', slots => 2",
        "'psql', who => to_json(repeat('x', 100000))",
        "'psql', wake => ''",
        "'psql', wake => repeat('x', 64)",
    ] {
        assert!(server.try_sql(&format!("SELECT token FROM dlock.acquire('{name}', {wrong})")).is_err(), "{wrong}");
    }
    server.dlock().run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
}

#[test]
fn a_database_of_another_encoding_keeps_locks_too() {
    let server = Postgres::shared();
    server.sql("CREATE DATABASE latin ENCODING LATIN1 TEMPLATE template0");
    let url = format!("postgres://postgres@127.0.0.1:{}/latin", server.port());
    let once = |key: &str| on(&url).run("once").args(["--once", key]).sh("echo ran").ended().expect(0).stdout;
    assert_eq!((once("täglich"), once("täglich")), ("ran\n".into(), "".into()));
    assert_eq!((once("10 €"), once("10 €")), ("ran\n".into(), "".into()));
    assert_eq!(once("10 \\u20ac"), "ran\n", "another key");
    let reasons: [(&[&str], &str, &str); 3] =
        [(&["--now"], "hängt", "(hängt)"), (&["--now"], "10 €", "(10 \\u20ac)"), (&[], "→", "(\\u2192)")];
    for (how, reason, told) in reasons {
        let (name, log) = (unique("reason"), Log::new());
        let holder = holding(&url, &name, &["--ttl", "1h"], &log);
        on(&url).args(["force-release", &name, "--yes", "--reason", reason]).args(how).ended().expect(0).silently();
        holder.ended().expect(79).saying(told);
    }
}

#[test]
fn another_schema_is_another_set_of_locks() {
    databases::another_prefix_is_another_set_of_locks::<PostgreSql>();
    let of_dlock = "prosrc LIKE '%dlock.%' AND pronamespace = 'apart'::regnamespace";
    assert_eq!(Postgres::shared().sql(&format!("SELECT count(*) FROM pg_proc WHERE {of_dlock}")), "0");
}

#[test]
fn an_uncontended_run_is_one_connection_and_two_calls() {
    let server = Postgres::with(&["log_statement=all", "log_connections=on"]);
    used(&server);
    let mut log = String::new();
    // On a busy machine even this one may take so long that it is renewed. Then it does not count.
    until("a run too short to be renewed", || {
        let before = server.log().len();
        server.dlock().run("first").sh("exit 0").ended().expect(0).silently();
        until("the release to be in the log", || server.log()[before..].contains("dlock.release"));
        log = server.log()[before..].to_owned();
        !log.contains("dlock.renew")
    });
    let is_statement = |line: &&str| line.contains("statement: ") || line.contains("execute ");
    let statements: Vec<_> = log.lines().filter(is_statement).collect();
    assert_eq!(log.matches("connection authorized").count(), 1, "{log}");
    assert_eq!(statements.len(), 2, "{statements:#?}");
}
