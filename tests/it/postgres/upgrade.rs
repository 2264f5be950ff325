//! A schema of version 3, as an older dlock has left it, is upgraded by the next run that may.

use nix::sys::signal::Signal;

use super::{on, used};
use crate::support::{Bed, Log, Postgres, unique, until};

/// What version 3 makes.
const OLDER: &str = include_str!("version3.sql");

fn older() -> Postgres {
    let server = Postgres::with(&[]);
    server.sql(OLDER);
    server
}

/// As version 3 took a lock that nobody waited for: its holder is in the lock's own row.
fn take(server: &Postgres, name: &str, ttl: &str) -> u64 {
    // The first time, and the only one, it had a row of its own.
    let first = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'earlier')"));
    server.sql(&format!("SELECT dlock.release('{name}', 'earlier', {first})"));
    let token = server.sql(&format!("SELECT token FROM dlock.take('{name}', 'alone', '{ttl}', NULL, NULL)"));
    assert_eq!(server.sql(&format!("SELECT crowd FROM dlock.locks WHERE name = '{name}'")), "1");
    token.parse().unwrap()
}

fn expires(server: &Postgres, name: &str) -> String {
    server.sql(&format!("SELECT expires FROM dlock.contenders WHERE name = '{name}' AND token IS NOT NULL"))
}

#[test]
fn a_lock_that_is_held_stays_held() {
    let (server, log) = (older(), Log::new());
    let alone = take(&server, "alone", "1 h");
    let in_row = server.sql("SELECT expires FROM dlock.locks WHERE name = 'alone'");
    let queue =
        |owner: &str| server.sql(&format!("SELECT outcome, token FROM dlock.acquire('both', '{owner}', '1 h')"));
    let both: u64 = queue("first").strip_prefix("granted|").unwrap().parse().unwrap();
    server.sql("SELECT outcome FROM dlock.acquire('both', 'second', '1 h', queue => true)");
    let in_table = expires(&server, "both");

    // Whoever comes upgrades the schema, for both.
    server.dlock().run("alone").arg("-n").sh("echo no").ended().expect(75).saying("alone");
    assert_eq!(server.sql("SELECT dlock.version()"), "5");
    assert_eq!((expires(&server, "alone"), expires(&server, "both")), (in_row, in_table), "no lease has changed");
    let next = ["alone", "both"].map(|name| server.dlock().run(name).args(log.witness(&["for=10"])).spawn());
    server.await_waiters("alone", 1);
    server.await_waiters("both", 2);

    // What version 3 says to renew and to release.
    let renew = |name: &str, owner: &str, token| {
        let with = format!("'{name}', '{owner}', {token}::bigint, make_interval(secs => 3600), NULL, 1, true, false");
        server.sql(&format!("SELECT outcome FROM dlock.renew({with})"))
    };
    let release = |name: &str, owner: &str, token| {
        let with = format!("'{name}', '{owner}', {token}::bigint, NULL::json, NULL, make_interval(secs => 0), 1");
        server.sql(&format!("SELECT dlock.release({with})"))
    };
    assert_eq!((renew("alone", "alone", alone), renew("both", "first", both)), ("held".into(), "held".into()));
    assert_eq!(log.runs().len(), 0);
    assert_eq!((release("alone", "alone", alone), release("both", "first", both)), ("t".into(), "t".into()));
    // The one that waited before the upgrade is still first, until it is clear that it does not ask any more.
    let [first, second] = next;
    first.ended().expect(0);
    second.ended().expect(0);
    let tokens: Vec<_> = log.runs().iter().map(|run| run.token).collect();
    assert!(tokens.len() == 2 && tokens[0] > alone && tokens[1] > both, "{tokens:?}");
    log.assert_no_overlap();
}

#[test]
fn a_lease_of_version_3_ends_when_it_was_going_to() {
    let (server, log) = (older(), Log::new());
    let token = take(&server, "short", "9 s");
    let waiter = server.dlock().run("short").args(log.witness(&["for=10"])).spawn();
    server.await_waiters("short", 1);
    let end = format!("SELECT extract(epoch FROM '{}'::timestamptz) * 1000000", expires(&server, "short"));
    let end: f64 = server.sql(&end).parse().unwrap();
    waiter.ended().expect(0);
    // A token is the server's clock, if nothing has made it greater.
    let granted = log.runs()[0].token;
    assert!(granted > token && granted as f64 >= end.floor(), "{granted} {end}");
}

#[test]
fn an_older_dlock_is_refused_by_the_upgraded_schema() {
    let server = older();
    used(&server);
    // All that version 3 asks before anything is granted.
    for call in [
        "SELECT token, version FROM dlock.take('first', 'me', make_interval(secs => 30), NULL::json, NULL)",
        "SELECT outcome FROM dlock.acquire('first', 'me', make_interval(secs => 30), 'exclusive', 1, true, NULL,
             NULL::json, NULL::text, false, 1)",
        "SELECT token FROM dlock.await('first', 'me', 1::bigint, make_interval(secs => 1), false)",
        "SELECT dlock.let_go('first', 'me', 1::bigint, NULL::json)",
        "SELECT * FROM dlock.everybody",
    ] {
        let refused = server.try_sql(call).unwrap_err();
        assert!(refused.contains("does not exist"), "{refused}");
    }
    assert_eq!(server.sql("SELECT dlock.version()"), "5");
}

#[test]
fn many_that_come_first_upgrade_it_once() {
    let (server, log) = (older(), Log::new());
    let token = take(&server, "job", "1 s");
    let all: Vec<_> = (0..6).map(|_| server.dlock().run("job").args(log.witness(&["for=10"])).spawn()).collect();
    for one in all {
        one.ended().expect(0).silently();
    }
    assert!(log.runs().len() == 6 && log.runs().iter().all(|run| run.token > token));
    log.assert_no_overlap();
}

#[test]
fn a_role_that_may_not_upgrade_it_is_told_who_can() {
    let server = older();
    server.sql("CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA dlock TO app");
    server.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dlock TO app");
    let url = server.url_as("app", "");
    let attempt = || on(&url).run("job").sh("exit 0").ended();
    attempt().expect(78).saying("of version 3, and role app may not upgrade it").saying("doctor --print-schema");
    assert_eq!(server.sql("SELECT dlock.version()"), "3");
    let script = on(&url).args(["doctor", "--print-schema"]).ended().expect(0).stdout;
    server.sql(&script);
    attempt().expect(0).silently();
    // A second time there is nothing to do.
    assert!(server.try_sql(&script).unwrap_err().contains("the schema is of version 5"));
}

#[test]
fn a_schema_of_version_3_by_another_name_is_upgraded_too() {
    let (server, name) = (Postgres::with(&[]), unique("named"));
    server.sql(&OLDER.replace("dlock.", "locks.").replace("SCHEMA dlock", "SCHEMA locks"));
    let url = server.url_as("postgres", "prefix=locks");
    let holder = on(&url).run(&name).sh("echo in; exec sleep 1000").spawn();
    until("it to be held", || holder.stdout() == "in\n");
    on(&url).run(&name).arg("-n").sh("echo no").ended().expect(75);
    holder.signal(Signal::SIGTERM);
    assert_eq!(server.sql("SELECT to_regnamespace('dlock') IS NULL AND locks.version() = 5"), "t");
}
