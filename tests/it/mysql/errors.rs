//! Every way of not getting in has its exit code and a sentence.

use std::os::unix::fs::PermissionsExt;

use super::{on, used};
use crate::support::{Bed, Dlock, Ended, Mysql, free_port, until};

fn attempt(url: &str) -> Ended {
    on(url).run("door").sh("echo no").ended()
}

#[test]
fn passwords_are_checked_and_found_where_mysql_finds_them() {
    let server = Mysql::with(&[]);
    server.sql("CREATE USER app IDENTIFIED BY 'open: #sesame'; GRANT ALL ON jobs.* TO app");
    let url = server.url_as("app", "");
    attempt(&server.url_as("app:wrong", "")).expect(77).saying("Access denied");
    attempt(&url).expect(77).saying("its password");
    attempt(&server.url_as("nobody:x", "")).expect(77);

    let read = |dlock: Dlock| dlock.run("door").sh("exit 0").ended();
    read(on(&server.url_as("app:open%3A%20%23sesame", ""))).expect(0).silently();
    read(on(&url).env("DLOCK_PASSWORD", "open: #sesame")).expect(0).silently();
    read(on(&url).env("MYSQL_PWD", "open: #sesame")).expect(0).silently();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("password");
    std::fs::write(&file, "open: #sesame\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    read(on(&server.url_as("app", &format!("password-file={}", file.display())))).expect(0).silently();

    // All that the client's own file knows.
    let dlock = on("mysql:///jobs");
    let text = format!("[client]\nuser=app\npassword=\"open: #sesame\"\nhost=127.0.0.1\nport={}\n", server.port());
    let file = dlock.home().join(".my.cnf");
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    read(dlock).expect(0).silently();
}

#[test]
fn a_log_in_by_ed25519_is_one_by_password() {
    let server = Mysql::with(&[]);
    server.sql("INSTALL SONAME 'auth_ed25519'; CREATE USER app IDENTIFIED VIA ed25519 USING PASSWORD('sesame')");
    server.sql("GRANT ALL ON jobs.* TO app");
    on(&server.url_as("app:sesame", "")).run("door").sh("exit 0").ended().expect(0).silently();
    attempt(&server.url_as("app:wrong", "")).expect(77).saying("Access denied");
}

#[test]
fn a_socket_is_a_way_to_the_server() {
    let server = Mysql::shared();
    let path = server.socket().display().to_string();
    let encoded = path.replace('/', "%2F");
    for url in [format!("mysql://root@{encoded}/jobs"), format!("mariadb://root@/jobs?socket={path}")] {
        on(&url).run("door").sh("exit 0").ended().expect(0).silently();
    }
}

#[test]
fn a_database_that_is_not_there_is_78() {
    let server = Mysql::shared();
    let url = format!("mysql://root@127.0.0.1:{}/nowhere", server.port());
    attempt(&url).expect(78).saying("nowhere");
    attempt(&format!("mysql://root@127.0.0.1:{}", server.port())).expect(78).saying("which database");
}

#[test]
fn a_server_that_is_down_is_69() {
    attempt(&format!("mysql://root@127.0.0.1:{}/jobs", free_port())).expect(69).saying("refused");
    attempt("mysql://root@%2Fnowhere/jobs").expect(69);
}

#[test]
fn a_server_that_hangs_is_69_when_the_connect_timeout_ends() {
    let server = Mysql::with(&[]);
    used(&server);
    server.freeze();
    let ended = server.dlock().run("door").args(["--connect-timeout", "700ms"]).sh("echo no").ended();
    ended.expect(69).saying("no answer within 700ms");
}

#[test]
fn a_read_only_server_is_69_whoever_asks() {
    let server = Mysql::with(&[]);
    used(&server);
    server.sql("CREATE USER app; GRANT ALL ON jobs.* TO app; SET GLOBAL read_only = 1");
    for user in ["app", "root"] {
        attempt(&server.url_as(user, "")).expect(69).saying("read-only");
    }
    on(&server.url()).args(["status", "first"]).ended().expect(0);
}

#[test]
fn a_server_without_a_connection_left_is_69_and_says_so() {
    let server = Mysql::with(&["--max-connections=10"]);
    used(&server);
    server.sql("CREATE USER app; GRANT EXECUTE ON jobs.* TO app");
    let url = server.url_as("app", "");
    let holders: Vec<_> =
        (0..10).map(|n| on(&url).run(&format!("seat{n}")).sh("echo in; exec sleep 1000").spawn()).collect();
    until("all seats to be taken", || holders.iter().all(|holder| holder.stdout() == "in\n"));
    let dlock = on(&url).run("door").args(["--connect-timeout", "1s"]);
    dlock.sh("echo no").ended().expect(69).saying("no connection left");
}

#[test]
fn a_user_that_may_not_create_the_tables_is_told_who_can() {
    let server = Mysql::with(&[]);
    server.sql("CREATE USER app, guest; GRANT SELECT ON jobs.* TO app, guest");
    let (url, guest) = (server.url_as("app", ""), server.url_as("guest", ""));
    attempt(&url).expect(77).saying("--print-schema").saying("GRANT EXECUTE ON");
    let script = on(&url).args(["doctor", "--print-schema"]).ended().expect(0).silently().stdout;
    server.sql(&script);
    attempt(&url).expect(77).saying("GRANT EXECUTE ON");
    // To call the procedures is all that it takes: the tables themselves are nobody's business.
    server.sql("REVOKE ALL, GRANT OPTION FROM app; GRANT EXECUTE ON jobs.* TO app");
    on(&url).run("door").sh("exit 0").ended().expect(0).silently();
    on(&url).arg("doctor").ended().expect(0);
    let shown = on(&url).args(["status", "--json"]).ended().expect(0).silently().stdout;
    assert!(shown.contains("door"), "{shown}");
    attempt(&guest).expect(77);
    Dlock::new().args(["doctor", "--print-schema"]).ended().expect(64);
}

#[test]
fn tables_of_another_version_are_78_and_half_of_them_are_completed() {
    let server = Mysql::with(&[]);
    used(&server);
    server.sql("DROP PROCEDURE dlock_clock");
    on(&server.url()).run("door").sh("exit 0").ended().expect(0).silently();
    let body = server.sql("SELECT body FROM mysql.proc WHERE db = 'jobs' AND name = 'dlock_ask'");
    assert!(body.contains("1 AS version"));
    server.sql("UPDATE mysql.proc SET body = REPLACE(body, '1 AS version', '7 AS version') WHERE name = 'dlock_ask'");
    server.sql("CREATE PROCEDURE other() SELECT 1; DROP PROCEDURE other");
    attempt(&server.url()).expect(78).saying("of version 7");
}
