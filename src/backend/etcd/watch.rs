//! Which changes of which keys a contender waits for, and the stream on which etcd reports them.

use anyhow::Result;
use etcd_client::{Client, Error, WatchFilterType, WatchOptions, WatchStream};

use super::queue::Entry;
use crate::lock::queue::Watched;

/// A key, and which of its changes matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchedKey {
    EndOf(Vec<u8>),
    /// Any of the keys with this prefix ends.
    EndOfAny(Vec<u8>),
    AnyChangeOf(Vec<u8>),
}

impl WatchedKey {
    /// What a waiter has to watch in the queue with this prefix.
    pub fn of(watched: &Watched<'_, Entry>, prefix: String) -> WatchedKey {
        match watched {
            Watched::EndOf(one) => WatchedKey::EndOf(one.key.clone()),
            Watched::EndOfAny(_) => WatchedKey::EndOfAny(prefix.into_bytes()),
            Watched::ChangeOf(one) => WatchedKey::AnyChangeOf(one.key.clone()),
        }
    }

    fn options(&self, from: i64) -> (Vec<u8>, WatchOptions) {
        let options = WatchOptions::new().with_start_revision(from);
        match self {
            WatchedKey::EndOf(key) => (key.clone(), options.with_filters([WatchFilterType::NoPut])),
            WatchedKey::EndOfAny(key) => (key.clone(), options.with_filters([WatchFilterType::NoPut]).with_prefix()),
            WatchedKey::AnyChangeOf(key) => (key.clone(), options),
        }
    }
}

/// What to watch, and since when. Survives the streams it is watched on.
#[derive(Default)]
pub struct Watch {
    keys: Vec<WatchedKey>,
    /// The first revision not seen yet.
    from: i64,
}

impl Watch {
    /// Whether there is nothing to wait for.
    pub fn is_idle(&self) -> bool {
        self.keys.is_empty()
    }

    pub fn watches(&self, keys: &[WatchedKey]) -> bool {
        self.keys == keys
    }

    /// Watches these from now on; all that happened up to this revision is known.
    pub fn set(&mut self, keys: Vec<WatchedKey>, seen: i64) {
        (self.keys, self.from) = (keys, seen + 1);
    }

    pub async fn open(&self, mut client: Client) -> Result<Stream, Error> {
        let mut keys = self.keys.iter().map(|key| key.options(self.from));
        let (key, options) = keys.next().ok_or_else(|| Error::WatchError("nothing to watch".to_owned()))?;
        let mut stream = client.watch(key, Some(options)).await?;
        for (key, options) in keys {
            stream.watch(key, Some(options)).await?;
        }
        Ok(Stream(stream))
    }

    /// What was seen up to this revision need not be seen again.
    pub fn seen_until(&mut self, revision: i64) {
        self.from = self.from.max(revision + 1);
    }
}

pub struct Stream(WatchStream);

pub enum WatchEvent {
    /// Something happened, up to this revision.
    Change(i64),
    /// The server keeps no history as far back as we asked for; there may have been a change.
    Compacted(i64),
    /// This stream will not tell us any more.
    Ended,
}

impl Stream {
    /// Waits for something to happen. May be dropped at any time without missing anything.
    pub async fn next(&mut self) -> WatchEvent {
        loop {
            match self.0.message().await {
                Ok(Some(answer)) if answer.compact_revision() > 0 => {
                    return WatchEvent::Compacted(answer.compact_revision());
                }
                Ok(Some(answer)) if answer.canceled() => return WatchEvent::Ended,
                Ok(Some(answer)) if answer.events().is_empty() => {}
                Ok(Some(answer)) => return WatchEvent::Change(answer.header().map_or(0, |header| header.revision())),
                Ok(None) | Err(_) => return WatchEvent::Ended,
            }
        }
    }
}
