//! The connection to a member, under HTTP/2: what is written in one turn of the runtime leaves in one piece.
//!
//! The head of a request, its body and the end of it come from tasks that flush one after the other. Each piece by
//! itself would wake the server, which can begin only when it has the body.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tonic::codegen::{Service, StdError};
use tonic::transport::{Channel, Endpoint, Uri};

/// More than this does not wait for the end of the turn.
const PLENTY: usize = 64 << 10;

/// A channel that connects when it is first used.
pub fn channel(endpoint: &Endpoint) -> Channel {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    endpoint.connect_with_connector_lazy(Connector(tcp))
}

struct Connector(HttpConnector);

impl Service<Uri> for Connector {
    type Response = TokioIo<Gathering>;
    type Error = StdError;
    type Future = BoxFuture<'static, Result<Self::Response, StdError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), StdError>> {
        self.0.poll_ready(cx).map_err(StdError::from)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let tcp = connecting.await?.into_inner();
            Ok(TokioIo::new(Gathering { tcp, outbox: Vec::new(), waited: false }))
        })
    }
}

pub struct Gathering {
    tcp: TcpStream,
    outbox: Vec<u8>,
    /// Everybody else has had a turn since something was to be flushed.
    waited: bool,
}

impl Gathering {
    fn send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.outbox.is_empty() {
            let sent = ready!(Pin::new(&mut self.tcp).poll_write(cx, &self.outbox))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.outbox.drain(..sent);
        }
        self.waited = false;
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Gathering {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, into)
    }
}

impl AsyncWrite for Gathering {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.outbox.len() >= PLENTY {
            ready!(self.send(cx))?;
        }
        self.outbox.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.outbox.is_empty() || std::mem::replace(&mut self.waited, true) {
            return self.send(cx);
        }
        // Whoever is woken now comes after all who are ready already.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.send(cx))?;
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use tokio::io::AsyncReadExt;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn what_is_flushed_in_one_turn_leaves_in_one_piece_and_all_of_it() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut member, _) = listener.accept().await.unwrap();
        let mut wire = Gathering { tcp, outbox: Vec::new(), waited: false };
        wire.tcp.writable().await.unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        for (piece, sent) in [(b"head", false), (b"body", true), (b"next", false)] {
            assert!(Pin::new(&mut wire).poll_write(&mut cx, piece).is_ready());
            assert_eq!(Pin::new(&mut wire).poll_flush(&mut cx).is_ready(), sent);
        }
        let mut piece = [0; 64];
        let length = member.read(&mut piece).await.unwrap();
        assert_eq!(&piece[..length], b"headbody");

        // More than the kernel takes at once, while nobody reads.
        let much = vec![7; 16 << 20];
        let writing = async {
            tokio::io::AsyncWriteExt::write_all(&mut wire, &much).await.unwrap();
            tokio::io::AsyncWriteExt::shutdown(&mut wire).await.unwrap();
        };
        let mut all = Vec::new();
        let (_, read) = tokio::join!(writing, member.read_to_end(&mut all));
        assert_eq!(read.unwrap(), b"next".len() + much.len());
        assert!(all.starts_with(b"next") && all[4..].iter().all(|byte| *byte == 7));
    }
}
