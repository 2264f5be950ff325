//! `sslmode` as for PostgreSQL, against a server that has TLS and users that insist on it.

use std::os::unix::fs::PermissionsExt;

use super::{on, used};
use crate::postgres::tls::certificates;
use crate::support::{Ended, Mysql};

#[test]
fn what_a_server_shows_is_checked_as_sslmode_says() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    certificates(dir.path());
    for file in std::fs::read_dir(dir.path()).unwrap() {
        std::fs::set_permissions(file.unwrap().path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    let path = |name: &str| dir.path().join(name).display().to_string();
    let [ca, cert, key] = [("ca", "ca.crt"), ("cert", "server.crt"), ("key", "server.key")]
        .map(|(k, f)| format!("--ssl-{k}={}", path(f)));
    let server = Mysql::with(&[&ca, &cert, &key]);
    used(&server);
    server.sql("CREATE USER open; CREATE USER safe REQUIRE SSL; CREATE USER known REQUIRE X509");
    server.sql("GRANT EXECUTE ON jobs.* TO open, safe, known");
    // `localhost` is in the certificate, 127.0.0.1 is not.
    let run = |user: &str, host: &str, parameters: &str| -> Ended {
        let parameters = parameters.replace("DIR", &dir.path().display().to_string());
        let url = format!("mysql://{user}@{host}:{}/jobs?{parameters}", server.port());
        on(&url).run("tls").sh("exit 0").ended()
    };
    for fine in ["", "sslmode=prefer", "sslmode=require", "sslmode=verify-full&tls-ca=DIR/ca.crt"] {
        run("safe", "localhost", fine).expect(0).silently();
    }
    run("open", "localhost", "sslmode=disable").expect(0).silently();
    run("safe", "localhost", "sslmode=disable").expect(77);
    // Somebody else's signature, or another host's name.
    run("safe", "localhost", "sslmode=verify-full&tls-ca=DIR/stranger.crt").expect(77);
    run("safe", "localhost", "sslmode=verify-ca&tls-ca=DIR/stranger.crt").expect(77);
    run("safe", "localhost", "sslmode=verify-full").expect(77);
    run("safe", "127.0.0.1", "sslmode=verify-full&tls-ca=DIR/ca.crt").expect(77);
    // The client library checks the name whenever it checks the signature.
    run("safe", "127.0.0.1", "sslmode=verify-ca&tls-ca=DIR/ca.crt").expect(77);
    run("safe", "localhost", "sslmode=verify-ca&tls-ca=DIR/ca.crt").expect(0).silently();
    run("safe", "127.0.0.1", "sslmode=require").expect(0).silently();
    // Who we are.
    run("known", "localhost", "sslmode=require").expect(77);
    run("known", "localhost", "sslmode=require&tls-cert=DIR/client.crt&tls-key=DIR/client.key").expect(0).silently();
    run("known", "localhost", "sslmode=require&tls-cert=DIR/client.crt").expect(78);
}

#[test]
fn a_server_without_tls_is_refused_where_it_is_wanted() {
    let server = Mysql::shared();
    used(server);
    for (mode, code) in [("require", 77), ("verify-full", 77), ("prefer", 0), ("allow", 0), ("disable", 0)] {
        on(&server.url_as("root", &format!("sslmode={mode}"))).run("tls").sh("exit 0").ended().expect(code);
    }
}
