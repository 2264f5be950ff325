//! Database servers: what the launchers of PostgreSQL and MariaDB have in common.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, OnceLock};

use nix::sys::signal::Signal;
use nix::unistd::User;
use tempfile::TempDir;

use super::place::{Ground, Server, Started};
use super::{Bed, Clock, Daemon, children_of, free_port, is_alive, server_home, until};
use crate::matrix::Fault;

/// A server, started on data of its own.
pub struct Database<K: Kind> {
    pub(super) port: u16,
    pub(super) daemon: Mutex<Daemon>,
    clock: Option<Clock>,
    pub(super) kind: K,
    /// Dropped last: a server that ends with its test shows what it has logged.
    pub(super) dir: TempDir,
}

/// What one kind of server has of its own.
pub trait Kind: Sized + 'static {
    /// Who runs it where we are root: a database does not run as root.
    const ACCOUNT: &'static str;
    /// `SCHEME`, role and database of its URLs.
    const URL: [&'static str; 3];
    /// What the names of dlock's tables begin with.
    const PREFIX: &'static str;
    /// What calls a procedure of dlock's.
    const CALL: &'static str;
    /// Between the columns that its client prints.
    const BETWEEN: char;
    /// What is true of a waiter's row.
    const WAITS: &'static str;
    /// A column without a value.
    const NULL: &'static str;
    /// What a release answers that was one.
    const DONE: &'static str;
    /// What it is told to end with, where it would leave something behind if it was just killed.
    const END: Option<Signal>;

    /// Settings with room for many contenders.
    const ROOMY: &'static [&'static str];

    fn once() -> &'static Once<Self>;
    fn set_up(dir: &Path);
    /// Takes down settings, for the data in this directory.
    fn configure(dir: &Path, port: u16, settings: &[&str]) -> Self;
    fn server(&self, dir: &Path, port: u16) -> Command;
    /// The same for one that was killed.
    fn server_again(&self, dir: &Path, port: u16) -> Command {
        self.server(dir, port)
    }
    /// Whether it answers once it is up. One of several may have to wait for the others.
    fn answers_alone(&self) -> bool {
        true
    }
    fn client(dir: &Path, port: u16, sql: &str) -> Command;
    /// Overwrites records with this text.
    fn scrawl(name: &str, text: &str) -> String;
    fn end_session(number: u32) -> String;
    fn leads(server: &Database<Self>) -> bool;
    fn promote(server: &Database<Self>);
    fn begin_again(_server: &Database<Self>) {}
}

/// What is made once.
pub struct Once<K: Kind> {
    /// The set-up takes seconds, a copy of what it made does not.
    template: OnceLock<TempDir>,
    shared: OnceLock<Database<K>>,
}

impl<K: Kind> Once<K> {
    pub const fn new() -> Once<K> {
        Once { template: OnceLock::new(), shared: OnceLock::new() }
    }
}

