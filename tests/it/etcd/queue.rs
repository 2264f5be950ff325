//! What a hand-over costs the server.

use std::io::{Read, Write};
use std::net::TcpStream;

use crate::support::assert_hand_overs_wake_one;
use crate::support::etcd::Etcd;

/// How many changes the server has told those who watch.
fn told(etcd: &Etcd) -> u64 {
    let mut stream = TcpStream::connect(("127.0.0.1", etcd.port())).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    let figure = page.lines().find_map(|line| line.strip_prefix("etcd_debugging_mvcc_events_total "));
    figure.unwrap().parse::<f64>().unwrap() as u64
}

#[test]
fn a_hand_over_wakes_one_waiter_not_all() {
    let etcd = Etcd::new();
    assert_hand_overs_wake_one(&etcd, || told(&etcd));
}
