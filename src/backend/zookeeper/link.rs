//! One connection to one server: frames in and out, answers in the order of the requests, and whether a
//! watch has fired. Knows no session beyond the handshake and no lock.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::wire::{self, Answer, Connected, Frame, Request};
use crate::backend::address::Host;
use crate::backend::tls;
use crate::exit::Fault;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

pub struct Link {
    stream: Box<dyn Stream>,
    /// What was read and not yet used: a frame may come in pieces, and its reader may be dropped.
    inbox: Vec<u8>,
    xid: i32,
    /// The latest transaction we have seen the effects of.
    pub seen: i64,
    /// A watch has fired since this was last set to false.
    pub notified: bool,
}

/// A server took our connection and wanted nothing more to do with us.
#[derive(Debug)]
pub struct NoSession;

impl fmt::Display for NoSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "no session was set up: the server has no quorum, or its fill of connections from here (maxClientCnxns)",
        )
    }
}

const PORT: u16 = 2181;
const TLS_PORT: u16 = 2281;
/// Larger than what ZooKeeper lets anybody store or list.
const LARGEST_FRAME: usize = 64 << 20;

impl Link {
    pub async fn open(host: &Host, tls: Option<&Arc<ClientConfig>>) -> Result<Link> {
        let at = host.with_port(if tls.is_some() { TLS_PORT } else { PORT });
        let tcp = TcpStream::connect(&at).await.map_err(unreachable).with_context(|| at.clone())?;
        tcp.set_nodelay(true).map_err(unreachable)?;
        let stream: Box<dyn Stream> = match tls {
            None => Box::new(tcp),
            Some(config) => {
                let name = ServerName::try_from(host.name.clone())
                    .with_context(|| format!("{:?} is not a host name", host.name))
                    .context(Fault::Config)?;
                let stream = TlsConnector::from(config.clone()).connect(name, tcp).await;
                Box::new(stream.map_err(unreachable).with_context(|| at.clone())?)
            }
        };
        Ok(Link { stream, inbox: Vec::new(), xid: 0, seen: 0, notified: false })
    }

    pub async fn handshake(&mut self, session: i64, password: &[u8], ttl: Duration, seen: i64) -> Result<Connected> {
        self.seen = seen;
        self.send(&wire::connect_request(session, password, ttl, seen)).await?;
        let frame = self.frame().await.context(NoSession)?;
        Connected::read(&frame)
    }

    /// Sends all requests at once and collects their answers. The server serves them one after the other,
    /// so each sees what those before it did.
    pub async fn call(&mut self, requests: &[Request]) -> Result<Vec<Answer>> {
        let mut frames = Vec::new();
        for request in requests {
            self.xid = self.xid.wrapping_add(1) & i32::MAX;
            request.write_to(&mut frames, self.xid);
        }
        self.send(&frames).await?;
        let mut answers = Vec::with_capacity(requests.len());
        while answers.len() < requests.len() {
            answers.extend(self.answer().await?);
        }
        Ok(answers)
    }

    /// Sends a last request, whose answer nobody waits for.
    pub async fn say(mut self, request: Request) -> Result<()> {
        let mut frame = Vec::new();
        request.write_to(&mut frame, self.xid.wrapping_add(1) & i32::MAX);
        self.send(&frame).await
    }

    /// Returns when a watch has fired. May be dropped and called again.
    pub async fn changed(&mut self) -> Result<()> {
        while !std::mem::take(&mut self.notified) {
            let _answer_to_nobody = self.answer().await?;
        }
        Ok(())
    }

    /// Takes the next frame: an answer, or the news that a watch has fired.
    async fn answer(&mut self) -> Result<Option<Answer>> {
        Ok(match Frame::read(&self.frame().await?)? {
            Frame::Notification => {
                self.notified = true;
                None
            }
            Frame::Reply { zxid, answer } => {
                self.seen = self.seen.max(zxid);
                Some(answer)
            }
        })
    }

    async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes).await.map_err(unreachable)?;
        self.stream.flush().await.map_err(unreachable)
    }

    async fn frame(&mut self) -> Result<Vec<u8>> {
        loop {
            if let Some((length, rest)) = self.inbox.split_first_chunk::<4>() {
                let length = u32::from_be_bytes(*length) as usize;
                ensure!(length <= LARGEST_FRAME, Fault::Unreachable.because("this does not speak ZooKeeper"));
                if rest.len() >= length {
                    let frame = rest[..length].to_vec();
                    self.inbox.drain(..4 + length);
                    return Ok(frame);
                }
            }
            if self.stream.read_buf(&mut self.inbox).await.map_err(unreachable)? == 0 {
                return Err(Fault::Unreachable.because("the server closed the connection"));
            }
        }
    }
}

fn unreachable(error: io::Error) -> anyhow::Error {
    let fault = tls::fault(&error);
    anyhow::Error::new(error).context(fault)
}
