//! MariaDB servers: one that many tests share, and whole ones, pairs and clusters for those that break theirs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use super::database::{
    Database, Kind, Once, PAIR, WRONG_AUTHORITIES, WRONG_PREFIXES, as_account, copy, new_data, run, spawn,
};
use super::place::{Expect, Leader, Place, Server, Started, Urls};
use super::{free_port, until};
use crate::matrix::{Fault, faults};

/// Its settings are written `--key=value`.
pub type Mysql = Database<MariaDb>;

pub struct MariaDb {
    settings: Vec<String>,
    part: Part,
}

/// What a server is among others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Alone,
    /// Of a Galera cluster.
    Node,
}

impl Mysql {
    /// A server, and a replica that it does not wait for.
    pub fn with_replica() -> (Mysql, Mysql) {
        Mysql::replicated(&[], &[])
    }

    /// A server whose commits wait for its replica, and that replica.
    pub fn pair() -> (Mysql, Mysql) {
        let waits = ["--rpl-semi-sync-master-enabled=1", "--rpl-semi-sync-master-timeout=2000"];
        let (primary, replica) = Mysql::replicated(&waits, &["--rpl-semi-sync-slave-enabled=1"]);
        until("the replica to be semi-synchronous", || {
            primary.status("Rpl_semi_sync_master_clients") == "1"
                && primary.status("Rpl_semi_sync_master_status") == "ON"
        });
        (primary, replica)
    }

    fn replicated(primary: &[&str], replica: &[&str]) -> (Mysql, Mysql) {
        let primary = Mysql::with(&[&["--log-bin=binlog", "--server-id=1"], primary].concat());
        let replica = Mysql::with(&[&["--log-bin=binlog", "--server-id=2", "--read-only=1"], replica].concat());
        replica.follow(&primary);
        (primary, replica)
    }

    fn follow(&self, primary: &Mysql) {
        self.sql(&format!(
            "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {}, MASTER_USER = 'root', \
             MASTER_USE_GTID = slave_pos, MASTER_CONNECT_RETRY = 1; START SLAVE",
            primary.port
        ));
        until("the replica to follow", || self.status("Slave_running") == "ON");
    }

    /// A Galera cluster of three. All begin with the same data, so that none has to be copied from one to another. A node
    /// that joins gets ready to be sent a copy all the same, on a port that would be the same for all.
    pub fn cluster() -> Vec<Mysql> {
        let ports: Vec<[u16; 4]> = (0..3).map(|_| std::array::from_fn(|_| free_port())).collect();
        let group = ports.iter().map(|[_, group, ..]| format!("127.0.0.1:{group}")).collect::<Vec<_>>().join(",");
        let settings = |n: usize| -> Vec<String> {
            let [_, listen, transfer, copy] = ports[n];
            let provider = format!(
                "gcache.size=8M;gmcast.listen_addr=tcp://127.0.0.1:{listen};ist.recv_addr=127.0.0.1:{transfer};\
                 evs.keepalive_period=PT0.5S;evs.suspect_timeout=PT3S;evs.inactive_timeout=PT6S;\
                 evs.inactive_check_period=PT0.5S;evs.install_timeout=PT6S"
            );
            let more = [
                "--wsrep-on=ON".to_owned(),
                "--wsrep-provider=/usr/lib/galera/libgalera_smm.so".to_owned(),
                "--binlog-format=ROW".to_owned(),
                "--innodb-autoinc-lock-mode=2".to_owned(),
                format!("--wsrep-cluster-address=gcomm://{group}"),
                format!("--wsrep-node-address=127.0.0.1:{listen}"),
                format!("--wsrep-node-name=node{n}"),
                "--wsrep-sst-method=rsync".to_owned(),
                format!("--wsrep-sst-receive-address=127.0.0.1:{copy}"),
                format!("--wsrep-provider-options={provider}"),
            ];
            more.to_vec()
        };
        let begun = [settings(0), vec!["--wsrep-new-cluster".to_owned()]].concat();
        // Its first life only makes the state that the others begin with.
        let mut founder = Mysql::launch(MariaDb::node(begun), new_data::<MariaDb>(), ports[0][0], None);
        founder.await_ready();
        {
            let mut daemon = founder.daemon.lock().unwrap();
            super::signal(daemon.pid(), nix::sys::signal::Signal::SIGTERM);
            until("the founder to stop", || daemon.has_ended());
        }
        let copies: Vec<TempDir> = (1..3).map(|_| copy::<MariaDb>(founder.dir())).collect();
        *founder.daemon.lock().unwrap() = spawn(founder.kind.server(founder.dir(), founder.port), founder.dir(), None);
        founder.await_ready();
        founder.kind = MariaDb::node(settings(0));
        let mut nodes = vec![founder];
        for (n, dir) in (1..3).zip(copies) {
            let state = dir.path().join("data/grastate.dat");
            let text = std::fs::read_to_string(&state).unwrap().replace("bootstrap: 1", "bootstrap: 0");
            std::fs::write(&state, text).unwrap();
            nodes.push(Mysql::launch(MariaDb::node(settings(n)), dir, ports[n][0], None));
        }
        nodes.iter().for_each(Mysql::await_ready);
        until("the cluster to be whole", || nodes[0].status("wsrep_cluster_size") == "3");
        nodes
    }

