//! Acquiring: taking a place in the queue, finding it again, keeping it, and getting the lock when it is our turn.
//!
//! Beside every place is a sign of life: one more ephemeral node of the same session, elsewhere, so that whoever cleans
//! up the queue by hand does not delete it. It is made and removed in the transactions that make and remove the place.
//! A sign without a place belongs to a contender whose place was deleted and who may not have noticed yet: its command
//! runs on for as long as its session may live, and the next in the queue waits for that. Other programs know nothing
//! of it.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::ZooKeeper;
use super::ensemble::Session;
use super::queue::{Details, Entry, Slot, server_date, token};
use super::status::View;
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use crate::backend::{Ask, Attempt, Busy, taken_away};
use crate::clock::{self, Instant};
use crate::lock::queue::{Watched, waiters, watched};
use crate::lock::{Holder, LockName, Mode, Record, SeenHolders, Token};

/// How soon to look again for a slot that should be free: its holder lost its place, and keeps the slot for as long as
/// its session lives.
const SOON: Duration = Duration::from_millis(250);

/// Our node among the contenders.
pub struct Place {
    pub path: String,
    pub(super) node: String,
    /// As it was when we made or found it.
    pub(super) stat: Stat,
    pub(super) record: Record<Details>,
    /// The run under it is on record, or may be.
    pub(super) noted: bool,
}

impl Place {
    pub(super) fn token(&self) -> Token {
        self.record.details.slot.map_or_else(|| token(self.stat.czxid), |slot| slot.token)
    }
}

