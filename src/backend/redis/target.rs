//! What a Redis URL names and how to get there: the server itself, the master that sentinels agree on,
//! or a node of a cluster. Knows nothing about locks.
//!
//! The crate has clients of its own for Sentinel and Cluster. They open their own sockets, which no bound on memory and no
//! certificate of ours would reach, and choose by themselves on which connection a request goes out and when to repeat
//! it; so we ask the sentinels and follow the cluster's redirects over plain connections instead.

use std::cell::Cell;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use redis::{ErrorKind, ProtocolVersion, RedisConnectionInfo, RedisError, ServerErrorKind, cmd};
use tokio_rustls::rustls::ClientConfig;

use super::connection::{Connection, is_unknown_command, lacks_resp3, refusal};
use crate::backend::net::{self, Socket};
use crate::backend::{Address, tls, within};
use crate::exit::Fault;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

#[derive(Clone)]
pub struct Target {
    kind: Kind,
    /// `host:port`
    pub hosts: Vec<String>,
    /// Which of them, counted on and on, is asked next.
    next: Cell<usize>,
    tls: Option<Arc<ClientConfig>>,
    login: RedisConnectionInfo,
}

#[derive(Clone)]
enum Kind {
    One,
    Unix(PathBuf),
    Sentinel { master: String, login: Box<RedisConnectionInfo> },
    Cluster,
}

impl Target {
    pub fn new(address: &Address) -> Result<Target> {
        let with_fault = |error: anyhow::Error| if error.is::<Fault>() { error } else { error.context(Fault::Config) };
        Target::read(address).map_err(with_fault)
    }

    fn read(address: &Address) -> Result<Target> {
        let scheme = address.scheme();
        let path: Vec<&str> = address.path().trim_matches('/').split('/').collect();
        let sentinel_user = address.param("sentinel-username").map(str::to_owned);
        let sentinel = (sentinel_user, address.password_in("sentinel-password-file")?);
        let many = 1..=usize::MAX;
        let (kind, db, port, hosts) = match scheme.split_once('+').map_or("", |(_, kind)| kind) {
            "" => (Kind::One, path.first(), PORT, 1..=1),
            "unix" => (Kind::Unix(address.path().into()), None, PORT, 0..=0),
            "sentinel" => {
                let login = Box::new(login(&sentinel, "")?.set_protocol(ProtocolVersion::RESP2));
                (Kind::Sentinel { master: path[0].to_owned(), login }, path.get(1), SENTINEL_PORT, many)
            }
            _ => (Kind::Cluster, path.first(), PORT, many),
        };
        let db = db.copied().or(address.param("db")).unwrap_or_default();
        match &kind {
            Kind::Unix(_) => {
                ensure!(!path[0].is_empty(), "{address} names no socket: it is redis+unix:///path/to.sock");
            }
            Kind::Sentinel { master, .. } => {
                ensure!(!master.is_empty(), "{address} names no master: it is redis+sentinel://host,host/master");
            }
            Kind::Cluster => ensure!(matches!(db, "" | "0"), "a Redis cluster has only database 0, not {db}"),
            Kind::One => {}
        }
        let (is_unix, is_sentinel) = (matches!(kind, Kind::Unix(_)), matches!(kind, Kind::Sentinel { .. }));
        ensure!(
            is_unix || address.param("db").is_none(),
            "db is for redis+unix://; here the database stands in the path: {scheme}://…/1"
        );
        ensure!(is_sentinel || sentinel == (None, None), "only redis+sentinel:// has a log-in for sentinels");
        let most = if is_sentinel { 2 } else { 1 };
        ensure!(is_unix || path.len() <= most, "{address} has a path that is too long");
        ensure!(hosts.contains(&address.hosts().len()), "{address} names {} hosts", address.hosts().len());
        let hosts = address.hosts().iter().map(|host| host.with_port(port)).collect();
        Target::of(kind, hosts, address, db)
    }

    fn of(kind: Kind, hosts: Vec<String>, address: &Address, db: &str) -> Result<Target> {
        let scheme = address.scheme().split('+').next().unwrap_or_default();
        let tls = tls::client_config(address, matches!(scheme, "rediss" | "redlocks"))?;
        let login = login(&(address.username().map(str::to_owned), address.password()?), db)?;
        Ok(Target { kind, hosts, next: Cell::default(), tls, login })
    }

