//! From a backend URL, the MySQL client's environment and its option file to what a connection needs to know.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use mysql_async::{ClientIdentity, OptsBuilder, SslOpts};

use super::option_file::OptionFile;
use crate::backend::sql::{is_on, plain_name};
use crate::backend::sslmode::{Check, Encryption, is_local, os_user, sslmode};
use crate::backend::{Address, Host, tls};
use crate::exit::Fault;

pub const PARAMETERS: &[&str] = &["socket", "sslmode", "defaults-file", "wake-up"];

/// Where the server is if nobody says otherwise: Debian's place.
const SOCKET: &str = "/run/mysqld/mysqld.sock";
const PORT: u16 = 3306;
/// No answer of ours is longer, and no server may fill our memory.
const LONGEST_PACKET: usize = 16 << 20;

/// One server to try, and how.
#[derive(Clone)]
pub struct Server {
    /// For people: never a password.
    pub label: String,
    pub options: OptsBuilder,
    pub tls: SslOpts,
    pub encryption: Encryption,
    /// What is sent does not leave this machine.
    pub is_local: bool,
}

pub struct Settings {
    pub servers: Vec<Server>,
    pub database: String,
    /// Of the names of all tables and procedures.
    pub prefix: String,
    /// Off for a proxy that gives each statement another connection.
    pub wakes_up: bool,
}

impl Settings {
    pub fn of(address: &Address) -> Result<Settings> {
        Settings::read(address).map_err(|error| error.context(Fault::Config))
    }

    fn read(address: &Address) -> Result<Settings> {
        let file = OptionFile::of(address)?;
        let database = Some(address.path().trim_start_matches('/').to_owned()).filter(|path| !path.is_empty());
        let database =
            database.or_else(|| file.get("database")).context("which database? Name one: mysql://HOST/DATABASE")?;
        let plain = |c: char| !c.is_control() && !matches!(c, '`' | '/' | '\\');
        ensure!(database.len() <= 64 && database.chars().all(plain), "{database:?} is not the name of a database");
        let wakes_up = is_on(address, "wake-up")?;
        let hosts = hosts(address, &file)?;
        let servers = hosts.iter().map(|host| server(address, &file, &database, host)).collect::<Result<_>>()?;
        let prefix = plain_name(address.param("prefix").unwrap_or("dlock"), "begins the names of tables")?;
        Ok(Settings { servers, database, prefix, wakes_up })
    }
}

/// A host that begins with a / is a socket, as for PostgreSQL. Without one, the option file's, else the usual socket.
fn hosts(address: &Address, file: &OptionFile) -> Result<Vec<Host>> {
    let port =
        |text: String| text.parse().ok().filter(|&port| port > 0).with_context(|| format!("{text:?} is not a port"));
    let named = |name: String| Host { name, port: None };
    if let Some(socket) = address.param("socket") {
        ensure!(address.hosts().is_empty(), "a URL names hosts or a socket, not both");
        ensure!(socket.starts_with('/'), "socket is the path of one, not {socket:?}");
        return Ok(vec![named(socket.to_owned())]);
    }
    let mut hosts = address.hosts().to_vec();
    if hosts.is_empty() {
        let environment = |key| std::env::var(key).ok().filter(|value| !value.is_empty());
        let host = environment("MYSQL_HOST").or_else(|| file.get("host")).filter(|host| host != "localhost");
        let socket = environment("MYSQL_UNIX_PORT").or_else(|| file.get("socket")).unwrap_or_else(|| SOCKET.to_owned());
        hosts = vec![named(host.unwrap_or(socket))];
        let given = environment("MYSQL_TCP_PORT").or_else(|| file.get("port"));
        hosts[0].port = given.map(port).transpose()?;
    }
    Ok(hosts)
}

fn server(address: &Address, file: &OptionFile, database: &str, host: &Host) -> Result<Server> {
    let user = address.username().map(str::to_owned).or_else(|| file.get("user")).or_else(os_user);
    let user = user.context("which user to log in as? Name one: mysql://USER@…")?;
    let password = match address.password()? {
        Some(password) => Some(password),
        None => {
            std::env::var("MYSQL_PWD").ok().filter(|password| !password.is_empty()).or_else(|| file.get("password"))
        }
    };
    let port = host.port.unwrap_or(PORT);
    let socket = host.name.starts_with('/').then(|| host.name.clone());
    let label = format!("{}/{database}", socket.clone().unwrap_or_else(|| host.with_port(port)));
    let options = OptsBuilder::default()
        .ip_or_hostname(&host.name)
        .tcp_port(port)
        .socket(socket)
        .prefer_socket(false)
        .user(Some(user))
        .pass(password)
        .db_name(Some(database))
        .stmt_cache_size(0)
        // What the server says of these would cost another question.
        .max_allowed_packet(Some(LONGEST_PACKET))
        .wait_timeout(Some(0));
    let (tls, encryption) = encryption(address, file, &host.name)?;
    Ok(Server { label, options, tls, encryption, is_local: is_local(&host.name) })
}

fn encryption(address: &Address, file: &OptionFile, host: &str) -> Result<(SslOpts, Encryption)> {
    let path = |ours, theirs| address.param(ours).map(str::to_owned).or_else(|| file.get(theirs)).map(PathBuf::from);
    let roots = path("tls-ca", "ssl-ca");
    let (encryption, check) = sslmode(address.param("sslmode"), host, roots.is_some())?;
    let mut tls = SslOpts::default();
    if check == Check::Nothing {
        // The roots that the library brings along are only there because it does not go without any.
        tls = tls.with_danger_accept_invalid_certs(true).with_danger_skip_domain_validation(true);
    } else {
        // The library checks the name with the signature, so that verify-ca is no less than verify-full: what skips the
        // name looks for words in rustls's error that rustls does not say any more.
        tls = tls.with_disable_built_in_roots(true).with_root_certs(match roots {
            Some(file) => {
                tls::roots(Some(&file))?;
                vec![file.into()]
            }
            None => tls::of_the_system()?.into_iter().map(|certificate| certificate.to_vec().into()).collect(),
        });
    }
    match (path("tls-cert", "ssl-cert"), path("tls-key", "ssl-key")) {
        (None, None) => {}
        (Some(chain), Some(key)) => {
            tls::check_client_certificate(&chain, &key)?;
            tls = tls.with_client_identity(Some(ClientIdentity::new(chain.into(), key.into())));
        }
        _ => anyhow::bail!("tls-cert and tls-key come together"),
    }
    Ok((tls, encryption))
}
