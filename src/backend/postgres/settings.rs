//! From a backend URL, libpq's environment and its password file to what a connection needs to know.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use super::passfile;
use super::tls::{Check, Connector, Files};
use crate::backend::Address;
use crate::backend::Host;
use crate::exit::Fault;

pub const PARAMETERS: &[&str] = &[
    "host",
    "hostaddr",
    "port",
    "user",
    "dbname",
    "passfile",
    "sslmode",
    "sslrootcert",
    "sslcert",
    "sslkey",
    "application_name",
    "options",
    "connect_timeout",
    "target_session_attrs",
    "channel_binding",
    "gssencmode",
    "client_encoding",
    "keepalives",
    "keepalives_idle",
    "keepalives_interval",
    "keepalives_count",
    "tcp_user_timeout",
    "listen",
];

/// One server to try, and how.
#[derive(Clone)]
pub struct Server {
    /// For people: never a password.
    pub label: String,
    pub config: Config,
    pub tls: Connector,
    /// Whether TLS is tried if the server refuses to go without.
    pub allows_tls: bool,
}

pub struct Settings {
    pub servers: Vec<Server>,
    pub schema: String,
    /// Off for a transaction pooler, where a LISTEN would stay behind on a connection that others share.
    pub listen: bool,
}

impl Settings {
    pub fn of(address: &Address) -> Result<Settings> {
        Settings::read(address).map_err(|error| error.context(Fault::Config))
    }

    fn read(address: &Address) -> Result<Settings> {
        let hosts = hosts(address)?;
        let addresses = addresses(address, hosts.len())?;
        let server = |(number, host)| server(address, host, addresses.get(number).copied(), hosts.len() > 1);
        let servers = hosts.iter().enumerate().map(server).collect::<Result<_>>()?;
        let listen = match address.param("listen") {
            None | Some("on") => true,
            Some("off") => false,
            Some(other) => bail!("listen is on or off, not {other:?}"),
        };
        match address.param("channel_binding") {
            None | Some("disable" | "prefer") => {}
            Some("require") => bail!("channel_binding=require is not supported; sslmode=verify-full protects as well"),
            Some(other) => bail!("channel_binding is disable or prefer, not {other:?}"),
        }
        match address.param("gssencmode") {
            None | Some("disable" | "prefer") => {}
            Some(other) => {
                bail!("gssencmode is disable or prefer, not {other:?}; sslmode=verify-full encrypts as well")
            }
        }
        // What is not ASCII goes to the server in JSON, so that any will do; ours is UTF8.
        ensure!(address.param("client_encoding") != Some(""), "client_encoding names no encoding");
        Ok(Settings { servers, schema: schema(address.param("prefix").unwrap_or("dlock"))?, listen })
    }
}

/// A schema name that needs no quotes anywhere.
fn schema(name: &str) -> Result<String> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    ensure!(
        (1..=32).contains(&name.len()) && name.chars().all(plain) && !name.starts_with(|c: char| c.is_ascii_digit()),
        "prefix names the schema: up to 32 of a-z 0-9 _, no digit first, not {name:?}"
    );
    Ok(name.to_owned())
}

/// A parameter of the URL, else of libpq's environment.
fn value(address: &Address, key: &str, variable: &str) -> Option<String> {
    let given = address.param(key).map(str::to_owned);
    given.or_else(|| std::env::var(variable).ok()).filter(|value| !value.is_empty())
}

fn hosts(address: &Address) -> Result<Vec<Host>> {
    let ports = value(address, "port", "PGPORT").unwrap_or_else(|| "5432".to_owned());
    let ports = ports
        .split(',')
        .map(|port| port.parse().ok().filter(|&port| port > 0).with_context(|| format!("{port:?} is not a port")))
        .collect::<Result<Vec<u16>>>()?;
    let mut hosts = address.hosts().to_vec();
    if hosts.is_empty() {
        let names = value(address, "host", "PGHOST").unwrap_or_else(|| "/var/run/postgresql".to_owned());
        hosts = names.split(',').map(|name| Host { name: name.to_owned(), port: None }).collect();
    }
    ensure!(
        ports.len() == 1 || ports.len() == hosts.len(),
        "there are {} ports for {} hosts",
        ports.len(),
        hosts.len()
    );
    for (host, port) in hosts.iter_mut().zip(ports.iter().cycle()) {
        host.port = host.port.or(Some(*port));
    }
    Ok(hosts)
}

