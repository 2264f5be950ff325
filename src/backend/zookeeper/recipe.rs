//! Acquiring: taking a place in the queue, finding it again, keeping it, and getting the lock when it is our turn.
//!
//! Beside every place is a sign of life: one more ephemeral node of the same session, elsewhere, so that whoever cleans
//! up the queue by hand does not delete it. It is made and removed in the transactions that make and remove the place.
//! A sign without a place belongs to a contender whose place was deleted and who may not have noticed yet: its command
//! runs on for as long as its session may live, and the next in the queue waits for that. Other programs know nothing
//! of it.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::queue::{Details, Entry, Queue, ServerClock, Slot};
use super::status::View;
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, found, refusal};
use super::{ZooKeeper, status, token};
use crate::backend::{Ask, Attempt, Busy, stale_token, taken_away};
use crate::clock::{self, Instant};
use crate::lock::queue::{Watched, waiters, watched};
use crate::lock::{Holder, LockName, Mode, Record, SeenHolders, Token, messages};
use crate::report::describe;

/// How soon to look again for a slot that should be free: its holder lost its place, and keeps the slot for as long as
/// its session lives.
const SOON: Duration = Duration::from_millis(250);

/// Our node among the contenders.
pub struct Place {
    pub path: String,
    pub(super) node: String,
    /// Whose ephemeral node it is.
    session: i64,
    pub(super) czxid: i64,
    /// Of its data when we made or found it.
    pub(super) version: i32,
    pub(super) record: Record<Details>,
    /// The run under it is on record, or may be.
    pub(super) noted: bool,
}

impl Place {
    pub(super) fn token(&self) -> Token {
        self.record.details.slot.map_or_else(|| token(self.czxid), |slot| slot.token)
    }
}

/// Reads the answers to [`ZooKeeper::look_requests`].
fn read_look(answers: &[Answer], dir: &str) -> Result<View> {
    let (signs, rest) = answers.split_first().context("an answer to each request")?;
    let (view, once) = rest.split_at_checked(3).context("an answer to each request")?;
    let signs = found(signs, wire::read_children, "cannot list who is alive")?.unwrap_or_default();
    Ok(View { signs, ran_once: once.first().is_some_and(Result::is_ok), ..View::read(view, dir)? })
}

