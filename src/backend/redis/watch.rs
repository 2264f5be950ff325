//! Being told when keys change, by the client-side caching that Redis has had since version 6: the
//! server pushes a message once a key that we have read is changed in whatever way.

use std::future::pending;
use std::time::Duration;

use anyhow::{Result, bail};
use redis::{PushInfo, PushKind, RedisError, Value, pipe};

use super::answer::{items, text};
use super::connection::refusal;
use super::server::Server;
use super::target::redirect;
use crate::backend::within;
use crate::clock;

/// Between attempts to get a connection back that only listens.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);

/// Keys to be told about, and what they held when we last heard of them.
#[derive(Clone, Debug, Default)]
pub struct Watch {
    pub keys: Vec<String>,
    pub seen: Vec<Option<String>>,
}

impl Watch {
    /// Whether one of the keys that were touched was not there before: then it is now, and need not be read.
    fn has_appeared(&self, news: &PushInfo) -> bool {
        let touched: Vec<String> = news.data.iter().flat_map(items).filter_map(text).collect();
        self.keys.iter().zip(&self.seen).any(|(key, seen)| seen.is_none() && touched.contains(key))
    }
}

impl Server {
    /// Returns when the keys differ from what was seen, or once when the connection on which we
    /// listened breaks; never, if the server cannot tell. May be dropped at any time.
    pub async fn changed(&mut self, watch: &Watch) {
        loop {
            if let Ok(()) = self.listen(watch).await {
                return;
            }
            // That a connection broke on which we listened is news; that there is none is not, and
            // whoever asks is told why.
            let broke = self.was_listening();
            self.forget_connection();
            if broke {
                return;
            }
            clock::sleep_until(clock::now() + LISTEN_AGAIN).await;
        }
    }

    /// Its requests change nothing, so the connection goes on when this is dropped.
    async fn listen(&mut self, watch: &Watch) -> Result<()> {
        while !self.deaf {
            let patience = self.allowed();
            let connection = self.connect().await?;
            let Some(news) = &mut connection.news else { break };
            // What was pushed before we read the keys is older than what we read.
            while news.try_recv().is_ok() {}
            let mut read = pipe();
            if !connection.listening {
                read.cmd("CLIENT").arg("TRACKING").arg("ON").arg("OPTIN");
            }
            // Of these keys alone: the scripts read others too, which change whenever anybody waits.
            read.cmd("CLIENT").arg("CACHING").arg("YES").cmd("MGET").arg(&watch.keys);
            let answers = connection.redis.send_packed_commands(&read, 0, read.len());
            let mut answers = within(patience, async { answers.await.map_err(refusal) }).await?;
            let values = answers.pop().unwrap_or_default();
            if answers.iter().any(|answer| matches!(answer, Value::ServerError(_))) {
                self.deaf = true;
                break;
            }
            connection.listening = true;
            if let Value::ServerError(error) = values {
                let error = RedisError::from(error);
                match redirect(&error) {
                    Some((node, false)) => self.visit(node),
                    _ => {
                        self.forget_connection();
                        return Err(refusal(error));
                    }
                }
            } else if items(&values).iter().map(text).ne(watch.seen.iter().cloned()) {
                return Ok(());
            } else {
                match news.recv().await {
                    Some(news) if news.kind == PushKind::Disconnection => bail!("the server closed the connection"),
                    Some(news) if watch.has_appeared(&news) => return Ok(()),
                    Some(_) => {}
                    None => bail!("the connection broke"),
                }
            }
        }
        pending().await
    }
}
