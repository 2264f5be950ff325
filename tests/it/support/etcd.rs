//! Real etcd servers: one that many tests share, one of one's own to break, or a cluster of three.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::rc::Rc;
use std::sync::OnceLock;

use tempfile::TempDir;

use super::place::{Expect, Leader, Place, Server, Started, Urls};
use super::{Bed, Daemon, Proxy, free_port, server_home, until};
use crate::matrix::{Fault, faults};

/// One etcd process.
pub struct Member {
    daemon: Daemon,
    command: Vec<String>,
    client: u16,
    data: PathBuf,
}

impl Member {
    fn start(name: &str, data: &Path, client: u16, urls: &str, options: &[String]) -> Member {
        let data = data.join(name);
        let directory = data.display().to_string();
        let urls = format!("{urls}://127.0.0.1:{client}");
        let mut command = vec!["etcd", "--name", name, "--data-dir", &directory, "--listen-client-urls", &urls];
        command.extend(["--advertise-client-urls", &urls, "--logger", "zap", "--log-level", "error"]);
        let command: Vec<_> = command.into_iter().map(str::to_owned).chain(options.iter().cloned()).collect();
        Member { daemon: spawn(&command, &data), command, client, data }
    }

    /// Asks this one alone, and not for long.
    fn etcdctl(&self, args: &[&str]) -> Output {
        let endpoint = format!("127.0.0.1:{}", self.client);
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &endpoint, "--command-timeout=1s"]).args(args);
        command.output().unwrap()
    }

    /// Loses all its data, as long as it is not running.
    pub fn forget(&self) {
        std::fs::remove_dir_all(&self.data).unwrap();
    }

    /// Has the data of a snapshot from now on, as long as it is not running.
    pub fn restore(&self, snapshot: &Path) {
        self.forget();
        let mut etcdctl = Command::new("etcdctl");
        etcdctl.env("ETCDCTL_API", "3").args(["snapshot", "restore"]).arg(snapshot);
        for option in ["--name", "--data-dir", "--initial-cluster", "--initial-advertise-peer-urls"] {
            etcdctl.args(self.command.iter().skip_while(|word| *word != option).take(2));
        }
        assert!(etcdctl.output().unwrap().status.success());
    }

    /// Starts it again with the data it had.
    pub fn restart(&mut self) {
        self.daemon = spawn(&self.command, &self.data);
    }
}

fn spawn(command: &[String], data: &Path) -> Daemon {
    let mut etcd = Command::new(&command[0]);
    etcd.args(&command[1..]);
    Daemon::spawn(etcd, &data.with_extension("log"))
}

