//! Servers on three hosts of their own, as their manuals have them: three members of etcd or ZooKeeper; a Redis, its
//! replica and three sentinels; a Redis Cluster whose masters have their replicas on another host each.

use tempfile::TempDir;

use crate::support::{Daemon, Network, Sentinel, address, server_home, until, zookeeper_server};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Etcd,
    ZooKeeper,
    Sentinel,
    Cluster,
}

/// The first hosts have the servers; then come the clients.
const BOXES: usize = 3;
pub const HOLDER: usize = 3;
pub const WAITER: usize = 4;

pub struct Service {
    kind: Kind,
    pub net: Network,
    servers: Vec<Daemon>,
    home: TempDir,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Etcd, Kind::ZooKeeper, Kind::Sentinel, Kind::Cluster];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Etcd => "etcd, 3 members",
            Kind::ZooKeeper => "zookeeper, 3 servers",
            Kind::Sentinel => "redis, 3 sentinels, wait-replicas=1",
            Kind::Cluster => "redis cluster, 3 masters, wait-replicas=1",
        }
    }

    pub fn url(self) -> String {
        let hosts = |port: u16| (0..BOXES).map(|host| at(host, port)).collect::<Vec<_>>().join(",");
        match self {
            Kind::Etcd => format!("etcd://{}", hosts(2379)),
            Kind::ZooKeeper => format!("zookeeper://{}", hosts(2181)),
            Kind::Sentinel => format!("redis+sentinel://{}/{}?wait-replicas=1", hosts(26379), Sentinel::GROUP),
            Kind::Cluster => format!("redis+cluster://{}?wait-replicas=1", hosts(MASTER)),
        }
    }
}

/// The ports of the two nodes of a Redis Cluster on each host.
const MASTER: u16 = 7000;
const REPLICA: u16 = 7001;

fn at(host: usize, port: u16) -> String {
    format!("{}:{port}", address(host))
}

impl Service {
    pub fn start(kind: Kind) -> Service {
        let net = Network::of(BOXES + 2);
        let mut service = Service { kind, net, servers: Vec::new(), home: server_home() };
        match kind {
            Kind::Etcd => service.start_etcd(),
            Kind::ZooKeeper => service.start_zookeeper(),
            Kind::Sentinel => service.start_sentinels(),
            Kind::Cluster => service.start_cluster(),
        }
        service
    }

    /// Starts a server on a host, in a directory of its own.
    fn serve(&mut self, host: usize, name: &str, program: &[&str]) {
        let mut command = self.net.on(host, program[0]);
        command.args(&program[1..]).current_dir(self.directory(name));
        self.servers.push(Daemon::spawn(command, &self.home.path().join(format!("{name}.log"))));
    }

