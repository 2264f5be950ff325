//! How long dlock waits for a backend that says nothing: a port that takes connections and never answers.

use std::net::TcpListener;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::{Dlock, PLACES, Place};

/// Every backend with a server, as one URL names it.
fn remote() -> impl Iterator<Item = &'static Place> {
    PLACES.into_iter().filter(|place| place.covered && place.hosts > 0)
}

/// For a machine that is busy with other things.
const SLACK: Duration = Duration::from_secs(5);

/// dlock's words about a silent backend, and how long it took to find them.
fn after_silence(place: &Place, patience: &[&str]) -> Duration {
    let listeners: Vec<_> = (0..place.hosts).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let ports: Vec<u16> = listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
    let url = place.url(&ports, Path::new(""));
    let began = Instant::now();
    let ended = Dlock::new().run("x").args(["-b", &url]).args(patience).sh("echo ran").ended().expect(69);
    assert_eq!(ended.stdout, "");
    began.elapsed()
}

#[test]
fn a_silent_backend_is_69_when_the_connect_timeout_is_over() {
    for place in remote() {
        let took = after_silence(place, &["--connect-timeout", "1s"]);
        assert!((Duration::from_millis(300)..Duration::from_secs(1) + SLACK).contains(&took), "{place:?}: {took:?}");
    }
}

#[test]
fn a_silent_backend_is_69_and_not_busy_when_no_more_is_to_be_waited_for_it() {
    for place in remote() {
        let took = after_silence(place, &["--wait", "1s", "--connect-timeout", "30s"]);
        assert!((Duration::from_secs(1)..Duration::from_secs(1) + SLACK).contains(&took), "{place:?}: {took:?}");
    }
}
