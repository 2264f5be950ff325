//! Our place in the queue: taking it, finding it again, keeping it.

use anyhow::{Context, Result, bail};

use super::life::read_signs;
use super::queue::Queue;
use super::record::{Record, ServerClock};
use super::reply::{self, Refusal, Stat};
use super::request::{ANY_VERSION, Kind, Request};
use super::{ZooKeeper, refusal, token};
use crate::backend::Ask;
use crate::lock::{LockName, Token};

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
    /// With it come the signs of life as they were just before.
    pub(super) async fn take_place(&mut self, ask: &Ask) -> Result<(Queue, Vec<String>)> {
        let dir = self.lock_path(&ask.name);
        // More than once, since our node and the container above it may be deleted while we look.
        for _ in 0..4 {
            if let Some(seen) = self.keep_place(&ask.name, &dir).await? {
                return Ok(seen);
            }
            if self.asked && self.find_place(ask, &dir).await? {
                continue;
            }
            if let Some(seen) = self.create_place(ask, &dir).await? {
                return Ok(seen);
            }
        }
        bail!("{dir} is deleted again and again")
    }

    async fn keep_place(&mut self, name: &LockName, dir: &str) -> Result<Option<(Queue, Vec<String>)>> {
        let Some(place) = &self.place else { return Ok(None) };
        let signs = self.signs_path(name);
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
        let Some(place) = &mut self.place else { return Ok(None) };
        // The signs first: whoever comes meanwhile is not taken for one that has lost its place.
        let requests =
            [Request::get_children(&signs), Request::get_children(dir), Request::get_data(&place.path, false)];
        let answers = self.ensemble.call(&requests).await?;
        let [alive, children, Ok(ours)] = &answers[..] else {
            self.place = None;
            return Ok(None);
        };
        let children = children.as_ref().map_err(|why| refusal(*why, format_args!("cannot list {dir}")))?;
        let queue = Queue::new(&reply::read_children(children)?);
        place.record.revoked = Record::from_bytes(&reply::read_data(ours)?.0).and_then(|record| record.revoked);
        if queue.position(&place.node).is_none() {
            self.place = None;
            return Ok(None);
        }
        Ok(Some((queue, read_signs(alive)?)))
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

    async fn create_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<(Queue, Vec<String>)>> {
        let prefix = self.spelling.prefix(&ask.who.owner, ask.mode);
        let record = Record::new(&ask.who, self.ensemble.session()?.ttl);
        let (signs, sign) = (self.signs_path(&ask.name), self.sign_path(&ask.name, &prefix));
        let place = format!("{dir}/{prefix}");
        let create = Request::multi(&[
            Request::create(&place, &record.to_bytes(), self.acl(), Kind::EphemeralSequential),
            Request::create(&sign, b"", self.acl(), Kind::Ephemeral),
        ]);
        self.asked = true;
        let ran_before = Request::exists(&self.meta_path(&ask.name), false);
        let twin = Request::exists(&sign, false);
        let requests = [create, twin, Request::get_children(&signs), Request::get_children(dir), ran_before];
        let answers = self.ensemble.call(&requests).await?;
        let [created, twin, alive, children, ran_before] = &answers[..] else { bail!("an answer to each request") };
        let refused = |why| refusal(why, format_args!("cannot take a place in {dir}"));
        let created = created.as_ref().map_err(|why| refused(*why))?;
        match reply::multi_refusal(created)? {
            None => {}
            Some((_, Refusal::NoNode)) => {
                self.make(&[(dir, Kind::Container), (&signs, Kind::Container)]).await?;
                return Ok(None);
            }
            // We had a place, and lost it.
            Some((_, Refusal::NodeExists)) => {
                let _gone_either_way = self.ensemble.call_one(Request::delete(&sign, ANY_VERSION)).await?;
                return Ok(None);
            }
            Some((_, why)) => return Err(refused(why)),
        }
        self.ran_before = ran_before.is_ok();
        // A multi tells no more than the path; but what was made in one transaction has the same number and date.
        let Ok(stat) = twin else { return Ok(None) };
        let (path, stat) = (reply::read_first_created(created)?, reply::read_stat(stat)?);
        let node = path.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/'));
        let node = node.context("a node is made where it was asked for")?.to_owned();
        let place = self.place.insert(Place::new(dir, node, stat, record));
        self.clock = Some(place.clock);
        self.ensemble.prove();
        let queue = Queue::new(&reply::read_children(children.as_ref().map_err(|why| refused(*why))?)?);
        Ok(queue.position(&place.node).is_some().then_some((queue, read_signs(alive)?)))
    }
}
