//! ZooKeeper's wire format ("jute"), as far as a lock needs it: requests as bytes.

use std::time::Duration;

/// Who may touch what we create.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acl {
    Anyone,
    /// Whoever authenticates as we did.
    Creator,
}

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

/// A request but for its number.
pub struct Request {
    op: i32,
    body: Vec<u8>,
}

const AUTH: i32 = 100;
/// Answers come in order; only authentication has to have this number.
const AUTH_XID: i32 = -4;
const NO_MORE: i32 = -1;

impl Request {
    pub fn create(path: &str, data: &[u8], acl: Acl, kind: Kind) -> Request {
        let (op, flags) = match kind {
            Kind::Persistent => (15, 0),
            Kind::Ephemeral => (15, 1),
            Kind::EphemeralSequential => (15, 3),
            Kind::Container => (19, 4),
            Kind::Expiring(_) => (21, 5),
        };
        let (scheme, id) = match acl {
            Acl::Anyone => ("world", "anyone"),
            Acl::Creator => ("auth", ""),
        };
        const ALL_PERMISSIONS: i32 = 31;
        let mut body = Vec::new();
        put_buffer(&mut body, path.as_bytes());
        put_buffer(&mut body, data);
        put_i32(&mut body, 1);
        put_i32(&mut body, ALL_PERMISSIONS);
        put_buffer(&mut body, scheme.as_bytes());
        put_buffer(&mut body, id.as_bytes());
        put_i32(&mut body, flags);
        if let Kind::Expiring(after) = kind {
            put_i64(&mut body, i64::try_from(after.as_millis()).unwrap_or(i64::MAX));
        }
        Request { op, body }
    }

    pub fn delete(path: &str, version: i32) -> Request {
        Request::on_version(2, path, version)
    }

    /// That the node is there; as part of a [`multi`](Self::multi) only.
    pub fn check(path: &str) -> Request {
        Request::on_version(13, path, ANY_VERSION)
    }

    pub fn exists(path: &str, watch: bool) -> Request {
        Request::reading(3, path, watch)
    }

    pub fn get_data(path: &str, watch: bool) -> Request {
        Request::reading(4, path, watch)
    }

    pub fn get_children(path: &str) -> Request {
        Request::reading(8, path, false)
    }

    pub fn set_data(path: &str, data: &[u8], version: i32) -> Request {
        let mut body = Vec::new();
        put_buffer(&mut body, path.as_bytes());
        put_buffer(&mut body, data);
        put_i32(&mut body, version);
        Request { op: 5, body }
    }

    /// All of them or none, in one transaction of the ensemble.
    pub fn multi(parts: &[Request]) -> Request {
        let mut body = Vec::new();
        for part in parts {
            put_multi_header(&mut body, part.op, false);
            body.extend_from_slice(&part.body);
        }
        put_multi_header(&mut body, NO_MORE, true);
        Request { op: 14, body }
    }

    pub fn digest_auth(username: &str, password: &str) -> Request {
        let mut body = Vec::new();
        put_i32(&mut body, 0);
        put_buffer(&mut body, b"digest");
        put_buffer(&mut body, format!("{username}:{password}").as_bytes());
        Request { op: AUTH, body }
    }

    pub fn close_session() -> Request {
        Request { op: -11, body: Vec::new() }
    }

    fn on_version(op: i32, path: &str, version: i32) -> Request {
        let mut body = Vec::new();
        put_buffer(&mut body, path.as_bytes());
        put_i32(&mut body, version);
        Request { op, body }
    }

    fn reading(op: i32, path: &str, watch: bool) -> Request {
        let mut body = Vec::new();
        put_buffer(&mut body, path.as_bytes());
        body.push(u8::from(watch));
        Request { op, body }
    }

    pub fn write_to(&self, out: &mut Vec<u8>, xid: i32) {
        put_i32(out, self.body.len() as i32 + 8);
        put_i32(out, if self.op == AUTH { AUTH_XID } else { xid });
        put_i32(out, self.op);
        out.extend_from_slice(&self.body);
    }
}

pub const ANY_VERSION: i32 = -1;

/// Opens a session, or takes one over to this connection.
pub fn connect_request(session: i64, password: &[u8], ttl: Duration, seen: i64) -> Vec<u8> {
    let mut body = Vec::new();
    put_i32(&mut body, 0);
    put_i64(&mut body, seen);
    put_i32(&mut body, i32::try_from(ttl.as_millis()).unwrap_or(i32::MAX));
    put_i64(&mut body, session);
    put_buffer(&mut body, password);
    body.push(0); // a server without a quorum is of no use to us, even for reading
    let mut frame = Vec::new();
    put_buffer(&mut frame, &body);
    frame
}

fn put_i32(out: &mut Vec<u8>, value: i32) {
    out.extend_from_slice(&value.to_be_bytes());
}

fn put_i64(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(&value.to_be_bytes());
}

fn put_buffer(out: &mut Vec<u8>, bytes: &[u8]) {
    put_i32(out, bytes.len() as i32);
    out.extend_from_slice(bytes);
}

fn put_multi_header(out: &mut Vec<u8>, op: i32, done: bool) {
    put_i32(out, op);
    out.push(u8::from(done));
    put_i32(out, -1);
}
