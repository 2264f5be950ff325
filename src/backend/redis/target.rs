//! What a Redis URL names and how to get there: the server itself, the master that sentinels agree on,
//! or a node of a cluster. Knows how to log in; knows nothing about locks.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use tokio_rustls::rustls::ClientConfig;

use super::link::{Link, refusal};
use super::resp::{Command, Value, command};
use crate::backend::{Address, tls};
use crate::exit::Fault;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

pub struct Target {
    kind: Kind,
    /// `host:port`
    pub hosts: Vec<String>,
    /// Which of them, counted on and on, is asked next.
    next: AtomicUsize,
    tls: Option<Arc<ClientConfig>>,
    login: Vec<Command>,
}

enum Kind {
    One,
    Unix(PathBuf),
    Sentinel { master: String },
    Cluster,
}

impl Target {
    pub fn new(address: &Address) -> Result<Target> {
        let with_fault = |error: anyhow::Error| if error.is::<Fault>() { error } else { error.context(Fault::Config) };
        Target::read(address).map_err(with_fault)
    }

    fn read(address: &Address) -> Result<Target> {
        let scheme = address.scheme();
        let segment = |n| address.path().trim_start_matches('/').split('/').nth(n).unwrap_or("");
        let (kind, db) = match scheme.split_once('+').map_or("", |(_, kind)| kind) {
            "" => (Kind::One, segment(0)),
            "unix" => (Kind::Unix(address.path().into()), address.param("db").unwrap_or("")),
            "sentinel" => (Kind::Sentinel { master: segment(0).to_owned() }, segment(1)),
            _ => (Kind::Cluster, segment(0)),
        };
        let (port, hosts) = match &kind {
            Kind::One => (PORT, 1..=1),
            Kind::Unix(path) => {
                ensure!(!path.as_os_str().is_empty(), "{address} names no socket: it is redis+unix:///path/to.sock");
                (PORT, 0..=0)
            }
            Kind::Sentinel { master } => {
                ensure!(!master.is_empty(), "{address} names no master: it is redis+sentinel://host,host/master");
                (SENTINEL_PORT, 1..=usize::MAX)
            }
            Kind::Cluster => {
                ensure!(matches!(db, "" | "0"), "a Redis cluster has only database 0, not {db}");
                (PORT, 1..=usize::MAX)
            }
        };
        ensure!(
            matches!(kind, Kind::Unix(_)) || address.param("db").is_none(),
            "db is for redis+unix://; here the database stands in the path: {scheme}://…/1"
        );
        let most = if matches!(kind, Kind::Sentinel { .. }) { 2 } else { 1 };
        ensure!(
            matches!(kind, Kind::Unix(_)) || address.path().trim_matches('/').split('/').count() <= most,
            "{address} has a path that is too long"
        );
        ensure!(hosts.contains(&address.hosts().len()), "{address} names {} hosts", address.hosts().len());
        let hosts = address.hosts().iter().map(|host| host.with_port(port)).collect();
        Ok(Target { kind, hosts, next: AtomicUsize::new(0), tls: secured(address)?, login: login(address, db)? })
    }

    /// The servers that an address names, each by itself: the nodes of a Redlock.
    pub fn each(address: &Address) -> Result<Vec<Target>> {
        let (tls, login) = (secured(address)?, login(address, address.path().trim_start_matches('/'))?);
        let one = |at| Target {
            kind: Kind::One,
            hosts: vec![at],
            next: AtomicUsize::new(0),
            tls: tls.clone(),
            login: login.clone(),
        };
        Ok(address.hosts().iter().map(|host| one(host.with_port(PORT))).collect())
    }

    pub fn is_cluster(&self) -> bool {
        matches!(self.kind, Kind::Cluster)
    }

    /// Connects and logs in, to the node of a cluster that is known to be the right one. Logging in takes
    /// a round trip of its own: a verb sent along with a log-in that fails would be carried out all the
    /// same, as whoever may, on whichever database.
    pub async fn connect(&self, node: Option<&str>, patience: Duration) -> Result<Link> {
        let mut link = match &self.kind {
            Kind::Unix(path) => Link::unix(path).await,
            Kind::Sentinel { master } => self.tcp(&self.ask_sentinels(master, patience).await?).await,
            Kind::One | Kind::Cluster => match node {
                Some(node) => self.tcp(node).await,
                None => self.first_that_answers(patience).await,
            },
        }?;
        if !self.login.is_empty() {
            for answer in link.call(&self.login, patience).await? {
                if let Value::Error(error) = answer {
                    return Err(refusal(&error));
                }
            }
            link.set_logged_in();
        }
        Ok(link)
    }