    /// The servers that an address names, each by itself: the nodes of a Redlock.
    pub fn each(address: &Address) -> Result<Vec<Target>> {
        let db = address.path().trim_start_matches('/');
        let any = Target::of(Kind::One, Vec::new(), address, db)?;
        Ok(address.hosts().iter().map(|host| Target { hosts: vec![host.with_port(PORT)], ..any.clone() }).collect())
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.kind, Kind::Cluster)
    }

    /// Connects and logs in, to the node of a cluster that is known to be the right one.
    pub async fn connect(&mut self, node: Option<&str>, patience: Duration) -> Result<Connection> {
        let socket = self.socket(node, patience).await?;
        match Connection::open(socket, &self.login).await {
            Err(error) if lacks_resp3(&error) => {
                self.login = self.login.clone().set_protocol(ProtocolVersion::RESP2);
                let socket = self.socket(node, patience).await?;
                Connection::open(socket, &self.login).await.map_err(refusal)
            }
            opened => opened.map_err(refusal),
        }
    }

    async fn socket(&self, node: Option<&str>, patience: Duration) -> Result<Socket> {
        let connect = async |at: &str| net::tcp(at, self.tls.as_ref()).await;
        match (&self.kind, node) {
            (Kind::Unix(path), _) => net::unix(path).await,
            (Kind::Sentinel { master, login }, _) => {
                let ask = async |host: &str| {
                    let answer = ask_sentinel(connect(host).await?, login, host, master).await;
                    answer.map_err(|error| Fault::of(&error).because(format_args!("sentinel {host}: {error:#}")))
                };
                connect(&self.first_that_answers(patience, ask).await?).await
            }
            (_, Some(node)) => connect(node).await,
            (_, None) => self.first_that_answers(patience, connect).await,
        }
    }

    /// Asks every host once, in turn, and lets none use up the time that all of them have. Should this be dropped, the next
    /// attempt begins with the host after.
    async fn first_that_answers<T>(&self, patience: Duration, ask: impl AsyncFn(&str) -> Result<T>) -> Result<T> {
        let share = patience / u32::try_from(self.hosts.len()).unwrap_or(u32::MAX);
        let mut last = None;
        for _ in 0..self.hosts.len() {
            let at = self.next.get() % self.hosts.len();
            self.next.set(at + 1);
            match within(share, ask(&self.hosts[at])).await {
                Ok(answer) => {
                    self.next.set(at);
                    return Ok(answer);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| Fault::Unreachable.because("the URL names no host")))
    }
}

/// Where the master is, by the word of one sentinel.
async fn ask_sentinel(socket: Socket, login: &RedisConnectionInfo, host: &str, master: &str) -> Result<String> {
    let question = async {
        let mut sentinel = Connection::open(socket, login).await?;
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(master);
        question.query_async::<Option<(String, u16)>>(&mut sentinel.redis).await
    };
    match question.await {
        Ok(Some((ip, port))) if ip.contains(':') => Ok(format!("[{ip}]:{port}")),
        Ok(Some((ip, port))) => Ok(format!("{ip}:{port}")),
        Ok(None) => Err(Fault::Config.because(format_args!("it knows no master named {master:?}"))),
        Err(error) if is_unknown_command(&error) => Err(Fault::Config.because(format_args!(
            "this is no sentinel but a Redis server: name the sentinels, or use redis://{host}"
        ))),
        Err(error) if error.code() == Some("NOAUTH") => Err(Fault::Refused.because(
            "it wants a password, and the one in a URL is for the servers that sentinels name: name a file that has it \
             with sentinel-password-file=PATH",
        )),
        Err(error) => Err(refusal(error)),
    }
}

/// Where another node of the cluster is that this error sends us to, and whether for this one request only.
pub fn redirect(error: &RedisError) -> Option<(String, bool)> {
    // Without a host it is the one that said so, which we know by another name.
    let (node, _) = error.redirect_node().filter(|(node, _)| !node.starts_with(':'))?;
    Some((node.to_owned(), error.kind() == ErrorKind::Server(ServerErrorKind::Ask)))
}

fn login((user, password): &(Option<String>, Option<String>), db: &str) -> Result<RedisConnectionInfo> {
    let number = if db.is_empty() { Some(0) } else { db.parse::<u32>().ok() };
    let Some(number) = number else {
        return Err(Fault::Config.because(format_args!("a Redis database is a number, not {db:?}")));
    };
    let login = RedisConnectionInfo::default().set_protocol(ProtocolVersion::RESP3).set_skip_set_lib_name();
    let login = login.set_db(number.into());
    Ok(match (user, password) {
        (Some(user), Some(password)) => login.set_username(user).set_password(password),
        (None, Some(password)) => login.set_password(password),
        (Some(_), None) => return Err(Fault::Config.because("there is a user name for Redis but no password")),
        (None, None) => login,
    })
}