    fn directory(&self, name: &str) -> std::path::PathBuf {
        let directory = self.home.path().join(name);
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    fn start_etcd(&mut self) {
        let peer = |host: usize| format!("http://{}", at(host, 2380));
        let cluster = (0..BOXES).map(|host| format!("m{host}={}", peer(host))).collect::<Vec<_>>().join(",");
        for host in 0..BOXES {
            let (name, own, client) = (format!("m{host}"), peer(host), format!("http://{}", at(host, 2379)));
            let mut etcd =
                vec!["etcd", "--name", &name, "--data-dir", "data", "--logger", "zap", "--log-level", "error"];
            etcd.extend(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
            etcd.extend(["--listen-peer-urls", &own, "--initial-advertise-peer-urls", &own]);
            etcd.extend(["--initial-cluster", &cluster]);
            self.serve(host, &name, &etcd);
        }
        until("etcd to serve everywhere", || (0..BOXES).all(|host| self.etcdctl(host, &["get", "x"]).status.success()));
    }

    fn etcdctl(&self, host: usize, words: &[&str]) -> std::process::Output {
        let mut command = self.net.on(host, "etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &at(host, 2379), "--command-timeout=1s"]);
        command.args(words).output().unwrap()
    }

    fn start_zookeeper(&mut self) {
        let all: String = (0..BOXES).map(|host| format!("server.{}={}:2888:3888\n", host + 1, address(host))).collect();
        for host in 0..BOXES {
            let name = format!("zookeeper{host}");
            let directory = self.directory(&name);
            std::fs::write(directory.join("myid"), (host + 1).to_string()).unwrap();
            let settings = format!("initLimit=50\nsyncLimit=10\nclientPort=2181\n{all}");
            let java = zookeeper_server(&directory, &settings);
            let words: Vec<String> = [java.get_program()]
                .into_iter()
                .chain(java.get_args())
                .map(|word| word.to_str().unwrap().to_owned())
                .collect();
            self.serve(host, &name, &words.iter().map(String::as_str).collect::<Vec<_>>());
        }
        until("a leader and two followers", || {
            let followers = |host: usize| figure(&self.zookeeper_says(host), "zk_synced_followers");
            (0..BOXES).any(|host| followers(host).is_some_and(|count| count.starts_with('2')))
        });
    }

    /// A server's figures about itself; nothing while it serves nobody.
    fn zookeeper_says(&self, host: usize) -> String {
        let script = format!("exec 3<>/dev/tcp/{}/2181 && echo -n mntr >&3 && timeout 1 cat <&3", address(host));
        let told = self.net.on(host, "bash").args(["-c", &script]).output().unwrap();
        String::from_utf8_lossy(&told.stdout).into_owned()
    }

    fn start_redis(&mut self, host: usize, port: u16, options: &[&str]) {
        let (name, port) = (format!("redis{host}-{port}"), port.to_string());
        let mut redis = vec!["redis-server", "--bind", "0.0.0.0", "--protected-mode", "no", "--port", &port];
        redis.extend(["--save", "", "--repl-diskless-sync-delay", "0"]);
        redis.extend(options);
        self.serve(host, &name, &redis);
        until("Redis to answer", || self.redis(host, port.parse().unwrap(), &["PING"]).starts_with("PONG"));
    }

    /// What a Redis says to somebody on its own host.
    fn redis(&self, host: usize, port: u16, words: &[&str]) -> String {
        let mut cli = self.net.on(host, "redis-cli");
        let told = cli.args(["-h", &address(host).to_string(), "-p", &port.to_string()]).args(words).output().unwrap();
        String::from_utf8_lossy(&told.stdout).into_owned()
    }

    fn start_sentinels(&mut self) {
        let (master, group) = (address(0).to_string(), Sentinel::GROUP);
        self.start_redis(0, 6379, &[]);
        self.start_redis(1, 6379, &["--replicaof", &master, "6379"]);
        for host in 0..BOXES {
            let name = format!("sentinel{host}");
            let config = self.directory(&name).join("sentinel.conf");
            let text = format!(
                "port 26379\nbind 0.0.0.0\nprotected-mode no\nsentinel monitor {group} {master} 6379 2\n\
                 sentinel down-after-milliseconds {group} 1000\nsentinel failover-timeout {group} 5000\n"
            );
            std::fs::write(config, text).unwrap();
            self.serve(host, &name, &["redis-sentinel", "sentinel.conf"]);
        }
        until("the sentinels to know everybody", || {
            (0..BOXES).all(|host| {
                let told = self.redis(host, 26379, &["sentinel", "master", group]);
                told.contains("num-slaves\n1\n") && told.contains("num-other-sentinels\n2\n")
            })
        });
    }

    fn start_cluster(&mut self) {
        let nodes: Vec<(usize, u16)> =
            [MASTER, REPLICA].into_iter().flat_map(|port| (0..BOXES).map(move |host| (host, port))).collect();
        for (host, port) in &nodes {
            self.start_redis(*host, *port, &["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]);
        }
        let mut create = self.net.on(WAITER, "redis-cli");
        create.args(["--cluster", "create"]).args(nodes.iter().map(|(host, port)| at(*host, *port)));
        let created = create.args(["--cluster-replicas", "1", "--cluster-yes"]).output().unwrap();
        assert!(created.status.success(), "{created:?}");
        until("the cluster to be ready", || {
            nodes.iter().all(|(host, port)| self.redis(*host, *port, &["CLUSTER", "INFO"]).contains("cluster_state:ok"))
                && (0..BOXES).all(|host| self.redis(host, MASTER, &["INFO", "replication"]).contains("state=online"))
        });
    }

    /// The hosts with a server that says it leads as far as this lock goes: one, or two while they are parted.
    fn leaders(&self, name: &str) -> Vec<usize> {
        let owns = |host: usize, port: u16| {
            self.redis(host, port, &["ROLE"]).starts_with("master")
                && self.redis(host, port, &["EXISTS", &format!("dlock:{name}")]).trim_end().parse::<u8>().is_ok()
        };
        let leads = |host: usize| match self.kind {
            Kind::Etcd => {
                let status = self.etcdctl(host, &["endpoint", "status"]);
                String::from_utf8_lossy(&status.stdout).contains(", true, false, ")
            }
            Kind::ZooKeeper => figure(&self.zookeeper_says(host), "zk_server_state").as_deref() == Some("leader"),
            Kind::Sentinel => owns(host, 6379),
            Kind::Cluster => owns(host, MASTER) || owns(host, REPLICA),
        };
        (0..BOXES).filter(|host| leads(*host)).collect()
    }

    pub fn leader(&self, name: &str) -> usize {
        let mut leaders = Vec::new();
        until("one leader", || {
            leaders = self.leaders(name);
            leaders.len() == 1
        });
        leaders[0]
    }

    /// A host that the others can do without: it neither leads nor has a copy that the leader waits for.
    pub fn follower(&self, name: &str) -> usize {
        let leader = self.leader(name);
        let port = if self.kind == Kind::Sentinel { 6379 } else { MASTER };
        let copies = match self.kind {
            Kind::Etcd | Kind::ZooKeeper => String::new(),
            Kind::Sentinel | Kind::Cluster => self.redis(leader, port, &["INFO", "replication"]),
        };
        let can_go = |host: &usize| *host != leader && !copies.contains(&format!("ip={},", address(*host)));
        (0..BOXES).find(can_go).unwrap()
    }

    pub fn await_another_than(&self, leader: usize, name: &str) {
        until("another leader", || self.leaders(name).iter().any(|host| *host != leader));
    }

    /// Everybody but the holder and one host with servers.
    pub fn everybody_but(&self, member: usize) -> impl Iterator<Item = usize> {
        (0..BOXES).filter(move |host| *host != member).chain([WAITER])
    }
}

fn figure(told: &str, key: &str) -> Option<String> {
    told.lines().find_map(|line| line.strip_prefix(key)).map(|value| value.trim().to_owned())
}
