//! From a backend URL, libpq's environment and its password file to what a connection needs to know.

use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};

use super::tls::{Check, Connector, Files};
use crate::backend::Address;
use crate::backend::Host;
use crate::exit::Fault;

pub const PARAMETERS: &[&str] = &[
    "host",
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
    "listen",
];

/// One server to try, and how.
#[derive(Clone)]
pub struct Server {
    /// For people: never a password.
    pub label: String,
    pub config: Config,
    pub tls: Connector,
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
        let servers = hosts.iter().map(|host| server(address, host, hosts.len() > 1)).collect::<Result<_>>()?;
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

fn server(address: &Address, host: &Host, one_of_many: bool) -> Result<Server> {
    let port = host.port.unwrap_or(5432);
    let user = address.username().map(str::to_owned).or_else(|| value(address, "user", "PGUSER"));
    let user = user.or_else(os_user).context("which role to log in as? Name one: postgres://ROLE@…")?;
    let database = Some(address.path().trim_start_matches('/').to_owned()).filter(|path| !path.is_empty());
    let database = database.or_else(|| value(address, "dbname", "PGDATABASE")).unwrap_or_else(|| user.clone());

    let mut config = Config::new();
    config.host(&host.name).port(port).user(&user).dbname(&database);
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
    } else if let Some(password) = from_passfile(address, &host.name, port, &database, &user)? {
        config.password(password);
    }
    let tls = tls(address, &host.name, &mut config)?;
    Ok(Server { label: format!("{}/{database}", host.with_port(port)), config, tls })
}

fn os_user() -> Option<String> {
    nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().map(|user| user.name)
}

fn is_local(host: &str) -> bool {
    host.starts_with('/') || host == "localhost" || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
}

/// `sslmode` by libpq's rules, but for its default: what leaves this machine is encrypted and verified.
fn tls(address: &Address, host: &str, config: &mut Config) -> Result<Connector> {
    let home = |file: &str| home().map(|home| home.join(".postgresql").join(file)).filter(|path| path.exists());
    let file = |key, ours, default| {
        let given = address.param(ours).map(str::to_owned).or_else(|| value(address, key, &env_name(key)));
        given.map(PathBuf::from).or_else(|| home(default))
    };
    let roots = file("sslrootcert", "tls-ca", "root.crt").filter(|roots| roots != Path::new("system"));
    let default = if is_local(host) { "prefer" } else { "verify-full" };
    let mode = value(address, "sslmode", "PGSSLMODE").unwrap_or_else(|| default.to_owned());
    let (mode, check) = match mode.as_str() {
        "disable" => (SslMode::Disable, Check::Nothing),
        // libpq's `allow` tries without TLS first; neither of them promises anything.
        "allow" | "prefer" => (SslMode::Prefer, Check::Nothing),
        "require" if roots.is_some() => (SslMode::Require, Check::Signer),
        "require" => (SslMode::Require, Check::Nothing),
        "verify-ca" => (SslMode::Require, Check::Signer),
        "verify-full" => (SslMode::Require, Check::SignerAndName),
        other => bail!("sslmode is disable, prefer, require, verify-ca or verify-full, not {other:?}"),
    };
    config.ssl_mode(if host.starts_with('/') { SslMode::Disable } else { mode });
    let certificate = file("sslcert", "tls-cert", "postgresql.crt");
    let key = file("sslkey", "tls-key", "postgresql.key");
    ensure!(certificate.is_some() == key.is_some(), "a client certificate and its key (sslcert, sslkey) come together");
    let certificate = certificate.as_deref().zip(key.as_deref());
    Connector::new(check, &Files { roots: roots.as_deref(), certificate })
}

/// `sslcert` is `PGSSLCERT`: libpq's own rule.
fn env_name(key: &str) -> String {
    format!("PG{}", key.to_ascii_uppercase())
}

fn home() -> Option<PathBuf> {
    std::env::var_os("HOME").map(PathBuf::from)
}

fn from_passfile(address: &Address, host: &str, port: u16, database: &str, user: &str) -> Result<Option<String>> {
    let file = value(address, "passfile", "PGPASSFILE").map(PathBuf::from);
    let Some(file) = file.or_else(|| home().map(|home| home.join(".pgpass"))).filter(|file| file.exists()) else {
        return Ok(None);
    };
    let mode = file.metadata().with_context(|| format!("cannot look at {}", file.display()))?.permissions().mode();
    ensure!(mode & 0o077 == 0, "{} can be read by others: chmod 600 it", file.display());
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
    let host = if host.starts_with('/') { "localhost" } else { host };
    Ok(text.lines().find_map(|line| password_in(line, [host, &port.to_string(), database, user])))
}

/// The password of a line `host:port:database:user:password` if it is about us; `*` fits all, `\` escapes.
fn password_in(line: &str, wanted: [&str; 4]) -> Option<String> {
    let mut fields = vec![String::new()];
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            ':' if fields.len() < 5 => fields.push(String::new()),
            '\\' => fields.last_mut()?.extend(chars.next()),
            _ => fields.last_mut()?.push(c),
        }
    }
    let password = fields.pop().filter(|_| fields.len() == 4 && !line.starts_with('#'))?;
    fields.iter().zip(wanted).all(|(field, wanted)| field == "*" || field == wanted).then_some(password)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(url: &str) -> Result<Settings> {
        Settings::of(&Address::parse(url).unwrap())
    }

    #[test]
    fn a_password_file_is_read_as_libpq_does() {
        let wanted = ["db", "5432", "jobs", "me"];
        assert_eq!(password_in("db:5432:jobs:me:s\\:e\\\\c:ret", wanted).as_deref(), Some("s:e\\c:ret"));
        assert_eq!(password_in("*:*:*:me:secret", wanted).as_deref(), Some("secret"));
        assert_eq!(password_in("other:*:*:me:secret", wanted), None);
        assert_eq!(password_in("#b:5432:jobs:me:secret", ["#b", "5432", "jobs", "me"]), None);
        assert_eq!(password_in("db:5432:jobs:me", wanted), None);
    }

    #[test]
    fn what_leaves_this_machine_is_encrypted_unless_told_otherwise() {
        let mode = |url| settings(url).unwrap().servers[0].config.get_ssl_mode();
        assert_eq!(mode("postgres://me@db.example/jobs"), SslMode::Require);
        assert_eq!(mode("postgres://me@db.example/jobs?sslmode=disable"), SslMode::Disable);
        assert_eq!(mode("postgres://me@127.0.0.1/jobs"), SslMode::Prefer);
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
    fn refuses_what_makes_no_sense() {
        for bad in ["sslmode=sometimes", "target_session_attrs=standby", "prefix=a-b", "prefix=1a", "listen=maybe"] {
            let error = settings(&format!("postgres://me@127.0.0.1/jobs?{bad}")).err().unwrap();
            assert_eq!(Fault::of(&error), Fault::Config, "{bad}");
        }
    }
}
