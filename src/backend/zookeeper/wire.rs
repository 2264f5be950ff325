//! One connection to one server, and ZooKeeper's wire format ("jute") as far as a lock needs it. Knows no session beyond
//! the handshake, and no lock.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures_util::{SinkExt, StreamExt, stream};
use tokio_rustls::rustls::ClientConfig;
use tokio_util::bytes::{Buf, Bytes, BytesMut};
use tokio_util::codec::{Framed, LengthDelimitedCodec, LengthDelimitedCodecError};

use crate::backend::address::Host;
use crate::backend::{net, tls};
use crate::exit::Fault;

/// Who may touch what we create, as `zkCli.sh` spells it.
pub const ANYONE: &str = "world:anyone";
/// Clients that authenticate as we did.
pub const CREATOR: &str = "auth:";

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Persistent,
    Ephemeral,
    EphemeralSequential,
    /// Removed by the server some time after its last child.
    Container,
    /// Removed by the server some time after this long, if it was told to have such nodes.
    Expiring(Duration),
}

/// A request without its number.
#[derive(Clone)]
pub struct Request {
    op: i32,
    body: Vec<u8>,
    /// As part of a transaction: if it is refused for this reason, what to send instead, or nothing.
    pub otherwise: Option<(Refusal, Option<Box<Request>>)>,
}

const AUTH: i32 = 100;
/// Answers come in order, so the numbers of requests do not matter; only authentication must have this one.
const AUTH_XID: i32 = -4;
const NO_MORE: i32 = -1;

impl Request {
    pub fn create(path: &str, data: &[u8], acl: &str, kind: Kind) -> Request {
        const ALL_PERMISSIONS: i32 = 31;
        let (op, flags) = match kind {
            Kind::Persistent => (15, 0),
            Kind::Ephemeral => (15, 1),
            Kind::EphemeralSequential => (15, 3),
            Kind::Container => (19, 4),
            Kind::Expiring(_) => (21, 5),
        };
        let (scheme, id) = acl.split_once(':').unwrap_or((acl, ""));
        let node = Request::new(op).buffer(path).buffer(data);
        let create = node.i32(1).i32(ALL_PERMISSIONS).buffer(scheme).buffer(id).i32(flags);
        match kind {
            Kind::Expiring(after) => create.i64(i64::try_from(after.as_millis()).unwrap_or(i64::MAX)),
            _ => create,
        }
    }

    pub fn delete(path: &str, version: i32) -> Request {
        Request::new(2).buffer(path).i32(version)
    }

    /// As part of a transaction: whether or not the node is there.
    pub fn delete_if_there(path: &str) -> Request {
        Request::delete(path, ANY_VERSION).unless(Refusal::NO_NODE)
    }

    /// That the node is there; as part of a [`multi`](Self::multi) only.
    pub fn check(path: &str) -> Request {
        Request::new(13).buffer(path).i32(ANY_VERSION)
    }

    pub fn exists(path: &str) -> Request {
        Request::new(3).buffer(path).bool(false)
    }

    pub fn get_data(path: &str) -> Request {
        Request::new(4).buffer(path).bool(false)
    }

    pub fn get_children(path: &str) -> Request {
        Request::new(8).buffer(path).bool(false)
    }

    /// The same request, which reads something, with a watch.
    pub fn watched(mut self) -> Request {
        self.body.pop();
        self.bool(true)
    }

    pub fn set_data(path: &str, data: &[u8], version: i32) -> Request {
        Request::new(5).buffer(path).buffer(data).i32(version)
    }

