//! The recipe: taking a place in the queue, finding it again, keeping it, and getting the lock when it is our turn.
//!
//! Beside every place lies a sign of life: one more ephemeral node of the same session, where nobody looks who cleans
//! up the queue by hand. It is made and removed in the transactions that make and remove the place. A sign without a
//! place is somebody's whose place was deleted, and who may not have noticed yet: its command runs on for as long as
//! its session may live, and whoever would be next waits for that. Other programs know nothing of it.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::queue::{Entry, Queue, sign_of};
use super::record::{Details, ServerClock, Slot};
use super::wire::{self, ANY_VERSION, Answer, Kind, Refusal, Request, Stat, refusal};
use super::{ZooKeeper, status, token};
use crate::backend::{Ask, Attempt, Busy, Lease, taken_away};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::queue::{Watched, free_slot, watched};
use crate::lock::{LastRun, LockName, Mode, Record, SeenHolders, Token, messages};
use crate::report::describe;

/// How soon to look again for a slot that nobody should have: its holder lost its node, and has the slot
/// for as long as its session lives.
const SOON: Duration = Duration::from_millis(250);

/// Our node among the contenders.
pub struct Place {
    pub path: String,
    pub(super) node: String,
    /// Whose ephemeral node it is.
    session: i64,
    pub(super) czxid: i64,
    /// Of the data that we wrote; another one is an operator's.
    pub(super) version: i32,
    pub(super) record: Record<Details>,
    /// We were told to wait, so that the node's age is not the age of the grant.
    waited: bool,
}

impl Place {
    fn new(dir: &str, node: String, stat: Stat, record: Record<Details>) -> Place {
        let Stat { czxid, version, ephemeral_owner: session, .. } = stat;
        Place { path: format!("{dir}/{node}"), node, session, czxid, version, record, waited: false }
    }

    pub(super) fn token(&self) -> Token {
        self.record.details.slot.map_or_else(|| token(self.czxid), |slot| slot.token)
    }
}

/// One look at a lock, after a transaction on the same connection.
pub(super) struct Look {
    /// As they were just before the queue was read: whoever comes meanwhile is not taken for one that lost its place.
    signs: Vec<String>,
    queue: Queue,
    /// How the last run ended, and the node that says so.
    last_run: Option<(Option<LastRun>, Stat)>,
    /// The `once` key that was asked for is on record.
    ran_once: bool,
}

impl Look {
    /// Reads the answers to [`ZooKeeper::look_requests`].
    fn read(answers: &[Answer], dir: &str) -> Result<Look> {
        let [signs, children, meta, once @ ..] = answers else { bail!("an answer to each request") };
        let signs = match signs {
            Ok(signs) => wire::read_children(signs)?,
            Err(Refusal::NoNode) => Vec::new(),
            Err(why) => return Err(refusal(*why, "cannot list who is alive")),
        };
        let children = children.as_ref().map_err(|why| refusal(*why, format_args!("cannot list {dir}")))?;
        let queue = Queue::new(&wire::read_children(children)?);
        let last_run = meta.as_ref().ok().map(|meta| wire::read_data(meta)).transpose()?;
        let last_run = last_run.map(|(data, stat)| (LastRun::from_json(&String::from_utf8_lossy(&data)), stat));
        Ok(Look { signs, queue, last_run, ran_once: once.first().is_some_and(Result::is_ok) })
    }

    fn last_token(&self) -> Option<Token> {
        self.last_run.as_ref()?.0.as_ref().map(|run| run.fencing_token)
    }
}

