//! PostgreSQL servers: one that many tests share, and whole ones for those that break theirs.

use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;

use super::database::{Database, Kind, Once, PAIR, WRONG_AUTHORITIES, WRONG_PREFIXES, as_account, directory, own, run};
use super::place::{Leader, Place, Started, Urls};
use super::until;
use crate::matrix::{Fault, faults};

/// Its settings are written `key=value`.
pub type Postgres = Database<PostgreSql>;

pub struct PostgreSql;

impl Postgres {
    /// A streaming standby of this one.
    pub fn standby(&self) -> Postgres {
        let dir = directory::<PostgreSql>();
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

    pub fn promote(&self) {
        self.sql("SELECT pg_promote()");
    }

    /// Adds settings to a running server.
    pub fn set(&self, setting: &str) {
        self.sql(&format!("ALTER SYSTEM SET {setting}"));
        self.sql("SELECT pg_reload_conf()");
    }

    /// Lets the server read a file beside its data, and nobody else.
    pub fn own(&self, file: &Path) {
        own::<PostgreSql>(file, 0o600);
    }
}

impl Kind for PostgreSql {
    const ACCOUNT: &'static str = "postgres";
    const URL: [&'static str; 3] = ["postgres"; 3];
    const PREFIX: &'static str = "dlock.";
    const CALL: &'static str = "SELECT * FROM dlock.";
    const BETWEEN: char = '|';
    const WAITS: &'static str = "token IS NULL AND expires > clock_timestamp()";
    const NULL: &'static str = "";
    const DONE: &'static str = "t";
    const ROOMY: &'static [&'static str] = &["max_connections=500"];
    /// An immediate shutdown, so that no shared memory stays behind.
    const END: Option<Signal> = Some(Signal::SIGQUIT);

    fn once() -> &'static Once<PostgreSql> {
        static ONCE: Once<PostgreSql> = Once::new();
        &ONCE
    }

    fn set_up(dir: &Path) {
        let initdb = ["--no-sync", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "-D"];
        run(program("initdb").args(initdb).arg(dir.join("data")));
    }

    fn configure(dir: &Path, port: u16, settings: &[&str]) -> PostgreSql {
        let (file, socket) = (dir.join("data/postgresql.conf"), dir.display());
        let fixed =
            format!("port={port}\nunix_socket_directories='{socket}'\nfsync=off\ndynamic_shared_memory_type=mmap\n");
        let before = std::fs::read_to_string(&file).unwrap();
        std::fs::write(&file, before + &fixed + &settings.join("\n") + "\n").unwrap();
        PostgreSql
    }

    fn server(&self, dir: &Path, _port: u16) -> Command {
        let mut server = program("postgres");
        server.arg("-D").arg(dir.join("data"));
        server
    }

    fn client(dir: &Path, port: u16, sql: &str) -> Command {
        let mut client = program("psql");
        client.arg("-h").arg(dir).args(["-p", &port.to_string(), "-U", "postgres"]);
        client.args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql]);
        client
    }

    /// What is no JSON cannot stand there.
    fn scrawl(name: &str, text: &str) -> String {
        let json = match serde_json::from_str::<serde_json::Value>(text) {
            Ok(_) => text.to_owned(),
            Err(_) => serde_json::to_string(text).unwrap(),
        };
        format!(
            "BEGIN; SET LOCAL dlock.inside = 'on';
             UPDATE dlock.contenders SET who = '{json}' WHERE name = '{name}';
             UPDATE dlock.locks SET last_run = '{json}' WHERE name = '{name}'; COMMIT"
        )
    }

    fn end_session(number: u32) -> String {
        format!("SELECT pg_terminate_backend({number})")
    }

    fn leads(server: &Postgres) -> bool {
        server.sql("SELECT pg_is_in_recovery()") == "f"
    }

    fn promote(server: &Postgres) {
        server.promote();
    }
}

/// One of PostgreSQL's programs, which Debian keeps outside PATH, as the user it wants to be.
fn program(name: &str) -> Command {
    let versions = std::fs::read_dir("/usr/lib/postgresql").expect("PostgreSQL; see tests/run");
    let mut found: Vec<_> = versions.map(|version| version.unwrap().path().join("bin").join(name)).collect();
    found.sort();
    as_account::<PostgreSql>(Command::new(found.pop().expect("a version of PostgreSQL; see tests/run")))
}

/// A database that lost its disk is another database; one that is there refuses to have rows deleted. The holder may
/// renew before anybody asks a server whose clock was set ahead.
pub static POSTGRES: Place = Place {
    name: "postgres",
    url: "postgres://postgres@HOSTS/postgres",
    hosts: 1,
    start: Postgres::on,
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
            ("prefix", WRONG_PREFIXES),
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
    faults: &[faults::ANYWHERE, faults::SERVERS, PAIR, &[Fault::LeaderWoken]],
    exit_codes: &[(Fault::FollowerKilled, &[79])],
    short: &[&[Fault::LeaderWoken, Fault::FollowerKilled, Fault::PathFrozen]],
    covered: false,
    urls: &[],
    ..POSTGRES
};
