//! From a backend URL, libpq's environment and its password file to what a connection needs to know.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tokio_postgres::Config;
use tokio_postgres::config::{SslMode, TargetSessionAttrs};
use tokio_rustls::rustls::ClientConfig;

use super::connect::tls_config;
use crate::backend::sql::{is_on, plain_name};
use crate::backend::sslmode::{Encryption, os_user, sslmode};
use crate::backend::{Address, Host};
use crate::exit::Fault;
use crate::openat;

#[rustfmt::skip]
pub const PARAMETERS: &[&str] = &[
    "host", "hostaddr", "port", "user", "dbname", "passfile", "sslmode", "sslrootcert", "sslcert", "sslkey",
    "application_name", "options", "connect_timeout", "target_session_attrs", "channel_binding", "gssencmode",
    "client_encoding", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count", "tcp_user_timeout",
    "listen",
];

/// One server to try, and how.
#[derive(Clone)]
pub struct Server {
    /// For people: never a password.
    pub label: String,
    pub config: Config,
    pub tls: Arc<ClientConfig>,
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
        let (hosts, mut common) = (hosts(address)?, common(address)?);
        // Asking costs a round trip; a single server that cannot be written to will say so itself.
        if hosts.len() > 1 {
            common.target_session_attrs(TargetSessionAttrs::ReadWrite);
        }
        let mut servers =
            hosts.iter().map(|host| server(address, common.clone(), host)).collect::<Result<Vec<Server>>>()?;
        // Where the hosts are, if their names are not to be looked up.
        if let Some(given) = value(address, "hostaddr") {
            let count = given.split(',').count();
            ensure!(count == hosts.len(), "there are {count} addresses in hostaddr for {} hosts", hosts.len());
            for (server, ip) in servers.iter_mut().zip(given.split(',')) {
                server.config.hostaddr(ip.parse().with_context(|| format!("hostaddr={ip:?} is not an address"))?);
            }
        }
        let listen = is_on(address, "listen")?;
        // What these would add is not to be had, and another parameter protects as well.
        for key in ["channel_binding", "gssencmode"] {
            let known = matches!(address.param(key), None | Some("disable" | "prefer"));
            ensure!(known, "{key} is disable or prefer; sslmode=verify-full protects as well");
        }
        // What is not ASCII goes to the server in JSON, so that any will do; ours is UTF8.
        ensure!(address.param("client_encoding") != Some(""), "client_encoding names no encoding");
        let schema = plain_name(address.param("prefix").unwrap_or("dlock"), "names the schema")?;
        Ok(Settings { servers, schema, listen })
    }
}

/// A parameter of the URL, else of libpq's environment, where `sslcert` is `PGSSLCERT`.
fn value(address: &Address, key: &str) -> Option<String> {
    let variable = match key {
        "dbname" => "PGDATABASE".to_owned(),
        _ => format!("PG{}", key.to_ascii_uppercase()),
    };
    let given = address.param(key).map(str::to_owned);
    given.or_else(|| std::env::var(variable).ok()).filter(|value| !value.is_empty())
}

fn hosts(address: &Address) -> Result<Vec<Host>> {
    let ports = value(address, "port").unwrap_or_else(|| "5432".to_owned());
    let port =
        |text: &str| text.parse().ok().filter(|&port| port > 0).with_context(|| format!("{text:?} is not a port"));
    let ports = ports.split(',').map(port).collect::<Result<Vec<u16>>>()?;
    let mut hosts = address.hosts().to_vec();
    if hosts.is_empty() {
        let names = value(address, "host").unwrap_or_else(|| "/var/run/postgresql".to_owned());
        hosts = names.split(',').map(|name| Host { name: name.to_owned(), port: None }).collect();
    }
    let counts = (ports.len(), hosts.len());
    ensure!(counts.0 == 1 || counts.0 == counts.1, "there are {} ports for {} hosts", counts.0, counts.1);
    for (host, port) in hosts.iter_mut().zip(ports.iter().cycle()) {
        host.port = host.port.or(Some(*port));
    }
    Ok(hosts)
}

