//! Our place in the queue: taking it, finding it again, keeping it.

use anyhow::{Context, Result, bail};

use super::queue::Queue;
use super::record::{Record, ServerClock};
use super::reply::{self, Refusal, Stat};
use super::request::{ANY_VERSION, Kind, Request};
use super::{ZooKeeper, refusal, token};
use crate::backend::Ask;
use crate::lock::Token;

/// Our node among the contenders.
pub(super) struct Place {
    pub(super) path: String,
    pub(super) node: String,
    /// Whose ephemeral node it is.
    pub(super) session: i64,
    pub(super) czxid: i64,
    /// Of the data that we wrote; another one is an operator's.
    pub(super) version: i32,
    pub(super) record: Record,
    pub(super) clock: ServerClock,
    /// We were told to wait, so that the node's age is not the age of the grant.
    pub(super) waited: bool,
}

impl Place {
    pub(super) fn new(dir: &str, node: String, stat: Stat, record: Record) -> Place {
        let Stat { czxid, ctime, version, ephemeral_owner: session, .. } = stat;
        let clock = ServerClock { date: ctime, read: crate::clock::now() };
        Place { path: format!("{dir}/{node}"), node, session, czxid, version, record, clock, waited: false }
    }

    /// Whether an answer about our node shows what we wrote, and not what an operator made of it.
    pub(super) fn is_as_written(&self, answer: &[u8]) -> Result<bool> {
        Ok(reply::read_data(answer)?.1.version == self.version)
    }

    pub(super) fn token(&self) -> Token {
        self.record.slot.map_or_else(|| token(self.czxid), |slot| slot.token)
    }
}

impl ZooKeeper {
    /// Finds or takes our place, and reads the queue that it is in, after a transaction on this connection.
    pub(super) async fn take_place(&mut self, ask: &Ask) -> Result<Queue> {
        let dir = self.lock_path(&ask.name);
        // More than once, since our node and the container above it may be deleted while we look.
        for _ in 0..4 {
            if let Some(queue) = self.keep_place(&dir).await? {
                return Ok(queue);
            }
            if self.asked && self.find_place(ask, &dir).await? {
                continue;
            }
            if let Some(queue) = self.create_place(ask, &dir).await? {
                return Ok(queue);
            }
        }
        bail!("{dir} is deleted again and again")
    }

    async fn keep_place(&mut self, dir: &str) -> Result<Option<Queue>> {
        let Some(place) = &self.place else { return Ok(None) };
        let session = self.ensemble.session()?;
        if place.session != session.id {
            self.place = None;
            return Ok(None);
        }
        if !session.is_proven() {
            let check = Request::multi(&[Request::check(&place.path)]);
            let committed = self.ensemble.call_one(check).await?;
            let committed = committed.map_err(|why| refusal(why, "cannot keep our place"))?;
            match reply::multi_refusal(&committed)? {
                None => self.ensemble.prove(),
                Some((_, Refusal::NoNode)) => self.place = None,
                Some((_, why)) => return Err(refusal(why, "cannot keep our place")),
            }
        }
        let queue = Queue::new(&self.children(dir).await?);
        if self.place.as_ref().is_some_and(|place| queue.position(&place.node).is_some()) {
            return Ok(Some(queue));
        }
        self.place = None;
        Ok(None)
    }

    /// Looks for the place that a request without an answer may have taken.
    async fn find_place(&mut self, ask: &Ask, dir: &str) -> Result<bool> {
        let queue = Queue::new(&self.children(dir).await?);
        let Some(contender) = queue.place_of(&self.spelling.stem(&ask.who.owner), false) else { return Ok(false) };
        let path = format!("{dir}/{}", contender.name);
        let Ok(answer) = self.ensemble.call_one(Request::get_data(&path, false)).await? else { return Ok(false) };
        let (data, stat) = reply::read_data(&answer)?;
        let session = self.ensemble.session()?;
        match Record::from_bytes(&data) {
            Some(record) if stat.ephemeral_owner == session.id => {
                let place = Place::new(dir, contender.name.clone(), stat, record);
                self.place = Some(place);
                Ok(true)
            }
            // Of a session that we have given up: it would only stand in our own way.
            _ => {
                let _gone_either_way = self.ensemble.call_one(Request::delete(&path, ANY_VERSION)).await?;
                Ok(false)
            }
        }
    }

    async fn create_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<Queue>> {
        let prefix = self.spelling.prefix(&ask.who.owner, ask.mode);
        let record = Record::new(&ask.who, self.ensemble.session()?.ttl);
        let path = format!("{dir}/{prefix}");
        let create = Request::create(&path, &record.to_bytes(), self.acl(), Kind::EphemeralSequential);
        self.asked = true;
        let ran_before = Request::exists(&self.meta_path(&ask.name), false);
        let answers = self.ensemble.call(&[create, Request::get_children(dir), ran_before]).await?;
        match &answers[..] {
            [Ok(created), Ok(children), ran_before] => {
                self.ran_before = ran_before.is_ok();
                let (path, stat) = reply::read_created(created)?;
                let node = path.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/'));
                let node = node.context("a node is made where it was asked for")?.to_owned();
                let place = Place::new(dir, node, stat, record);
                self.clock = Some(place.clock);
                self.place = Some(place);
                self.ensemble.prove();
                let queue = Queue::new(&reply::read_children(children)?);
                Ok(self.place.as_ref().and_then(|place| queue.position(&place.node)).map(|_| queue))
            }
            [Err(Refusal::NoNode), ..] => {
                self.make(dir, Kind::Container).await?;
                Ok(None)
            }
            [Err(why), ..] | [_, Err(why), _] => Err(refusal(*why, format_args!("cannot take a place in {dir}"))),
            _ => bail!("three answers to three requests"),
        }
    }
}
