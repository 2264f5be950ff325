//! Every way of not getting in has its exit code and a sentence.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{on, used};
use crate::support::{Bed, Dlock, Ended, Pooler, Postgres, free_port, unique, until};

fn attempt(url: &str) -> Ended {
    on(url).run("door").sh("echo no").ended()
}

fn with_a_password_for(role: &str) -> Postgres {
    let server = Postgres::with(&["password_encryption=scram-sha-256"]);
    server.sql(&format!("CREATE ROLE {role} LOGIN PASSWORD 'open: sesame'"));
    server.sql(&format!("CREATE SCHEMA dlock AUTHORIZATION {role}"));
    let rules = format!("local all postgres trust\nhost all {role} 127.0.0.1/32 scram-sha-256\n");
    std::fs::write(server.dir().join("data/pg_hba.conf"), rules).unwrap();
    server.sql("SELECT pg_reload_conf()");
    server
}

#[test]
fn passwords_are_checked_and_found_where_libpq_finds_them() {
    let server = with_a_password_for("app");
    let url = server.url_as("app", "");
    attempt(&server.url_as("app:wrong", "")).expect(77).saying("password authentication failed");
    attempt(&url).expect(77).saying("password missing");
    attempt(&server.url_as("nobody:x", "")).expect(77);

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("pgpass");
    std::fs::write(&file, format!("*:*:*:other:no\n127.0.0.1:{}:*:app:open\\: sesame\n", server.port())).unwrap();
    let read = |dlock: Dlock| dlock.run("door").sh("exit 0").ended();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).unwrap();
    read(on(&url).env("PGPASSFILE", &file)).expect(78).saying("chmod 600");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    read(on(&url).env("PGPASSFILE", &file)).expect(0).silently();
    read(on(&url).env("PGPASSWORD", "open: sesame")).expect(0).silently();
    let dlock = on(&url);
    std::fs::copy(&file, dlock.home().join(".pgpass")).unwrap();
    read(dlock).expect(0).silently();
}

#[test]
fn a_database_that_is_not_there_is_78() {
    let server = Postgres::shared();
    let url = format!("postgres://postgres@127.0.0.1:{}/nowhere", server.port());
    attempt(&url).expect(78).saying("\"nowhere\" does not exist");
    attempt(&server.url_as("postgres", "sslmod=disable")).expect(78).saying("sslmode");
}

#[test]
fn a_server_that_is_down_is_69() {
    attempt(&format!("postgres://postgres@127.0.0.1:{}/postgres", free_port())).expect(69).saying("refused");
    attempt("postgres://postgres@%2Fnowhere/postgres").expect(69);
}

#[test]
fn a_server_that_hangs_is_69_when_the_connect_timeout_ends() {
    let server = Postgres::with(&[]);
    used(&server);
    server.freeze();
    let ended = server.dlock().run("door").args(["--connect-timeout", "700ms"]).sh("echo no").ended();
    ended.expect(69).saying("no answer within 700ms");
}

#[test]
fn a_read_only_server_is_69_and_says_so() {
    let server = Postgres::shared();
    used(server);
    let url = server.url_as("postgres", "options=-c%20default_transaction_read_only%3Don");
    attempt(&url).expect(69).saying("read-only");
    on(&url).args(["status", "first"]).ended().expect(0);
}

#[test]
fn a_server_without_a_connection_left_is_69_and_says_so() {
    let server = Postgres::with(&["max_connections=6", "superuser_reserved_connections=5", "max_wal_senders=0"]);
    used(&server);
    server.sql("CREATE ROLE app LOGIN");
    server.sql("GRANT USAGE ON SCHEMA dlock TO app");
    server.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dlock TO app");
    let url = server.url_as("app", "");
    let holder = on(&url).run("seat").sh("echo in; exec sleep 1000").spawn();
    crate::support::until("the only seat to be taken", || holder.stdout() == "in\n");
    let dlock = on(&url).run("door").args(["--connect-timeout", "1s"]);
    dlock.sh("echo no").ended().expect(69).saying("no connection left");
}

#[test]
fn a_role_that_may_not_create_the_schema_is_told_who_can() {
    let server = Postgres::with(&[]);
    server.sql("CREATE ROLE app LOGIN");
    let url = server.url_as("app", "");
    on(&url).args(["status", "--json"]).ended().expect(0);
    let advice = "CREATE SCHEMA dlock AUTHORIZATION app";
    attempt(&url).expect(77).saying(advice);
    server.sql(advice);
    on(&url).run("door").sh("exit 0").ended().expect(0).silently();

    server.sql("CREATE ROLE guest LOGIN");
    attempt(&server.url_as("guest", "")).expect(77).saying("USAGE on dlock's schema");
    server.sql("GRANT USAGE ON SCHEMA dlock TO guest");
    attempt(&server.url_as("guest", "")).expect(77);
    server.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dlock TO guest");
    on(&server.url_as("guest", "")).run("door").sh("exit 0").ended().expect(0).silently();
}

#[test]
fn an_administrator_can_make_the_whole_schema() {
    let server = Postgres::with(&[]);
    server.sql("CREATE ROLE app LOGIN");
    let url = server.url_as("app", "prefix=locks");
    let script = on(&url).args(["doctor", "--print-schema"]).ended().expect(0).silently().stdout;
    server.sql(&script);
    server.sql("GRANT USAGE ON SCHEMA locks TO app");
    server.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA locks TO app");
    on(&url).run("door").sh("exit 0").ended().expect(0).silently();
    on(&url).arg("doctor").ended().expect(0);
    Dlock::new().args(["doctor", "--print-schema"]).ended().expect(64);
}