impl<K: Kind> Database<K> {
    /// The server of all tests that do it no harm.
    pub fn shared() -> &'static Self {
        K::once().shared.get_or_init(|| Self::with(K::ROOMY))
    }

    /// A server of one's own, with these settings, as its kind writes them.
    pub fn with(settings: &[&str]) -> Self {
        Self::start(new_data::<K>(), settings, None)
    }

    /// With a wall clock of its own.
    pub fn with_clock() -> Self {
        Self::start(new_data::<K>(), &[], Some(Clock::new()))
    }

    /// As a place of the fault matrix.
    pub(super) fn on(ground: Ground) -> Started {
        match ground {
            Ground::OwnClocks => Started::one(Self::with_clock()),
            _ => Started::one(Self::with(K::ROOMY)),
        }
    }

    pub(super) fn start(dir: TempDir, settings: &[&str], clock: Option<Clock>) -> Self {
        let port = free_port();
        let server = Self::launch(K::configure(dir.path(), port, settings), dir, port, clock);
        until("the server to answer", || server.answers());
        server
    }

    pub(super) fn launch(kind: K, dir: TempDir, port: u16, clock: Option<Clock>) -> Self {
        let daemon = Mutex::new(spawn(kind.server(dir.path(), port), dir.path(), clock.as_ref()));
        Database { port, daemon, clock, kind, dir }
    }

    fn answers(&self) -> bool {
        self.try_sql("SELECT 1").is_ok()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// As a role other than the usual, with more parameters.
    pub fn url_as(&self, role: &str, parameters: &str) -> String {
        let [scheme, _, database] = K::URL;
        format!("{scheme}://{role}@127.0.0.1:{}/{database}?{parameters}", self.port)
    }

    /// As it is reached through another port.
    pub fn url_at(port: u16) -> String {
        let [scheme, role, database] = K::URL;
        format!("{scheme}://{role}@127.0.0.1:{port}/{database}")
    }

    /// What an SQL client gets: its rows, one a line; or the error.
    pub fn try_sql(&self, sql: &str) -> Result<String, String> {
        let done = K::client(self.dir(), self.port, sql).output().expect("a client; see tests/run");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
        if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
    }

    #[track_caller]
    pub fn sql(&self, sql: &str) -> String {
        self.try_sql(sql).unwrap()
    }

    /// The SQL that calls a procedure of dlock's.
    pub fn call(procedure: &str, with: &str) -> String {
        format!("{}{procedure}({with})", K::CALL)
    }

    /// The columns that a procedure of dlock's answers.
    #[track_caller]
    pub fn called(&self, procedure: &str, with: &str) -> Vec<String> {
        self.sql(&Self::call(procedure, with)).split(K::BETWEEN).map(str::to_owned).collect()
    }

    /// The server's numbers of the connections that hold this lock; none while it does not answer.
    pub fn sessions(&self, name: &str) -> Vec<u32> {
        let holds = format!("name = '{name}' AND token IS NOT NULL");
        let rows = self.try_sql(&format!("SELECT session FROM {}contenders WHERE {holds}", K::PREFIX));
        rows.unwrap_or_default().lines().map(|number| number.parse().unwrap()).collect()
    }

    /// Waiters may have taken every connection there is; then the server has none for us yet.
    pub fn await_waiters(&self, name: &str, count: usize) {
        let waits = format!("name = '{name}' AND {}", K::WAITS);
        let sql = format!("SELECT COUNT(*) FROM {}contenders WHERE {waits}", K::PREFIX);
        until(&format!("{count} waiter(s) for {name}"), || self.try_sql(&sql) == Ok(count.to_string()));
    }

    /// Stops every process of it. Nobody is told; connections stay open.
    pub fn freeze(&self) {
        self.signal_all(Signal::SIGSTOP);
    }

    pub fn thaw(&self) {
        self.signal_all(Signal::SIGCONT);
    }

    fn signal_all(&self, which: Signal) {
        let first = self.daemon.lock().unwrap().pid();
        tell(first, which);
        children_of(first).into_iter().for_each(|child| tell(child, which));
    }

    /// SIGKILL for all of it, as a crash of the machine would have it.
    pub fn kill(&self) {
        let mut daemon = self.daemon.lock().unwrap();
        let children = children_of(daemon.pid());
        daemon.kill();
        for child in children {
            // They also end by themselves when they see that the first one is gone.
            tell(child, Signal::SIGKILL);
            until("a server process to be gone", || !is_alive(child));
        }
    }

    /// After [`kill`](Self::kill), on the same port and with the same data. PostgreSQL refuses to start as long as any
    /// process of its former life is left.
    pub fn start_again(&self) {
        until("the server to be back", || {
            let mut daemon = self.daemon.lock().unwrap();
            if daemon.has_ended() {
                *daemon = spawn(self.kind.server_again(self.dir(), self.port), self.dir(), self.clock.as_ref());
            }
            !self.kind.answers_alone() || self.answers()
        });
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.dir().join("log")).unwrap()
    }
}

impl<K: Kind> Drop for Database<K> {
    fn drop(&mut self) {
        let Some(end) = K::END else { return };
        self.thaw();
        let mut daemon = self.daemon.lock().unwrap();
        tell(daemon.pid(), end);
        until("the server to shut down", || daemon.has_ended());
    }
}

