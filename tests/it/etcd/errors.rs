//! What is wrong with the way to etcd has its own exit code, and a sentence.

use std::process::Command;

use crate::support::etcd::{Etcd, shared};
use crate::support::{Bed, Dlock, Ended, Proxy, in_time, unique, until};

fn run(url: &str) -> Ended {
    Dlock::new().env("DLOCK_BACKEND", url).run(&unique("error")).sh("echo ran").ended()
}

#[test]
fn nobody_there_is_69() {
    run("etcd://127.0.0.1:1").expect(69).saying("refused");
    run("etcd://127.0.0.1:1,127.0.0.1:2,127.0.0.1:3").expect(69).saying("127.0.0.1:3");
}

#[test]
fn silence_is_69_when_the_connect_timeout_is_over() {
    let proxy = Proxy::to(shared().port());
    proxy.freeze();
    let dlock = Dlock::new().env("DLOCK_BACKEND", format!("etcd://127.0.0.1:{}", proxy.port()));
    let dlock = dlock.run(&unique("silent")).args(["--connect-timeout", "500ms"]).sh("echo ran");
    assert_eq!(dlock.ended().expect(69).saying("answer").stdout, "");
}

#[test]
fn a_url_that_makes_no_sense_is_78() {
    run("etcd://").expect(78).saying("host");
    run("etcd://h/path").expect(78).saying("prefix");
    run("etcd://h?prefx=a").expect(78).saying("prefix");
    run("etcd://h?tls-ca=/ca.pem").expect(78).saying("etcds://");
    run("etcds://h?tls-ca=/nowhere/ca.pem").expect(78).saying("/nowhere/ca.pem");
    run("etcds://h?tls-cert=/nowhere/cert.pem").expect(78);
}

#[test]
fn locks_lie_where_the_prefix_says() {
    let (etcd, name) = (shared(), unique("prefix"));
    let url = format!("{}?prefix=team/locks", etcd.url());
    let dlock = || Dlock::new().env("DLOCK_BACKEND", &url);
    let script = format!("etcdctl --endpoints {} get --prefix --keys-only team/locks/{name}/", etcd.endpoints()[0]);
    let ended = dlock().env("ETCDCTL_API", "3").run(&name).sh(&script).ended().expect(0);
    assert!(ended.stdout.starts_with("team/locks/"), "{ended:#?}");
    let listed = dlock().args(["status", "--json"]).ended().expect(0).stdout;
    assert!(listed.contains(&name));
    assert!(!etcd.dlock().args(["status", "--json"]).ended().expect(0).stdout.contains(&name));
}

#[test]
fn whoever_is_not_let_in_gets_77() {
    let etcd = Etcd::new();
    for command in [
        &["user", "add", "root:pw"][..],
        &["user", "grant-role", "root", "root"],
        &["user", "add", "joe:pw"],
        &["role", "add", "joes"],
        &["role", "grant-permission", "joes", "--prefix=true", "readwrite", "joe/"],
        &["role", "grant-permission", "joes", "--prefix=true", "readwrite", "joe-meta/"],
        &["user", "grant-role", "joe", "joes"],
    ] {
        etcd.ctl(command);
    }
    let at = |login: &str, rest: &str| format!("etcd://{login}127.0.0.1:{}{rest}", etcd.port());
    run(&at("root:pw@", "")).expect(78).saying("authentication is not enabled");
    etcd.ctl(&["auth", "enable"]);
    run(&at("", "")).expect(77).saying("user name is empty");
    run(&at("root:wrong@", "")).expect(77).saying("invalid user ID or password");
    run(&at("joe:pw@", "")).expect(77).saying("permission denied");
    // A password in the URL is visible to others, which is worth a warning.
    run(&at("joe:pw@", "?prefix=joe/")).expect(0);
    let file = etcd.directory().join("password");
    std::fs::write(&file, "pw\n").unwrap();
    run(&at("joe@", &format!("?prefix=joe/&password-file={}", file.display()))).expect(0).silently();
}