    /// All of them or none, in one transaction of the ensemble.
    pub fn multi<'a>(parts: impl IntoIterator<Item = &'a Request>) -> Request {
        let mut all = Request::new(14);
        for part in parts {
            all = all.i32(part.op).bool(false).i32(-1).bytes(&part.body);
        }
        all.i32(NO_MORE).bool(true).i32(-1)
    }

    /// As part of a transaction: left out if it is refused for this reason.
    pub fn unless(self, refused: Refusal) -> Request {
        Request { otherwise: Some((refused, None)), ..self }
    }

    /// As part of a transaction: replaced if it is refused for this reason.
    pub fn or(self, refused: Refusal, instead: Request) -> Request {
        Request { otherwise: Some((refused, Some(Box::new(instead)))), ..self }
    }

    pub fn digest_auth(username: &str, password: &str) -> Request {
        Request::new(AUTH).i32(0).buffer("digest").buffer(format!("{username}:{password}"))
    }

    pub fn close_session() -> Request {
        Request::new(-11)
    }

    fn frame(&self, xid: i32) -> Bytes {
        let xid = if self.op == AUTH { AUTH_XID } else { xid };
        [&xid.to_be_bytes(), &self.op.to_be_bytes(), &self.body[..]].concat().into()
    }

    fn new(op: i32) -> Request {
        Request { op, body: Vec::new(), otherwise: None }
    }

    fn bytes(mut self, bytes: &[u8]) -> Request {
        self.body.extend_from_slice(bytes);
        self
    }

    fn i32(self, value: i32) -> Request {
        self.bytes(&value.to_be_bytes())
    }

    fn i64(self, value: i64) -> Request {
        self.bytes(&value.to_be_bytes())
    }

    fn bool(self, value: bool) -> Request {
        self.bytes(&[u8::from(value)])
    }

    fn buffer(self, bytes: impl AsRef<[u8]>) -> Request {
        self.i32(bytes.as_ref().len() as i32).bytes(bytes.as_ref())
    }
}

pub const ANY_VERSION: i32 = -1;

/// What a server answers instead of a result. Those with a name mean something to a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal(i32);

impl Refusal {
    pub const UNIMPLEMENTED: Refusal = Refusal(-6);
    pub const NO_NODE: Refusal = Refusal(-101);
    pub const NO_AUTH: Refusal = Refusal(-102);
    pub const BAD_VERSION: Refusal = Refusal(-103);
    pub const NODE_EXISTS: Refusal = Refusal(-110);
    pub const SESSION_EXPIRED: Refusal = Refusal(-112);
    const AUTH_FAILED: Refusal = Refusal(-115);
    pub const SESSION_MOVED: Refusal = Refusal(-118);
    /// The server demands a kind of authentication that we did not offer.
    const AUTH_REQUIRED: Refusal = Refusal(-124);
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Refusal::UNIMPLEMENTED => "the server does not implement this",
            Refusal::NO_NODE => "the node does not exist",
            Refusal::NO_AUTH => "the node's ACL denies us access",
            Refusal::BAD_VERSION => "the node was changed meanwhile",
            Refusal::NODE_EXISTS => "the node exists already",
            Refusal::SESSION_EXPIRED => "the server has expired our session",
            Refusal::AUTH_FAILED | Refusal::AUTH_REQUIRED => "authentication failed",
            Refusal::SESSION_MOVED => "the session has moved to another server",
            Refusal(code) => return write!(f, "ZooKeeper error {code}"),
        })
    }
}

impl std::error::Error for Refusal {}

/// Whether the ensemble has ended our session, or is as good as certain to have; what was ephemeral of it is gone.
pub fn has_expired(error: &anyhow::Error) -> bool {
    error.downcast_ref() == Some(&Refusal::SESSION_EXPIRED)
}

/// A refusal that is no part of the recipe, as an error.
pub fn refusal(why: Refusal, what: impl fmt::Display) -> anyhow::Error {
    let error = anyhow::Error::new(why).context(what.to_string());
    match why {
        Refusal::NO_AUTH | Refusal::AUTH_FAILED | Refusal::AUTH_REQUIRED => error.context(Fault::Refused),
        _ => error,
    }
}

pub type Answer = Result<Vec<u8>, Refusal>;

const NOTIFICATION_XID: i32 = -1;
const ERROR: i32 = -1;
const ROLLED_BACK: i32 = -2;

