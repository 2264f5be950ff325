//! Redis servers of the tests' own.

use std::cell::RefCell;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use super::place::{Expect, Ground, Leader, Place, Server, Started, Urls};
use super::{Abilities, Bed, Clock, Daemon, free_port, server_home, target, until};
use crate::matrix::{Fault, faults};

/// Another product with the same protocol, from the Python environment that `tests/run` makes.
const VALKEY: &str = "test-python/bin/valkey-server";

/// One server, on a port of its own.
pub struct Redis {
    program: String,
    daemon: RefCell<Daemon>,
    port: u16,
    dir: TempDir,
    options: Vec<String>,
    clock: Option<Clock>,
}

impl Redis {
    pub fn new() -> Redis {
        Redis::with(&[])
    }

    /// With more options, as on its command line. `DIR` in them is the server's own directory.
    pub fn with(options: &[&str]) -> Redis {
        Redis::in_dir(server_home(), options)
    }

    /// With a wall clock of its own.
    pub fn with_clock(options: &[&str]) -> Redis {
        Redis::launch("redis-server", server_home(), options, Some(Clock::new()))
    }

    pub fn in_dir(dir: TempDir, options: &[&str]) -> Redis {
        Redis::launch("redis-server", dir, options, None)
    }

    pub fn valkey() -> Redis {
        Redis::launch(&target(VALKEY).display().to_string(), server_home(), &[], None)
    }

    fn launch(program: &str, dir: TempDir, options: &[&str], clock: Option<Clock>) -> Redis {
        let own = dir.path().display().to_string();
        let options: Vec<String> = options.iter().map(|option| option.replace("DIR", &own)).collect();
        // A port that is free now may be taken by the time the server wants it.
        let try_start = || {
            let port = free_port();
            Some((start(program, &dir, port, &options, clock.as_ref())?, port))
        };
        let (daemon, port) = std::iter::repeat_with(try_start).flatten().next().unwrap();
        Redis { program: program.to_owned(), daemon: RefCell::new(daemon), port, dir, options, clock }
    }

    /// A replica of this one that has all it has.
    pub fn replica(&self, options: &[&str]) -> Redis {
        let of = format!("127.0.0.1 {}", self.port);
        let replica = Redis::with(&[&["--replicaof", &of], options].concat());
        until("the replica to be in step", || replica.does(&["INFO", "replication"]).contains("master_link_status:up"));
        replica
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
    }

    /// Whether it says so: one that has just been made a master, or is just being, hangs up on everybody.
    pub fn is_master(&self) -> bool {
        ask(self.port, &[], &["ROLE"]).stdout.starts_with(b"master")
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn daemon(&self) -> std::cell::Ref<'_, Daemon> {
        self.daemon.borrow()
    }

    pub fn kill(&self) {
        self.daemon.borrow_mut().kill();
    }

    /// Comes back on the same port, with nothing but what it had on its disk.
    pub fn restart(&self) {
        self.kill();
        until("Redis to be back", || match start(&self.program, &self.dir, self.port, &self.options, self.clock()) {
            Some(daemon) => {
                *self.daemon.borrow_mut() = daemon;
                true
            }
            None => false,
        });
    }

    /// What an operator or another program says to it, as redis-cli would; its answer as redis-cli prints it.
    #[track_caller]
    pub fn does(&self, command: &[&str]) -> String {
        cli(self.port, &[], command)
    }
}

/// Starts a server and waits until it says that it is ready; `None` if its port was taken.
fn start(program: &str, dir: &TempDir, port: u16, options: &[String], clock: Option<&Clock>) -> Option<Daemon> {
    let log = dir.path().join("log");
    let _ = std::fs::remove_file(&log);
    let mut command = Command::new(program);
    command.args(["--bind", "127.0.0.1", "--port", &port.to_string(), "--save", "", "--dir"]).arg(dir.path());
    command.args(options);
    if let Some(clock) = clock {
        clock.govern(&mut command);
    }
    let mut daemon = Daemon::spawn(command, &log);
    let mut said = String::new();
    until("Redis to be ready", || {
        said = std::fs::read_to_string(&log).unwrap_or_default();
        said.contains("eady to accept connections") || daemon.has_ended()
    });
    assert!(!daemon.has_ended() || said.contains("Address already in use"), "{said}");
    Some(daemon).filter(|_| said.contains("eady to accept connections"))
}

