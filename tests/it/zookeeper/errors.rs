//! The ways in which ZooKeeper refuses, each with its exit code and a sentence.

use std::path::Path;
use std::process::Command;

use crate::support::{Bed, Dlock, Log, ZooKeeperBed, ZooKeeperEnsemble, free_port, in_time, unique, until};

fn at(url: &str) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", url)
}

#[test]
fn without_a_quorum_it_is_69_within_the_connect_timeout() {
    let mut ensemble = ZooKeeperEnsemble::new();
    for server in &mut ensemble.servers[1..] {
        server.daemon.kill();
    }
    until("the last server to stop serving", || ensemble.servers[0].role().is_none());
    let dlock = ensemble.dlock().run("quorum").args(["--connect-timeout", "2s"]);
    in_time(|| dlock.sh("echo no").ended()).expect(69).saying("no quorum");
    // Those that do not even say so.
    let ensemble = ZooKeeperEnsemble::new();
    ensemble.servers.iter().for_each(|server| server.daemon.freeze());
    let dlock = ensemble.dlock().run("quorum").args(["--connect-timeout", "2s"]);
    in_time(|| dlock.sh("echo no").ended()).expect(69).saying("cannot be reached");
}

#[test]
fn nobody_listening_is_69() {
    at(&format!("zookeeper://127.0.0.1:{}", free_port())).run("x").sh("echo no").ended().expect(69).saying("refused");
}

#[test]
fn a_chroot_must_exist() {
    let bed = ZooKeeperBed::shared();
    let chroot = unique("chroot");
    let url = format!("{}/{chroot}", bed.url());
    at(&url).run("x").sh("echo no").ended().expect(78).saying(&chroot);
    at(&url).args(["status", "x"]).ended().expect(78).saying(&chroot);
    // The root of another prefix is as good as any other node that exists.
    at(&format!("{}?prefix={chroot}", bed.url())).run("x").sh("exit 0").ended().expect(0).silently();
    at(&url).run("x").sh("exit 0").ended().expect(0).silently();
}

#[test]
fn who_has_the_password_keeps_the_others_out() {
    let bed = ZooKeeperBed::shared();
    let (prefix, name) = (unique("digest"), unique("x"));
    let url = |login: &str| format!("zookeeper://{login}127.0.0.1:{}?prefix={prefix}", bed.port);
    at(&url("alice:right@")).run(&name).args(["-q"]).sh("exit 0").ended().expect(0);
    at(&url("alice:wrong@")).run(&name).args(["-q"]).sh("echo no").ended().expect(77);
    let refused = at(&url("")).run(&name).sh("echo no").ended().expect(77).saying("ACL");
    assert!(!refused.stderr.contains("right"));
    // Asked while it is held: an empty parent is removed by the server, and what is not there is free.
    let log = Log::new();
    let _holder = at(&url("alice:right@")).run(&name).args(["-q"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    at(&url("")).args(["status", &name]).ended().expect(77);
}

fn openssl(dir: &Path, line: &str) {
    let done = Command::new("openssl").args(line.split_whitespace()).current_dir(dir).output().unwrap();
    assert!(done.status.success(), "openssl {line}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn tls_verifies_both_sides() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    for ca in ["ca", "other"] {
        openssl(
            dir,
            &format!("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={ca} -keyout {ca}.key -out {ca}.pem"),
        );
    }
    std::fs::write(dir.join("names"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    for who in ["server", "client"] {
        openssl(dir, &format!("req -newkey rsa:2048 -nodes -subj /CN={who} -keyout {who}.key -out {who}.csr"));
        openssl(
            dir,
            &format!(
                "x509 -req -in {who}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out {who}.pem"
            ),
        );
    }
    let read = |file: &str| std::fs::read_to_string(dir.join(file)).unwrap();
    std::fs::write(dir.join("both.pem"), read("server.key") + &read("server.pem")).unwrap();
    let (port, at_dir) = (free_port(), dir.display());
    let _bed = ZooKeeperBed::new(&format!(
        "secureClientPortAddress=127.0.0.1\nsecureClientPort={port}\n\
         serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
         ssl.keyStore.location={at_dir}/both.pem\nssl.keyStore.type=PEM\n\
         ssl.trustStore.location={at_dir}/ca.pem\nssl.trustStore.type=PEM\nssl.clientAuth=need\n"
    ));
    let url = |host: &str, ca: &str| format!("zookeepers://{host}:{port}?tls-ca={at_dir}/{ca}.pem");
    let ours = format!("&tls-cert={at_dir}/client.pem&tls-key={at_dir}/client.key");
    let first = at(&(url("127.0.0.1", "ca") + &ours)).run("tls");
    // The first handshake takes a new server long.
    first.args(["--connect-timeout", "30s"]).sh("exit 0").ended().expect(0).silently();
    at(&(url("127.0.0.1", "other") + &ours)).run("tls").sh("echo no").ended().expect(77).saying("certificate");
    at(&(url("localhost", "ca") + &ours)).run("tls").sh("echo no").ended().expect(77).saying("certificate");
    at(&url("127.0.0.1", "ca")).run("tls").sh("echo no").ended().expect(77).saying("ertificate");
}
