//! PostgreSQL servers: one that many tests share, and whole ones for those that break theirs.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, OnceLock};

use nix::sys::signal::Signal;
use nix::unistd::User;
use tempfile::TempDir;

use super::place::{Ground, Leader, Place, Server, Started, Urls};
use super::{Bed, Clock, Daemon, children_of, free_port, server_home, until};
use crate::matrix::{Fault, faults};

pub struct Postgres {
    port: u16,
    daemon: Mutex<Daemon>,
    clock: Option<Clock>,
    /// Dropped last: a server that ends with its test shows what it has logged.
    dir: TempDir,
}

impl Postgres {
    /// The server of all tests that do it no harm.
    pub fn shared() -> &'static Postgres {
        static SHARED: OnceLock<Postgres> = OnceLock::new();
        SHARED.get_or_init(|| Postgres::with(&[]))
    }

    /// A server of one's own, with these settings (`key=value`).
    pub fn with(settings: &[&str]) -> Postgres {
        Postgres::start(new_database(), settings, None)
    }

    /// With a wall clock of its own.
    pub fn with_clock() -> Postgres {
        Postgres::start(new_database(), &[], Some(Clock::new()))
    }

    /// A streaming standby of this one.
    pub fn standby(&self) -> Postgres {
        let dir = directory();
        let mut copy = program("pg_basebackup");
        copy.args(["-h", "127.0.0.1", "-p", &self.port.to_string(), "-U", "postgres", "--checkpoint=fast", "-R", "-D"]);
        run(copy.arg(dir.path().join("data")));
        Postgres::start(dir, &[], None)
    }

    /// A server whose commits wait for its standby, and that standby.
    pub fn pair() -> (Postgres, Postgres) {
        let primary = Postgres::with(&[]);
        let standby = primary.standby();
        primary.wait_for_standby();
        (primary, standby)
    }

    /// From now on no commit counts before the standby has it.
    pub fn wait_for_standby(&self) {
        self.set("synchronous_standby_names = '*'");
        until("the standby to be synchronous", || {
            self.sql("SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'") == "1"
        });
    }

    fn start(dir: TempDir, settings: &[&str], clock: Option<Clock>) -> Postgres {
        let port = free_port();
        let socket = dir.path().display();
        let fixed =
            format!("port={port}\nunix_socket_directories='{socket}'\nfsync=off\ndynamic_shared_memory_type=mmap\n");
        append(&dir.path().join("data/postgresql.conf"), &(fixed + &settings.join("\n") + "\n"));
        let daemon = Mutex::new(launch(dir.path(), clock.as_ref()));
        let server = Postgres { port, daemon, clock, dir };
        server.await_answer();
        server
    }

    fn await_answer(&self) {
        until("PostgreSQL to answer", || self.psql("SELECT 1").status.success());
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn clock(&self) -> Option<&Clock> {
        self.clock.as_ref()
    }

    /// As a role other than the superuser, with more parameters.
    pub fn url_as(&self, role: &str, parameters: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/postgres?{parameters}", self.port)
    }

    fn psql(&self, sql: &str) -> Output {
        let host = self.dir.path().display().to_string();
        let to = ["-h", &host, "-p", &self.port.to_string(), "-U", "postgres"];
        program("psql").args(to).args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]).output().unwrap()
    }

    /// What an SQL client gets: its rows, one a line, columns between bars; or the error.
    pub fn try_sql(&self, sql: &str) -> Result<String, String> {
        let done = self.psql(sql);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
    }

    #[track_caller]
    pub fn sql(&self, sql: &str) -> String {
        self.try_sql(sql).unwrap()
    }

    /// The server processes of dlock's connections.
    pub fn backends(&self, name: &str) -> Vec<u32> {
        let sql = format!("SELECT session FROM dlock.contenders WHERE name = '{name}' AND token IS NOT NULL");
        self.sql(&sql).lines().map(|pid| pid.parse().unwrap()).collect()
    }

    /// Stops every process of it. Nobody is told; connections stay open.
    pub fn freeze(&self) {
        self.signal_all(Signal::SIGSTOP);
    }

    pub fn thaw(&self) {
        self.signal_all(Signal::SIGCONT);
    }

    fn signal_all(&self, which: Signal) {
        let postmaster = self.daemon.lock().unwrap().pid();
        tell(postmaster, which);
        children_of(postmaster).into_iter().for_each(|child| tell(child, which));
    }

    /// SIGKILL for all of it, as a crash of the machine would have it.
    pub fn kill(&self) {
        let mut daemon = self.daemon.lock().unwrap();
        let children = children_of(daemon.pid());
        daemon.kill();
        for child in children {
            // They also end by themselves when they see that the postmaster is gone.
            tell(child, Signal::SIGKILL);
            until("a server process to be gone", || !super::is_alive(child));
        }
    }

    /// After [`kill`](Self::kill), on the same port and with the same data. It refuses to start as long as
    /// any process of its former life is left.
    pub fn start_again(&self) {
        until("PostgreSQL to be back", || {
            let mut daemon = self.daemon.lock().unwrap();
            if daemon.has_ended() {
                *daemon = launch(self.dir.path(), self.clock());
            }
            self.psql("SELECT 1").status.success()
        });
    }

    pub fn promote(&self) {
        self.sql("SELECT pg_promote()");
    }

    /// Adds settings to a running server.
    pub fn set(&self, setting: &str) {
        self.sql(&format!("ALTER SYSTEM SET {setting}"));
        self.sql("SELECT pg_reload_conf()");
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Puts a file beside the data that the server may read and nobody else.
    pub fn own(&self, file: &Path) {
        std::fs::set_permissions(file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let (uid, gid) = account();
        std::os::unix::fs::chown(file, Some(uid), Some(gid)).unwrap();
    }
}

impl Drop for Postgres {
    /// An immediate shutdown, so that no shared memory stays behind.
    fn drop(&mut self) {
        self.thaw();
        let mut daemon = self.daemon.lock().unwrap();
        tell(daemon.pid(), Signal::SIGQUIT);
        until("PostgreSQL to shut down", || daemon.has_ended());
    }
}

impl Bed for Postgres {
    fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// What is no JSON cannot stand there.
    fn scrawl(&self, name: &str, _owner: &str, text: &str) {
        let json = match serde_json::from_str::<serde_json::Value>(text) {
            Ok(_) => text.to_owned(),
            Err(_) => serde_json::to_string(text).unwrap(),
        };
        self.sql(&format!(
            "BEGIN; SET LOCAL dlock.inside = 'on';
             UPDATE dlock.contenders SET who = '{json}' WHERE name = '{name}';
             UPDATE dlock.locks SET last_run = '{json}' WHERE name = '{name}'; COMMIT"
        ));
    }
}

impl Bed for &'static Postgres {
    fn url(&self) -> String {
        Postgres::url(self)
    }

    fn scrawl(&self, name: &str, owner: &str, text: &str) {
        Postgres::scrawl(self, name, owner, text);
    }
}