#[track_caller]
pub fn cli(port: u16, options: &[&str], command: &[&str]) -> String {
    let out = ask(port, options, command);
    assert!(out.status.success(), "{out:?}");
    String::from_utf8(out.stdout).unwrap().trim_end().to_owned()
}

fn ask(port: u16, options: &[&str], command: &[&str]) -> Output {
    Command::new("redis-cli").args(["-p", &port.to_string()]).args(options).args(command).output().unwrap()
}

impl Bed for Redis {
    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn scrawl(&self, name: &str, owner: &str, text: &str) {
        for part in ["last", &format!("note:{owner}")] {
            self.does(&["SET", &format!("{{dlock:{name}}}:{part}"), text]);
        }
        self.does(&["DEL", &format!("{{dlock:{name}}}:held")]);
        self.does(&["HSET", &format!("{{dlock:{name}}}:details"), owner, text, "somebody", text]);
    }

    fn scrawl_token(&self, name: &str, text: &str) {
        self.does(&["SET", &format!("{{dlock:{name}}}:token"), text]);
    }
}

/// Watches over a master with one replica, alone: it has nobody to ask before it acts.
pub struct Sentinel {
    port: u16,
    _daemon: Daemon,
    _dir: TempDir,
}

impl Sentinel {
    /// The master's name.
    pub const GROUP: &str = "mine";

    pub fn over(master: &Redis) -> Sentinel {
        Sentinel::with(master, "", &[])
    }

    /// With more lines in its configuration, and what redis-cli has to say to be let in.
    pub fn with(master: &Redis, lines: &str, login: &[&str]) -> Sentinel {
        // A port that is free now may be taken by the time the sentinel wants it.
        std::iter::repeat_with(|| Sentinel::try_over(master, lines, login)).flatten().next().unwrap()
    }

    fn try_over(master: &Redis, lines: &str, login: &[&str]) -> Option<Sentinel> {
        let (dir, port) = (server_home(), free_port());
        let config = dir.path().join("sentinel.conf");
        let (home, group) = (dir.path().display(), Sentinel::GROUP);
        let text = format!(
            "port {port}\nbind 127.0.0.1\ndir {home}\nsentinel monitor {group} 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds {group} 500\nsentinel failover-timeout {group} 3000\n{lines}\n",
            master.port
        );
        std::fs::write(&config, text).unwrap();
        let mut command = Command::new("redis-sentinel");
        command.arg(&config);
        let mut daemon = Daemon::spawn(command, &dir.path().join("log"));
        until("the sentinel to know its master", || {
            let told = ask(port, login, &["sentinel", "master", group]);
            daemon.has_ended() || String::from_utf8_lossy(&told.stdout).contains("num-slaves\n1")
        });
        (!daemon.has_ended()).then_some(Sentinel { port, _daemon: daemon, _dir: dir })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

impl Bed for Sentinel {
    fn url(&self) -> String {
        format!("redis+sentinel://127.0.0.1:{}/{}", self.port, Sentinel::GROUP)
    }
}

/// So many independent servers.
pub struct Redlock {
    pub nodes: Vec<Redis>,
}

impl Redlock {
    pub fn of(count: usize) -> Redlock {
        Redlock { nodes: (0..count).map(|_| Redis::new()).collect() }
    }
}

impl Bed for Redlock {
    fn url(&self) -> String {
        let hosts: Vec<String> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.port)).collect();
        format!("redlock://{}", hosts.join(","))
    }

    fn abilities(&self) -> Abilities {
        Abilities { shared_and_slots: false, in_order: false }
    }

    fn scrawl(&self, name: &str, owner: &str, text: &str) {
        for node in &self.nodes {
            node.scrawl(name, owner, text);
            node.does(&["SET", &format!("{{dlock:{name}}}:held"), text]);
        }
    }

    fn scrawl_token(&self, name: &str, text: &str) {
        self.nodes.iter().for_each(|node| node.scrawl_token(name, text));
    }
}

impl Server for Redis {
    fn port(&self) -> u16 {
        Redis::port(self)
    }

    fn freeze(&self) {
        self.daemon().freeze();
    }