impl ZooKeeper {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(ask.ttl).await?;
        }
        let mut view = self.take_place(ask).await?;
        if view.ran_once {
            self.leave().await?;
            return Ok(Attempt::AlreadyRan);
        }
        let held_until = self.pass_holds(&ask.name, &mut view.queue).await?;
        let place = self.place()?;
        let position = view.queue.position(&place.node).context("our place is in the queue")?;
        let revoked = place.record.details.revoked.clone();
        if let Some(why) = self.other_slots(ask, view.queue.ahead(position)).await? {
            self.leave().await?;
            return Ok(Attempt::OtherSlots(why));
        }
        let vanished = self.vanished(&view)?;
        if !view.queue.holds(position) {
            return self.wait(ask, &view, position, held_until).await;
        }
        if let Some(reason) = revoked {
            self.leave().await?;
            return Err(taken_away(&reason));
        }
        let alive = view.queue.alive_without_place(&view.signs, ask.mode);
        if !alive.is_empty() || vanished.is_some() {
            // It is our turn, but a contender whose place is gone may still run its command.
            let watches = alive.iter().map(|sign| Request::exists(&self.sign_path(&ask.name, sign)).watched());
            self.watch(watches.collect()).await?;
            return self.busy(ask, None, 0, vanished).await;
        }
        if let Some(stale) = self.stale_token(ask, view.last_token)? {
            self.leave().await?;
            return Err(stale);
        }
        self.grant(ask, view).await
    }

    pub(super) fn place(&self) -> Result<&Place> {
        self.place.as_ref().context("we have no place in the queue")
    }

    /// Finds or takes our place, and reads the queue that it is in.
    async fn take_place(&mut self, ask: &Ask) -> Result<View> {
        let dir = self.lock_path(&ask.name);
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

    fn look_requests(&self, ask: &Ask) -> Vec<Request> {
        let mut requests = vec![Request::get_children(&self.signs_path(&ask.name))];
        requests.extend(self.view_requests(&ask.name));
        requests.extend(ask.once.as_ref().map(|key| Request::exists(&self.once_path(&ask.name, key))));
        requests
    }

    /// `None` if our place is gone.
    async fn keep_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<View>> {
        let place = self.place()?;
        let (path, session) = (place.path.clone(), self.ensemble.session()?);
        if place.session != session.id {
            self.place = None;
            return Ok(None);
        }
        if session.proven != session.attached {
            match self.commit(vec![Request::check(&path)], &ask.name, "cannot keep our place").await? {
                None => self.ensemble.prove(),
                Some(_) => self.place = None,
            }
        }
        let mut requests = self.look_requests(ask);
        requests.push(Request::get_data(&path));
        let answers = self.ensemble.call(&requests).await?;
        if let (Some(place), Some((Ok(ours), answers))) = (&mut self.place, answers.split_last()) {
            place.record.details.revoked = Record::read(&wire::read_data(ours)?.0).and_then(|one| one.details.revoked);
            let view = read_look(answers, dir)?;
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
        let record = Record::of_waiter(&ask.who, self.ensemble.session()?.ttl);
        let (path, data) = (format!("{dir}/{prefix}"), record.to_json());
        let (signs, sign) = (self.signs_path(&ask.name), self.sign_path(&ask.name, &prefix));
        let create = Request::multi([
            &Request::create(&path, data.as_bytes(), self.acl(), Kind::EphemeralSequential),
            &Request::create(&sign, b"", self.acl(), Kind::Ephemeral),
        ]);
        let mut requests = vec![create, Request::exists(&sign)];
        requests.extend(self.look_requests(ask));
        let answers = self.ensemble.call(&requests).await?;
        let refused = |why| refusal(why, format_args!("cannot take a place in {dir}"));
        let created = answers[0].as_ref().map_err(|why| refused(*why))?;
        match wire::multi_refusal(created)? {
            None => {}
            Some((_, Refusal::NO_NODE)) => {
                self.make(dir, Kind::Container).await?;
                self.make(&signs, Kind::Container).await?;
                return Ok(None);
            }
            // An earlier request of ours took a place, and its answer got lost; or the place was deleted.
            Some((_, Refusal::NODE_EXISTS)) => {
                self.find_place(ask, dir, &sign).await?;
                return Ok(None);
            }
            Some((_, why)) => return Err(refused(why)),
        }
        // A multi tells no more than the path; but what was made in one transaction has the same number and date.
        let Ok(stat) = &answers[1] else { return Ok(None) };
        let (path, stat) = (wire::read_first_created(created)?, wire::read_stat(stat)?);
        let node = path.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/'));
        let node = node.context("a node is made where it was asked for")?.to_owned();
        self.ensemble.prove();
        let place = self.settle(dir, node, stat, record);
        Ok(Some(read_look(&answers[2..], dir)?).filter(|view| view.queue.position(&place.node).is_some()))
    }

    /// This place is ours from now on.
    fn settle(&mut self, dir: &str, node: String, stat: Stat, record: Record<Details>) -> &Place {
        self.clock = Some(ServerClock { date: stat.ctime, read: clock::now() });
        let Stat { czxid, version, ephemeral_owner: session, .. } = stat;
        self.place.insert(Place { path: format!("{dir}/{node}"), node, session, czxid, version, record, noted: false })
    }

    /// Looks for the place that goes with a sign of ours. A sign without one, or with one of a session that we have
    /// given up, would only be in our own way: deletes it.
    async fn find_place(&mut self, ask: &Ask, dir: &str, sign: &str) -> Result<()> {
        let queue = Queue::new(&self.ensemble.children(dir).await?);
        let stem = self.spelling.stem(&ask.who.owner);
        if let Some(at) = queue.place_of(&stem) {
            let node = queue.entries[at].name.clone();
            let path = format!("{dir}/{node}");
            let session = self.ensemble.session()?.id;
            let place = self.ensemble.data(&path).await?.filter(|(_, stat)| stat.ephemeral_owner == session);
            if let Some((Some(record), stat)) = place.map(|(data, stat)| (Record::read(&data), stat)) {
                self.settle(dir, node, stat, record);
                return Ok(());
            }
            let _gone_either_way = self.ensemble.call_one(Request::delete(&path, ANY_VERSION)).await?;
        }
        let _gone_either_way = self.ensemble.call_one(Request::delete(sign, ANY_VERSION)).await?;
        Ok(())
    }

    /// Until when a holder that vanished together with our session may run its command: the servers have lost their
    /// data. As long as our session lasts the signs of life tell, and a holder without one ended in good order.
    fn vanished(&mut self, view: &View) -> Result<Option<Instant>> {
        let session = self.ensemble.session()?.id;
        if self.seen_in.replace(session) == Some(session) {
            self.seen.keep_missing();
        }
        let is_present = |node: &str| view.queue.position(node).is_some();
        Ok(self.seen.may_run_until(clock::now(), is_present, view.last_token))
    }

    /// Watches for what has to happen before it is our turn.
    async fn wait(&mut self, ask: &Ask, view: &View, position: usize, held_until: Option<Instant>) -> Result<Attempt> {
        let dir = self.lock_path(&ask.name);
        let path = |entry: &Entry| format!("{dir}/{}", entry.name);
        let watch = |entry: &Entry| Request::exists(&path(entry)).watched();
        let head = &view.queue.entries[0];
        let mut requests = vec![Request::get_data(&path(head))];
        if ask.queue {
            // A waiter that loses its place is in the way of others until it takes a new one.
            requests.push(watch(&view.queue.entries[position]));
            match watched(ask.mode, view.queue.ahead(position)) {
                Some(Watched::EndOf(one) | Watched::ChangeOf(one)) => requests.push(watch(one)),
                Some(Watched::EndOfAny(holders)) => requests.extend(holders.iter().map(watch)),
                None => {}
            }
        }
        let mut holder = None;
        if let Some(Ok(answer)) = self.watch(requests).await?.first() {
            let (data, stat) = wire::read_data(answer)?;
            let record = Record::read(&data);
            if let Some(record) = record.as_ref().filter(|one| one.details.hold.is_none())
                && head.mode == Mode::Exclusive
            {
                self.seen.see(&head.name, token(stat.czxid), record.details.ttl(), None);
            }
            holder = Some(status::contender(head.mode, stat, record).into_holder());
        }
        self.busy(ask, holder, waiters(view.queue.ahead(position)), held_until).await
    }

    /// Sends requests with watches. Whatever is gone already will not change any more: look again at once.
    pub(super) async fn watch(&mut self, requests: Vec<Request>) -> Result<Vec<Answer>> {
        let answers = self.ensemble.call(&requests).await?;
        if answers.contains(&Err(Refusal::NO_NODE)) {
            self.ensemble.set_notified(true);
        }
        Ok(answers)
    }

    /// Waits in the queue, or leaves it. Asks again in time to keep the session alive, and no later than `until`.
    async fn busy(
        &mut self,
        ask: &Ask,
        holder: Option<Holder>,
        ahead: usize,
        until: Option<Instant>,
    ) -> Result<Attempt> {
        let session = self.ensemble.session()?;
        let keep_alive = session.proven + session.ttl / 3;
        let ask_again = until.map_or(keep_alive, |until| until.min(keep_alive));
        if !ask.queue {
            self.leave().await?;
        }
        Ok(Attempt::Busy(Busy { holder, ahead: Some(ahead), ask_again }))
    }

    /// Why our token must not be handed out, if transaction numbers went back.
    fn stale_token(&self, ask: &Ask, recorded: Option<Token>) -> Result<Option<anyhow::Error>> {
        let (own, next) = (token(self.place()?.czxid), token(self.ensemble.session()?.seen + 1));
        let cause = "the servers' transaction numbers went back, as with old data or on another ensemble";
        let meta = self.meta_path(&ask.name);
        let advice = format!("If nothing compares with the old tokens any more, type: zkCli.sh set {meta} \"\"");
        Ok(stale_token(ask.mode, own, next, recorded, cause, &advice))
    }

    async fn grant(&mut self, ask: &Ask, view: View) -> Result<Attempt> {
        let mut slot = self.place()?.record.details.slot;
        if let Mode::Slots(slots) = ask.mode
            && slot.is_none()
        {
            slot = self.claim_slot(&ask.name, slots).await?;
            if slot.is_none() {
                return self.busy(ask, None, 0, Some(clock::now() + SOON)).await;
            }
        }
        let place = self.place.as_mut().context("we have no place in the queue")?;
        place.record.details.acquire_now();
        if place.record.details.slot != slot {
            // The next waiter for a slot waits for this. If it is refused, an operator has changed our node.
            place.record.details.slot = slot;
            let say = Request::set_data(&place.path, place.record.to_json().as_bytes(), place.version);
            let _refused = self.ensemble.call_one(say).await?;
        }
        self.runs = Some(self.runs_in(&ask.name, view).await?);
        self.seen = SeenHolders::default();
        let slot = slot.map(|slot| slot.number);
        Ok(Attempt::Granted(ask.lease(self.place()?.token(), slot, self.lease_grant()?)))
    }

    /// Takes the lowest free slot; `None` if none is free.
    async fn claim_slot(&mut self, name: &LockName, slots: u32) -> Result<Option<Slot>> {
        let session = self.ensemble.session()?.id;
        let exists: Vec<Request> = (0..slots).map(|slot| Request::exists(&self.slot_path(name, slot))).collect();
        let mut free = Vec::new();
        for (number, answer) in (0..).zip(self.ensemble.call(&exists).await?) {
            match found(&answer, wire::read_stat, "cannot look at a slot")? {
                // We have one: the answer to an earlier request got lost.
                Some(stat) if stat.ephemeral_owner == session => {
                    return Ok(Some(Slot { number, token: token(stat.czxid) }));
                }
                Some(_) => {}
                None => free.push(number),
            }
        }
        for number in free {
            let path = self.slot_path(name, number);
            let create = Request::create(&path, b"", self.acl(), Kind::Ephemeral);
            let mut answer = self.ensemble.call_one(create.clone()).await?;
            if answer == Err(Refusal::NO_NODE) {
                self.make(&self.meta_path(name), Kind::Persistent).await?;
                answer = self.ensemble.call_one(create).await?;
            }
            match answer {
                Ok(created) => {
                    let (_, stat) = wire::read_created(&created)?;
                    return Ok(Some(Slot { number, token: token(stat.czxid) }));
                }
                Err(Refusal::NODE_EXISTS) => {}
                Err(why) => return Err(refusal(why, format_args!("cannot take {path}"))),
            }
        }
        Ok(None)
    }

    /// A dlock before us that uses the lock with another number of slots. Other programs know of none, and their names
    /// look like ours: the nodes have to be read.
    async fn other_slots(&mut self, ask: &Ask, ahead: &[Entry]) -> Result<Option<String>> {
        let differs = |one: &&Entry| one.mode.slots() != ask.mode.slots();
        for other in self.read_nodes(ahead.iter().filter(differs).map(|one| (&ask.name, one))).await? {
            if let Some((_, record)) = other.node()?
                && (record.is_some() || other.entry.hold.is_some())
            {
                let who = describe(&other.contender().into_holder());
                return Ok(Some(messages::other_slots(who, other.entry.mode, ask.mode)));
            }
        }
        Ok(None)
    }
}
