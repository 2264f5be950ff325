//! ZooKeeper servers of Debian's package: one alone, or an ensemble of three.

use std::cell::RefCell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tempfile::TempDir;

use super::place::{self, Expect, Ground, Leader, Place, Started, Urls};
use super::{Bed, Clock, Daemon, Proxy, free_port, server_home, target, until};
use crate::matrix::{Fault, faults};

/// One server process with its directory; can be killed and started again.
pub struct Server {
    pub daemon: Daemon,
    pub port: u16,
    directory: PathBuf,
    /// Removed with the server, if it is all its own.
    home: Option<TempDir>,
    pub clock: Option<Clock>,
}

impl Server {
    fn start(directory: &Path, port: u16, settings: &str, clock: Option<Clock>) -> Server {
        std::fs::create_dir_all(directory).unwrap();
        configure(directory, settings);
        let daemon = Server::launch(directory, clock.as_ref());
        Server { daemon, port, directory: directory.to_owned(), home: None, clock }
    }

    fn launch(directory: &Path, clock: Option<&Clock>) -> Daemon {
        let mut java = java(directory);
        if let Some(clock) = clock {
            clock.govern(&mut java);
        }
        Daemon::spawn(java, &directory.join("log"))
    }

    /// Loses all it has stored.
    pub fn forget(&self) {
        std::fs::remove_dir_all(self.directory.join("version-2")).unwrap();
    }

    pub fn restart(&mut self) {
        self.daemon = Server::launch(&self.directory, self.clock.as_ref());
    }

    /// `leader`, `follower` or `standalone`; `None` while it serves nobody.
    pub fn role(&self) -> Option<String> {
        self.figure("zk_server_state")
    }

    /// One of the figures by which a server describes itself.
    pub fn figure(&self, key: &str) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        // A server that is about to start may take a question and never answer.
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        let mut answer = String::new();
        stream.write_all(b"mntr").and_then(|()| stream.read_to_string(&mut answer)).ok()?;
        answer.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned())
    }
}

/// A server on another host, of which everything is in this directory: its settings now, and how it is started.
pub fn zookeeper_server(directory: &Path, settings: &str) -> Command {
    configure(directory, settings);
    java(directory)
}

fn configure(directory: &Path, settings: &str) {
    let common = format!(
        "tickTime=200\nmaxSessionTimeout=7200000\ndataDir={}\nadmin.enableServer=false\nmaxClientCnxns=0\n\
         4lw.commands.whitelist=mntr\n",
        directory.display()
    );
    std::fs::write(directory.join("zoo.cfg"), common + settings).unwrap();
}

fn java(directory: &Path) -> Command {
    let jars = ["netty-codec", "netty-resolver", "zookeeper", "slf4j-simple"];
    let path: Vec<String> = jars.iter().map(|jar| format!("/usr/share/java/{jar}.jar")).collect();
    let mut java = Command::new("java");
    java.args(["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no"]);
    // Looks for empty lock parents and for nodes whose time is over twice a second, not once a minute.
    java.arg("-Dznode.container.checkIntervalMs=500");
    java.args(["-cp", &path.join(":"), "org.apache.zookeeper.server.quorum.QuorumPeerMain"]);
    java.arg(directory.join("zoo.cfg"));
    java
}

/// kazoo, about a lock of dlock's; what it is to do follows. See kazoo_lock.py.
pub fn kazoo(port: u16, name: &str, pattern: &str) -> Command {
    kazoo_at(port, &format!("/dlock/{name}"), pattern)
}

/// The same about any node.
pub fn kazoo_at(port: u16, path: &str, pattern: &str) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut python = Command::new(target("test-python/bin/python"));
    python.arg(root.join("tests/it/zookeeper/kazoo_lock.py")).args([&port.to_string(), path, pattern]);
    python
}

/// One server, shared by all tests that need no more than that.
pub struct ZooKeeperBed {
    server: Arc<Mutex<Server>>,
    pub port: u16,
}

impl ZooKeeperBed {
    /// The one that other tests use at the moment, or a new one.
    pub fn shared() -> ZooKeeperBed {
        static RUNNING: Mutex<Weak<Mutex<Server>>> = Mutex::new(Weak::new());
        let mut running = RUNNING.lock().unwrap();
        if let Some(server) = running.upgrade() {
            let port = server.lock().unwrap().port;
            return ZooKeeperBed { server, port };
        }
        let bed = ZooKeeperBed::new("");
        *running = Arc::downgrade(&bed.server);
        bed
    }