    fn thaw(&self) {
        self.daemon().thaw();
    }

    fn kill(&self) {
        Redis::kill(self);
    }

    fn start_again(&self) {
        self.restart();
    }

    fn forget(&self) {
        std::fs::remove_dir_all(self.dir().join("appendonlydir")).unwrap();
    }

    fn delete_record(&self, name: &str) {
        self.does(&["DEL", &format!("dlock:{name}")]);
    }

    fn told(&self, words: &[&str]) -> String {
        self.does(words)
    }

    fn leads(&self) -> bool {
        self.is_master()
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.clock().unwrap().set_ahead(seconds);
    }
}

/// A server that loses nothing when it is killed, and lets a replica begin at once.
const DURABLE: [&str; 6] = ["--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync-delay", "0"];

fn servers(count: usize, ground: Ground) -> Started {
    let start = if ground == Ground::OwnClocks { Redis::with_clock } else { Redis::with };
    Started::of((0..count).map(|_| -> Box<dyn Server> { Box::new(start(&DURABLE)) }).collect())
}

/// What only Redis can have: others cannot be made to answer with more than a dlock has room for.
const ITS_OWN: &[Fault] =
    &[Fault::ServersRestartedEmpty, Fault::RecordDeleted, Fault::Flushed, Fault::Evicted, Fault::DlockOutOfMemory];

/// Of a database.
const WRONG_NUMBERS: &[&str] = &["/x", "/-1", "/1.5", "/99999999999", "/0/1"];
const WRONG_COUNTS: &[&str] = &["", "x", "-1", "1.5", "99999999999"];
const WRONG_VALUES: &[(&str, &[&str])] = &[
    ("prefix", &["{", "a}b"]),
    ("db", &["", "0"]),
    ("wait-replicas", WRONG_COUNTS),
    ("sentinel-password-file", &[]),
    ("sentinel-username", &[]),
];

pub static REDIS: Place = Place {
    name: "redis",
    url: "redis://HOSTS",
    hosts: 1,
    start: |ground| servers(1, ground),
    independent: false,
    leader: Leader::Nobody,
    late: 4,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, faults::CLOCKS, ITS_OWN],
    expect: &[],
    exit_codes: &[],
    short: &[&Fault::ALL],
    covered: true,
    urls: &[
        Urls {
            schemes: &["redis", "rediss"],
            encrypted: &["rediss"],
            host: "127.0.0.1",
            hostless: false,
            path: "/0",
            wrong_paths: WRONG_NUMBERS,
            wrong_values: WRONG_VALUES,
        },
        Urls {
            schemes: &["redis+unix"],
            encrypted: &[],
            host: "",
            hostless: true,
            path: "/nonexistent/socket",
            wrong_paths: &[""],
            wrong_values: &[
                ("prefix", &["{", "a}b"]),
                ("db", &["x", "-1", "1.5"]),
                ("wait-replicas", WRONG_COUNTS),
                ("sentinel-password-file", &[]),
                ("sentinel-username", &[]),
            ],
        },
        Urls {
            schemes: &["redis+cluster", "rediss+cluster"],
            encrypted: &["rediss+cluster"],
            host: "127.0.0.1",
            hostless: false,
            path: "",
            wrong_paths: &["/x", "/1"],
            wrong_values: WRONG_VALUES,
        },
    ],
};

/// Nodes that have forgotten the lock are taken again by its holder; whoever waits is told in the same moment as it.
pub static REDLOCK_3: Place = Place {
    name: "redlock, 3 nodes",
    url: "redlock://HOSTS",
    hosts: 3,
    start: |ground| servers(3, ground),
    independent: true,
    late: 32,
    faults: &[
        faults::ANYWHERE,
        faults::PATHS,
        faults::SERVERS,
        faults::CLOCKS,
        ITS_OWN,
        &[Fault::OneRestartedEmpty, Fault::MajorityRotates],
    ],
    expect: &[
        (Fault::ServersRestartedEmpty, Expect::TokenRefuses),
        (Fault::RecordDeleted, Expect::TokenRefuses),
        (Fault::Flushed, Expect::TokenRefuses),
        (Fault::Evicted, Expect::TokenRefuses),
    ],
    exit_codes: &[
        (Fault::ClockForward, &[79, 137]),
        (Fault::ServersRestartedEmpty, &[79, 137]),
        (Fault::RecordDeleted, &[79, 137]),
        (Fault::Flushed, &[79, 137]),
        (Fault::Evicted, &[79, 137]),
    ],
    short: &[&[
        Fault::PathFrozen,
        Fault::PathCut,
        Fault::ServersPaused,
        Fault::OneRestartedEmpty,
        Fault::MajorityRotates,
        Fault::DlockStopped,
    ]],
    urls: &[Urls {
        schemes: &["redlock", "redlocks"],
        encrypted: &["redlocks"],
        host: "127.0.0.1:3,127.0.0.1:2,127.0.0.1",
        hostless: false,
        path: "",
        wrong_paths: WRONG_NUMBERS,
        wrong_values: WRONG_VALUES,
    }],
    ..REDIS
};

