//! The stream to a server: a TCP or unix socket, TLS as `sslmode` asks for it, and a bound on what the server may send.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context as Task, Poll, ready};

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio_postgres::Config;
use tokio_postgres::config::{Host, SslMode};

use super::tls::Connector;
use crate::backend::net::Socket;
use crate::exit::Fault;

/// What a server may send before we ask for more: otherwise it could fill our memory. A log-in is a few kilobytes, and
/// small messages take several times their size in memory.
const BEFORE_LOG_IN: usize = 1 << 20;
/// A page of `dlock status` may be large.
const AFTER_LOG_IN: usize = 32 << 20;

pub struct Stream {
    socket: Socket,
    /// Bytes since we last wrote.
    received: usize,
    log_in: LogIn,
}

/// What the server has said until we were logged in.
#[derive(Clone, Default)]
pub struct LogIn(Arc<Mutex<Option<Vec<u8>>>>);

impl Stream {
    /// Connects to the one host of a configuration.
    pub async fn open(config: &Config, tls: &Connector) -> Result<Stream> {
        let (host, port) = (&config.get_hosts()[0], config.get_ports()[0]);
        let connecting = async {
            match host {
                Host::Unix(dir) => {
                    Ok(Box::new(UnixStream::connect(dir.join(format!(".s.PGSQL.{port}"))).await?) as Socket)
                }
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
        let socket = connected.map_err(|error| match error.downcast_ref() {
            Some(Fault::Refused) => error,
            _ => error.context(Fault::Unreachable),
        })?;
        Ok(Stream { socket, received: 0, log_in: LogIn(Arc::new(Mutex::new(Some(Vec::new())))) })
    }

    pub fn log_in(&self) -> LogIn {
        self.log_in.clone()
    }
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

async fn encrypt(mut socket: TcpStream, host: &str, mode: SslMode, tls: &Connector) -> Result<Socket> {
    /// Length and code, as the protocol has it.
    const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    if mode == SslMode::Disable {
        return Ok(Box::new(socket));
    }
    socket.write_all(&SSL_REQUEST).await?;
    match socket.read_u8().await? {
        b'S' => match tls.connect(host, socket).await {
            Ok(stream) => Ok(Box::new(stream)),
            // What rustls does not like; everything else is the network.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                Err(anyhow::Error::new(error).context("error performing TLS handshake").context(Fault::Refused))
            }
            Err(error) => Err(anyhow::Error::new(error).context("error performing TLS handshake")),
        },
        _ if mode == SslMode::Prefer => Ok(Box::new(socket)),
        _ => Err(Fault::Refused.because("the server does not support TLS")),
    }
}

impl LogIn {
    fn said(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The server process that serves us, as it said. A pooler says something else, which is how we know one: behind it,
    /// nothing that belongs to a session is ours.
    pub fn done(&self) -> Option<i32> {
        process_id(&self.said().take()?)
    }
}

/// From the message with the key for cancel requests. A message is a letter, its length without that, and a body.
fn process_id(mut said: &[u8]) -> Option<i32> {
    while let Some(([letter, length @ ..], rest)) = said.split_first_chunk::<5>() {
        let (body, next) = rest.split_at_checked((u32::from_be_bytes(*length) as usize).checked_sub(4)?)?;
        if *letter == b'K' {
            return body.first_chunk().copied().map(i32::from_be_bytes);
        }
        said = next;
    }
    None
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Task<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(task, buffer))?;
        let new = &buffer.filled()[before..];
        self.received += new.len();
        let limit = match self.log_in.said().as_mut() {
            Some(said) => {
                said.extend_from_slice(new);
                BEFORE_LOG_IN
            }
            None => AFTER_LOG_IN,
        };
        if self.received > limit {
            let what = format!("the server sent more than {limit} bytes, which is no answer to us");
            return Poll::Ready(Err(io::Error::other(what)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Task<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.received = 0;
        Pin::new(&mut self.socket).poll_write(task, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_found_among_what_the_server_says() {
        let said = b"R\0\0\0\x08\0\0\0\0S\0\0\0\x06a\0K\0\0\0\x0c\0\0\x01\x02abcdZ\0\0\0\x05I";
        assert_eq!(process_id(said), Some(258));
        assert_eq!(process_id(&said[..20]), None);
        assert_eq!(process_id(b"K\0\0\0\x01abcd"), None);
    }
}