    async fn tcp(&self, at: &str) -> Result<Link> {
        Link::tcp(at, self.tls.as_ref()).await
    }

    async fn first_that_answers(&self, patience: Duration) -> Result<Link> {
        let mut last = None;
        for host in self.in_turn() {
            match self.fairly(patience, self.tcp(host)).await {
                Ok(link) => {
                    self.begin_here_again();
                    return Ok(link);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| Fault::Unreachable.because("the URL names no host")))
    }

    async fn ask_sentinels(&self, master: &str, patience: Duration) -> Result<String> {
        let question = [command!["SENTINEL", "GET-MASTER-ADDR-BY-NAME", master]];
        let mut last = None;
        for host in self.in_turn() {
            let ask = async { self.tcp(host).await?.call(&question, patience).await };
            last = Some(match self.fairly(patience, ask).await.as_deref() {
                Ok([Value::Error(error)]) if error.starts_with("ERR unknown command") => Fault::Config.because(
                    format_args!("{host} is no sentinel but a Redis server: name the sentinels, or use redis://{host}"),
                ),
                Ok([Value::Error(error)]) if error.starts_with("NOAUTH") => Fault::Refused.because(format_args!(
                    "sentinel {host} wants a password, and the one in a URL is for the servers that sentinels name"
                )),
                Ok([Value::Error(error)]) => refusal(error).context(format!("sentinel {host}")),
                Ok([answer]) => match answer.items() {
                    [ip, port] => {
                        self.begin_here_again();
                        return Ok(with_port(&ip.text().unwrap_or_default(), &port.text().unwrap_or_default()));
                    }
                    _ => Fault::Config.because(format_args!("sentinel {host} knows no master named {master:?}")),
                },
                Ok(_) => Fault::Unreachable.because(format_args!("sentinel {host} answered nothing")),
                Err(error) => Fault::of(error).because(format_args!("sentinel {host}: {error:#}")),
            });
        }
        Err(last.unwrap_or_else(|| Fault::Unreachable.because("no sentinel answered")))
    }

    /// Every host once. Should an attempt be dropped, the next one begins with the host after.
    fn in_turn(&self) -> impl Iterator<Item = &String> {
        let next = || self.next.fetch_add(1, Ordering::Relaxed) % self.hosts.len();
        (0..self.hosts.len()).map(move |_| &self.hosts[next()])
    }

    /// The host that was asked last has answered.
    fn begin_here_again(&self) {
        self.next.fetch_sub(1, Ordering::Relaxed);
    }

    /// Lets no single host use up the time that all of them have.
    async fn fairly<T>(&self, patience: Duration, attempt: impl Future<Output = Result<T>>) -> Result<T> {
        let share = patience / u32::try_from(self.hosts.len()).unwrap_or(u32::MAX);
        tokio::time::timeout(share, attempt)
            .await
            .map_err(|_| Fault::Unreachable.because(format_args!("no answer within {share:?}")))?
    }
}

fn with_port(host: &str, port: &str) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn secured(address: &Address) -> Result<Option<Arc<ClientConfig>>> {
    let scheme = address.scheme().split('+').next().unwrap_or_default();
    if matches!(scheme, "rediss" | "redlocks") {
        return tls::client_config(address).map(Some);
    }
    tls::refuse(address).map(|()| None)
}

fn login(address: &Address, db: &str) -> Result<Vec<Command>> {
    let mut login = Vec::new();
    match (address.username(), address.password()?) {
        (Some(user), Some(password)) => login.push(command!["AUTH", user, password]),
        (None, Some(password)) => login.push(command!["AUTH", password]),
        (Some(_), None) => return Err(Fault::Config.because("there is a user name for Redis but no password")),
        (None, None) => {}
    }
    if db.parse::<u32>().is_err() && !db.is_empty() {
        return Err(Fault::Config.because(format_args!("a Redis database is a number, not {db:?}")));
    }
    if !matches!(db, "" | "0") {
        login.push(command!["SELECT", db]);
    }
    Ok(login)
}