pub struct Connected {
    /// Zero if the session asked for is no more.
    pub session: i64,
    pub password: Vec<u8>,
    pub ttl: Duration,
}

impl Connected {
    pub fn read(frame: &[u8]) -> Result<Connected> {
        let mut read = frame;
        let _protocol = read.try_get_i32()?;
        let ttl = Duration::from_millis(u64::try_from(read.try_get_i32()?).unwrap_or(0));
        Ok(Connected { session: read.try_get_i64()?, password: buffer(&mut read)?.to_vec(), ttl })
    }
}

/// Reads a frame from the server, after the session is set up: an answer, with the latest transaction that the server has
/// seen, or `None` for a watch that has fired.
pub fn read_frame(frame: &[u8]) -> Result<Option<(i64, Answer)>> {
    let mut read = frame;
    let (xid, zxid, code) = (read.try_get_i32()?, read.try_get_i64()?, read.try_get_i32()?);
    let answer = if code == 0 { Ok(read.to_vec()) } else { Err(Refusal(code)) };
    Ok((xid != NOTIFICATION_XID).then_some((zxid, answer)))
}

/// Which part of a transaction was refused, and how; `None` if all was done.
pub fn multi_refusal(answer: &[u8]) -> Result<Option<(usize, Refusal)>> {
    let mut read = answer;
    for part in 0.. {
        let (op, done, code) = (read.try_get_i32()?, read.try_get_u8()? != 0, read.try_get_i32()?);
        // The parts of a refused multi are all errors, so whatever else comes first means success.
        if done || op != ERROR {
            break;
        }
        let _code_again = read.try_get_i32()?;
        if code != 0 && code != ROLLED_BACK {
            return Ok(Some((part, Refusal(code))));
        }
    }
    Ok(None)
}

/// What of a node's stat matters to a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    pub czxid: i64,
    /// When it was created by the server's clock, in milliseconds since the epoch.
    pub ctime: i64,
    pub version: i32,
    pub ephemeral_owner: i64,
}

pub fn read_stat(answer: &[u8]) -> Result<Stat> {
    let mut read = answer;
    let (czxid, _mzxid) = (read.try_get_i64()?, read.try_get_i64()?);
    let (ctime, _mtime) = (read.try_get_i64()?, read.try_get_i64()?);
    let (version, _cversion, _aversion) = (read.try_get_i32()?, read.try_get_i32()?, read.try_get_i32()?);
    Ok(Stat { czxid, ctime, version, ephemeral_owner: read.try_get_i64()? })
}

pub fn read_data(answer: &[u8]) -> Result<(Vec<u8>, Stat)> {
    let mut read = answer;
    Ok((buffer(&mut read)?.to_vec(), read_stat(read)?))
}

pub fn read_children(answer: &[u8]) -> Result<Vec<String>> {
    let mut read = answer;
    let string = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).context("a reply of the server is not UTF-8");
    (0..read.try_get_i32()?).map(|_| string(buffer(&mut read)?)).collect()
}

/// What a request about a node found; `None` if there is no such node.
pub fn found<T>(answer: &Answer, read: fn(&[u8]) -> Result<T>, what: impl fmt::Display) -> Result<Option<T>> {
    match answer {
        Ok(answer) => read(answer).map(Some),
        Err(Refusal::NO_NODE) => Ok(None),
        Err(why) => Err(refusal(*why, what)),
    }
}

/// A length of -1 stands for null, which to us is as good as empty.
fn buffer<'a>(read: &mut &'a [u8]) -> Result<&'a [u8]> {
    let length = read.try_get_i32()?;
    ensure!(length >= -1, "a reply of the server has a negative length");
    let length = usize::try_from(length).unwrap_or(0);
    let (head, tail) = read.split_at_checked(length).context("a reply of the server ends early")?;
    *read = tail;
    Ok(head)
}

