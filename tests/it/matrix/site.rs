//! The places a cell of the matrix is played in: a backend with all its servers, a way to them that is the
//! holder's alone, and another for everybody else.

use std::path::Path;
use std::time::Duration;

use super::server::{Member, Peer, Server};
use crate::support::etcd::Etcd;
use crate::support::{Bed, Dlock, FileBed, Postgres, Proxy, Redis, Sentinel, ZooKeeperBed, ZooKeeperEnsemble, until};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backend {
    File,
    Redis,
    Redlock3,
    Redlock5,
    Etcd1,
    Etcd3,
    ZooKeeper1,
    ZooKeeper3,
    Postgres,
    RedisSentinel,
    RedisReplicated,
    PostgresPair,
}

/// What a place has beyond the usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    Plain,
    /// Every server has a wall clock of its own.
    OwnClocks,
    /// The lock directory is on a disk of its own, with room for little.
    SmallDisk,
}

impl Backend {
    pub const ALL: [Backend; 12] = [
        Backend::File,
        Backend::Redis,
        Backend::Redlock3,
        Backend::Redlock5,
        Backend::Etcd1,
        Backend::Etcd3,
        Backend::ZooKeeper1,
        Backend::ZooKeeper3,
        Backend::Postgres,
        Backend::RedisSentinel,
        Backend::RedisReplicated,
        Backend::PostgresPair,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Backend::File => "file",
            Backend::Redis => "redis",
            Backend::Redlock3 => "redlock, 3 nodes",
            Backend::Redlock5 => "redlock, 5 nodes",
            Backend::Etcd1 => "etcd",
            Backend::Etcd3 => "etcd, 3 members",
            Backend::ZooKeeper1 => "zookeeper",
            Backend::ZooKeeper3 => "zookeeper, 3 servers",
            Backend::Postgres => "postgres",
            Backend::RedisSentinel => "redis, Sentinel",
            Backend::RedisReplicated => "redis, Sentinel, wait-replicas=1",
            Backend::PostgresPair => "postgres, synchronous standby",
        }
    }

    /// The one that reports call so.
    pub fn named(name: &str) -> Backend {
        let names = || Backend::ALL.map(Backend::name).join("; ");
        Backend::ALL.into_iter().find(|one| one.name() == name).unwrap_or_else(|| panic!("not one of: {}", names()))
    }

    pub fn is_redlock(self) -> bool {
        matches!(self, Backend::Redlock3 | Backend::Redlock5)
    }

    pub fn elects(self) -> bool {
        matches!(self, Backend::Etcd3 | Backend::ZooKeeper3)
    }

    /// A leader, and one other that can take its place.
    pub fn is_pair(self) -> bool {
        matches!(self, Backend::RedisSentinel | Backend::RedisReplicated | Backend::PostgresPair)
    }

    fn open(self, ground: Ground) -> (Vec<Box<dyn Server>>, Option<Sentinel>) {
        let own_clock = ground == Ground::OwnClocks;
        let start = if own_clock { Redis::with_clock } else { Redis::with };
        let redis = || -> Box<dyn Server> { Box::new(start(&DURABLE)) };
        let servers: Vec<Box<dyn Server>> = match self {
            Backend::File => Vec::new(),
            Backend::Redis => vec![redis()],
            Backend::Redlock3 => (0..3).map(|_| redis()).collect(),
            Backend::Redlock5 => (0..5).map(|_| redis()).collect(),
            Backend::Etcd1 => Member::all_of(Etcd::new()),
            Backend::Etcd3 => Member::all_of(Etcd::cluster()),
            Backend::ZooKeeper1 if own_clock => vec![Box::new(ZooKeeperBed::with_clock())],
            Backend::ZooKeeper1 => vec![Box::new(ZooKeeperBed::new(""))],
            Backend::ZooKeeper3 => Peer::all_of(ZooKeeperEnsemble::new()),
            Backend::Postgres if own_clock => vec![Box::new(Postgres::with_clock())],
            // Room for a crowd.
            Backend::Postgres => vec![Box::new(Postgres::with(&["max_connections=500"]))],
            Backend::RedisSentinel | Backend::RedisReplicated => {
                let master = Redis::with(&DURABLE);
                let replica = master.replica(&DURABLE);
                let sentinel = Sentinel::over(&master);
                return (vec![Box::new(master), Box::new(replica)], Some(sentinel));
            }
            Backend::PostgresPair => {
                let (primary, standby) = Postgres::pair();
                vec![Box::new(primary), Box::new(standby)]
            }
        };
        (servers, None)
    }

    fn url(self, ports: &[u16], directory: &Path) -> String {
        let hosts = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",");
        match self {
            Backend::File => format!("file://{}", directory.display()),
            Backend::Redis => format!("redis://{hosts}"),
            Backend::Redlock3 | Backend::Redlock5 => format!("redlock://{hosts}"),
            Backend::Etcd1 | Backend::Etcd3 => format!("etcd://{hosts}"),
            Backend::ZooKeeper1 | Backend::ZooKeeper3 => format!("zookeeper://{hosts}"),
            Backend::Postgres | Backend::PostgresPair => format!("postgres://postgres@{hosts}/postgres"),
            Backend::RedisSentinel => format!("redis+sentinel://{hosts}/{}", Sentinel::GROUP),
            Backend::RedisReplicated => format!("redis+sentinel://{hosts}/{}?wait-replicas=1", Sentinel::GROUP),
        }
    }
}