    /// One of its own, with more settings.
    pub fn new(settings: &str) -> ZooKeeperBed {
        ZooKeeperBed::launch(settings, None)
    }

    /// One with a wall clock of its own.
    pub fn with_clock() -> ZooKeeperBed {
        ZooKeeperBed::launch("", Some(Clock::new()))
    }

    fn launch(settings: &str, clock: Option<Clock>) -> ZooKeeperBed {
        let (home, port) = (server_home(), free_port());
        let settings = format!("clientPortAddress=127.0.0.1\nclientPort={port}\n{settings}");
        let mut server = Server::start(home.path(), port, &settings, clock);
        server.home = Some(home);
        until("the server to serve", || server.role().is_some());
        ZooKeeperBed { server: Arc::new(Mutex::new(server)), port }
    }

    pub fn server(&self) -> std::sync::MutexGuard<'_, Server> {
        self.server.lock().unwrap()
    }
}

impl Bed for ZooKeeperBed {
    fn url(&self) -> String {
        format!("zookeeper://127.0.0.1:{}", self.port)
    }

    fn would_miss(&self, name: &str) -> bool {
        let notes = format!("/dlock-meta/~noted/{name}");
        kazoo_at(self.port, &notes, "-").arg("parent").output().unwrap().status.success()
    }

    fn scrawl(&self, name: &str, _owner: &str, text: &str) {
        for parent in ["/dlock", "/dlock-meta"] {
            let out = kazoo_at(self.port, &format!("{parent}/{name}"), "-").args(["scrawl", text]).output().unwrap();
            assert!(out.status.success(), "{out:?}");
        }
    }
}

/// Three servers that elect a leader.
pub struct ZooKeeperEnsemble {
    pub servers: Vec<Server>,
    links_of_first: Vec<Proxy>,
    _home: TempDir,
}

impl ZooKeeperEnsemble {
    pub fn new() -> ZooKeeperEnsemble {
        ZooKeeperEnsemble::start(10, false)
    }

    /// One whose first server can be cut off from the others, which it takes 40 s to notice. It is never
    /// the leader as long as all are new.
    pub fn divisible() -> ZooKeeperEnsemble {
        ZooKeeperEnsemble::start(200, true)
    }

    pub fn cut_off_first(&self) {
        self.links_of_first.iter().for_each(Proxy::freeze);
    }

    /// A server gives up on one that it has not heard from for so many ticks of 200 ms.
    fn start(sync_limit: u32, divisible: bool) -> ZooKeeperEnsemble {
        let home = server_home();
        let peers: Vec<(u16, u16)> = (0..3).map(|_| (free_port(), free_port())).collect();
        let behind = if divisible { &peers[1..] } else { &[] };
        let links_of_first: Vec<Proxy> = behind.iter().map(|(quorum, _)| Proxy::to(*quorum)).collect();
        let servers = (0..3).map(|id: usize| {
            let (directory, port) = (home.path().join(id.to_string()), free_port());
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join("myid"), (id + 1).to_string()).unwrap();
            let mut settings = format!("initLimit=50\nsyncLimit={sync_limit}\n");
            settings += &format!("clientPortAddress=127.0.0.1\nclientPort={port}\n");
            for (other, (quorum, election)) in peers.iter().enumerate() {
                let link = links_of_first.get(other.wrapping_sub(1)).filter(|_| id == 0);
                let quorum = link.map_or(*quorum, Proxy::port);
                settings += &format!("server.{}=127.0.0.1:{quorum}:{election}\n", other + 1);
            }
            Server::start(&directory, port, &settings, None)
        });
        let servers = servers.collect();
        let ensemble = ZooKeeperEnsemble { servers, links_of_first, _home: home };
        ensemble.await_whole();
        ensemble
    }

    /// Waits until one leads and the other two follow it, also in its own eyes: who comes back does not
    /// know at once how things stand.
    #[track_caller]
    pub fn await_whole(&self) {
        until("a leader and two followers", || {
            let in_role =
                |role: &str| self.servers.iter().filter(move |one| one.role().as_deref() == Some(role)).count();
            let follows = |one: &Server| one.figure("zk_synced_followers").is_some_and(|count| count.starts_with('2'));
            in_role("leader") == 1 && in_role("follower") == 2 && self.servers.iter().any(follows)
        });
    }
}