impl ZooKeeper {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        self.ensemble.refresh(ask.ttl).await?;
        let mut view = self.take_place(ask).await?;
        if view.ran_once {
            return Ok(Attempt::AlreadyRan);
        }
        // Other programs know of no slots, and their names look like ours: the nodes have to be read.
        let differs = |one: &Entry| one.mode.slots() != ask.mode.slots();
        let queues = std::iter::once((&ask.name, &mut view.queue));
        self.read_nodes(queues, |one| differs(one) || one.hold.is_some()).await?;
        let held_until = self.pass_holds(&ask.name, &mut view.queue).await?;
        let position = view.queue.position(&self.place()?.node).context("our place is in the queue")?;
        let is_ours = |one: &Entry| one.record.is_some() || one.hold.is_some();
        if let Some(other) = view.queue.ahead(position).iter().find(|one| differs(one) && is_ours(one)) {
            return Ok(ask.differs_from(other.contender()));
        }
        let vanished = self.vanished(&view)?;
        if !view.queue.holds(position) {
            return self.wait(ask, &view, position, held_until).await;
        }
        if let Some(reason) = &self.place()?.record.details.revoked {
            return Err(taken_away(reason));
        }
        let alive = view.queue.alive_without_place(&view.signs, ask.mode);
        if !alive.is_empty() || vanished.is_some() {
            // It is our turn, but a contender whose place is gone may still run its command.
            let watches = alive.iter().map(|sign| Request::exists(&self.paths.sign(&ask.name, sign)).watched());
            self.watch(watches.collect()).await?;
            return self.busy(None, 0, vanished);
        }
        self.check_token(ask, view.last_token)?;
        self.grant(ask, view).await
    }

    pub(super) fn place(&self) -> Result<&Place> {
        self.place.as_ref().context("we have no place in the queue")
    }

    /// Finds or takes our place, and reads the queue that it is in.
    async fn take_place(&mut self, ask: &Ask) -> Result<View> {
        let dir = self.paths.queue(&ask.name);
        // More than once, since our node and the container above it may be deleted while we look.
        for _ in 0..4 {
            let view = match &self.place {
                Some(_) => self.keep_place(ask, &dir).await?,
                None => self.create_place(ask, &dir).await?,
            };
            if let Some(view) = view {
                return Ok(view);
            }
        }
        bail!("{dir} is deleted again and again")
    }

    /// `None` if our place is gone.
    async fn keep_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<View>> {
        let place = self.place()?;
        let (path, session) = (place.path.clone(), self.ensemble.session()?);
        if place.stat.ephemeral_owner != session.id {
            self.place = None;
            return Ok(None);
        }
        if session.proven != session.attached {
            if self.commit(vec![Request::check(&path)], &ask.name, "cannot keep our place").await? {
                self.ensemble.prove();
            } else {
                self.place = None;
            }
        }
        let mut requests = self.view_requests(&ask.name, Some(ask));
        requests.push(Request::get_data(&path));
        let answers = self.ensemble.call(&requests).await?;
        if let (Some(place), Some((Ok(ours), answers))) = (&mut self.place, answers.split_last()) {
            place.record.details.revoked = Record::read(&wire::read_data(ours)?.0).and_then(|one| one.details.revoked);
            let view = View::read(answers, dir, Some(ask))?;
            if view.queue.position(&place.node).is_some() {
                return Ok(Some(view));
            }
        }
        self.place = None;
        Ok(None)
    }

    /// `None` if that did not work, but may work the next time.
    async fn create_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<View>> {
        let prefix = self.spelling.prefix(&ask.who.owner, ask.mode);
        let Session { id: session, ttl, .. } = *self.ensemble.session()?;
        let record = Record::of_waiter(&ask.who, ttl);
        let (path, data) = (format!("{dir}/{prefix}"), record.to_json());
        let (signs, sign) = (self.paths.signs(&ask.name), self.paths.sign(&ask.name, &prefix));
        let create = Request::multi([
            &self.create(&path, data.as_bytes(), Kind::EphemeralSequential),
            &self.create(&sign, b"", Kind::Ephemeral),
        ]);
        let mut requests = vec![create, Request::exists(&sign)];
        requests.extend(self.view_requests(&ask.name, Some(ask)));
        let answers = self.ensemble.call(&requests).await?;
        let refused = |why| refusal(why, format_args!("cannot take a place in {dir}"));
        let is_new = match wire::multi_refusal(answers[0].as_ref().map_err(|why| refused(*why))?)? {
            None => true,
            // An earlier request of ours took a place, and its answer got lost; or the place was deleted.
            Some((_, Refusal::NODE_EXISTS)) => false,
            Some((_, Refusal::NO_NODE)) => {
                self.make(dir, Kind::Container).await?;
                self.make(&signs, Kind::Container).await?;
                return Ok(None);
            }
            Some((_, why)) => return Err(refused(why)),
        };
        // A multi tells no more than paths. But what was made in one transaction has the same number and date.
        let stat = found(&answers[1], wire::read_stat, "cannot look for our place")?;
        let view = View::read(&answers[2..], dir, Some(ask))?;
        let node = view.queue.place_of(&self.spelling.stem(&ask.who.owner)).map(|at| &view.queue.entries[at].name);
        let node = node.map(|node| (node.clone(), format!("{dir}/{node}")));
        if let Some(stat) = stat.filter(|stat| stat.ephemeral_owner == session)
            && let Some((node, path)) = node
        {
            self.clock = Some((server_date(stat.ctime), clock::now()));
            self.place = Some(Place { path, node, stat, record, noted: false });
            if is_new {
                self.ensemble.prove();
            }
            return Ok(is_new.then_some(view));
        }
        // A sign without a place, or both of a session that we have given up, would only be in our own way.
        let paths = [node.map(|(_, path)| path), Some(sign)].into_iter().flatten();
        let deletes: Vec<_> = paths.map(|path| Request::delete(&path, ANY_VERSION)).collect();
        let _gone_either_way = self.ensemble.call(&deletes).await?;
        Ok(None)
    }

    /// Until when a holder that vanished together with our session may run its command: the servers have lost their
    /// data. As long as our session lasts the signs of life tell, and a holder without one ended in good order.
    fn vanished(&mut self, view: &View) -> Result<Option<Instant>> {
        let session = self.ensemble.session()?.id;
        let is_present = |node: &str| view.queue.position(node).is_some();
        // Not those that are there: the servers may lose their data before we have seen them again.
        if self.seen_in.replace(session) == Some(session) {
            self.seen.forget_gone(is_present);
        }
        Ok(self.seen.may_run_until(clock::now(), is_present, view.last_token))
    }

    /// Watches for what has to happen before it is our turn.
    async fn wait(&mut self, ask: &Ask, view: &View, position: usize, held_until: Option<Instant>) -> Result<Attempt> {
        let dir = self.paths.queue(&ask.name);
        let path = |entry: &Entry| format!("{dir}/{}", entry.name);
        let watch = |entry: &Entry| Request::exists(&path(entry)).watched();
        let mut head = view.queue.entries[0].clone();
        let mut requests = vec![Request::get_data(&path(&head))];
        if ask.queue {
            // A waiter that loses its place is in the way of others until it takes a new one.
            requests.push(watch(&view.queue.entries[position]));
            match watched(ask.mode, view.queue.ahead(position)) {
                Some(Watched::EndOf(one) | Watched::ChangeOf(one)) => requests.push(watch(one)),
                Some(Watched::EndOfAny(holders)) => requests.extend(holders.iter().map(watch)),
                None => {}
            }
        }
        let is_there = head.read(&self.watch(requests).await?[0])?;
        if let (Mode::Exclusive, None, Some(stat), Some(record)) = (head.mode, head.hold, head.stat, &head.record) {
            self.seen.see(&head.name, token(stat.czxid), record.details.ttl(), None);
        }
        let holder = is_there.then(|| head.contender());
        self.busy(holder, waiters(view.queue.ahead(position)), held_until)
    }

    /// Sends requests with watches. Whatever is gone already will not change any more: look again at once.
    pub(super) async fn watch(&mut self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let answers = self.ensemble.call(&requests).await?;
        if answers.contains(&Err(Refusal::NO_NODE)) {
            self.ensemble.set_notified(true);
        }
        Ok(answers)
    }

    /// Asks again in time to keep the session alive, and no later than `until`.
    fn busy(&self, holder: Option<Holder>, ahead: usize, until: Option<Instant>) -> Result<Attempt> {
        let session = self.ensemble.session()?;
        let keep_alive = session.proven + session.ttl / 3;
        let ask_again = until.map_or(keep_alive, |until| until.min(keep_alive));
        Ok(Attempt::Busy(Busy { holder, ahead: Some(ahead), ask_again }))
    }

    /// Refuses our token if transaction numbers went back.
    fn check_token(&self, ask: &Ask, recorded: Option<Token>) -> Result<()> {
        let (own, next) = (token(self.place()?.stat.czxid), token(self.ensemble.session()?.seen + 1));
        let cause = "the servers' transaction numbers went back, as with old data or on another ensemble";
        let meta = self.paths.history(&ask.name);
        let advice = format!("If nothing compares with the old tokens any more, type: zkCli.sh set {meta} \"\"");
        ask.check_token([own, next], recorded, [cause, &advice])
    }

    async fn grant(&mut self, ask: &Ask, mut view: View) -> Result<Attempt> {
        let mut slot = self.place()?.record.details.slot;
        if let Mode::Slots(slots) = ask.mode
            && slot.is_none()
        {
            slot = self.claim_slot(&ask.name, slots).await?;
            if slot.is_none() {
                return self.busy(None, 0, Some(clock::now() + SOON));
            }
        }
        let place = self.place.as_mut().context("we have no place in the queue")?;
        place.record.details.acquire_now();
        if place.record.details.slot != slot {
            // The next waiter for a slot waits for this. If it is refused, an operator has changed our node.
            place.record.details.slot = slot;
            let say = Request::set_data(&place.path, place.record.to_json().as_bytes(), place.stat.version);
            let _refused = self.ensemble.call_one(say).await?;
        }
        self.read_notes(&ask.name, &mut view).await?;
        self.runs = Some(view.runs);
        self.seen = SeenHolders::default();
        let slot = slot.map(|slot| slot.number);
        Ok(Attempt::Granted(ask.lease(self.place()?.token(), slot, self.lease_grant()?)))
    }

    /// Takes the lowest free slot; `None` if none is free.
    async fn claim_slot(&mut self, name: &LockName, slots: u32) -> Result<Option<Slot>> {
        let session = self.ensemble.session()?.id;
        let paths: Vec<String> = (0..slots).map(|slot| self.paths.slot(name, slot)).collect();
        let exists: Vec<Request> = paths.iter().map(|path| Request::exists(path)).collect();
        loop {
            let mut free = None;
            for (number, answer) in (0..).zip(self.ensemble.call(&exists).await?) {
                match found(&answer, wire::read_stat, "cannot look at a slot")? {
                    Some(stat) if stat.ephemeral_owner == session => {
                        return Ok(Some(Slot { number, token: token(stat.czxid) }));
                    }
                    Some(_) => {}
                    None => free = free.or(paths.get(number as usize)),
                }
            }
            // Look again whose it is: ours, or another's who was faster.
            let Some(path) = free else { return Ok(None) };
            match self.ensemble.call_one(self.create(path, b"", Kind::Ephemeral)).await? {
                Ok(_) | Err(Refusal::NODE_EXISTS) => {}
                Err(Refusal::NO_NODE) => self.make(&self.paths.history(name), Kind::Persistent).await?,
                Err(why) => return Err(refusal(why, format_args!("cannot take {path}"))),
            }
        }
    }
}