/// Where the hosts are, if their names are not to be looked up.
fn addresses(address: &Address, hosts: usize) -> Result<Vec<IpAddr>> {
    let Some(given) = value(address, "hostaddr", "PGHOSTADDR") else { return Ok(Vec::new()) };
    let parse = |ip: &str| ip.parse().with_context(|| format!("hostaddr={ip:?} is not an address"));
    let given = given.split(',').map(parse).collect::<Result<Vec<_>>>()?;
    ensure!(given.len() == hosts, "there are {} addresses in hostaddr for {hosts} hosts", given.len());
    Ok(given)
}

/// A parameter that is a whole number.
fn count(address: &Address, key: &str) -> Result<Option<u32>> {
    let parse = |text: &str| text.parse().with_context(|| format!("{key}={text:?} is not a whole number"));
    address.param(key).map(parse).transpose()
}

/// How the kernel finds out that the other side is gone; as in libpq, zero is the kernel's own idea of it.
fn keepalives(address: &Address, config: &mut Config) -> Result<()> {
    let seconds =
        |key| Ok::<_, anyhow::Error>(count(address, key)?.filter(|&n| n > 0).map(|n| Duration::from_secs(n.into())));
    if let Some(on) = count(address, "keepalives")? {
        config.keepalives(on != 0);
    }
    if let Some(idle) = seconds("keepalives_idle")? {
        config.keepalives_idle(idle);
    }
    if let Some(interval) = seconds("keepalives_interval")? {
        config.keepalives_interval(interval);
    }
    if let Some(retries) = count(address, "keepalives_count")?.filter(|&n| n > 0) {
        config.keepalives_retries(retries);
    }
    if let Some(millis) = count(address, "tcp_user_timeout")?.filter(|&n| n > 0) {
        config.tcp_user_timeout(Duration::from_millis(millis.into()));
    }
    Ok(())
}

fn server(address: &Address, host: &Host, at: Option<IpAddr>, one_of_many: bool) -> Result<Server> {
    let port = host.port.unwrap_or(5432);
    let user = address.username().map(str::to_owned).or_else(|| value(address, "user", "PGUSER"));
    let user = user.or_else(os_user).context("which role to log in as? Name one: postgres://ROLE@…")?;
    let database = Some(address.path().trim_start_matches('/').to_owned()).filter(|path| !path.is_empty());
    let database = database.or_else(|| value(address, "dbname", "PGDATABASE")).unwrap_or_else(|| user.clone());

    let mut config = Config::new();
    config.host(&host.name).port(port).user(&user).dbname(&database);
    if let Some(at) = at {
        config.hostaddr(at);
    }
    keepalives(address, &mut config)?;
    config.application_name(address.param("application_name").unwrap_or("dlock"));
    if let Some(options) = value(address, "options", "PGOPTIONS") {
        config.options(options);
    }
    if let Some(seconds) = address.param("connect_timeout") {
        let seconds = seconds.parse().with_context(|| format!("connect_timeout={seconds:?} is not in seconds"))?;
        config.connect_timeout(Duration::from_secs(seconds));
    }
    match address.param("target_session_attrs") {
        None | Some("any" | "read-write" | "primary") => {}
        Some(other) => bail!("target_session_attrs={other}: a lock needs a server that can be written to"),
    }
    // Asking costs a round trip; a single server that cannot be written to will say so itself.
    if one_of_many {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    if let Some(password) = address.password()?.or_else(|| std::env::var("PGPASSWORD").ok()) {
        config.password(password);
    } else if let Some(file) = value(address, "passfile", "PGPASSFILE").map(PathBuf::from).or_else(usual_passfile)
        && let Some(password) = passfile::password(&file, &host.name, port, [&database, &user])?
    {
        config.password(password);
    }
    let (tls, allows_tls) = tls(address, &host.name, &mut config)?;
    Ok(Server { label: format!("{}/{database}", host.with_port(port)), config, tls, allows_tls })
}

fn os_user() -> Option<String> {
    nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name)
}

