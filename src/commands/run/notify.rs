//! What a service manager is told, as sd_notify(3) would: datagrams of assignments to the socket that `$NOTIFY_SOCKET`
//! names. Nobody waits for it, and nothing depends on it.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

use crate::report::escape;

/// Names the socket. The command does not get it: dlock is who notifies.
pub const VARIABLE: &str = "NOTIFY_SOCKET";

#[derive(Debug)]
pub struct Notify {
    socket: UnixDatagram,
    manager: SocketAddr,
    /// The last STATUS=.
    status: String,
}

impl Notify {
    pub fn to(manager: &OsStr) -> Option<Notify> {
        let socket = UnixDatagram::unbound().ok()?;
        socket.set_nonblocking(true).ok()?;
        // An absolute path, or an abstract name behind an `@`.
        let manager = match manager.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name).ok()?,
            [b'/', ..] => SocketAddr::from_pathname(manager).ok()?,
            _ => return None,
        };
        Some(Notify { socket, manager, status: String::new() })
    }

    /// What happens at present; told when it changes.
    pub fn status(&mut self, text: &str) {
        // A line break in what others wrote would begin another assignment.
        let text = format!("STATUS={}\n", escape(text));
        if text != self.status {
            self.send(&text);
            self.status = text;
        }
    }

    pub fn ready(&mut self, status: &str) {
        self.send("READY=1\n");
        self.status(status);
    }

    pub fn stopping(&self) {
        self.send("STOPPING=1\n");
    }

    fn send(&self, assignments: &str) {
        let _ = self.socket.send_to_addr(assignments.as_bytes(), &self.manager);
    }
}
