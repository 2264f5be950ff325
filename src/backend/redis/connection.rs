//! One connection to one Redis server, by the `redis` crate over a stream of ours. The crate knows the protocol and how to
//! log in. What it leaves to us: how much a server may send, and that a connection with a request that was given up is
//! never used again, since such a request may still be carried out and its answer still arrive.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::anyhow;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ErrorKind, ProtocolVersion, PushInfo, RedisConnectionInfo, RedisError, Value};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::backend::net::{Bounded, Socket};
use crate::backend::tls;
use crate::exit::Fault;

/// What a server may send as one answer, before it has let us in and after. No answer comes near to these.
const LARGEST_OF_A_STRANGER: usize = 16 << 20;
const LARGEST: usize = 64 << 20;
/// How many pushes are kept. All of them mean the same: it is time to look.
const MOST_PUSHES: usize = 16;
/// How much of an error of the server is shown (characters).
const LONGEST_ERROR: usize = 500;

pub struct Connection {
    pub redis: MultiplexedConnection,
    /// What the server pushes; `None` if it does not know RESP3.
    pub pushes: Option<mpsc::Receiver<PushInfo>>,
    /// The server was asked to push a message when a key changes that we have read.
    pub listening: bool,
    driver: JoinHandle<()>,
}

impl Connection {
    /// Logs in, in a round trip of its own: a verb sent along with a log-in that fails would be carried out all the same, as
    /// whoever may, on whichever database.
    pub async fn open(socket: Socket, login: &RedisConnectionInfo) -> Result<Connection, RedisError> {
        let limit = Arc::new(AtomicUsize::new(LARGEST_OF_A_STRANGER));
        let stream = Bounded::new(socket, Arc::clone(&limit), in_memory);
        // Callers keep their own time.
        let mut config = AsyncConnectionConfig::new().set_response_timeout(None);
        let mut pushes = None;
        if login.protocol() == ProtocolVersion::RESP3 {
            let (sender, receiver) = mpsc::channel(MOST_PUSHES);
            config = config.set_push_sender(move |push| sender.try_send(push));
            pushes = Some(receiver);
        }
        let (redis, driver) = MultiplexedConnection::new_with_config(login, stream, config).await?;
        if login.password().is_some() {
            limit.store(LARGEST, Ordering::Relaxed);
        }
        Ok(Connection { redis, pushes, listening: false, driver: tokio::spawn(driver) })
    }
}

/// What an answer takes in memory: its text, and for each value the value itself and what is allocated for it. Each value
/// takes a line at least.
fn in_memory(answer: &[u8]) -> usize {
    answer.len() + answer.iter().filter(|&&byte| byte == b'\n').count() * 2 * size_of::<Value>()
}

impl Drop for Connection {
    /// Without this the crate would keep the connection until all that was sent is answered.
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// Whether the server itself has said this, so that the connection is as good as before.
pub fn is_answer(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(_) | ErrorKind::Extension)
}

pub fn is_unknown_command(error: &RedisError) -> bool {
    error.detail().is_some_and(|detail| detail.starts_with("unknown command"))
}

/// Whether the server, or what stands before it, knows no RESP3.
pub fn lacks_resp3(error: &RedisError) -> bool {
    let kind = error.kind();
    kind == ErrorKind::RESP3NotSupported || error.code() == Some("NOPROTO") || is_unknown_command(error)
}

/// Whether an error is about us or about the server's own condition, and in which words to say so.
pub fn refusal(error: RedisError) -> anyhow::Error {
    const REFUSED: [&str; 5] = ["WRONGPASS", "NOPERM", "ERR invalid password", "ERR AUTH", "ERR Client sent AUTH"];
    const UNABLE: &str = "LOADING READONLY MASTERDOWN CLUSTERDOWN TRYAGAIN MOVED ASK BUSY MISCONF OOM NOREPLICAS";
    let text = format!("{} {}", error.code().unwrap_or_default(), error.detail().unwrap_or_default());
    let says = anyhow!("Redis says: {}", text.chars().take(LONGEST_ERROR).collect::<String>());
    let starts = |with: &[&str]| with.iter().any(|word| text.starts_with(word));
    match error.kind() {
        ErrorKind::Parse => Fault::Unreachable.because("this is not the protocol of Redis"),
        ErrorKind::AuthenticationFailed => Fault::Refused.because("Redis denied this user and password"),
        _ if !is_answer(&error) => broken(&error),
        // Redis does not even read a long command of somebody who has not logged in.
        _ if starts(&["NOAUTH", "ERR Protocol error: unauthenticated"]) => Fault::Refused.because(
            "Redis wants a password and was given none: name a file that has it with password-file=PATH in the URL",
        ),
        _ if starts(&REFUSED) => says.context(Fault::Refused),
        _ if UNABLE.split(' ').any(|word| starts(&[word])) => says.context(Fault::Unreachable),
        _ if starts(&["ERR max number of clients"]) => says.context(Fault::Unreachable),
        _ if starts(&["ERR DB index"]) => says.context(Fault::Config),
        _ if text.contains("WRONGTYPE") => says.context("a key of this lock has been overwritten by something else"),
        _ => says,
    }
}

fn broken(error: &RedisError) -> anyhow::Error {
    let inner = error.source().and_then(|inner| inner.downcast_ref::<Arc<dyn Error + Send + Sync>>());
    let inner = inner.and_then(|inner| inner.downcast_ref::<io::Error>());
    anyhow!("{error}").context("the connection broke").context(inner.map_or(Fault::Unreachable, tls::fault))
}

#[cfg(test)]
mod tests {
    use redis::parse_redis_value;

    use super::*;

    fn error(text: &str) -> RedisError {
        let value = parse_redis_value(format!("-{text}\r\n").as_bytes()).unwrap();
        value.extract_error().unwrap_err()
    }

    #[test]
    fn what_redis_says_decides_whose_fault_it_is() {
        for (text, fault) in [
            ("WRONGPASS invalid username-password pair or user is disabled.", Fault::Refused),
            ("NOAUTH Authentication required.", Fault::Refused),
            ("NOPERM this user has no permissions to run the 'evalsha' command", Fault::Refused),
            ("ERR Protocol error: unauthenticated multibulk length", Fault::Refused),
            ("LOADING Redis is loading the dataset in memory", Fault::Unreachable),
            ("READONLY You can't write against a read only replica.", Fault::Unreachable),
            ("CLUSTERDOWN The cluster is down", Fault::Unreachable),
            ("ERR DB index is out of range", Fault::Config),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", Fault::Internal),
        ] {
            assert_eq!(Fault::of(&refusal(error(text))), fault, "{text}");
        }
    }

    #[test]
    fn a_server_without_resp3_is_told_from_one_that_refuses_us() {
        for text in ["ERR unknown command 'HELLO', with args", "ERR unknown command `HELLO`", "NOPROTO unsupported"] {
            assert!(lacks_resp3(&error(text)), "{text}");
        }
        for text in ["WRONGPASS invalid", "NOAUTH HELLO must be called", "ERR max number of clients reached"] {
            assert!(!lacks_resp3(&error(text)), "{text}");
        }
    }
}
