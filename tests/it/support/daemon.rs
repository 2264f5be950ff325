//! Servers that live no longer than the tests.

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock};

use nix::sys::signal::Signal;

use super::{lines, signal};

/// So many lines of a server's log are shown when a test fails.
const LAST_WORDS: usize = 5;

pub struct Daemon {
    child: Child,
    log: PathBuf,
}

/// A port that nobody listens on now, and that nobody else here was given. It is none of those that the kernel gives to
/// whoever connects: one of them could take it before the server does, or while that is down.
pub fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let first: u32 = range.split_whitespace().next().unwrap().parse().unwrap();
    let any = || u16::try_from(10_000 + getrandom::u32().unwrap() % first.saturating_sub(10_000).max(1_000)).unwrap();
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    let mut given = GIVEN.lock().unwrap();
    std::iter::repeat_with(any).filter(is_free).find(|port| given.insert(*port)).unwrap()
}

impl Daemon {
    /// Starts a server that is killed when this is dropped, and at the latest when the tests end. What it
    /// prints goes to `log`.
    pub fn spawn(mut command: Command, log: &Path) -> Daemon {
        let out = std::fs::File::options().create(true).append(true).open(log).unwrap();
        command.stdin(Stdio::null()).stdout(out.try_clone().unwrap()).stderr(out);
        Daemon { child: spawn_on_lasting_thread(command), log: log.to_owned() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it is gone without having been asked to.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn freeze(&self) {
        signal(self.pid(), Signal::SIGSTOP);
    }

    pub fn thaw(&self) {
        signal(self.pid(), Signal::SIGCONT);
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let said = lines(&self.log);
            let last = &said[said.len().saturating_sub(LAST_WORDS)..];
            eprintln!("server {} (ended: {}) last said:\n  {}", self.pid(), self.has_ended(), last.join("\n  "));
        }
        self.kill();
    }
}

type Order = (Command, Sender<std::io::Result<Child>>);

/// PR_SET_PDEATHSIG follows the thread that forked, and a test's thread ends with the test: so one thread
/// that lasts does all the forking.
fn spawn_on_lasting_thread(command: Command) -> Child {
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, ordered) = channel::<Order>();
        std::thread::spawn(move || {
            for (mut command, reply) in ordered {
                #[allow(unsafe_code)]
                // SAFETY: prctl(2) may be called between fork and exec.
                unsafe {
                    command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?));
                }
                let _ = reply.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let (reply, child) = channel();
    let program = format!("{:?}", command.get_program());
    spawner.lock().unwrap().send((command, reply)).unwrap();
    child.recv().unwrap().unwrap_or_else(|error| panic!("cannot start {program}: {error}; see tests/run"))
}
