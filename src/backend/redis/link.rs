//! One connection to one Redis server. Commands go out together and are answered in one round trip. News
//! that the server pushes are set apart from answers.
//!
//! A client library would hide what matters here: which requests are still unanswered when a caller
//! gives up, and exactly when bytes are written.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;

use super::resp::{Command, Value, decode, encode};
use crate::backend::tls;
use crate::exit::Fault;

/// No answer comes near to these; whoever sends more means us no good. Anybody may listen where we connect to.
const LARGEST_OF_A_STRANGER: usize = 16 << 20;
const LARGEST: usize = 64 << 20;

/// Of what the server says so much is repeated (characters).
const LONGEST_ERROR: usize = 500;

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

pub struct Link {
    stream: Box<dyn Stream>,
    input: Vec<u8>,
    /// A verb was written whose answer has not been read: whoever finds this must not use the link.
    suspect: bool,
    /// Answers to come that nobody waits for any more.
    owed: usize,
    news: bool,
    listening: bool,
    /// The most that one answer may take.
    limit: usize,
}

impl Link {
    pub async fn unix(path: &Path) -> Result<Link> {
        let stream = UnixStream::connect(path)
            .await
            .with_context(|| format!("cannot connect to {}", path.display()))
            .context(Fault::Unreachable)?;
        Ok(Link::over(Box::new(stream)))
    }

    /// `at` is `host:port`.
    pub async fn tcp(at: &str, secured: Option<&Arc<ClientConfig>>) -> Result<Link> {
        let stream = TcpStream::connect(at)
            .await
            .with_context(|| format!("cannot connect to {at}"))
            .context(Fault::Unreachable)?;
        stream.set_nodelay(true).context("TCP_NODELAY")?;
        let Some(config) = secured else { return Ok(Link::over(Box::new(stream))) };
        let host = at.rsplit_once(':').map_or(at, |(host, _)| host).trim_matches(['[', ']']);
        let host = ServerName::try_from(host.to_owned())
            .with_context(|| format!("TLS cannot verify a host named {host:?}"))
            .context(Fault::Config)?;
        let stream = TlsConnector::from(config.clone()).connect(host, stream).await.map_err(|error| {
            let fault = tls::fault(&error);
            anyhow!(error).context(format!("TLS with {at}")).context(fault)
        })?;
        Ok(Link::over(Box::new(stream)))
    }

    fn over(stream: Box<dyn Stream>) -> Link {
        let limit = LARGEST_OF_A_STRANGER;
        Link { stream, input: Vec::new(), suspect: false, owed: 0, news: false, listening: false, limit }
    }

    /// The server has accepted our password.
    pub fn set_logged_in(&mut self) {
        self.limit = LARGEST;
    }

    pub fn is_sound(&self) -> bool {
        !self.suspect
    }

    /// Sends the commands in one go and reads the answer to each. A link on which this did not come to
    /// its end is not sound any more.
    pub async fn call(&mut self, commands: &[Command], within: Duration) -> Result<Vec<Value>> {
        self.suspect = true;
        let answers = self.read(commands, within).await?;
        self.suspect = false;
        Ok(answers)
    }

    /// The same for commands that change nothing: may be dropped at any time, and the link goes on.
    pub async fn read(&mut self, commands: &[Command], within: Duration) -> Result<Vec<Value>> {
        tokio::time::timeout(within, self.exchange(commands))
            .await
            .map_err(|_| Fault::Unreachable.because(format_args!("no answer within {within:?}")))?
    }

    async fn exchange(&mut self, commands: &[Command]) -> Result<Vec<Value>> {
        let mut out = Vec::new();
        commands.iter().for_each(|command| encode(command, &mut out));
        let suspect = std::mem::replace(&mut self.suspect, true);
        let written = self.write(&out).await;
        self.suspect = suspect;
        let forgotten = self.owed;
        self.owed += commands.len();
        let mut answers = Vec::with_capacity(commands.len());
        for n in 0..self.owed {
            let answer = self.answer().await?;
            self.owed -= 1;
            if n >= forgotten {
                answers.push(answer);
            }
        }
        // Looked at last: a server that closes on us may have said why, and that is the better error.
        written?;
        Ok(answers)
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        written.await.map_err(broken)
    }

    async fn answer(&mut self) -> Result<Value> {
        loop {
            match self.frame().await? {
                Value::Push(_) => self.news = true,
                answer => return Ok(answer),
            }
        }
    }

    /// Returns when the server has pushed news since this was last asked, with the keys if it is known which.
    /// May be dropped at any time.
    pub async fn news(&mut self) -> Result<Vec<String>> {
        if std::mem::take(&mut self.news) {
            return Ok(Vec::new());
        }
        let Value::Push(news) = self.frame().await? else { bail!("an answer that nobody asked for") };
        Ok(news.iter().flat_map(Value::items).filter_map(Value::text).collect())
    }

    /// What was pushed before an answer came is older than that answer.
    pub fn forget_news(&mut self) {
        self.news = false;
    }

    pub fn is_listening(&self) -> bool {
        self.listening
    }

    pub fn set_listening(&mut self) {
        self.listening = true;
    }

    /// Bytes wait in `input` until they are a whole value, so nothing is lost if this is dropped.
    async fn frame(&mut self) -> Result<Value> {
        loop {
            if let Some((value, length)) = decode(&self.input, self.limit).context(Fault::Unreachable)? {
                self.input.drain(..length);
                return Ok(value);
            }
            self.input.reserve(4096);
            if self.stream.read_buf(&mut self.input).await.map_err(broken)? == 0 {
                return Err(Fault::Unreachable.because("the server closed the connection"));
            }
        }
    }
}

fn broken(error: io::Error) -> anyhow::Error {
    let fault = tls::fault(&error);
    anyhow!(error).context("the connection broke").context(fault)
}

/// An error that the server answered with, and whether it is about us or about its own condition.
pub fn refusal(text: &str) -> anyhow::Error {
    let refused = ["WRONGPASS", "NOPERM", "ERR invalid password", "ERR AUTH", "ERR Client sent AUTH"];
    let unable = [
        "LOADING",
        "READONLY",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "MOVED",
        "ASK",
        "BUSY",
        "MISCONF",
        "OOM",
        "NOREPLICAS",
        "ERR max number of clients",
    ];
    let starts = |with: &[&str]| with.iter().any(|word| text.starts_with(word));
    let error = anyhow!("Redis says: {}", text.chars().take(LONGEST_ERROR).collect::<String>());
    // Redis does not even read a long command of somebody who has not logged in.
    let not_logged_in = starts(&["NOAUTH", "ERR Protocol error: unauthenticated"]);
    match () {
        () if not_logged_in => Fault::Refused.because(
            "Redis wants a password and was given none: name a file that has it with password-file=PATH in the URL",
        ),
        () if starts(&refused) => error.context(Fault::Refused),
        () if starts(&unable) => error.context(Fault::Unreachable),
        () if text.starts_with("ERR DB index") => error.context(Fault::Config),
        () if text.contains("WRONGTYPE") => error.context("a key of this lock has been overwritten by something else"),
        () => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(Fault::of(&refusal(text)), fault, "{text}");
        }
    }
}
