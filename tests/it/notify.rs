//! What systemd is told, by a socket of our own in its place.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::support::{Bed, FileBed, Log, unique};

fn bound(address: &SocketAddr) -> UnixDatagram {
    let socket = UnixDatagram::bind_addr(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket
}

fn next(socket: &UnixDatagram) -> String {
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer).expect("a notification within a minute");
    String::from_utf8(buffer[..length].to_vec()).unwrap()
}

#[test]
fn systemd_is_told_whom_we_wait_for_when_we_lead_and_that_we_stop() {
    let (bed, log) = (FileBed::new(), Log::new());
    let abstract_name = unique("dlock-notify");
    let path = bed.dir().join("notify");
    let sockets = [
        (path.display().to_string(), SocketAddr::from_pathname(&path).unwrap()),
        (format!("@{abstract_name}"), SocketAddr::from_abstract_name(abstract_name.as_bytes()).unwrap()),
    ];
    for (runs, (variable, address)) in sockets.into_iter().enumerate() {
        let socket = bound(&address);
        // What another holder wrote must not become an assignment.
        let holder = bed.dlock().run("x").args(log.witness(&[])).arg("a\nMAINPID=1").spawn();
        log.await_runs(runs + 1, 1);
        let service = bed.dlock().env("NOTIFY_SOCKET", &variable).run("x");
        let service = service.sh("echo ${NOTIFY_SOCKET-none}; exec sleep 1000").spawn();
        let waits = next(&socket);
        assert!(waits.starts_with("STATUS=waits for x, held by "), "{waits:?}");
        assert!(waits.contains(&format!("pid {}", holder.pid())) && waits.lines().count() == 1, "{waits:?}");
        holder.signal(Signal::SIGTERM);
        holder.ended().expect(143);
        assert_eq!(next(&socket), "READY=1\n");
        let leads = next(&socket);
        assert!(leads.starts_with("STATUS=holds x since 2") && leads.contains("fencing token"), "{leads:?}");
        crate::support::until("the command", || service.stdout() == "none\n");
        service.signal(Signal::SIGTERM);
        assert_eq!(next(&socket), "STOPPING=1\n");
        service.ended().expect(143);
    }
}

/// Nobody is there, or nobody reads.
#[test]
fn a_manager_that_does_not_listen_delays_nothing() {
    let bed = FileBed::new();
    let path = bed.dir().join("notify");
    let socket = bound(&SocketAddr::from_pathname(&path).unwrap());
    let full = UnixDatagram::unbound().unwrap();
    full.set_nonblocking(true).unwrap();
    while full.send_to(b"x", &path).is_ok() {}
    let run = |variable: &str| bed.dlock().env("NOTIFY_SOCKET", variable).run("x").sh("exit 5").ended().expect(5);
    run(path.to_str().unwrap()).silently();
    drop(socket);
    for variable in [path.to_str().unwrap(), "@nobody-is-there", "/nonexistent", "nonsense", "@", ""] {
        run(variable).silently();
    }
}
