//! What is worth being woken for, and the stream on which etcd says that it happened.

use anyhow::Result;
use etcd_client::{Client, Error, WatchFilterType, WatchOptions, WatchStream};

use super::queue::{Contender, Queue};
use crate::lock::Mode;

/// A key, or all keys that begin with it, and which changes of it matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sight {
    pub key: Vec<u8>,
    pub and_below: bool,
    pub ignore: Option<WatchFilterType>,
}

impl Sight {
    /// Somebody's key vanishes.
    pub fn end_of(key: &[u8]) -> Sight {
        Sight { key: key.to_vec(), and_below: false, ignore: Some(WatchFilterType::NoPut) }
    }

    /// Anything at all happens to a key.
    pub fn of(key: &[u8]) -> Sight {
        Sight { key: key.to_vec(), and_below: false, ignore: None }
    }

    /// Any of the keys that begin so vanishes.
    pub fn end_of_any(prefix: &str) -> Sight {
        Sight { key: prefix.into(), and_below: true, ignore: Some(WatchFilterType::NoPut) }
    }
}

/// The one thing a waiter has to look at, so that a release wakes one waiter and not all of them.
pub fn in_the_way(mode: Mode, ahead: &[Contender], prefix: &str) -> Vec<Sight> {
    let last = |blocks: &dyn Fn(&&Contender) -> bool| ahead.iter().rfind(blocks).map(|one| Sight::end_of(&one.key));
    let sight = match mode {
        Mode::Exclusive => last(&|_| true),
        Mode::Shared => last(&|one| one.mode() != Mode::Shared),
        Mode::Slots(n) => match ahead.iter().rfind(|one| one.is_foreign()) {
            Some(alone) => Some(Sight::end_of(&alone.key)),
            // The first in the queue waits for any of the holders, and writes its key when it holds the
            // lock itself; that is the sign for the next to become the first.
            None if ahead.len() <= n as usize => Some(Sight::end_of_any(prefix)),
            None => ahead.last().map(|one| Sight::of(&one.key)),
        },
    };
    sight.into_iter().collect()
}

/// What to watch, and since when. Survives the streams it is watched on.
#[derive(Default)]
pub struct Watch {
    sights: Vec<Sight>,
    /// The first revision not seen yet.
    from: i64,
    /// The stream that is open looks at something else.
    turned: bool,
}

impl Watch {
    /// Whether this is nothing to wait for.
    pub fn is_idle(&self) -> bool {
        self.sights.is_empty()
    }

    /// Looks at these from now on.
    pub fn turn_to(&mut self, sights: Vec<Sight>, seen: &Queue) {
        self.from = seen.revision + 1;
        self.turned |= self.sights != sights;
        self.sights = sights;
    }

    /// Whether an open stream has to be replaced, which this takes as done.
    pub fn has_turned(&mut self) -> bool {
        std::mem::take(&mut self.turned)
    }

    pub async fn open(&self, mut client: Client) -> Result<Stream, Error> {
        let mut sights = self.sights.iter().map(|sight| (sight.key.clone(), self.options(sight)));
        let (key, options) = sights.next().ok_or_else(|| Error::WatchError("nothing to watch".to_owned()))?;
        let mut stream = client.watch(key, Some(options)).await?;
        for (key, options) in sights {
            stream.watch(key, Some(options)).await?;
        }
        Ok(Stream(stream))
    }

    fn options(&self, sight: &Sight) -> WatchOptions {
        let options = WatchOptions::new()
            .with_start_revision(self.from)
            .with_filters(sight.ignore.into_iter().collect::<Vec<_>>());
        if sight.and_below { options.with_prefix() } else { options }
    }

    /// What was seen up to this revision need not be seen again.
    pub fn seen_until(&mut self, revision: i64) {
        self.from = self.from.max(revision + 1);
    }
}

pub struct Stream(WatchStream);

pub enum Glimpse {
    /// Something happened, up to this revision.
    Change(i64),
    /// The server keeps no history as far back as we asked for; there may have been a change.
    Compacted(i64),
    /// This stream will not tell us any more.
    Over,
}

impl Stream {
    /// Waits for something to happen. May be dropped at any time without missing anything.
    pub async fn glimpse(&mut self) -> Glimpse {
        loop {
            match self.0.message().await {
                Ok(Some(answer)) if answer.compact_revision() > 0 => {
                    return Glimpse::Compacted(answer.compact_revision());
                }
                Ok(Some(answer)) if answer.canceled() => return Glimpse::Over,
                Ok(Some(answer)) if answer.events().is_empty() => {}
                Ok(Some(answer)) => return Glimpse::Change(answer.header().map_or(0, |header| header.revision())),
                Ok(None) | Err(_) => return Glimpse::Over,
            }
        }
    }
}