pub static REDLOCK_5: Place = Place {
    name: "redlock, 5 nodes",
    hosts: 5,
    start: |ground| servers(5, ground),
    short: &[],
    covered: false,
    urls: &[],
    ..REDLOCK_3
};

/// With a replica. Redis tells its client before its replica: what that has not heard of when it takes over never was. A
/// waiter that saw the holder says so to the new master; but a newcomer has seen nothing, and nobody has seen the last
/// renewal for certain. The sentinel may make the one or the other the master when both are back.
pub static SENTINEL: Place = Place {
    name: "redis, Sentinel",
    url: "redis+sentinel://HOSTS/mine",
    start: |_| {
        let master = Redis::with(&DURABLE);
        let replica = master.replica(&DURABLE);
        let sentinel = Some(Sentinel::over(&master));
        Started { servers: vec![Box::new(master), Box::new(replica)], sentinel }
    },
    leader: Leader::OfPair { may_come_back: true },
    late: 32,
    faults: &[
        faults::ANYWHERE,
        faults::SERVERS,
        faults::ELECTIONS,
        &[Fault::LeaderLost, Fault::FollowerKilled, Fault::RecordDeleted, Fault::DlockOutOfMemory],
    ],
    expect: &[
        (Fault::LeaderKilled, Expect::TokenRefuses),
        (Fault::LeaderFrozen, Expect::TokenRefuses),
        (Fault::LeaderWoken, Expect::TokenRefuses),
        (Fault::LeaderLost, Expect::TokenRefuses),
        (Fault::ServersPausedBriefly, Expect::TokenRefuses),
        (Fault::ServersPaused, Expect::TokenRefuses),
        (Fault::ServersKilled, Expect::TokenRefuses),
        (Fault::ServersRestarted, Expect::TokenRefuses),
    ],
    short: &[&[Fault::LeaderLost, Fault::DlockStopped]],
    covered: false,
    urls: &[Urls {
        schemes: &["redis+sentinel", "rediss+sentinel"],
        encrypted: &["rediss+sentinel"],
        host: "127.0.0.1",
        hostless: false,
        path: "/master",
        wrong_paths: &["", "/", "/m/x", "/m/0/1"],
        wrong_values: &[
            ("prefix", &["{", "a}b"]),
            ("db", &["", "0"]),
            ("wait-replicas", WRONG_COUNTS),
            ("sentinel-password-file", &["", "/nonexistent", "/dev"]),
            ("sentinel-username", &[]),
        ],
    }],
    ..REDIS
};

/// With wait-replicas=1 nothing counts before the one replica has it, and a former master that still takes itself for one
/// has no replica to confirm anything: as long as the two servers' clocks agree.
pub static REPLICATED: Place = Place {
    name: "redis, Sentinel, wait-replicas=1",
    url: "redis+sentinel://HOSTS/mine?wait-replicas=1",
    faults: &[
        faults::ANYWHERE,
        faults::SERVERS,
        &[
            Fault::LeaderKilled,
            Fault::LeaderWoken,
            Fault::FollowerKilled,
            Fault::RecordDeleted,
            Fault::DlockOutOfMemory,
        ],
    ],
    expect: &[],
    exit_codes: &[(Fault::FollowerKilled, &[79])],
    short: &[&[Fault::LeaderKilled, Fault::ServersRestarted]],
    urls: &[],
    ..SENTINEL
};