fn is_local(host: &str) -> bool {
    host.starts_with('/') || host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// `sslmode` by libpq's rules, but for its default: what leaves this machine is encrypted and verified, and what does not
/// leave it is not, unless the server insists.
fn tls(address: &Address, host: &str, config: &mut Config) -> Result<(Connector, bool)> {
    let home = |file: &str| home().map(|home| home.join(".postgresql").join(file)).filter(|path| path.exists());
    let file = |key, ours, default| {
        let given = address.param(ours).map(str::to_owned).or_else(|| value(address, key, &env_name(key)));
        given.map(PathBuf::from).or_else(|| home(default))
    };
    let roots = file("sslrootcert", "tls-ca", "root.crt").filter(|roots| roots != Path::new("system"));
    let default = if is_local(host) { "allow" } else { "verify-full" };
    let word = value(address, "sslmode", "PGSSLMODE").unwrap_or_else(|| default.to_owned());
    let (mode, check) = match word.as_str() {
        "disable" | "allow" => (SslMode::Disable, Check::Nothing),
        "prefer" => (SslMode::Prefer, Check::Nothing),
        "require" if roots.is_some() => (SslMode::Require, Check::Signer),
        "require" => (SslMode::Require, Check::Nothing),
        "verify-ca" => (SslMode::Require, Check::Signer),
        "verify-full" => (SslMode::Require, Check::SignerAndName),
        other => bail!("sslmode is disable, allow, prefer, require, verify-ca or verify-full, not {other:?}"),
    };
    config.ssl_mode(if host.starts_with('/') { SslMode::Disable } else { mode });
    let certificate = file("sslcert", "tls-cert", "postgresql.crt");
    let key = file("sslkey", "tls-key", "postgresql.key");
    ensure!(certificate.is_some() == key.is_some(), "a client certificate and its key (sslcert, sslkey) come together");
    let certificate = certificate.as_deref().zip(key.as_deref());
    let connector = Connector::new(check, &Files { roots: roots.as_deref(), certificate })?;
    Ok((connector, word == "allow" && !host.starts_with('/')))
}

/// `sslcert` is `PGSSLCERT`: libpq's own rule.
fn env_name(key: &str) -> String {
    format!("PG{}", key.to_ascii_uppercase())
}

fn home() -> Option<PathBuf> {
    std::env::var_os("HOME").map(PathBuf::from)
}

fn usual_passfile() -> Option<PathBuf> {
    home().map(|home| home.join(".pgpass"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<Settings> {
        Settings::of(&Address::parse(url).unwrap())
    }

    #[test]
    fn what_leaves_this_machine_is_encrypted_unless_told_otherwise() {
        let mode = |url| settings(url).unwrap().servers[0].config.get_ssl_mode();
        let allows_tls = |url| settings(url).unwrap().servers[0].allows_tls;
        assert_eq!(mode("postgres://me@db.example/jobs"), SslMode::Require);
        assert_eq!(mode("postgres://me@db.example/jobs?sslmode=disable"), SslMode::Disable);
        assert_eq!(mode("postgres://me@127.0.0.1/jobs"), SslMode::Disable);
        assert_eq!(mode("postgres://me@127.0.0.1/jobs?sslmode=prefer"), SslMode::Prefer);
        assert!(
            allows_tls("postgres://me@127.0.0.1/jobs") && !allows_tls("postgres://me@127.0.0.1/jobs?sslmode=disable")
        );
        assert_eq!(mode("postgres://me@%2Ftmp/jobs?sslmode=verify-full"), SslMode::Disable);
    }

    #[test]
    fn several_hosts_have_their_ports_and_must_be_writable() {
        let settings = settings("postgresql://me@a,b:7/jobs?port=6,9&prefix=other").unwrap();
        let labels: Vec<_> = settings.servers.iter().map(|server| server.label.as_str()).collect();
        assert_eq!(labels, ["a:6/jobs", "b:7/jobs"]);
        assert_eq!(settings.schema, "other");
        assert_eq!(settings.servers[0].config.get_target_session_attrs(), TargetSessionAttrs::ReadWrite);
    }

    #[test]
    fn takes_what_libpq_takes() {
        let libpq = "hostaddr=127.0.0.1&gssencmode=disable&client_encoding=UTF8&keepalives=1&keepalives_idle=30\
                     &keepalives_interval=5&keepalives_count=3&tcp_user_timeout=9000";
        let settings = settings(&format!("postgres://me@db.example/jobs?{libpq}")).unwrap();
        let config = &settings.servers[0].config;
        assert_eq!(config.get_hostaddrs(), [IpAddr::from([127, 0, 0, 1])]);
        assert_eq!(config.get_keepalives_idle(), Duration::from_secs(30));
        assert_eq!(config.get_tcp_user_timeout(), Some(&Duration::from_secs(9)));
    }

    #[test]
    fn refuses_what_makes_no_sense() {
        for bad in ["sslmode=sometimes", "target_session_attrs=standby", "prefix=a-b", "prefix=1a", "listen=maybe"] {
            let error = settings(&format!("postgres://me@127.0.0.1/jobs?{bad}")).err().unwrap();
            assert_eq!(Fault::of(&error), Fault::Config, "{bad}");
        }
    }
}