#[test]
fn a_schema_of_another_version_is_78() {
    let server = Postgres::with(&[]);
    used(&server);
    server.sql("CREATE OR REPLACE FUNCTION dlock.version() RETURNS int LANGUAGE sql AS 'SELECT 6'");
    attempt(&server.url()).expect(78).saying("of version 6");
    assert_eq!(server.sql("SELECT count(*) FROM dlock.contenders"), "0");
    server.sql("ALTER FUNCTION dlock.acquire RENAME TO obtain");
    attempt(&server.url()).expect(78).saying("of version 6");
}

#[test]
fn a_schema_that_is_half_there_is_78() {
    let server = Postgres::with(&[]);
    used(&server);
    server.sql("ALTER FUNCTION dlock.acquire RENAME TO obtain");
    attempt(&server.url()).expect(78).saying("not all that this dlock needs");
    server.sql("ALTER FUNCTION dlock.version RENAME TO edition");
    attempt(&server.url()).expect(78).saying("not all that this dlock needs");
}

#[test]
fn a_name_that_the_server_keeps_to_itself_is_78() {
    for prefix in ["prefix=user", "prefix=pg_locks"] {
        attempt(&Postgres::shared().url_as("postgres", prefix)).expect(78).saying("?prefix=");
    }
}

#[test]
fn a_database_or_a_role_that_lets_nobody_in_says_how_it_would() {
    let server = Postgres::shared();
    let at = |role: &str, database: &str| {
        let url = format!("postgres://{role}@127.0.0.1:{}/{database}", server.port());
        on(&url).run("door").args(["--connect-timeout", "1s"]).sh("echo no").ended()
    };
    server.sql("CREATE DATABASE closed ALLOW_CONNECTIONS false");
    at("postgres", "closed").expect(69).saying("ALLOW_CONNECTIONS");
    server.sql("CREATE DATABASE private");
    server.sql("REVOKE CONNECT ON DATABASE private FROM PUBLIC");
    server.sql("CREATE ROLE stranger LOGIN");
    at("stranger", "private").expect(77).saying("GRANT CONNECT");
    server.sql("CREATE ROLE limited LOGIN CONNECTION LIMIT 0");
    at("limited", "postgres").expect(69).saying("raise its CONNECTION LIMIT");
}

#[test]
fn what_a_pooler_does_not_know_is_78() {
    let pooler = Pooler::to(Postgres::shared());
    attempt(&pooler.url("listen=off&options=-c%20work_mem%3D8MB")).expect(78).saying("ignore_startup_parameters");
}

#[test]
fn a_transaction_that_sits_on_the_row_is_named() {
    let (server, name) = (Postgres::shared(), unique("sat-upon"));
    used(server);
    let sit = format!("BEGIN; SELECT dlock.acquire('{name}', 'sitter'); SELECT pg_sleep(7); ROLLBACK");
    let sitting = std::thread::spawn(move || server.sql(&sit));
    until("the row to be taken", || {
        server.sql("SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%sitter%' AND wait_event = 'PgSleep'")
            == "1"
    });
    server.dlock().run(&name).sh("echo no").ended().expect(69).saying("a transaction that has not ended yet");
    sitting.join().unwrap();
}

/// A server that says this to whoever logs in, the last of it again and again, for as long as it is listened to; and how many
/// bytes that was.
fn flood(first: &'static [u8], then: &'static [u8]) -> (u16, Arc<AtomicUsize>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (port, sent) = (listener.local_addr().unwrap().port(), Arc::new(AtomicUsize::new(0)));
    let total = Arc::clone(&sent);
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            client.read_exact(&mut [0; 8]).unwrap();
            client.write_all(first).unwrap();
            let many = then.repeat((1 << 16) / then.len());
            while client.write_all(&many).is_ok() {
                total.fetch_add(many.len(), Ordering::SeqCst);
            }
        }
    });
    (port, sent)
}

#[test]
fn a_server_that_floods_whoever_logs_in_does_not_get_far() {
    const WELCOME: &[u8] = b"R\0\0\0\x08\0\0\0\0";
    const LOGGED_IN: &[u8] = b"R\0\0\0\x08\0\0\0\0K\0\0\0\x0c\0\0\0\x01\0\0\0\x01Z\0\0\0\x05I";
    // A message without an end, before the log-in and after it; and small ones that each take many times their size in
    // memory: a notice, a setting.
    let floods: [(&[u8], &[u8], usize); 4] = [
        (b"R\x7f\xff\xff\xff", b"x", 16 << 20),
        (WELCOME, b"N\0\0\0\x05\0", 16 << 20),
        (WELCOME, b"S\0\0\0\x06\0\0", 16 << 20),
        (LOGGED_IN, b"E\x7f\xff\xff\xffxxxxxxxx", 64 << 20),
    ];
    for (first, then, limit) in floods {
        let (port, sent) = flood(first, then);
        let url = format!("postgres://me@127.0.0.1:{port}/jobs?sslmode=disable");
        let ended = on(&url).run("door").args(["--connect-timeout", "1m"]).sh("echo no").ended().expect(69);
        if first != LOGGED_IN {
            ended.saying("which is no answer to us");
        }
        // Some of it waits in the kernel's buffers; and on giving up dlock comes back once.
        let sent = sent.load(Ordering::SeqCst);
        assert!(sent < 2 * limit, "{sent}");
    }
}