impl std::ops::Deref for Member {
    type Target = Daemon;
    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl std::ops::DerefMut for Member {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

/// An etcd of one or of three members.
pub struct Etcd {
    pub members: Vec<Member>,
    /// In front of each member's port for its peers.
    peers: Vec<Proxy>,
    /// What etcdctl needs besides the endpoints, to be let in.
    login: Vec<String>,
    directory: TempDir,
}

impl Etcd {
    pub fn new() -> Etcd {
        let mut etcd = Etcd::with_options("http", &[], &[]);
        etcd.await_health();
        etcd
    }

    /// One member that takes `options`, and an etcdctl that takes `login`. It may not be up yet.
    pub fn with_options(urls: &str, options: &[String], login: &[String]) -> Etcd {
        let directory = server_home();
        let peer = format!("http://127.0.0.1:{}", free_port());
        let own = ["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer, "--initial-cluster"];
        let cluster = format!("m0={peer}");
        let own = own.into_iter().map(str::to_owned).chain([cluster]).chain(options.iter().cloned());
        let member = Member::start("m0", directory.path(), free_port(), urls, &own.collect::<Vec<_>>());
        Etcd { members: vec![member], peers: Vec::new(), login: login.to_vec(), directory }
    }

    pub fn cluster() -> Etcd {
        let directory = server_home();
        let ports: Vec<_> = (0..3).map(|_| free_port()).collect();
        let peers: Vec<_> = ports.iter().map(|port| Proxy::to(*port)).collect();
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let named = |(n, proxy): (usize, &Proxy)| format!("m{n}={}", url(proxy.port()));
        let all = peers.iter().enumerate().map(named).collect::<Vec<_>>().join(",");
        let start = |n: usize| {
            let (own, seen) = (url(ports[n]), url(peers[n].port()));
            let options =
                ["--listen-peer-urls", &own, "--initial-advertise-peer-urls", &seen, "--initial-cluster", &all];
            Member::start(&format!("m{n}"), directory.path(), free_port(), "http", &options.map(str::to_owned))
        };
        let members = (0..3).map(start).collect();
        let mut etcd = Etcd { members, peers, login: Vec::new(), directory };
        etcd.await_health();
        etcd
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn port(&self) -> u16 {
        self.members[0].client
    }

    pub fn endpoints(&self) -> Vec<String> {
        self.members.iter().map(|member| format!("127.0.0.1:{}", member.client)).collect()
    }

    pub fn etcdctl(&self) -> Command {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").arg("--endpoints").arg(self.endpoints().join(",")).args(&self.login);
        command
    }

    /// What etcdctl prints.
    #[track_caller]
    pub fn ctl(&self, args: &[&str]) -> String {
        let Output { status, stdout, stderr } = self.etcdctl().args(args).output().unwrap();
        assert!(status.success(), "etcdctl {args:?}: {}", String::from_utf8_lossy(&stderr));
        String::from_utf8(stdout).unwrap()
    }

    /// The keys of all contenders for a lock, dlock's and others'.
    pub fn contenders(&self, name: &str) -> Vec<String> {
        let keys = self.ctl(&["get", "--prefix", "--keys-only", &format!("dlock/{}/", name.replace('/', "%2F"))]);
        keys.lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
    }

    /// Waits for an answer to a linearizable read.
    pub fn await_health(&mut self) {
        until("etcd to be healthy", || {
            // Its port was free when we looked, but somebody may have been faster.
            for member in &mut self.members {
                if member.has_ended() {
                    member.restart();
                }
            }
            self.etcdctl().args(["get", "x"]).output().unwrap().status.success()
        });
    }

    /// The member that leads the others now.
    pub fn leader(&self) -> usize {
        let leads = |member: &Member| {
            let status = member.etcdctl(&["endpoint", "status"]);
            String::from_utf8_lossy(&status.stdout).contains(", true, false, ")
        };
        let mut leader = None;
        until("a leader", || {
            leader = self.members.iter().position(leads);
            leader.is_some()
        });
        leader.unwrap_or_default()
    }

    /// Cuts a member off from its peers, in both directions; its clients still reach it.
    pub fn part(&self, member: usize) {
        self.peers[member].cut();
        for peer in &self.peers {
            peer.refuse(self.members[member].pid());
        }
        until("the member to be alone", || !self.members[member].etcdctl(&["get", "x"]).status.success());
    }
}

impl Bed for Etcd {
    fn url(&self) -> String {
        format!("etcd://{}", self.endpoints().join(","))
    }

    fn would_miss(&self, name: &str) -> bool {
        !self.ctl(&["get", "--prefix", "--keys-only", &format!("dlock-meta/runs/{name}/noted/")]).is_empty()
    }

    fn scrawl(&self, name: &str, _owner: &str, text: &str) {
        // A whole record with a token says that the holder has gone and left the key behind: that would be believed.
        if !text.contains("\"token\"") {
            self.ctl(&["put", "--ignore-lease", "--", &self.contenders(name)[0], text]);
        }
        self.ctl(&["put", "--", &format!("dlock-meta/runs/{name}/last"), text]);
    }
}

/// The one that tests share which break nothing.
pub fn shared() -> &'static Etcd {
    static SHARED: OnceLock<Etcd> = OnceLock::new();
    SHARED.get_or_init(Etcd::new)
}

/// One member of a cluster, to be broken.
pub struct Breakable {
    cluster: Rc<RefCell<Etcd>>,
    number: usize,
}

impl Breakable {
    pub fn all_of(cluster: Etcd) -> Vec<Box<dyn Server>> {
        let (count, cluster) = (cluster.members.len(), Rc::new(RefCell::new(cluster)));
        let member = |number| -> Box<dyn Server> { Box::new(Breakable { cluster: Rc::clone(&cluster), number }) };
        (0..count).map(member).collect()
    }
}

impl Server for Breakable {
    fn port(&self) -> u16 {
        let endpoint = &self.cluster.borrow().endpoints()[self.number];
        endpoint.rsplit(':').next().unwrap().parse().unwrap()
    }

    fn freeze(&self) {
        self.cluster.borrow().members[self.number].freeze();
    }

    fn thaw(&self) {
        self.cluster.borrow().members[self.number].thaw();
    }

    fn kill(&self) {
        self.cluster.borrow_mut().members[self.number].kill();
    }

    fn start_again(&self) {
        self.cluster.borrow_mut().members[self.number].restart();
    }

    fn forget(&self) {
        self.cluster.borrow().members[self.number].forget();
    }

    fn delete_record(&self, name: &str) {
        let cluster = self.cluster.borrow();
        let oldest = ["--sort-by=CREATE", "--order=ASCEND", "--limit=1", "--keys-only"];
        let prefix = format!("dlock/{name}/");
        let key = cluster.ctl(&[&["get", "--prefix", &prefix][..], &oldest].concat());
        cluster.ctl(&["del", key.trim()]);
    }

    fn leads(&self) -> bool {
        self.cluster.borrow().leader() == self.number
    }
}

/// Go asks the kernel for the time, past every library that could tell it another; by etcd's design its leases do not
/// depend on it.
pub static ETCD: Place = Place {
    name: "etcd",
    url: "etcd://HOSTS",
    hosts: 1,
    start: |_| Started::of(Breakable::all_of(Etcd::new())),
    independent: false,
    leader: Leader::Nobody,
    late: 16,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, &[Fault::ServersRestartedEmpty, Fault::RecordDeleted]],
    expect: &[(Fault::ServersRestartedEmpty, Expect::NoOverlapButTokens)],
    exit_codes: &[],
    short: &[&[
        Fault::PathFrozen,
        Fault::PathCut,
        Fault::ServersPaused,
        Fault::RecordDeleted,
        Fault::DlockStopped,
        Fault::AllStopped,
        Fault::MachineFrozen,
    ]],
    covered: true,
    urls: &[Urls {
        schemes: &["etcd", "etcds"],
        encrypted: &["etcds"],
        host: "127.0.0.1",
        hostless: false,
        path: "",
        wrong_paths: &["/x"],
        wrong_values: &[("prefix", &["", "/"])],
    }],
};

/// Members that have forgotten are replaced by their operators, not restarted.
pub static ETCD_3: Place = Place {
    name: "etcd, 3 members",
    hosts: 3,
    start: |_| Started::of(Breakable::all_of(Etcd::cluster())),
    leader: Leader::Elected,
    late: 32,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, faults::ELECTIONS, &[Fault::RecordDeleted]],
    expect: &[],
    short: &[&[Fault::LeaderKilled, Fault::LeaderWoken, Fault::ServersKilled]],
    urls: &[],
    ..ETCD
};
