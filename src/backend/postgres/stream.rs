//! The way to a server: a TCP or unix socket, and TLS as `sslmode` asks for it.

use std::io;
use std::sync::Arc;

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::backend::net::Socket;
use crate::exit::Fault;

/// Connects to the one host of a configuration.
pub async fn open(config: &Config, tls: &Arc<ClientConfig>) -> Result<Socket> {
    let (host, port) = (&config.get_hosts()[0], config.get_ports()[0]);
    let connecting = async {
        match host {
            Host::Unix(dir) => Ok(Box::new(UnixStream::connect(dir.join(format!(".s.PGSQL.{port}"))).await?) as Socket),
            Host::Tcp(name) => {
                let socket = connect(config, name, port).await?;
                encrypt(socket, name, config.get_ssl_mode(), tls).await
            }
        }
    };
    let connected = match config.get_connect_timeout() {
        Some(limit) => tokio::time::timeout(*limit, connecting).await.unwrap_or_else(|late| Err(late.into())),
        None => connecting.await,
    };
    connected.map_err(|error| match error.downcast_ref() {
        Some(Fault::Refused) => error,
        _ => error.context(Fault::Unreachable),
    })
}

async fn connect(config: &Config, name: &str, port: u16) -> Result<TcpStream> {
    let addresses = match config.get_hostaddrs() {
        [] => lookup_host((name, port)).await.with_context(|| format!("cannot look up {name}"))?.collect(),
        given => given.iter().map(|ip| (*ip, port).into()).collect::<Vec<_>>(),
    };
    let mut failure = io::Error::new(io::ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(socket) => {
                set_options(&socket, config)?;
                return Ok(socket);
            }
            Err(error) => failure = error,
        }
    }
    Err(anyhow::Error::new(failure).context("error connecting to server"))
}

/// How the kernel finds out that the other side is gone.
fn set_options(socket: &TcpStream, config: &Config) -> Result<()> {
    let seconds = |span: std::time::Duration| u32::try_from(span.as_secs()).unwrap_or(u32::MAX).max(1);
    socket.set_nodelay(true)?;
    if let Some(limit) = config.get_tcp_user_timeout() {
        setsockopt(socket, sockopt::TcpUserTimeout, &u32::try_from(limit.as_millis()).unwrap_or(u32::MAX))?;
    }
    if config.get_keepalives() {
        setsockopt(socket, sockopt::KeepAlive, &true)?;
        setsockopt(socket, sockopt::TcpKeepIdle, &seconds(config.get_keepalives_idle()))?;
        if let Some(interval) = config.get_keepalives_interval() {
            setsockopt(socket, sockopt::TcpKeepInterval, &seconds(interval))?;
        }
        if let Some(count) = config.get_keepalives_retries().filter(|&count| count > 0) {
            setsockopt(socket, sockopt::TcpKeepCount, &count)?;
        }
    }
    Ok(())
}

async fn encrypt(mut socket: TcpStream, host: &str, mode: SslMode, tls: &Arc<ClientConfig>) -> Result<Socket> {
    /// Length and code, as the protocol has it.
    const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    if mode == SslMode::Disable {
        return Ok(Box::new(socket));
    }
    socket.write_all(&SSL_REQUEST).await?;
    match socket.read_u8().await? {
        b'S' => {
            let host = ServerName::try_from(host.to_owned())?;
            let encrypted = TlsConnector::from(tls.clone()).connect(host, socket).await;
            Ok(Box::new(encrypted.map_err(|error| {
                // What rustls does not like; everything else is the network.
                let refused = error.kind() == io::ErrorKind::InvalidData;
                let error = anyhow::Error::new(error).context("error performing TLS handshake");
                if refused { error.context(Fault::Refused) } else { error }
            })?))
        }
        _ if mode == SslMode::Prefer => Ok(Box::new(socket)),
        _ => Err(Fault::Refused.because("the server does not support TLS")),
    }
}