/// PostgreSQL does not run as root.
fn account() -> (u32, u32) {
    let me = nix::unistd::geteuid();
    let user = if me.is_root() { User::from_name("postgres") } else { User::from_uid(me) };
    let user = user.unwrap().expect("a user called postgres; see tests/run");
    (user.uid.as_raw(), user.gid.as_raw())
}

/// Signals a process that may have ended already.
fn tell(pid: u32, which: Signal) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.try_into().unwrap()), which);
}

pub(super) fn directory() -> TempDir {
    let dir = server_home();
    let (uid, gid) = account();
    std::os::unix::fs::chown(dir.path(), Some(uid), Some(gid)).unwrap();
    dir
}

/// initdb takes a second or two, a copy of what it made does not.
fn template() -> PathBuf {
    static TEMPLATE: OnceLock<TempDir> = OnceLock::new();
    let made = TEMPLATE.get_or_init(|| {
        let dir = directory();
        let initdb = ["--no-sync", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-D"];
        run(program("initdb").args(initdb).arg(dir.path().join("data")));
        dir
    });
    made.path().join("data")
}

fn new_database() -> TempDir {
    let dir = directory();
    run(Command::new("cp").arg("-a").arg(template()).arg(dir.path().join("data")));
    dir
}

fn launch(dir: &Path, clock: Option<&Clock>) -> Daemon {
    let mut server = program("postgres");
    server.arg("-D").arg(dir.join("data"));
    if let Some(clock) = clock {
        clock.govern(&mut server);
    }
    Daemon::spawn(server, &dir.join("log"))
}

/// One of PostgreSQL's programs, which Debian keeps outside PATH, as the user it wants to be.
fn program(name: &str) -> Command {
    let versions = std::fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL; see tests/run");
    let mut found: Vec<_> = versions.map(|version| version.unwrap().path().join("bin").join(name)).collect();
    found.sort();
    as_postgres(Command::new(found.pop().expect("a version of PostgreSQL; see tests/run")))
}

pub(super) fn as_postgres(mut command: Command) -> Command {
    if nix::unistd::geteuid().is_root() {
        let (uid, gid) = account();
        command.uid(uid).gid(gid);
    }
    command.current_dir("/");
    command
}

fn run(command: &mut Command) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

fn append(file: &Path, text: &str) {
    let before = std::fs::read_to_string(file).unwrap();
    std::fs::write(file, before + text).unwrap();
}

impl Server for Postgres {
    fn port(&self) -> u16 {
        Postgres::port(self)
    }

    fn freeze(&self) {
        Postgres::freeze(self);
    }

    fn thaw(&self) {
        Postgres::thaw(self);
    }

    fn kill(&self) {
        Postgres::kill(self);
    }

    fn start_again(&self) {
        Postgres::start_again(self);
    }

    fn told(&self, words: &[&str]) -> String {
        words.iter().map(|sql| self.try_sql(sql).unwrap_or_else(|error| error)).collect()
    }

    fn leads(&self) -> bool {
        self.sql("SELECT pg_is_in_recovery()") == "f"
    }

    fn promote(&self) {
        Postgres::promote(self);
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.clock().unwrap().set_ahead(seconds);
    }

    fn refuses(&self, older: u64, newer: u64) -> bool {
        let write = |token: u64| self.told(&[&format!("SELECT dlock.fence('resource', {token})")]);
        !write(newer).contains("ERROR") && write(older).contains("ERROR")
    }
}

/// They are read where something depends on them.
const WRONG_AUTHORITIES: &[&str] = &["/nonexistent&sslmode=verify-full", "/dev&sslmode=verify-full"];

/// A database that lost its disk is another database; one that is there refuses to have rows deleted. The holder may
/// renew before anybody asks a server whose clock was set ahead.
pub static POSTGRES: Place = Place {
    name: "postgres",
    url: "postgres://postgres@HOSTS/postgres",
    hosts: 1,
    start: |ground| match ground {
        Ground::OwnClocks => Started::one(Postgres::with_clock()),
        // Room for many contenders.
        _ => Started::one(Postgres::with(&["max_connections=500"])),
    },
    independent: false,
    leader: Leader::Nobody,
    late: 16,
    faults: &[faults::ANYWHERE, faults::PATHS, faults::SERVERS, faults::CLOCKS],
    expect: &[],
    exit_codes: &[(Fault::ClockForward, &[79, 137])],
    short: &[&[
        Fault::PathFrozen,
        Fault::AnswersLate,
        Fault::ServersPaused,
        Fault::ServersKilled,
        Fault::ServersRestarted,
        Fault::ClockBack,
    ]],
    covered: true,
    urls: &[Urls {
        schemes: &["postgres", "postgresql"],
        encrypted: &[],
        host: "127.0.0.1",
        hostless: true,
        path: "/db",
        wrong_paths: &[],
        wrong_values: &[
            ("prefix", &["", "a-b", "1a", "%22", "abcdefghijklmnopqrstuvwxyzabcdefgh"]),
            ("tls-ca", WRONG_AUTHORITIES),
            ("sslrootcert", WRONG_AUTHORITIES),
            ("sslcert", &["/nonexistent", "/dev", "/dev/null"]),
            ("sslkey", &["/nonexistent", "/dev", "/dev/null"]),
            ("port", &["x", "0", "-1", "65536", "1,2"]),
            ("sslmode", &["x", "VERIFY-FULL", "require%20"]),
            // An empty one is none, as for libpq.
            ("connect_timeout", &["x", "1.5"]),
            ("target_session_attrs", &["", "x", "standby"]),
            ("channel_binding", &["", "x", "require"]),
            ("gssencmode", &["", "x", "require"]),
            ("client_encoding", &[""]),
            ("hostaddr", &["x", "127.0.0.1,127.0.0.1"]),
            ("keepalives", &["x", "1.5"]),
            ("keepalives_idle", &["x", "1.5"]),
            ("keepalives_interval", &["x", "1.5"]),
            ("keepalives_count", &["x", "1.5"]),
            ("tcp_user_timeout", &["x", "1.5"]),
            ("listen", &["", "x"]),
            ("host", &[]),
            ("user", &[]),
            ("dbname", &[]),
            ("passfile", &[]),
            ("application_name", &[]),
            ("options", &[]),
        ],
    }],
};

/// With a synchronous standby: no commit counts before that has it, and a lease from before a failover counts anew,
/// whatever the clocks say. A former primary may not come back.
pub static POSTGRES_PAIR: Place = Place {
    name: "postgres, synchronous standby",
    hosts: 2,
    start: |_| {
        let (primary, standby) = Postgres::pair();
        Started::of(vec![Box::new(primary), Box::new(standby)])
    },
    leader: Leader::OfPair { may_come_back: false },
    late: 32,
    faults: &[
        faults::ANYWHERE,
        faults::SERVERS,
        &[
            Fault::LeaderKilled,
            Fault::LeaderWoken,
            Fault::FollowerKilled,
            Fault::PathFrozen,
            Fault::PathCut,
            Fault::PathHalfOpen,
            Fault::PathSlowTwice,
            Fault::GuardianStopped,
        ],
    ],
    exit_codes: &[(Fault::FollowerKilled, &[79])],
    short: &[&[Fault::LeaderWoken, Fault::FollowerKilled, Fault::PathFrozen]],
    covered: false,
    urls: &[],
    ..POSTGRES
};