pub struct Link {
    frames: Framed<net::Socket, LengthDelimitedCodec>,
    xid: i32,
    /// The latest transaction we have seen the effects of.
    pub seen: i64,
    /// A watch has fired since this was last set to false.
    pub notified: bool,
}

/// A server accepted our connection and then closed it.
pub const NO_SESSION: &str =
    "no session was set up: the server has no quorum, or its fill of connections from here (maxClientCnxns)";

const PORT: u16 = 2181;
const TLS_PORT: u16 = 2281;
/// Larger than what ZooKeeper lets anybody store or list.
const LARGEST_FRAME: usize = 64 << 20;

impl Link {
    pub async fn open(host: &Host, tls: Option<&Arc<ClientConfig>>) -> Result<Link> {
        let at = host.with_port(if tls.is_some() { TLS_PORT } else { PORT });
        let codec = LengthDelimitedCodec::builder().max_frame_length(LARGEST_FRAME).new_codec();
        let frames = Framed::new(net::tcp(&at, tls).await?, codec);
        Ok(Link { frames, xid: 0, seen: 0, notified: false })
    }

    /// Opens a session, or takes one over to this connection. A server without a quorum is of no use to us, not even for
    /// reading, which the last byte would allow.
    pub async fn handshake(&mut self, session: i64, password: &[u8], ttl: Duration, seen: i64) -> Result<Connected> {
        self.seen = seen;
        let ttl = i32::try_from(ttl.as_millis()).unwrap_or(i32::MAX);
        let request = Request::new(0).i32(0).i64(seen).i32(ttl).i64(session).buffer(password).bool(false);
        self.send(vec![Bytes::from(request.body)]).await?;
        let frame = self.frame().await.context(NO_SESSION)?;
        Connected::read(&frame)
    }

    /// Sends all requests at once and collects their answers. The server serves them one after the other,
    /// so each sees what those before it did.
    pub async fn call(&mut self, requests: &[Request]) -> Result<Vec<Answer>> {
        self.ask(requests).await?;
        let mut answers = Vec::with_capacity(requests.len());
        while answers.len() < requests.len() {
            answers.extend(self.answer().await?);
        }
        Ok(answers)
    }

    /// Sends requests whose answers nobody waits for yet.
    pub async fn ask(&mut self, requests: &[Request]) -> Result<()> {
        let mut frames = Vec::with_capacity(requests.len());
        for request in requests {
            self.xid = self.xid.wrapping_add(1) & i32::MAX;
            frames.push(request.frame(self.xid));
        }
        self.send(frames).await
    }

    /// Returns when a watch has fired. May be dropped and called again.
    pub async fn changed(&mut self) -> Result<()> {
        while !std::mem::take(&mut self.notified) {
            let _answer_to_nobody = self.answer().await?;
        }
        Ok(())
    }

    /// Takes the next frame: an answer, or `None` for a watch that has fired.
    async fn answer(&mut self) -> Result<Option<Answer>> {
        let Some((zxid, answer)) = read_frame(&self.frame().await?)? else {
            self.notified = true;
            return Ok(None);
        };
        self.seen = self.seen.max(zxid);
        Ok(Some(answer))
    }

    async fn send(&mut self, frames: Vec<Bytes>) -> Result<()> {
        self.frames.send_all(&mut stream::iter(frames.into_iter().map(Ok))).await.map_err(unreachable)
    }

    async fn frame(&mut self) -> Result<BytesMut> {
        match self.frames.next().await {
            Some(Err(error)) if error.get_ref().is_some_and(|why| why.is::<LengthDelimitedCodecError>()) => {
                Err(Fault::Unreachable.because("this does not speak ZooKeeper"))
            }
            Some(frame) => frame.map_err(unreachable),
            None => Err(Fault::Unreachable.because("the server closed the connection")),
        }
    }
}

fn unreachable(error: io::Error) -> anyhow::Error {
    let fault = tls::fault(&error);
    anyhow::Error::new(error).context(fault)
}