impl ZooKeeper {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(ask.ttl).await?;
        }
        let mut look = self.take_place(ask).await?;
        self.ran_before = look.last_run.is_some();
        if look.ran_once {
            self.leave().await?;
            return Ok(Attempt::AlreadyRan);
        }
        let held_until = self.pass_holds(&ask.name, &mut look.queue).await?;
        let place = self.place()?;
        let position = look.queue.position(&place.node).context("our place is in the queue")?;
        let revoked = place.record.details.revoked.clone();
        if let Some(why) = self.other_slots(ask, look.queue.ahead(position)).await? {
            self.leave().await?;
            return Ok(Attempt::OtherTerms(why));
        }
        let vanished = self.vanished(&look)?;
        if !look.queue.holds(position) {
            return self.wait(ask, &look, position, held_until).await;
        }
        if let Some(reason) = revoked {
            self.leave().await?;
            return Err(taken_away(&reason));
        }
        let alive = look.queue.alive_without_place(&look.signs, ask.mode);
        if !alive.is_empty() || vanished.is_some() {
            return self.wait_out(ask, &alive, vanished).await;
        }
        self.expect_newest_token(ask, look.last_token()).await?;
        self.grant(ask).await
    }

    pub(super) fn place(&self) -> Result<&Place> {
        self.place.as_ref().context("we have no place in the queue")
    }

    fn place_mut(&mut self) -> Result<&mut Place> {
        self.place.as_mut().context("we have no place in the queue")
    }

    /// Where the signs of a lock's contenders lie. No lock is named so.
    fn signs_path(&self, name: &LockName) -> String {
        format!("{}/~alive/{}", self.meta, name.encoded())
    }

    /// The sign of whoever has, or is about to get, the place of this name.
    pub(super) fn sign_path(&self, name: &LockName, node: &str) -> String {
        format!("{}/{}", self.signs_path(name), sign_of(node))
    }

    /// Finds or takes our place, and reads the queue that it is in.
    async fn take_place(&mut self, ask: &Ask) -> Result<Look> {
        let dir = self.lock_path(&ask.name);
        // More than once, since our node and the container above it may be deleted while we look.
        for _ in 0..4 {
            if let Some(look) = self.keep_place(ask, &dir).await? {
                return Ok(look);
            }
            if self.asked && self.find_place(ask, &dir).await? {
                continue;
            }
            if let Some(look) = self.create_place(ask, &dir).await? {
                return Ok(look);
            }
        }
        bail!("{dir} is deleted again and again")
    }

    fn look_requests(&self, ask: &Ask, dir: &str) -> Vec<Request> {
        let mut requests = vec![
            Request::get_children(&self.signs_path(&ask.name)),
            Request::get_children(dir),
            Request::get_data(&self.meta_path(&ask.name)),
        ];
        requests.extend(ask.once.as_ref().map(|key| Request::exists(&self.once_path(&ask.name, key))));
        requests
    }

    async fn keep_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<Look>> {
        let Some(place) = &self.place else { return Ok(None) };
        let (path, session) = (place.path.clone(), self.ensemble.session()?);
        if place.session != session.id {
            self.place = None;
            return Ok(None);
        }
        if !session.is_proven() {
            match self.ensemble.transact(&[Request::check(&path)], "cannot keep our place").await? {
                None => self.ensemble.prove(),
                Some((_, Refusal::NoNode)) => self.place = None,
                Some((_, why)) => return Err(refusal(why, "cannot keep our place")),
            }
        }
        let mut requests = self.look_requests(ask, dir);
        requests.push(Request::get_data(&path));
        let answers = self.ensemble.call(&requests).await?;
        let (Some(place), Some((Ok(ours), answers))) = (&mut self.place, answers.split_last()) else {
            self.place = None;
            return Ok(None);
        };
        place.record.details.revoked = Record::read(&wire::read_data(ours)?.0).and_then(|one| one.details.revoked);
        let look = Look::read(answers, dir)?;
        if look.queue.position(&place.node).is_none() {
            self.place = None;
            return Ok(None);
        }
        Ok(Some(look))
    }

    /// Looks for the place that a request without an answer may have taken.
    async fn find_place(&mut self, ask: &Ask, dir: &str) -> Result<bool> {
        let queue = Queue::new(&self.ensemble.children(dir).await?);
        let Some(at) = queue.place_of(&self.spelling.stem(&ask.who.owner)) else { return Ok(false) };
        let node = queue.entries()[at].name.clone();
        let path = format!("{dir}/{node}");
        let Some((data, stat)) = self.ensemble.data(&path).await? else { return Ok(false) };
        match Record::read(&data) {
            Some(record) if stat.ephemeral_owner == self.ensemble.session()?.id => {
                self.clock = Some(ServerClock { date: stat.ctime, read: clock::now() });
                self.place = Some(Place::new(dir, node, stat, record));
                Ok(true)
            }
            // Of a session that we have given up: it would only stand in our own way.
            _ => {
                let _gone_either_way = self.ensemble.call_one(Request::delete(&path, ANY_VERSION)).await?;
                Ok(false)
            }
        }
    }

    async fn create_place(&mut self, ask: &Ask, dir: &str) -> Result<Option<Look>> {
        let prefix = self.spelling.prefix(&ask.who.owner, ask.mode);
        let record = Record::of_waiter(&ask.who, self.ensemble.session()?.ttl);
        let (signs, sign) = (self.signs_path(&ask.name), self.sign_path(&ask.name, &prefix));
        let create = Request::multi(&[
            Request::create(
                &format!("{dir}/{prefix}"),
                record.to_json().as_bytes(),
                self.acl(),
                Kind::EphemeralSequential,
            ),
            Request::create(&sign, b"", self.acl(), Kind::Ephemeral),
        ]);
        let mut requests = vec![create, Request::exists(&sign)];
        requests.extend(self.look_requests(ask, dir));
        self.asked = true;
        let answers = self.ensemble.call(&requests).await?;
        let refused = |why| refusal(why, format_args!("cannot take a place in {dir}"));
        let created = answers[0].as_ref().map_err(|why| refused(*why))?;
        match wire::multi_refusal(created)? {
            None => {}
            Some((_, Refusal::NoNode)) => {
                self.make(dir, Kind::Container).await?;
                self.make(&signs, Kind::Container).await?;
                return Ok(None);
            }
            // We had a place, and lost it.
            Some((_, Refusal::NodeExists)) => {
                let _gone_either_way = self.ensemble.call_one(Request::delete(&sign, ANY_VERSION)).await?;
                return Ok(None);
            }
            Some((_, why)) => return Err(refused(why)),
        }
        // A multi tells no more than the path; but what was made in one transaction has the same number and date.
        let Ok(stat) = &answers[1] else { return Ok(None) };
        let (path, stat) = (wire::read_first_created(created)?, wire::read_stat(stat)?);
        let node = path.strip_prefix(dir).and_then(|rest| rest.strip_prefix('/'));
        let node = node.context("a node is made where it was asked for")?.to_owned();
        self.clock = Some(ServerClock { date: stat.ctime, read: clock::now() });
        self.ensemble.prove();
        let place = self.place.insert(Place::new(dir, node, stat, record));
        Ok(Some(Look::read(&answers[2..], dir)?).filter(|look| look.queue.position(&place.node).is_some()))
    }

    /// Until when a holder that vanished together with our session may run its command: the servers have lost their
    /// data. As long as the session lasts, signs of life tell, and whoever has none ended in good order.
    fn vanished(&mut self, look: &Look) -> Result<Option<Instant>> {
        let session = self.ensemble.session()?.id;
        if self.seen_in.replace(session) == Some(session) {
            self.seen.keep_missing();
        }
        let is_present = |node: &str| look.queue.position(node).is_some();
        Ok(self.seen.may_run_until(clock::now(), is_present, look.last_token()))
    }

    /// Watches for what has to happen before it is our turn.
    async fn wait(&mut self, ask: &Ask, look: &Look, position: usize, held_until: Option<Instant>) -> Result<Attempt> {
        let dir = self.lock_path(&ask.name);
        let path = |entry: &Entry| format!("{dir}/{}", entry.name);
        let watch = |entry: &Entry| Request::exists(&path(entry)).watched();
        let head = &look.queue.entries()[0];
        let mut requests = vec![Request::get_data(&path(head))];
        if ask.queue {
            // Whoever loses its place is in others' way until it takes a new one. (A holder of a slot or a share writes
            // to its node itself, and would hear of nothing else.)
            let own = (ask.mode == Mode::Exclusive).then_some(&look.queue.entries()[position]);
            requests.extend(own.map(watch));
            match watched(ask.mode, look.queue.ahead(position)) {
                Some(Watched::EndOf(one) | Watched::ChangeOf(one)) => requests.push(watch(one)),
                Some(Watched::EndOfAny(holders)) => requests.extend(holders.iter().map(watch)),
                None => {}
            }
        }
        let answers = self.ensemble.call(&requests).await?;
        if answers[1..].contains(&Err(Refusal::NoNode)) {
            self.ensemble.poke();
        }
        let mut holder = None;
        if let Ok(answer) = &answers[0] {
            let (data, stat) = wire::read_data(answer)?;
            let record = Record::read(&data);
            let released = look.last_run.as_ref().map(|(_, stat)| *stat).filter(|_| head.mode == Mode::Exclusive);
            if let Some(record) = record.as_ref().filter(|one| one.details.hold.is_none())
                && head.mode == Mode::Exclusive
            {
                self.seen.see(&head.name, token(stat.czxid), record.details.ttl(), None);
            }
            holder = Some(status::contender(head.mode, stat, record, released).into_holder());
        }
        let ask_again = self.next_keep_alive()?;
        let ask_again = held_until.map_or(ask_again, |end| end.min(ask_again));
        if ask.queue {
            self.place_mut()?.waited = true;
        } else {
            self.leave().await?;
        }
        Ok(Attempt::Busy(Busy { holder, ahead: Some(position), ask_again }))
    }

    /// It is our turn, but somebody whose place is gone may still run its command: those who give these signs of life,
    /// and one until then.
    async fn wait_out(&mut self, ask: &Ask, signs: &[String], until: Option<Instant>) -> Result<Attempt> {
        let watch = |sign: &String| Request::exists(&self.sign_path(&ask.name, sign)).watched();
        let requests: Vec<Request> = signs.iter().map(watch).collect();
        if !requests.is_empty() && self.ensemble.call(&requests).await?.contains(&Err(Refusal::NoNode)) {
            self.ensemble.poke();
        }
        let keep_alive = self.next_keep_alive()?;
        if !ask.queue {
            self.leave().await?;
        }
        let ask_again = until.map_or(keep_alive, |until| until.min(keep_alive));
        Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again }))
    }

    /// Refuses to go on where transaction numbers went back. With shares and slots a holder may end before another one
    /// asks for its token, so that only the latest transaction tells.
    async fn expect_newest_token(&mut self, ask: &Ask, recorded: Option<Token>) -> Result<()> {
        let newest = match ask.mode {
            Mode::Exclusive => token(self.place()?.czxid),
            Mode::Shared | Mode::Slots(_) => token(self.ensemble.session()?.seen + 1),
        };
        let Some(recorded) = messages::newer_on_record(newest, recorded) else { return Ok(()) };
        self.leave().await?;
        let cause = "the servers' transaction numbers went back, as with old data or on another ensemble";
        let meta = self.meta_path(&ask.name);
        let advice = format!("If nothing compares with the old tokens any more, type: zkCli.sh set {meta} \"\"");
        Err(Fault::StaleToken.because(messages::counter_went_back(newest, recorded, cause, advice)))
    }

    async fn grant(&mut self, ask: &Ask) -> Result<Attempt> {
        if let Mode::Slots(slots) = ask.mode
            && self.place()?.record.details.slot.is_none()
        {
            let slot = self.claim_slot(&ask.name, slots).await?;
            self.place_mut()?.record.details.slot = slot;
            if slot.is_none() {
                if !ask.queue {
                    self.leave().await?;
                }
                return Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again: clock::now() + SOON }));
            }
        }
        self.note_acquired(ask.mode).await?;
        self.watches_place = false;
        self.seen = SeenHolders::default();
        let place = self.place()?;
        Ok(Attempt::Granted(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: place.token(),
            slot: place.record.details.slot.map(|slot| slot.number),
            term: self.term()?,
            descriptors: Vec::new(),
        }))
    }

    /// Notes down in our node since when we hold the lock. Whoever holds alone since another released it need not: the
    /// date of that release tells.
    async fn note_acquired(&mut self, mode: Mode) -> Result<()> {
        let place = self.place.as_mut().context("we have no place in the queue")?;
        let tells = match mode {
            Mode::Exclusive => false,
            Mode::Shared => place.waited,
            Mode::Slots(_) => true,
        };
        if tells && place.record.details.acquired_ms.is_none() {
            place.record.details.acquire_now();
            let note = Request::set_data(&place.path, place.record.to_json().as_bytes(), place.version);
            if let Ok(noted) = self.ensemble.call_one(note).await? {
                place.version = wire::read_stat(&noted)?.version;
            }
        }
        Ok(())
    }

    /// Watches the node by which we hold the lock, unless that is done. False if an operator was there before the
    /// watch.
    pub async fn watch_place(&mut self) -> Result<bool> {
        let Some(place) = self.place.as_ref().filter(|_| !self.watches_place) else { return Ok(true) };
        let ours = self.ensemble.call_one(Request::get_data(&place.path).watched()).await?;
        self.watches_place = true;
        Ok(ours.is_ok_and(|ours| wire::read_data(&ours).is_ok_and(|(_, stat)| stat.version == place.version)))
    }

    /// Takes the lowest free slot; `None` if none is free.
    async fn claim_slot(&mut self, name: &LockName, slots: u32) -> Result<Option<Slot>> {
        let dir = self.meta_path(name);
        let children = self.ensemble.children(&dir).await?;
        let number = |child: &String| child.strip_prefix("slot-")?.parse::<u32>().ok();
        let mut taken: Vec<u32> = children.iter().filter_map(number).collect();
        let exists: Vec<Request> = taken.iter().map(|slot| Request::exists(&self.slot_path(name, *slot))).collect();
        let answers = if exists.is_empty() { Vec::new() } else { self.ensemble.call(&exists).await? };
        let session = self.ensemble.session()?.id;
        for (number, answer) in taken.iter().zip(&answers) {
            let stat = answer.as_ref().ok().map(|answer| wire::read_stat(answer)).transpose()?;
            if let Some(stat) = stat.filter(|stat| stat.ephemeral_owner == session) {
                return Ok(Some(Slot { number: *number, token: token(stat.czxid) }));
            }
        }
        loop {
            let number = free_slot(taken.iter().copied());
            if number >= slots {
                return Ok(None);
            }
            let path = self.slot_path(name, number);
            match self.ensemble.call_one(Request::create(&path, b"", self.acl(), Kind::Ephemeral)).await? {
                Ok(created) => {
                    let (_, stat) = wire::read_created(&created)?;
                    return Ok(Some(Slot { number, token: token(stat.czxid) }));
                }
                Err(Refusal::NoNode) => self.make(&dir, Kind::Persistent).await?,
                Err(Refusal::NodeExists) => taken.push(number),
                Err(why) => return Err(refusal(why, format_args!("cannot take {path}"))),
            }
        }
    }

    /// A dlock before us that uses the lock with another number of slots. Other programs know of none; that their names
    /// tell no more than ours do is why the nodes have to be read.
    async fn other_slots(&mut self, ask: &Ask, ahead: &[Entry]) -> Result<Option<String>> {
        let dir = self.lock_path(&ask.name);
        for other in ahead.iter().filter(|one| one.mode.slots() != ask.mode.slots()) {
            let Some((data, stat)) = self.ensemble.data(&format!("{dir}/{}", other.name)).await? else { continue };
            let record = Record::read(&data);
            if record.is_some() || other.hold.is_some() {
                let who = describe(&status::contender(other.mode, stat, record, None).into_holder());
                return Ok(Some(messages::other_slots(who, other.mode, ask.mode)));
            }
        }
        Ok(None)
    }
}
