//! A TCP proxy that can be told to swallow everything or the answers alone, to be slow, to cut every connection, or to
//! do so after a certain byte: the network's faults without touching the machine's network.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
}

struct Shared {
    target: SocketAddr,
    mode: AtomicU8,
    /// The process that is not let through; 0 for none.
    refused: AtomicU32,
    /// By how many milliseconds requests and answers are late.
    late: [AtomicU64; 2],
    answers: Mutex<Answers>,
    open: Mutex<Vec<TcpStream>>,
}

/// The bytes of the answers on all connections.
#[derive(Default)]
struct Answers {
    passed: u64,
    /// After so many, this happens.
    torn: Option<(u64, Tear)>,
}

/// What follows the last byte that gets through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tear {
    /// The connection is reset; others, and new ones, are not.
    Cut,
    /// Nothing gets through any more, on any connection, and nobody is told.
    Freeze,
}

const PASS: u8 = 0;
const FROZEN: u8 = 1;
const CUT: u8 = 2;
const CLOSED: u8 = 3;
const DEAF: u8 = 4;

const REQUESTS: usize = 0;
const ANSWERS: usize = 1;

impl Proxy {
    /// Listens on a port of its own and passes everything on.
    pub fn to(port: u16) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let target = SocketAddr::from(([127, 0, 0, 1], port));
        let shared = Arc::new(Shared {
            target,
            mode: AtomicU8::new(PASS),
            refused: AtomicU32::new(0),
            late: Default::default(),
            answers: Mutex::default(),
            open: Mutex::default(),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                match accepting.mode.load(Ordering::SeqCst) {
                    CUT => reset(&client),
                    _ if accepting.refuses(&client) => reset(&client),
                    CLOSED => return,
                    _ => accepting.connect(client),
                }
            }
        });
        Proxy { port: own, shared }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on nothing gets through, and nobody is told: a black hole.
    pub fn freeze(&self) {
        self.shared.mode.store(FROZEN, Ordering::SeqCst);
    }

    /// Requests get through, answers do not: half-open, as behind a firewall that forgot us.
    pub fn swallow_answers(&self) {
        self.shared.mode.store(DEAF, Ordering::SeqCst);
    }

    /// From now on every request, or every answer, takes so much longer.
    pub fn slow(&self, requests: Duration, answers: Duration) {
        for (late, by) in self.shared.late.iter().zip([requests, answers]) {
            late.store(by.as_millis().try_into().unwrap(), Ordering::SeqCst);
        }
    }

    /// Resets every connection, and every new one.
    pub fn cut(&self) {
        self.shared.mode.store(CUT, Ordering::SeqCst);
        self.shared.reset_all();
    }

    /// Resets every connection, and every new one of this process; others may come back.
    pub fn refuse(&self, pid: u32) {
        self.shared.refused.store(pid, Ordering::SeqCst);
        self.shared.reset_all();
    }

    /// Exactly so many bytes of answers get through, from the first connection on.
    pub fn tear(&self, after: u64, how: Tear) {
        self.shared.answers.lock().unwrap().torn = Some((after, how));
    }

    /// So many bytes of answers have got through.
    pub fn answered(&self) -> u64 {
        self.shared.answers.lock().unwrap().passed
    }

    /// What was held back since [`freeze`](Self::freeze) gets through now: late, but it arrives.
    pub fn heal(&self) {
        self.slow(Duration::ZERO, Duration::ZERO);
        self.shared.mode.store(PASS, Ordering::SeqCst);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.mode.store(CLOSED, Ordering::SeqCst);
        self.shared.reset_all();
        // Wakes the accepting thread, which then ends.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

impl Shared {
    fn refuses(&self, client: &TcpStream) -> bool {
        let pid = self.refused.load(Ordering::SeqCst);
        pid != 0 && client.peer_addr().is_ok_and(|from| owns_port(pid, from.port()))
    }

    fn connect(self: &Arc<Shared>, client: TcpStream) {
        let Ok(server) = TcpStream::connect(self.target) else { return reset(&client) };
        // Those that have ended need not be kept.
        self.open.lock().unwrap().retain(|stream| stream.peer_addr().is_ok());
        for stream in [&client, &server] {
            stream.set_nodelay(true).unwrap();
            self.open.lock().unwrap().push(stream.try_clone().unwrap());
        }
        let ways = [(client.try_clone().unwrap(), server.try_clone().unwrap(), REQUESTS), (server, client, ANSWERS)];
        for (from, to, what) in ways {
            let shared = Arc::clone(self);
            std::thread::spawn(move || shared.pump(from, to, what));
        }
    }

    fn pump(&self, mut from: TcpStream, mut to: TcpStream, what: usize) {
        let mut buffer = [0; 16 * 1024];
        loop {
            let length = from.read(&mut buffer).unwrap_or(0);
            std::thread::sleep(Duration::from_millis(self.late[what].load(Ordering::SeqCst)));
            while self.holds_back(what) {
                std::thread::sleep(Duration::from_millis(2));
            }
            let (length, torn) = if what == ANSWERS { self.let_through(length) } else { (length, None) };
            let written = to.write_all(&buffer[..length]);
            match torn {
                Some(Tear::Cut) => return [&from, &to].into_iter().for_each(reset),
                Some(Tear::Freeze) => {}
                None if length == 0 || written.is_err() => {
                    let _ = to.shutdown(Shutdown::Write);
                    return;
                }
                None => {}
            }
        }
    }

    /// How many of these bytes of an answer get through, and what follows the last of them.
    fn let_through(&self, length: usize) -> (usize, Option<Tear>) {
        let mut answers = self.answers.lock().unwrap();
        let passing = match answers.torn {
            Some((after, _)) => length.min(usize::try_from(after - answers.passed).unwrap()),
            None => length,
        };
        answers.passed += passing as u64;
        let passed = answers.passed;
        let torn = answers.torn.take_if(|(after, _)| *after == passed).map(|(_, how)| how);
        if torn == Some(Tear::Freeze) {
            self.mode.store(FROZEN, Ordering::SeqCst);
        }
        (passing, torn)
    }

    fn holds_back(&self, what: usize) -> bool {
        match self.mode.load(Ordering::SeqCst) {
            FROZEN => true,
            DEAF => what == ANSWERS,
            _ => false,
        }
    }

    fn reset_all(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            reset(&stream);
        }
    }
}

/// Ends a connection with RST instead of FIN, as a rebooted peer would.
fn reset(stream: &TcpStream) {
    let linger = nix::libc::linger { l_onoff: 1, l_linger: 0 };
    let _ = nix::sys::socket::setsockopt(stream, nix::sys::socket::sockopt::Linger, &linger);
    let _ = stream.shutdown(Shutdown::Both);
}

/// Whether a connection from this local port is one of the process's descriptors.
fn owns_port(pid: u32, port: u16) -> bool {
    let connections = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let from_port =
        |line: &&str| line.split_whitespace().nth(1).is_some_and(|at| at.ends_with(&format!(":{port:04X}")));
    let inodes: Vec<_> =
        connections.lines().filter(from_port).filter_map(|line| line.split_whitespace().nth(9)).collect();
    let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    descriptors.flatten().filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok()).any(|target| {
        let inode = target.to_str().and_then(|target| target.strip_prefix("socket:[")?.strip_suffix(']'));
        inode.is_some_and(|inode| inodes.contains(&inode))
    })
}
