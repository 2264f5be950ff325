//! The verbs against a real server: what the tests share.

mod holding;
mod waiting;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::resp::Value;
use super::*;
use crate::backend::Busy;
use crate::lock::{Identity, LastRun, Mode, Outcome, State, Token};

/// A Redis of this test's own, without data.
pub struct Server {
    process: Child,
    pub port: u16,
}

impl Server {
    pub fn start() -> Server {
        // A port that is free now may be taken by the time the server wants it.
        std::iter::repeat_with(Server::try_start).flatten().next().expect("there are free ports")
    }

    fn try_start() -> Option<Server> {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut process = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir", "/tmp"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("redis-server is installed");
        let log = BufReader::new(process.stdout.take().unwrap());
        let up = log.lines().map_while(Result::ok).any(|line| line.contains("Ready to accept connections"));
        let server = Server { process, port };
        up.then_some(server)
    }

    /// Does not answer any more; whoever it is connected with cannot tell why.
    pub fn freeze(&self) {
        self.signal(nix::sys::signal::Signal::SIGSTOP);
    }

    pub fn thaw(&self) {
        self.signal(nix::sys::signal::Signal::SIGCONT);
    }

    fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.process.id() as i32), signal).unwrap();
    }

    fn client(&self) -> Redis {
        let patience = Patience { connect: Duration::from_secs(20), attempt: Duration::from_secs(20) };
        Redis::open(&Address::parse(&format!("redis://127.0.0.1:{}", self.port)).unwrap(), patience).unwrap()
    }

    /// What an operator or a foreign program would do.
    pub async fn does(&self, command: &[&str]) -> Value {
        let command = command.iter().map(|part| part.as_bytes().to_vec()).collect();
        self.client().server.call(&[command]).await.unwrap().remove(0)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

pub fn ask(mode: Mode) -> Ask {
    Ask {
        name: "job/a".parse().unwrap(),
        who: Identity::of_this_process("make all").unwrap(),
        mode,
        ttl: Duration::from_secs(60),
        queue: true,
        once: None,
    }
}

pub fn ending(lease: &Lease) -> Ending {
    let last_run = LastRun {
        fencing_token: lease.token,
        host: "h".into(),
        user: "u".into(),
        command: "make all".into(),
        started_at: std::time::SystemTime::UNIX_EPOCH,
        ended_at: None,
        outcome: Outcome::Exited,
        exit_code: Some(0),
        once: Some("today".into()),
        reason: None,
    };
    Ending { last_run: Some(last_run), hold_until: None }
}

pub async fn granted(redis: &mut dyn Backend, ask: &Ask) -> Lease {
    match redis.try_acquire(ask).await.unwrap() {
        Attempt::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

pub async fn busy(redis: &mut dyn Backend, ask: &Ask) -> Busy {
    match redis.try_acquire(ask).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("{other:?}"),
    }
}

/// Whoever is told finds it changed; a hang is the failure.
pub async fn told(redis: &mut dyn Backend) {
    tokio::time::timeout(Duration::from_secs(20), redis.changed()).await.expect("nobody told us").unwrap();
}