/// A server that loses nothing when it is killed, and lets a replica begin at once.
const DURABLE: [&str; 6] = ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"];

pub struct Site {
    pub backend: Backend,
    pub servers: Vec<Box<dyn Server>>,
    /// Whom to ask which of the servers leads, where there is somebody.
    sentinel: Option<Sentinel>,
    /// The holder's way to each of the servers.
    ways: Vec<Proxy>,
    /// Where the file backend keeps its locks, and where resources to be fenced lie.
    pub files: FileBed,
}

impl Site {
    pub fn open(backend: Backend) -> Site {
        Site::on(Ground::Plain, backend)
    }

    pub fn on(ground: Ground, backend: Backend) -> Site {
        let (servers, sentinel) = backend.open(ground);
        let asked = Site::asked(&servers, sentinel.as_ref());
        let ways = asked.into_iter().map(Proxy::to).collect();
        let files = if ground == Ground::SmallDisk { FileBed::on_small_disk() } else { FileBed::new() };
        let site = Site { backend, servers, sentinel, ways, files };
        // Whatever is made at the first use is there when the clock begins to matter.
        until("the first run", || site.dlock().run("first").sh("exit 0").ended().code == Some(0));
        site
    }

    /// The ports that a URL names.
    fn asked(servers: &[Box<dyn Server>], sentinel: Option<&Sentinel>) -> Vec<u16> {
        let all = || servers.iter().map(|server| server.port()).collect();
        sentinel.map_or_else(all, |sentinel| vec![sentinel.port()])
    }

    pub fn holders_url(&self) -> String {
        let ports: Vec<u16> = self.ways.iter().map(Proxy::port).collect();
        self.backend.url(&ports, self.files.dir())
    }

    pub fn holders_port(&self) -> Option<u16> {
        self.ways.first().map(Proxy::port)
    }

    /// One more way to all servers, for whoever shares it.
    pub fn another_way(&self) -> (Vec<Proxy>, String) {
        let asked = Site::asked(&self.servers, self.sentinel.as_ref());
        let ways: Vec<Proxy> = asked.into_iter().map(Proxy::to).collect();
        let ports: Vec<u16> = ways.iter().map(Proxy::port).collect();
        let url = self.backend.url(&ports, self.files.dir());
        (ways, url)
    }

    /// Does something to every way of the holder's.
    pub fn ways(&self, fault: impl Fn(&Proxy)) {
        self.ways.iter().for_each(fault);
    }

    /// Makes the holder's ways slow, there and back together by so much.
    pub fn slow_ways(&self, round_trip: Duration) {
        self.ways(|way| way.slow(round_trip / 2, round_trip / 2));
    }

    /// As many servers as it takes for the others to be no majority.
    pub fn majority(&self) -> &[Box<dyn Server>] {
        &self.servers[..self.servers.len() / 2 + 1]
    }

    pub fn leader(&self) -> &dyn Server {
        let mut leader = None;
        until("a leader", || {
            leader = self.servers.iter().find(|server| server.leads());
            leader.is_some()
        });
        leader.unwrap().as_ref()
    }

    /// The number of one that follows.
    pub fn follower(&self) -> usize {
        self.servers.iter().position(|server| !server.leads()).unwrap()
    }

    /// Waits until somebody else leads, who may have to be told to.
    pub fn await_another_than(&self, leader: &dyn Server) {
        let others = self.servers.iter().filter(|server| server.port() != leader.port());
        if self.backend == Backend::PostgresPair {
            others.clone().for_each(|server| server.promote());
        }
        until("another leader", || others.clone().any(|server| server.leads()));
    }

    /// Sets the clocks of a majority of the servers, and waits for proof that they go by them.
    pub fn set_clocks_ahead(&self, seconds: i64) {
        self.majority().iter().for_each(|server| server.set_clock_ahead(seconds));
        until("the server to have another time", || {
            let told = self.dlock().args(["doctor", "--json"]).ended().stdout;
            let told: serde_json::Value = serde_json::from_str(&told).unwrap_or_default();
            let offset = told["clock_offset_ms"].as_f64().unwrap_or_default() / 1000.0;
            (offset - seconds as f64).abs() < 60.0
        });
    }

    /// The resource's side: whether it takes the newer token and, from then on, not the older one.
    pub fn refuses(&self, older: u64, newer: u64) -> bool {
        let resource = self.files.dir().join("resource");
        let write = |token: u64| {
            let dlock = Dlock::new().arg("fence").arg(&resource).args(["--token", &token.to_string()]);
            dlock.args(["--", "true"]).ended().code
        };
        let by_file = (write(newer), write(older)) == (Some(0), Some(79));
        let by_table = self.backend != Backend::Postgres || {
            let write = |token: u64| self.servers[0].told(&[&format!("SELECT dlock.fence('resource', {token})")]);
            !write(newer).contains("ERROR") && write(older).contains("ERROR")
        };
        by_file && by_table
    }
}

impl Bed for Site {
    fn url(&self) -> String {
        self.backend.url(&Site::asked(&self.servers, self.sentinel.as_ref()), self.files.dir())
    }
}