/// What all servers have in common, read by the client library: it knows these as libpq does.
fn common(address: &Address) -> Result<Config> {
    const THEIRS: &str =
        "application_name options connect_timeout keepalives keepalives_idle keepalives_interval keepalives_count";
    let mut settings = "application_name=dlock".to_owned();
    for key in THEIRS.split(' ') {
        if let Some(value) = value(address, key) {
            let key = if key == "keepalives_count" { "keepalives_retries" } else { key };
            settings += &format!(" {key}='{}'", value.replace('\\', "\\\\").replace('\'', "\\'"));
        }
    }
    let mut config: Config = settings.parse()?;
    // The library takes this for seconds.
    if let Some(millis) = address.param("tcp_user_timeout") {
        let millis = millis.parse().with_context(|| format!("tcp_user_timeout={millis:?} is not a whole number"))?;
        config.tcp_user_timeout(Duration::from_millis(millis));
    }
    match address.param("target_session_attrs") {
        None | Some("any" | "read-write" | "primary") => {}
        Some(other) => bail!("target_session_attrs={other}: a lock needs a server that can be written to"),
    }
    Ok(config)
}

fn server(address: &Address, mut config: Config, host: &Host) -> Result<Server> {
    let port = host.port.unwrap_or(5432);
    let user = address.username().map(str::to_owned).or_else(|| value(address, "user"));
    let user = user.or_else(os_user).context("which role to log in as? Name one: postgres://ROLE@…")?;
    let database = Some(address.path().trim_start_matches('/').to_owned()).filter(|path| !path.is_empty());
    let database = database.or_else(|| value(address, "dbname")).unwrap_or_else(|| user.clone());
    config.host(&host.name).port(port).user(&user).dbname(&database);
    if let Some(password) = address.password()?.or_else(|| std::env::var("PGPASSWORD").ok()) {
        config.password(password);
    } else if let Some(file) = value(address, "passfile").map(PathBuf::from).or_else(|| in_home(".pgpass"))
        && let Some(password) = password(&file, &host.name, port, [&database, &user])?
    {
        config.password(password);
    }
    let (tls, allows_tls) = tls(address, &host.name, &mut config)?;
    Ok(Server { label: format!("{}/{database}", host.with_port(port)), config, tls, allows_tls })
}

fn in_home(file: &str) -> Option<PathBuf> {
    std::env::var_os("HOME").map(|home| Path::new(&home).join(file)).filter(|path| path.exists())
}

/// And whether TLS is tried if the server refuses to go without.
fn tls(address: &Address, host: &str, config: &mut Config) -> Result<(Arc<ClientConfig>, bool)> {
    let file = |key, ours, default| {
        let given = address.param(ours).map(str::to_owned).or_else(|| value(address, key));
        given.map(PathBuf::from).or_else(|| in_home(&format!(".postgresql/{default}")))
    };
    let roots = file("sslrootcert", "tls-ca", "root.crt").filter(|roots| roots != Path::new("system"));
    let (encryption, check) = sslmode(value(address, "sslmode").as_deref(), host, roots.is_some())?;
    config.ssl_mode(match encryption {
        Encryption::Never | Encryption::IfWanted => SslMode::Disable,
        Encryption::IfOffered => SslMode::Prefer,
        Encryption::Always => SslMode::Require,
    });
    let certificate = file("sslcert", "tls-cert", "postgresql.crt");
    let key = file("sslkey", "tls-key", "postgresql.key");
    ensure!(certificate.is_some() == key.is_some(), "a client certificate and its key (sslcert, sslkey) come together");
    let tls = tls_config(check, roots.as_deref(), certificate.as_deref().zip(key.as_deref()))?;
    Ok((tls, encryption == Encryption::IfWanted))
}

/// From libpq's password file, for this host, and for this database and user; a file that is none is no obstacle.
fn password(file: &Path, host: &str, port: u16, whose: [&str; 2]) -> Result<Option<String>> {
    if !file.is_file() {
        return Ok(None);
    }
    let mode = file.metadata().with_context(|| format!("cannot look at {}", file.display()))?.permissions().mode();
    ensure!(mode & 0o077 == 0, "{} can be read by others: chmod 600 it", file.display());
    let text = openat::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    // A socket in the usual place goes by localhost, in any other by its directory.
    let other = if host.starts_with('/') { "localhost" } else { host };
    let (port, [database, user]) = (port.to_string(), whose);
    let of = |line, host| password_in(line, [host, &port, database, user]);
    Ok(text.lines().find_map(|line| of(line, host).or_else(|| of(line, other))))
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
    use std::net::IpAddr;

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
    fn a_password_file_knows_a_socket_by_its_directory_and_is_no_device() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pgpass");
        std::fs::write(&file, "/run/db:*:*:me:there\nlocalhost:*:*:me:here\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let password = |file, host| password(file, host, 5432, ["jobs", "me"]).unwrap();
        assert_eq!(password(&file, "/run/db").as_deref(), Some("there"));
        assert_eq!(password(&file, "/var/run/postgresql").as_deref(), Some("here"));
        assert_eq!(password(Path::new("/dev/null"), "h"), None);
    }
}