    pub fn status(&self, name: &str) -> String {
        let row = self.try_sql(&format!("SHOW GLOBAL STATUS LIKE '{name}'")).unwrap_or_default();
        row.split_once('\t').map(|(_, value)| value.to_owned()).unwrap_or_default()
    }

    /// Until a node of a cluster takes part in it.
    pub fn await_ready(&self) {
        until("a node to be ready", || {
            assert!(!self.daemon.lock().unwrap().has_ended(), "a node has given up");
            self.status("wsrep_ready") == "ON"
        });
    }

    /// Cuts a node off from the others, or takes it back.
    pub fn isolate(&self, isolated: bool) {
        self.sql(&format!("SET GLOBAL wsrep_provider_options = 'gmcast.isolate={}'", u8::from(isolated)));
    }

    pub fn socket(&self) -> PathBuf {
        socket(self.dir())
    }
}

impl MariaDb {
    fn node(settings: Vec<String>) -> MariaDb {
        MariaDb { settings, part: Part::Node }
    }

    /// How far a killed node had come, as Debian's start script would find out.
    fn position(&self, dir: &Path, port: u16) -> String {
        let said = self.server(dir, port).arg("--wsrep-recover").output().unwrap();
        let said = String::from_utf8_lossy(&said.stderr).into_owned() + &String::from_utf8_lossy(&said.stdout);
        let found = said.lines().find_map(|line| line.split_once("Recovered position: ").map(|(_, position)| position));
        found.unwrap_or_else(|| panic!("no position: {said}")).trim().to_owned()
    }
}

impl Kind for MariaDb {
    const ACCOUNT: &'static str = "mysql";
    const URL: [&'static str; 3] = ["mysql", "root", "jobs"];
    const PREFIX: &'static str = "dlock_";
    const CALL: &'static str = "CALL dlock_";
    const BETWEEN: char = '\t';
    const WAITS: &'static str = "token IS NULL";
    const NULL: &'static str = "NULL";
    const DONE: &'static str = "done";
    const ROOMY: &'static [&'static str] = &["--max-connections=500"];
    const END: Option<Signal> = None;

    fn once() -> &'static Once<MariaDb> {
        static ONCE: Once<MariaDb> = Once::new();
        &ONCE
    }

    fn set_up(dir: &Path) {
        let data = format!("--datadir={}", dir.join("data").display());
        if let Some(mysqld) = mysqld() {
            // A new MySQL knows nobody who comes over TCP, and its databases are more than directories.
            let begin = dir.join("begin.sql");
            let sql = "CREATE DATABASE jobs;\nCREATE USER root@'127.0.0.1';\n\
                       GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n";
            std::fs::write(&begin, sql).unwrap();
            let mut install = as_account::<MariaDb>(Command::new(mysqld));
            install.args(["--no-defaults", "--initialize-insecure", &data]);
            return run(install.arg(format!("--init-file={}", begin.display())));
        }
        // A server that starts removes what others have in its directory for temporary tables.
        let temporary = format!("--tmpdir={}", dir.display());
        let mut install = as_account::<MariaDb>(Command::new("mariadb-install-db"));
        install.args(["--no-defaults", &data, &temporary, "--auth-root-authentication-method=normal"]);
        run(install.args(["--skip-test-db", "--innodb-log-file-size=4M", "--innodb-flush-method=fsync"]));
        run(as_account::<MariaDb>(Command::new("mkdir")).arg(dir.join("data/jobs")));
    }

    fn configure(_dir: &Path, _port: u16, settings: &[&str]) -> MariaDb {
        MariaDb { settings: settings.iter().map(|&setting| setting.to_owned()).collect(), part: Part::Alone }
    }

    fn server(&self, dir: &Path, port: u16) -> Command {
        let mut server = as_account::<MariaDb>(Command::new(mysqld().unwrap_or_else(|| "mariadbd".into())));
        let path = |key: &str, name: &str| format!("--{key}={}", dir.join(name).display());
        server.args(["--no-defaults", &format!("--port={port}"), "--bind-address=127.0.0.1", "--skip-name-resolve"]);
        server.args([path("datadir", "data"), path("socket", "socket"), path("pid-file", "pid"), path("tmpdir", "")]);
        server.args(["--innodb-buffer-pool-size=16M", "--innodb-flush-method=fsync"]);
        match mysqld() {
            Some(_) => server.args(["--innodb-redo-log-capacity=8M", "--mysqlx=OFF"]),
            None => server.arg("--innodb-log-file-size=4M"),
        };
        server.args(&self.settings);
        server
    }

    fn server_again(&self, dir: &Path, port: u16) -> Command {
        let mut server = self.server(dir, port);
        if self.part == Part::Node {
            server.arg(format!("--wsrep-start-position={}", self.position(dir, port)));
        }
        server
    }

    fn answers_alone(&self) -> bool {
        self.part == Part::Alone
    }

    fn client(dir: &Path, _port: u16, sql: &str) -> Command {
        let mut client = Command::new("mariadb");
        client.args(["--no-defaults", "-uroot", "-BN", "-S"]).arg(socket(dir)).args(["-D", "jobs", "-e", sql]);
        client
    }

    fn scrawl(name: &str, text: &str) -> String {
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        format!(
            "UPDATE dlock_contenders SET who = _utf8mb4 x'{hex}', renewal = renewal + 1 WHERE name = '{name}';
             UPDATE dlock_history SET runs = _utf8mb4 x'{hex}' WHERE name = '{name}'"
        )
    }

    fn end_session(number: u32) -> String {
        format!("KILL {number}")
    }

    /// Every node of a cluster does as long as it takes part in it; dlock uses the first.
    fn leads(server: &Mysql) -> bool {
        match server.kind.part {
            Part::Alone => server.try_sql("SELECT @@read_only") == Ok("0".to_owned()),
            Part::Node => server.status("wsrep_ready") == "ON",
        }
    }

    fn promote(server: &Mysql) {
        if server.kind.part == Part::Alone {
            server.sql("STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only = 0");
        }
    }

    /// As docs/backends/mysql.md says.
    fn begin_again(server: &Mysql) {
        if server.status("wsrep_cluster_status") == "non-Primary" {
            server.sql("SET GLOBAL wsrep_provider_options = 'pc.bootstrap=1'");
        }
    }
}

