//! MariaDB servers: one that many tests share, and whole ones, pairs and clusters for those that break theirs.

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

use nix::unistd::User;
use tempfile::TempDir;

use super::place::{Expect, Ground, Leader, Place, Server, Started, Urls};
use super::{Bed, Clock, Daemon, free_port, server_home, until};
use crate::matrix::{Fault, faults};

pub struct Mysql {
    port: u16,
    settings: Vec<String>,
    daemon: Mutex<Daemon>,
    clock: Option<Clock>,
    part: Part,
    /// Dropped last: a server that ends with its test shows what it has logged.
    dir: TempDir,
}

/// What a server is among others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Alone,
    /// Of a Galera cluster.
    Node,
}

impl Mysql {
    /// The server of all tests that do it no harm.
    pub fn shared() -> &'static Mysql {
        static SHARED: OnceLock<Mysql> = OnceLock::new();
        SHARED.get_or_init(|| Mysql::with(&["--max-connections=500"]))
    }

    /// A server of one's own, with these settings (`--key=value`).
    pub fn with(settings: &[&str]) -> Mysql {
        Mysql::start(new_data(), settings, None)
    }

    /// With a wall clock of its own.
    pub fn with_clock() -> Mysql {
        Mysql::start(new_data(), &[], Some(Clock::new()))
    }

    fn start(dir: TempDir, settings: &[&str], clock: Option<Clock>) -> Mysql {
        let settings: Vec<String> = settings.iter().map(|&setting| setting.to_owned()).collect();
        let server = Mysql::launch(dir, free_port(), settings, clock, Part::Alone);
        server.await_answer();
        server
    }

    fn launch(dir: TempDir, port: u16, settings: Vec<String>, clock: Option<Clock>, part: Part) -> Mysql {
        let daemon = Mutex::new(launch(dir.path(), port, &settings, clock.as_ref()));
        Mysql { port, settings, daemon, clock, part, dir }
    }

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
        let first = new_data();
        let mut begun = settings(0);
        begun.push("--wsrep-new-cluster".to_owned());
        // Its first life only makes the state that the others begin with.
        let founder = Mysql::launch(first, ports[0][0], begun.clone(), None, Part::Node);
        founder.await_ready();
        {
            let mut daemon = founder.daemon.lock().unwrap();
            super::signal(daemon.pid(), nix::sys::signal::Signal::SIGTERM);
            until("the founder to stop", || daemon.has_ended());
        }
        let copies: Vec<TempDir> = (1..3).map(|_| copy(founder.dir.path())).collect();
        *founder.daemon.lock().unwrap() = launch(founder.dir.path(), ports[0][0], &begun, None);
        founder.await_ready();
        let mut nodes = vec![Mysql { settings: settings(0), ..founder }];
        for (n, dir) in (1..3).zip(copies) {
            let state = dir.path().join("data/grastate.dat");
            let text = std::fs::read_to_string(&state).unwrap().replace("bootstrap: 1", "bootstrap: 0");
            std::fs::write(&state, text).unwrap();
            nodes.push(Mysql::launch(dir, ports[n][0], settings(n), None, Part::Node));
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

    pub fn await_answer(&self) {
        until("MariaDB to answer", || self.client("SELECT 1").status.success());
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// As a user other than root, with more parameters.
    pub fn url_as(&self, user: &str, parameters: &str) -> String {
        format!("mysql://{user}@127.0.0.1:{}/jobs?{parameters}", self.port)
    }

    fn client(&self, sql: &str) -> Output {
        let mut client = Command::new("mariadb");
        client.args(["--no-defaults", "-uroot", "-BN", "-S"]).arg(self.socket()).args(["-D", "jobs", "-e", sql]);
        client.output().expect("the mariadb client; see tests/run")
    }

    /// What an SQL client gets: its rows, one a line, columns between tabs; or the error.
    pub fn try_sql(&self, sql: &str) -> Result<String, String> {
        let done = self.client(sql);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
    }

    #[track_caller]
    pub fn sql(&self, sql: &str) -> String {
        self.try_sql(sql).unwrap()
    }

    /// The numbers of dlock's connections that hold this lock.
    pub fn connections(&self, name: &str) -> Vec<u32> {
        let sql = format!("SELECT session FROM dlock_contenders WHERE name = '{name}' AND token IS NOT NULL");
        self.sql(&sql).lines().map(|id| id.parse().unwrap()).collect()
    }

    /// Nobody is told; connections stay open.
    pub fn freeze(&self) {
        self.daemon.lock().unwrap().freeze();
    }

    pub fn thaw(&self) {
        self.daemon.lock().unwrap().thaw();
    }

    pub fn kill(&self) {
        self.daemon.lock().unwrap().kill();
    }

    /// After [`kill`](Self::kill), on the same port and with the same data.
    pub fn start_again(&self) {
        until("MariaDB to be back", || {
            let mut daemon = self.daemon.lock().unwrap();
            if daemon.has_ended() {
                let mut settings = self.settings.clone();
                if self.part != Part::Alone {
                    settings.push(format!("--wsrep-start-position={}", self.position()));
                }
                *daemon = launch(self.dir.path(), self.port, &settings, self.clock.as_ref());
            }
            // A node may have to wait for the others before it has anything to say.
            self.part != Part::Alone || self.client("SELECT 1").status.success()
        });
    }

    /// How far a killed node had come, as Debian's start script would find out.
    fn position(&self) -> String {
        let mut recover = server(self.dir.path(), self.port, &self.settings);
        let said = recover.arg("--wsrep-recover").output().unwrap();
        let said = String::from_utf8_lossy(&said.stderr).into_owned() + &String::from_utf8_lossy(&said.stdout);
        let found = said.lines().find_map(|line| line.split_once("Recovered position: ").map(|(_, position)| position));
        found.unwrap_or_else(|| panic!("no position: {said}")).trim().to_owned()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }
}

impl Bed for Mysql {
    fn url(&self) -> String {
        format!("mysql://root@127.0.0.1:{}/jobs", self.port)
    }

    fn scrawl(&self, name: &str, _owner: &str, text: &str) {
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.sql(&format!(
            "UPDATE dlock_contenders SET who = _utf8mb4 x'{hex}', renewal = renewal + 1 WHERE name = '{name}';
             UPDATE dlock_history SET runs = _utf8mb4 x'{hex}' WHERE name = '{name}'"
        ));
    }
}

impl Bed for &'static Mysql {
    fn url(&self) -> String {
        Mysql::url(self)
    }

    fn scrawl(&self, name: &str, owner: &str, text: &str) {
        Mysql::scrawl(self, name, owner, text);
    }
}