impl Bed for ZooKeeperEnsemble {
    fn url(&self) -> String {
        let hosts: Vec<String> = self.servers.iter().map(|server| format!("127.0.0.1:{}", server.port)).collect();
        format!("zookeeper://{}", hosts.join(","))
    }
}

impl place::Server for ZooKeeperBed {
    fn port(&self) -> u16 {
        self.port
    }

    fn freeze(&self) {
        self.server().daemon.freeze();
    }

    fn thaw(&self) {
        self.server().daemon.thaw();
    }

    fn kill(&self) {
        self.server().daemon.kill();
    }

    fn start_again(&self) {
        self.server().restart();
    }

    fn forget(&self) {
        self.server().forget();
    }

    fn delete_record(&self, name: &str) {
        behead(self.port, name);
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.server().clock.as_ref().unwrap().set_ahead(seconds);
    }
}

/// Deletes the node of whoever holds the lock.
fn behead(port: u16, name: &str) {
    let deleted = kazoo(port, name, "-").arg("behead").output().unwrap();
    assert!(deleted.status.success(), "{deleted:?}");
}

/// One server of a ZooKeeper ensemble.
pub struct Peer {
    ensemble: Rc<RefCell<ZooKeeperEnsemble>>,
    number: usize,
}

impl Peer {
    pub fn all_of(ensemble: ZooKeeperEnsemble) -> Vec<Box<dyn place::Server>> {
        let (count, ensemble) = (ensemble.servers.len(), Rc::new(RefCell::new(ensemble)));
        let peer = |number| -> Box<dyn place::Server> { Box::new(Peer { ensemble: Rc::clone(&ensemble), number }) };
        (0..count).map(peer).collect()
    }
}

impl place::Server for Peer {
    fn port(&self) -> u16 {
        self.ensemble.borrow().servers[self.number].port
    }

    fn freeze(&self) {
        self.ensemble.borrow().servers[self.number].daemon.freeze();
    }

    fn thaw(&self) {
        self.ensemble.borrow().servers[self.number].daemon.thaw();
    }

    fn kill(&self) {
        self.ensemble.borrow_mut().servers[self.number].daemon.kill();
    }

    fn start_again(&self) {
        self.ensemble.borrow_mut().servers[self.number].restart();
    }

    fn delete_record(&self, name: &str) {
        behead(self.port(), name);
    }

    fn leads(&self) -> bool {
        self.ensemble.borrow().servers[self.number].role().as_deref() == Some("leader")
    }
}

/// A session lasts for so long on a clock that nobody sets.
pub static ZOOKEEPER: Place = Place {
    name: "zookeeper",
    url: "zookeeper://HOSTS",
    hosts: 1,
    start: |ground| match ground {
        Ground::OwnClocks => Started::one(ZooKeeperBed::with_clock()),
        _ => Started::one(ZooKeeperBed::new("")),
    },
    independent: false,
    leader: Leader::Nobody,
    late: 32,
    faults: &[
        faults::ANYWHERE,
        faults::PATHS,
        faults::SERVERS,
        faults::CLOCKS,
        &[Fault::ServersRestartedEmpty, Fault::RecordDeleted],
    ],
    expect: &[(Fault::ServersRestartedEmpty, Expect::NoOverlapButTokens), (Fault::ClockForward, Expect::NoOverlap)],
    exit_codes: &[(Fault::ClockForward, &[79, 137])],
    short: &[&[Fault::PathFrozen, Fault::PathCut, Fault::ServersPaused, Fault::RecordDeleted, Fault::ClockForward]],
    covered: true,
    urls: &[Urls {
        schemes: &["zookeeper", "zk", "zookeepers"],
        encrypted: &["zookeepers"],
        host: "127.0.0.1",
        hostless: false,
        path: "",
        wrong_paths: &["//x", "/..", "/a/./b"],
        wrong_values: &[("prefix", &["", "..", "a//b"]), ("recipe", &["", "x", "Curator"])],
    }],
};

/// Servers that have forgotten are replaced by their operators, not restarted. What one server does with its clock is
/// what three do.
pub static ZOOKEEPER_3: Place = Place {
    name: "zookeeper, 3 servers",
    hosts: 3,
    start: |_| Started::of(Peer::all_of(ZooKeeperEnsemble::new())),
    leader: Leader::Elected,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, faults::ELECTIONS, &[Fault::RecordDeleted]],
    expect: &[],
    exit_codes: &[],
    short: &[&[Fault::LeaderKilled, Fault::ServersKilled]],
    covered: false,
    urls: &[],
    ..ZOOKEEPER
};