/// Makes a key and a certificate, signed by `ca` or by itself.
fn certify(etcd_dir: &std::path::Path, name: &str, alternative: &str, ca: Option<&str>) -> (String, String) {
    let path = |end: &str| etcd_dir.join(format!("{name}.{end}")).display().to_string();
    let of_ca = |ca: &str, end: &str| etcd_dir.join(format!("{ca}.{end}")).display().to_string();
    let mut openssl = Command::new("openssl");
    openssl.args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]);
    openssl.args(["-keyout", &path("key"), "-out", &path("pem"), "-subj", &format!("/CN={name}")]);
    if let Some(ca) = ca {
        openssl.args(["-CA", &of_ca(ca, "pem"), "-CAkey", &of_ca(ca, "key")]);
        openssl.args(["-addext", "basicConstraints=critical,CA:FALSE"]);
        openssl.args(["-addext", &format!("subjectAltName={alternative}")]);
    }
    let output = openssl.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (path("pem"), path("key"))
}

#[test]
fn tls_lets_in_who_shows_and_believes_the_right_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let (ca, _) = certify(dir.path(), "ca", "", None);
    let (other, other_key) = certify(dir.path(), "other", "", None);
    let (server, server_key) = certify(dir.path(), "server", "IP:127.0.0.1", Some("ca"));
    let (client, client_key) = certify(dir.path(), "client", "DNS:client", Some("ca"));
    let options = ["--cert-file", &server, "--key-file", &server_key, "--client-cert-auth", "--trusted-ca-file", &ca];
    let login = ["--cacert", &ca, "--cert", &client, "--key", &client_key];
    let mut etcd = Etcd::with_options("https", &options.map(str::to_owned), &login.map(str::to_owned));
    etcd.await_health();
    let at = |host: &str, ca: &str, cert: &str, key: &str| {
        run(&format!("etcds://{host}:{}?tls-ca={ca}&tls-cert={cert}&tls-key={key}", etcd.port()))
    };
    assert_eq!(at("127.0.0.1", &ca, &client, &client_key).expect(0).silently().stdout, "ran\n");
    at("127.0.0.1", &other, &client, &client_key).expect(77).saying("UnknownIssuer");
    at("127.0.0.1", &ca, &other, &other_key).expect(77).saying("tls-cert");
    at("localhost", &ca, &client, &client_key).expect(77).saying("not valid for name");
    run(&format!("etcds://127.0.0.1:{}?tls-ca={ca}", etcd.port())).expect(77).saying("tls-cert");
    run(&format!("etcds://127.0.0.1:{}", etcd.port())).expect(77).saying("UnknownIssuer");
    run(&format!("etcd://127.0.0.1:{}", etcd.port())).expect(69);
}

#[test]
fn a_cluster_of_which_most_are_frozen_is_69_and_says_so() {
    let etcd = Etcd::cluster();
    let left = etcd.leader();
    for (_, member) in etcd.members.iter().enumerate().filter(|(n, _)| *n != left) {
        member.freeze();
    }
    let dlock = etcd.dlock().run(&unique("frozen")).args(["--connect-timeout", "2s"]).sh("echo ran");
    assert_eq!(
        in_time(|| dlock.ended()).expect(69).saying("no quorum of 3 members").saying("did not answer").stdout,
        ""
    );
}

#[test]
fn a_cluster_without_quorum_is_69() {
    let mut etcd = Etcd::cluster();
    let left = etcd.leader();
    for (n, member) in etcd.members.iter_mut().enumerate() {
        if n != left {
            member.kill();
        }
    }
    let dlock = || etcd.dlock().run(&unique("quorum")).args(["--connect-timeout", "2s"]).sh("echo ran").ended();
    assert_eq!(in_time(dlock).expect(69).saying("no quorum of 3 members").stdout, "");
    // The one that is left comes to know that it leads nobody, and says so.
    until("the last member to say that it has no leader", || dlock().expect(69).stderr.contains("no leader"));
}
