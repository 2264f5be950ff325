//! The one place that opens sockets for the protocols that we feed ourselves: TCP, unix and, over TCP, TLS. Knows no
//! protocol and keeps no time: a caller drops what takes too long.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context as Task, Poll, ready};

use anyhow::{Context, Result, anyhow};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::tls;
use crate::exit::Fault;

pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A connection of whichever kind.
pub type Socket = Box<dyn Stream>;

pub async fn unix(path: &Path) -> Result<Socket> {
    let connected = UnixStream::connect(path).await;
    let stream = connected.with_context(|| format!("cannot connect to {}", path.display()));
    Ok(Box::new(stream.context(Fault::Unreachable)?))
}

/// `at` is `host:port`.
pub async fn tcp(at: &str, secured: Option<&Arc<ClientConfig>>) -> Result<Socket> {
    let connected = TcpStream::connect(at).await.with_context(|| format!("cannot connect to {at}"));
    let stream = connected.context(Fault::Unreachable)?;
    stream.set_nodelay(true).context("TCP_NODELAY")?;
    match secured {
        Some(config) => encrypt(stream, at, config).await,
        None => Ok(Box::new(stream)),
    }
}

/// TLS with `host:port`, which has to prove that it is this host.
pub async fn encrypt(stream: TcpStream, at: &str, config: &Arc<ClientConfig>) -> Result<Socket> {
    let host = at.rsplit_once(':').map_or(at, |(host, _)| host).trim_matches(['[', ']']);
    let host = ServerName::try_from(host.to_owned())
        .with_context(|| format!("TLS cannot verify a host named {host:?}"))
        .context(Fault::Config)?;
    let encrypted = TlsConnector::from(config.clone()).connect(host, stream).await;
    Ok(Box::new(encrypted.map_err(|error| failed(error, format!("TLS with {at}")))?))
}

/// What became of a connection, and whether one side refused the other's certificate.
pub fn failed(error: io::Error, what: String) -> anyhow::Error {
    let fault = tls::fault(&error);
    anyhow!(error).context(what).context(fault)
}

/// Ends when a server sends more than any answer has: a client library would take whatever comes.
pub struct Bounded {
    socket: Socket,
    /// The memory that the server's answers since our last request may take.
    received: usize,
    limit: Arc<AtomicUsize>,
    weigh: fn(&[u8]) -> usize,
}

impl Bounded {
    /// The limit may change while the connection lasts.
    pub fn new(socket: Socket, limit: Arc<AtomicUsize>, weigh: fn(&[u8]) -> usize) -> Bounded {
        Bounded { socket, received: 0, limit, weigh }
    }
}

impl AsyncRead for Bounded {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Task<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.socket).poll_read(task, buffer))?;
        self.received += (self.weigh)(&buffer.filled()[before..]);
        let limit = self.limit.load(Ordering::Relaxed);
        if self.received > limit {
            let what = format!("the server sent more than {limit} bytes, which is no answer to us");
            return Poll::Ready(Err(io::Error::other(what)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Bounded {
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
