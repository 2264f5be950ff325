//! ZooKeeper's wire format ("jute"), as far as a lock needs it: replies from bytes.

use std::fmt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// What a server answers instead of a result. Only those with a name mean something to a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    NoNode,
    NoAuth,
    BadVersion,
    NodeExists,
    SessionExpired,
    AuthFailed,
    SessionMoved,
    Unimplemented,
    Other(i32),
}

impl Refusal {
    fn from_code(code: i32) -> Option<Refusal> {
        Some(match code {
            0 => return None,
            -6 => Refusal::Unimplemented,
            -101 => Refusal::NoNode,
            -102 => Refusal::NoAuth,
            -103 => Refusal::BadVersion,
            -110 => Refusal::NodeExists,
            -112 => Refusal::SessionExpired,
            // -124: the server demands a kind of authentication that we did not offer.
            -115 | -124 => Refusal::AuthFailed,
            -118 => Refusal::SessionMoved,
            other => Refusal::Other(other),
        })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NoNode => f.write_str("the node does not exist"),
            Refusal::NoAuth => f.write_str("the node's ACL keeps us out"),
            Refusal::BadVersion => f.write_str("the node was changed meanwhile"),
            Refusal::NodeExists => f.write_str("the node exists already"),
            Refusal::SessionExpired => f.write_str("the session has expired"),
            Refusal::AuthFailed => f.write_str("authentication failed"),
            Refusal::SessionMoved => f.write_str("the session has moved to another server"),
            Refusal::Unimplemented => f.write_str("the server does not implement this"),
            Refusal::Other(code) => write!(f, "ZooKeeper error {code}"),
        }
    }
}

impl std::error::Error for Refusal {}

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
        let mut read = Reader(frame);
        let _protocol = read.i32()?;
        let ttl = Duration::from_millis(u64::try_from(read.i32()?).unwrap_or(0));
        Ok(Connected { session: read.i64()?, password: read.buffer()?.to_vec(), ttl })
    }
}

/// One frame from the server, after the session is set up.
pub enum Frame {
    Notification,
    Reply { zxid: i64, answer: Answer },
}

impl Frame {
    pub fn read(frame: &[u8]) -> Result<Frame> {
        let mut read = Reader(frame);
        let (xid, zxid, code) = (read.i32()?, read.i64()?, read.i32()?);
        Ok(match (xid, Refusal::from_code(code)) {
            (NOTIFICATION_XID, _) => Frame::Notification,
            (_, Some(refusal)) => Frame::Reply { zxid, answer: Err(refusal) },
            (_, None) => Frame::Reply { zxid, answer: Ok(read.0.to_vec()) },
        })
    }
}

/// Which part of a multi was refused, and how; `None` if all was done.
pub fn multi_refusal(answer: &[u8]) -> Result<Option<(usize, Refusal)>> {
    let mut read = Reader(answer);
    for part in 0.. {
        let (op, done, code) = (read.i32()?, read.bool()?, read.i32()?);
        // The parts of a refused multi are all errors, so whatever else comes first means success.
        if done || op != ERROR {
            break;
        }
        let _code_again = read.i32()?;
        if let Some(refusal) = Refusal::from_code(code).filter(|_| code != ROLLED_BACK) {
            return Ok(Some((part, refusal)));
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
    /// The same of the last change of its data.
    pub mtime: i64,
    pub version: i32,
    pub ephemeral_owner: i64,
}

pub fn read_stat(answer: &[u8]) -> Result<Stat> {
    Reader(answer).stat()
}

pub fn read_created(answer: &[u8]) -> Result<(String, Stat)> {
    let mut read = Reader(answer);
    Ok((read.string()?, read.stat()?))
}

/// The path of the node that the first part of a multi has created, if all of it was done.
pub fn read_first_created(answer: &[u8]) -> Result<String> {
    let mut read = Reader(answer);
    let (_op, _done, _code) = (read.i32()?, read.bool()?, read.i32()?);
    read.string()
}

pub fn read_data(answer: &[u8]) -> Result<(Vec<u8>, Stat)> {
    let mut read = Reader(answer);
    Ok((read.buffer()?.to_vec(), read.stat()?))
}

pub fn read_children(answer: &[u8]) -> Result<Vec<String>> {
    let mut read = Reader(answer);
    (0..read.i32()?).map(|_| read.string()).collect()
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count).context("a reply of the server ends early")?;
        self.0 = tail;
        Ok(head)
    }

    fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_be_bytes(self.take(4)?.try_into()?))
    }

    fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_be_bytes(self.take(8)?.try_into()?))
    }

    fn bool(&mut self) -> Result<bool> {
        Ok(self.take(1)?[0] != 0)
    }

    /// A length of -1 stands for null, which to us is as good as empty.
    fn buffer(&mut self) -> Result<&'a [u8]> {
        let length = self.i32()?;
        ensure!(length >= -1, "a reply of the server has a negative length");
        self.take(usize::try_from(length).unwrap_or(0))
    }

    fn string(&mut self) -> Result<String> {
        String::from_utf8(self.buffer()?.to_vec()).context("a reply of the server is not UTF-8")
    }

    fn stat(&mut self) -> Result<Stat> {
        let czxid = self.i64()?;
        let _mzxid = self.i64()?;
        let ctime = self.i64()?;
        let mtime = self.i64()?;
        let version = self.i32()?;
        let _cversion = self.i32()?;
        let _aversion = self.i32()?;
        Ok(Stat { czxid, ctime, mtime, version, ephemeral_owner: self.i64()? })
    }
}