fn socket(dir: &Path) -> PathBuf {
    dir.join("socket")
}

/// The program of a MySQL that plays MariaDB's part wherever a server is alone.
fn mysqld() -> Option<OsString> {
    std::env::var_os("DLOCK_MYSQLD")
}

/// A database that lost its disk is another database; one that is there refuses to have rows deleted. The clock that leases
/// count by is none that can be set.
pub static MYSQL: Place = Place {
    name: "mysql",
    url: "mysql://root@HOSTS/jobs",
    hosts: 1,
    start: Mysql::on,
    independent: false,
    leader: Leader::Nobody,
    late: 16,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, faults::CLOCKS],
    expect: &[(Fault::ClockForward, Expect::NoOverlap)],
    exit_codes: &[(Fault::ClockForward, &[137])],
    short: &[&[
        Fault::PathFrozen,
        Fault::AnswersLate,
        Fault::ServersPaused,
        Fault::ServersKilled,
        Fault::ServersRestarted,
        Fault::ClockForward,
        Fault::ClockBack,
    ]],
    covered: true,
    urls: &[Urls {
        schemes: &["mysql", "mariadb"],
        encrypted: &[],
        host: "127.0.0.1",
        hostless: true,
        path: "/db",
        wrong_paths: &["", "/", "/a`b", "/a/b"],
        wrong_values: &[
            ("prefix", WRONG_PREFIXES),
            ("tls-ca", WRONG_AUTHORITIES),
            ("sslmode", &["x", "VERIFY-FULL", "require%20"]),
            // A URL with hosts names no socket.
            ("socket", &["", "x", "/nonexistent"]),
            ("defaults-file", &["", "/nonexistent", "/dev"]),
            ("wake-up", &["", "x"]),
        ],
    }],
};

/// With a semi-synchronous replica: no grant counts before that has it, and a lease from before a failover counts anew,
/// whatever the clocks say. A former primary may not come back.
pub static MYSQL_PAIR: Place = Place {
    name: "mysql, semi-synchronous replica",
    hosts: 2,
    start: |_| {
        let (primary, replica) = Mysql::pair();
        Started::of(vec![Box::new(primary), Box::new(replica)])
    },
    leader: Leader::OfPair { may_come_back: false },
    late: 32,
    faults: &[faults::ANYWHERE, faults::SERVERS, PAIR],
    expect: &[],
    exit_codes: &[(Fault::FollowerKilled, &[79])],
    short: &[&[Fault::LeaderKilled, Fault::FollowerKilled]],
    covered: false,
    urls: &[],
    ..MYSQL
};

/// Three nodes that are one server: a grant counts when a majority has certified it, whichever node was asked.
pub static GALERA: Place = Place {
    name: "galera, 3 nodes",
    hosts: 3,
    start: |_| Started::of(Mysql::cluster().into_iter().map(|node| Box::new(node) as Box<dyn Server>).collect()),
    leader: Leader::Elected,
    late: 32,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, faults::ELECTIONS],
    expect: &[],
    exit_codes: &[],
    short: &[],
    covered: false,
    urls: &[],
    ..MYSQL
};