/// MariaDB does not run as root, unless it is told to.
fn account() -> (u32, u32) {
    let me = nix::unistd::geteuid();
    let user = if me.is_root() { User::from_name("mysql") } else { User::from_uid(me) };
    let user = user.unwrap().expect("a user called mysql; see tests/run");
    (user.uid.as_raw(), user.gid.as_raw())
}

fn as_account(mut command: Command) -> Command {
    if nix::unistd::geteuid().is_root() {
        let (uid, gid) = account();
        command.uid(uid).gid(gid);
    }
    command.current_dir("/");
    command
}

fn directory() -> TempDir {
    let dir = server_home();
    let (uid, gid) = account();
    std::os::unix::fs::chown(dir.path(), Some(uid), Some(gid)).unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

/// The set-up takes seconds, a copy of what it made does not.
fn new_data() -> TempDir {
    static TEMPLATE: OnceLock<TempDir> = OnceLock::new();
    let template = TEMPLATE.get_or_init(|| {
        let dir = directory();
        let data = format!("--datadir={}", dir.path().join("data").display());
        if let Some(mysqld) = mysqld() {
            // A new MySQL knows nobody who comes over TCP, and its databases are more than directories.
            let begin = dir.path().join("begin.sql");
            let sql = "CREATE DATABASE jobs;\nCREATE USER root@'127.0.0.1';\n\
                       GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n";
            std::fs::write(&begin, sql).unwrap();
            let mut install = as_account(Command::new(mysqld));
            install.args(["--no-defaults", "--initialize-insecure", &data]);
            let made = install.arg(format!("--init-file={}", begin.display())).output().unwrap();
            assert!(made.status.success(), "{made:?}");
            return dir;
        }
        // A server that starts removes what others have in its directory for temporary tables.
        let temporary = format!("--tmpdir={}", dir.path().display());
        let mut install = as_account(Command::new("mariadb-install-db"));
        install.args(["--no-defaults", &data, &temporary, "--auth-root-authentication-method=normal"]);
        install.args(["--skip-test-db", "--innodb-log-file-size=4M", "--innodb-flush-method=fsync"]);
        let made = install.output().expect("see tests/run");
        assert!(made.status.success(), "{made:?}");
        let created = as_account(Command::new("mkdir")).arg(dir.path().join("data/jobs")).status().unwrap();
        assert!(created.success());
        dir
    });
    copy(template.path())
}

/// With the data of another server, which does not run.
fn copy(from: &Path) -> TempDir {
    let dir = directory();
    let copied = Command::new("cp").arg("-a").arg(from.join("data")).arg(dir.path().join("data")).output();
    assert!(copied.as_ref().is_ok_and(|done| done.status.success()), "{copied:?}");
    dir
}

fn launch(dir: &Path, port: u16, settings: &[String], clock: Option<&Clock>) -> Daemon {
    let mut server = server(dir, port, settings);
    if let Some(clock) = clock {
        clock.govern(&mut server);
    }
    Daemon::spawn(server, &dir.join("log"))
}

/// The program of a MySQL that plays MariaDB's part wherever a server is alone.
fn mysqld() -> Option<OsString> {
    std::env::var_os("DLOCK_MYSQLD")
}

fn server(dir: &Path, port: u16, settings: &[String]) -> Command {
    let mut server = as_account(Command::new(mysqld().unwrap_or_else(|| "mariadbd".into())));
    let path = |key: &str, name: &str| format!("--{key}={}", dir.join(name).display());
    server.args(["--no-defaults", &format!("--port={port}"), "--bind-address=127.0.0.1", "--skip-name-resolve"]);
    server.args([path("datadir", "data"), path("socket", "socket"), path("pid-file", "pid"), path("tmpdir", "")]);
    server.args(["--innodb-buffer-pool-size=16M", "--innodb-flush-method=fsync"]);
    match mysqld() {
        Some(_) => server.args(["--innodb-redo-log-capacity=8M", "--mysqlx=OFF"]),
        None => server.arg("--innodb-log-file-size=4M"),
    };
    server.args(settings);
    server
}

impl Server for Mysql {
    fn port(&self) -> u16 {
        Mysql::port(self)
    }

    fn freeze(&self) {
        Mysql::freeze(self);
    }

    fn thaw(&self) {
        Mysql::thaw(self);
    }

    fn kill(&self) {
        Mysql::kill(self);
    }

    fn start_again(&self) {
        Mysql::start_again(self);
    }

    fn told(&self, words: &[&str]) -> String {
        words.iter().map(|sql| self.try_sql(sql).unwrap_or_else(|error| error)).collect()
    }

    /// Every node of a cluster does as long as it takes part in it; dlock uses the first.
    fn leads(&self) -> bool {
        match self.part {
            Part::Alone => self.try_sql("SELECT @@read_only") == Ok("0".to_owned()),
            Part::Node => self.status("wsrep_ready") == "ON",
        }
    }

    fn promote(&self) {
        if self.part == Part::Alone {
            self.sql("STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only = 0");
        }
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.clock.as_ref().unwrap().set_ahead(seconds);
    }

    fn refuses(&self, older: u64, newer: u64) -> bool {
        let write = |token: u64| self.told(&[&format!("CALL dlock_fence('resource', {token})")]);
        !write(newer).contains("ERROR") && write(older).contains("ERROR")
    }
}

/// They are read where something depends on them.
const WRONG_AUTHORITIES: &[&str] = &["/nonexistent&sslmode=verify-full", "/dev&sslmode=verify-full"];

/// A database that lost its disk is another database; one that is there refuses to have rows deleted. The clock that leases
/// count by is none that can be set.
pub static MYSQL: Place = Place {
    name: "mysql",
    url: "mysql://root@HOSTS/jobs",
    hosts: 1,
    start: |ground| match ground {
        Ground::OwnClocks => Started::one(Mysql::with_clock()),
        // Room for many contenders.
        _ => Started::one(Mysql::with(&["--max-connections=500"])),
    },
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
            ("prefix", &["", "a-b", "1a", "%22", "abcdefghijklmnopqrstuvwxyzabcdefgh"]),
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
    faults: &[
        faults::ANYWHERE,
        faults::SERVERS,
        &[
            Fault::LeaderKilled,
            Fault::FollowerKilled,
            Fault::PathFrozen,
            Fault::PathCut,
            Fault::PathHalfOpen,
            Fault::PathSlowTwice,
            Fault::GuardianStopped,
        ],
    ],
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
