//! How long dlock waits for a backend that says nothing: a port that takes connections and never answers.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use crate::support::Dlock;

const SCHEMES: [&str; 5] = ["redis", "redlock", "etcd", "zookeeper", "postgres"];

/// For a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(5);

/// dlock's words about a silent backend, and how long it took to find them.
fn after_silence(scheme: &str, patience: &[&str]) -> Duration {
    let ports: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let count = if scheme == "redlock" { 3 } else { 1 };
    let hosts: Vec<_> = ports[..count].iter().map(|port| port.local_addr().unwrap().to_string()).collect();
    let tail = if scheme == "postgres" { "/db?sslmode=disable" } else { "" };
    let url = format!("{scheme}://{}{tail}", hosts.join(","));
    let began = Instant::now();
    let ended = Dlock::new().run("x").args(["-b", &url]).args(patience).sh("echo ran").ended().expect(69);
    assert_eq!(ended.stdout, "");
    began.elapsed()
}

#[test]
fn a_silent_backend_is_69_when_the_connect_timeout_is_over() {
    for scheme in SCHEMES {
        let took = after_silence(scheme, &["--connect-timeout", "1s"]);
        assert!((Duration::from_millis(300)..Duration::from_secs(1) + SLACK).contains(&took), "{scheme}: {took:?}");
    }
}

#[test]
fn a_silent_backend_is_69_and_not_busy_when_no_more_is_to_be_waited_for_it() {
    for scheme in SCHEMES {
        let took = after_silence(scheme, &["--wait", "1s", "--connect-timeout", "30s"]);
        assert!((Duration::from_secs(1)..Duration::from_secs(1) + SLACK).contains(&took), "{scheme}: {took:?}");
    }
}
