//! Being told when keys change, by the client-side caching that Redis has had since version 6: the
//! server pushes a message once a key that we have read is changed in whatever way.

use std::future::pending;
use std::time::Duration;

use anyhow::{Context, Result};

use super::link::refusal;
use super::resp::{Command, Value, command};
use super::server::Server;
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
    fn has_appeared(&self, touched: &[String]) -> bool {
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
            self.forget_link();
            if broke {
                return;
            }
            clock::sleep_until(clock::now() + LISTEN_AGAIN).await;
        }
    }

    async fn listen(&mut self, watch: &Watch) -> Result<()> {
        let read: Command = ["MGET"].into_iter().chain(watch.keys.iter().map(String::as_str)).map(Into::into).collect();
        while !self.deaf {
            let within = self.allowed();
            let link = self.link().await?;
            let mut commands = vec![command!["HELLO", "3"], command!["CLIENT", "TRACKING", "ON", "OPTIN"]];
            if link.is_listening() {
                commands.clear();
            }
            // Of these keys alone: the scripts read others too, which change whenever anybody waits.
            commands.extend([command!["CLIENT", "CACHING", "YES"], read.clone()]);
            let mut answers = link.read(&commands, within).await?;
            link.forget_news();
            let values = answers.pop().context("one answer to each command")?;
            if answers.iter().any(|answer| matches!(answer, Value::Error(_))) {
                self.deaf = true;
                break;
            }
            link.set_listening();
            match values {
                Value::Error(error) if error.starts_with("MOVED ") => self.follow(&error)?,
                Value::Error(error) => return Err(refusal(&error)),
                values if values.items().iter().map(Value::text).ne(watch.seen.iter().cloned()) => return Ok(()),
                _ => {
                    let touched = link.news().await?;
                    if watch.has_appeared(&touched) {
                        return Ok(());
                    }
                }
            }
        }
        pending().await
    }
}