impl<K: Kind> Bed for Database<K> {
    fn url(&self) -> String {
        Self::url_at(self.port)
    }

    fn scrawl(&self, name: &str, _owner: &str, text: &str) {
        self.sql(&K::scrawl(name, text));
    }
}

impl<K: Kind> Server for Database<K> {
    fn port(&self) -> u16 {
        self.port
    }

    fn freeze(&self) {
        Database::freeze(self);
    }

    fn thaw(&self) {
        Database::thaw(self);
    }

    fn kill(&self) {
        Database::kill(self);
    }

    fn start_again(&self) {
        Database::start_again(self);
    }

    fn told(&self, words: &[&str]) -> String {
        words.iter().map(|sql| self.try_sql(sql).unwrap_or_else(|error| error)).collect()
    }

    fn leads(&self) -> bool {
        K::leads(self)
    }

    fn promote(&self) {
        K::promote(self);
    }

    fn begin_again(&self) {
        K::begin_again(self);
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.clock.as_ref().unwrap().set_ahead(seconds);
    }

    fn refuses(&self, older: u64, newer: u64) -> bool {
        let write = |token: u64| self.try_sql(&Self::call("fence", &format!("'resource', {token}")));
        write(newer).is_ok() && write(older).is_err()
    }
}

fn account<K: Kind>() -> (u32, u32) {
    let me = nix::unistd::geteuid();
    let user = if me.is_root() { User::from_name(K::ACCOUNT) } else { User::from_uid(me) };
    let user = user.unwrap().unwrap_or_else(|| panic!("no user called {}; see tests/run", K::ACCOUNT));
    (user.uid.as_raw(), user.gid.as_raw())
}

/// As the user that the server wants to be.
pub fn as_account<K: Kind>(mut command: Command) -> Command {
    if nix::unistd::geteuid().is_root() {
        let (uid, gid) = account::<K>();
        command.uid(uid).gid(gid);
    }
    command.current_dir("/");
    command
}

/// Makes it the server's.
pub fn own<K: Kind>(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    let (uid, gid) = account::<K>();
    std::os::unix::fs::chown(path, Some(uid), Some(gid)).unwrap();
}

pub fn directory<K: Kind>() -> TempDir {
    let dir = server_home();
    own::<K>(dir.path(), 0o755);
    dir
}

pub fn new_data<K: Kind>() -> TempDir {
    let template = K::once().template.get_or_init(|| {
        let dir = directory::<K>();
        K::set_up(dir.path());
        dir
    });
    copy::<K>(template.path())
}

/// With the data of another server, which does not run.
pub fn copy<K: Kind>(from: &Path) -> TempDir {
    let dir = directory::<K>();
    run(Command::new("cp").arg("-a").arg(from.join("data")).arg(dir.path().join("data")));
    dir
}

pub fn spawn(mut server: Command, dir: &Path, clock: Option<&Clock>) -> Daemon {
    if let Some(clock) = clock {
        clock.govern(&mut server);
    }
    Daemon::spawn(server, &dir.join("log"))
}

#[track_caller]
pub fn run(command: &mut Command) {
    let done = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; see tests/run"));
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Signals a process that may have ended already.
fn tell(pid: u32, which: Signal) {
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.try_into().unwrap()), which);
}

/// What a primary and its replica can have of the faults, beyond what every server can.
pub const PAIR: &[Fault] = &[
    Fault::LeaderKilled,
    Fault::FollowerKilled,
    Fault::PathFrozen,
    Fault::PathCut,
    Fault::PathHalfOpen,
    Fault::PathSlowTwice,
    Fault::GuardianStopped,
];

pub const WRONG_PREFIXES: &[&str] = &["", "a-b", "1a", "%22", "abcdefghijklmnopqrstuvwxyzabcdefgh"];
/// They are read where something depends on them.
pub const WRONG_AUTHORITIES: &[&str] = &["/nonexistent&sslmode=verify-full", "/dev&sslmode=verify-full"];
