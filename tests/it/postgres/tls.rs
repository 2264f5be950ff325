//! `sslmode` by libpq's rules, against a server that insists on TLS.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::on;
use crate::support::{Ended, Postgres};

fn openssl(dir: &Path, line: &str) {
    let done = Command::new("openssl").args(line.split_whitespace()).current_dir(dir).output().unwrap();
    assert!(done.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&done.stderr));
}

/// A root, `name.crt` and `name.key` signed by it for this host, and a root that has signed nothing.
pub fn certificates(dir: &Path) {
    for root in ["ca", "stranger"] {
        openssl(
            dir,
            &format!(
                "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={root} -keyout {root}.key -out {root}.crt"
            ),
        );
    }
    for (name, subject) in [("server", "localhost"), ("client", "app")] {
        let extension = format!("basicConstraints=CA:FALSE\nsubjectAltName=DNS:{subject}\n");
        std::fs::write(dir.join("extension"), extension).unwrap();
        openssl(
            dir,
            &format!(
                "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN={subject} -keyout {name}.key -out {name}.csr"
            ),
        );
        openssl(
            dir,
            &format!(
                "x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile extension -out {name}.crt"
            ),
        );
    }
}

struct Tls {
    server: Postgres,
    dir: PathBuf,
}

impl Tls {
    /// `localhost` has to show a certificate; 127.0.0.1 is a name that is not in it.
    fn new() -> Tls {
        let server = Postgres::with(&["ssl=off"]);
        let dir = server.dir().join("data");
        certificates(&dir);
        for file in ["server.key", "server.crt", "ca.crt"] {
            server.own(&dir.join(file));
        }
        server.sql("CREATE ROLE app LOGIN");
        let rules = "local all all trust\nhostssl all postgres all trust\nhostssl all app all cert\n";
        std::fs::write(dir.join("pg_hba.conf"), rules).unwrap();
        server.sql("ALTER SYSTEM SET ssl_ca_file = 'ca.crt'");
        server.set("ssl = on");
        crate::support::until("the server to speak TLS", || {
            let tls = Tls::run_on(&server, "postgres", "127.0.0.1", "sslmode=require");
            tls.code == Some(0)
        });
        server.sql("GRANT USAGE ON SCHEMA dlock TO app");
        server.sql("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA dlock TO app");
        Tls { server, dir }
    }

    fn run_on(server: &Postgres, role: &str, host: &str, parameters: &str) -> Ended {
        let url = format!("postgres://{role}@{host}:{}/postgres?{parameters}", server.port());
        on(&url).run("tls").sh("exit 0").ended()
    }

    fn run(&self, role: &str, host: &str, parameters: &str) -> Ended {
        let parameters = parameters.replace("DIR", &self.dir.display().to_string());
        Tls::run_on(&self.server, role, host, &parameters)
    }
}

#[test]
fn sslmode_says_how_much_of_the_certificate_is_checked() {
    let tls = Tls::new();
    let run = |host, parameters| tls.run("postgres", host, parameters);
    run("127.0.0.1", "").expect(0).silently();
    run("127.0.0.1", "sslmode=allow").expect(0).silently();
    run("127.0.0.1", "sslmode=prefer").expect(0).silently();
    run("127.0.0.1", "sslmode=disable").expect(77).saying("no encryption");
    run("127.0.0.1", "sslmode=require").expect(0).silently();
    run("127.0.0.1", "sslmode=require&sslrootcert=DIR/stranger.crt").expect(77);
    run("127.0.0.1", "sslmode=verify-ca&sslrootcert=DIR/ca.crt").expect(0).silently();
    run("127.0.0.1", "sslmode=verify-ca&sslrootcert=DIR/stranger.crt").expect(77).saying("certificate");
    run("127.0.0.1", "sslmode=verify-full&sslrootcert=DIR/ca.crt").expect(77).saying("certificate");
    run("localhost", "sslmode=verify-full&sslrootcert=DIR/ca.crt").expect(0).silently();
    run("localhost", "sslmode=verify-full&tls-ca=DIR/ca.crt").expect(0).silently();
    run("localhost", "sslmode=verify-full").expect(77).saying("certificate");
    run("localhost", "sslmode=verify-full&sslrootcert=DIR/nothing.crt").expect(78).saying("nothing.crt");
}

#[test]
fn a_certificate_that_the_server_has_signed_itself_is_its_own_root() {
    let tls = Tls::new();
    let make = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
                -addext subjectAltName=DNS:localhost -keyout server.key -out server.crt";
    openssl(&tls.dir, make);
    ["server.key", "server.crt"].iter().for_each(|file| tls.server.own(&tls.dir.join(file)));
    tls.server.sql("SELECT pg_reload_conf()");
    let run = |host, parameters| tls.run("postgres", host, parameters);
    crate::support::until("the server to show it", || {
        run("localhost", "sslmode=verify-full&sslrootcert=DIR/server.crt").code == Some(0)
    });
    run("127.0.0.1", "sslmode=verify-ca&sslrootcert=DIR/server.crt").expect(0).silently();
    run("127.0.0.1", "sslmode=verify-full&sslrootcert=DIR/server.crt").expect(77).saying("certificate");
    run("localhost", "sslmode=verify-full&sslrootcert=DIR/ca.crt").expect(77).saying("certificate");
}

#[test]
fn a_client_certificate_lets_its_role_in() {
    let tls = Tls::new();
    let mine = "sslmode=verify-full&sslrootcert=DIR/ca.crt&sslcert=DIR/client.crt&sslkey=DIR/client.key";
    tls.run("app", "localhost", mine).expect(0).silently();
    tls.run("app", "localhost", "sslmode=verify-full&sslrootcert=DIR/ca.crt").expect(77);
}

#[test]
fn a_server_without_tls_is_refused_when_tls_is_required() {
    Tls::run_on(Postgres::shared(), "postgres", "127.0.0.1", "sslmode=require").expect(77).saying("TLS");
}
