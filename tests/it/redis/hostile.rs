//! A server that means us no good: it may be anybody who listens where a URL leads.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

use crate::support::{Dlock, until};

const MB: u64 = 1 << 20;
/// A list that grows is there twice while it is copied, and one of a connection before may not have been given back yet.
const MOST_OF_LIMIT: u64 = 4;

/// Answers whatever it is asked with the head, and then with the filling for as long as somebody reads.
fn hostile(accepts_log_in: bool, head: &'static str, filling: &'static str) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            std::thread::spawn(move || pour(client, accepts_log_in, head, filling));
        }
    });
    port
}

fn pour(mut client: TcpStream, accepts_log_in: bool, head: &str, filling: &str) {
    let mut asked = [0; 65536];
    if accepts_log_in {
        let _ = client.read(&mut asked);
        let _ = client.write_all(b"+OK\r\n");
    }
    let _ = client.read(&mut asked);
    let mut sent = client.write_all(head.as_bytes());
    let many = filling.repeat(65536 / filling.len());
    while sent.is_ok() {
        sent = client.write_all(many.as_bytes());
    }
}

const ANSWERS: [(&str, &str); 9] = [
    ("$15000000\r\n", "x"),
    ("$2000000000\r\n", "x"),
    ("*2000000000\r\n", "_\r\n"),
    ("*2000000000\r\n", "$0\r\n\r\n"),
    ("%2000000000\r\n", "*1\r\n+\r\n"),
    ("-", "x"),
    (">2000000000\r\n", "$0\r\n\r\n"),
    ("", "*1\r\n"),
    ("", "*2000000000\r\n"),
];

/// The most memory that dlock ever had, by the kernel's word, while it made nothing of these answers.
fn peak_memory(login: &str, port: u16) -> u64 {
    let url = format!("redis://{login}127.0.0.1:{port}");
    let dlock = Dlock::new().env("DLOCK_BACKEND", url).run("job").args(["--connect-timeout", "2s"]);
    let mut running = dlock.sh("echo no").spawn();
    let status = format!("/proc/{}/status", running.pid());
    let mut peak = 0;
    until("dlock to end", || {
        let status = std::fs::read_to_string(&status).unwrap_or_default();
        let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
        peak = kilobytes.map_or(0, |kilobytes| kilobytes.trim().parse::<u64>().unwrap() << 10).max(peak);
        running.has_ended()
    });
    let ended = running.ended().expect(69);
    assert!(ended.stderr.len() < 2000, "{}", ended.stderr);
    peak
}

/// What is read and what is made of it may each be so large; dlock itself needs a little.
#[test]
fn a_hostile_server_costs_little_memory() {
    for (head, filling) in ANSWERS {
        for greets in [false, true] {
            let before = peak_memory("", hostile(greets, head, filling));
            assert!(before < MOST_OF_LIMIT * 16 * MB + 32 * MB, "{head:?}: {} MB", before / MB);
        }
        let after = peak_memory(":password@", hostile(true, head, filling));
        assert!(after < MOST_OF_LIMIT * 64 * MB + 32 * MB, "{head:?}: {} MB", after / MB);
    }
}
