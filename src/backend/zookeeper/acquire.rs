//! Getting to the head of the queue.

use std::time::Duration;

use anyhow::{Context, Result};

use super::queue::{Contender, Queue};
use super::record::{Record, Slot};
use super::reply::{self, Refusal, Stat};
use super::request::{Kind, Request};
use super::{ZooKeeper, operate, refusal, token};
use crate::backend::{Ask, Attempt, Busy, Lease, taken_away};
use crate::clock::{self, Instant};
use crate::lock::{Holder, LockName, Mode};

/// How soon to look again for a slot that nobody should have: its holder lost its node, and has the slot
/// for as long as its session lives.
const SOON: Duration = Duration::from_millis(250);
/// How long a new holder keeps quiet. A command that ends sooner was no trouble to anybody, and one that goes on is not
/// slowed down in its first moments by what we and the server do beside it.
const SETTLING: Duration = Duration::from_millis(20);

impl ZooKeeper {
    pub(super) async fn contend(&mut self, ask: &Ask) -> Result<Attempt> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(ask.ttl).await?;
        }
        let (mut queue, signs) = self.take_place(ask).await?;
        let held_until = self.pass_holds(&ask.name, &mut queue).await?;
        let place = self.place.as_ref().context("we have a place")?;
        let position = queue.position(&place.node).context("our place is in the queue")?;
        if let Some(why) = self.other_terms(ask, queue.ahead(position)).await? {
            self.leave().await?;
            return Ok(Attempt::OtherTerms(why));
        }
        if !queue.holds(position) {
            return self.wait(ask, &queue, position, held_until).await;
        }
        if let Some(reason) = self.place.as_ref().and_then(|place| place.record.revoked.clone()) {
            self.leave().await?;
            return Err(taken_away(&reason));
        }
        match &queue.struck(&signs, ask.mode)[..] {
            [] => self.grant(ask).await,
            struck => self.mourn(ask, struck).await,
        }
    }

    async fn grant(&mut self, ask: &Ask) -> Result<Attempt> {
        if let Mode::Slots(slots) = ask.mode
            && self.place.as_ref().is_some_and(|place| place.record.slot.is_none())
        {
            let slot = self.claim_slot(&ask.name, slots).await?;
            self.place.as_mut().context("we have a place")?.record.slot = slot;
            if slot.is_none() {
                if !ask.queue {
                    self.leave().await?;
                }
                return Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again: clock::now() + SOON }));
            }
        }
        let place = self.place.as_ref().context("we have a place")?;
        // Whoever holds alone since another let go needs no mark: the date of that release tells.
        let marks = place.record.acquired_ms.is_none()
            && match ask.mode {
                Mode::Exclusive => false,
                Mode::Shared => place.waited,
                Mode::Slots(_) => true,
            };
        if !marks && ask.once.is_none() {
            self.settled = Some(clock::now() + SETTLING);
        } else if !self.watch_place(ask, marks).await? {
            self.leave().await?;
            return Ok(Attempt::AlreadyRan);
        }
        let place = self.place.as_ref().context("we have a place")?;
        Ok(Attempt::Granted(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: place.token(),
            slot: place.record.slot.map(|slot| slot.number),
            term: self.term()?,
            descriptors: Vec::new(),
        }))
    }

    /// Watches our node, after noting down in it that we hold the lock if it `marks` that. False if the `once` key is
    /// on record.
    async fn watch_place(&mut self, ask: &Ask, marks: bool) -> Result<bool> {
        let place = self.place.as_mut().context("we have a place")?;
        let mut requests = Vec::new();
        if marks {
            place.record.acquire_now();
            requests.push(Request::set_data(&place.path, &place.record.to_bytes(), place.version));
        }
        requests.push(Request::get_data(&place.path, true));
        let path = place.path.clone();
        requests.extend(ask.once.as_ref().map(|key| Request::exists(&self.once_path(&ask.name, key), false)));
        let answers = self.ensemble.call(&requests).await?;
        if ask.once.is_some() && answers.last().is_some_and(Result::is_ok) {
            return Ok(false);
        }
        let place = self.place.as_mut().context("we have a place")?;
        if marks && let Ok(marked) = &answers[0] {
            place.version = reply::read_stat(marked)?.version;
        }
        let ours = answers[usize::from(marks)].as_ref();
        let ours = ours.map_err(|why| refusal(*why, format_args!("cannot watch {path}")))?;
        if !place.is_as_written(ours)? {
            // An operator was here before the watch: the next renewal tells.
            self.ensemble.poke();
        }
        Ok(true)
    }

    /// Watches our node once there is time for it: a new holder starts its command first. What happened to it
    /// meanwhile shows in the answer.
    pub(super) async fn settle(&mut self) -> Result<()> {
        let Some(settled) = self.settled else { return Ok(()) };
        clock::sleep_until(settled).await;
        self.settled = None;
        match &self.place {
            Some(place) => self.ensemble.say(Request::get_data(&place.path, true)).await,
            None => Ok(()),
        }
    }

    /// Takes the lowest free slot; `None` if none is free.
    async fn claim_slot(&mut self, name: &LockName, slots: u32) -> Result<Option<Slot>> {
        let dir = self.meta_path(name);
        let children = self.children(&dir).await?;
        let number = |child: &String| child.strip_prefix("slot-")?.parse::<u32>().ok();
        let taken: Vec<u32> = children.iter().filter_map(number).collect();
        let exists: Vec<Request> =
            taken.iter().map(|slot| Request::exists(&self.slot_path(name, *slot), false)).collect();
        let answers = if exists.is_empty() { Vec::new() } else { self.ensemble.call(&exists).await? };
        let session = self.ensemble.session()?.id;
        for (number, answer) in taken.iter().zip(&answers) {
            let stat = answer.as_ref().ok().map(|answer| reply::read_stat(answer)).transpose()?;
            if let Some(stat) = stat.filter(|stat| stat.ephemeral_owner == session) {
                return Ok(Some(Slot { number: *number, token: token(stat.czxid) }));
            }
        }
        for number in (0..slots).filter(|number| !taken.contains(number)) {
            let path = self.slot_path(name, number);
            let create = |acl| Request::create(&path, b"", acl, Kind::Ephemeral);
            let mut answer = self.ensemble.call_one(create(self.acl())).await?;
            if answer == Err(Refusal::NoNode) {
                self.make(&[(&dir, Kind::Persistent)]).await?;
                answer = self.ensemble.call_one(create(self.acl())).await?;
            }
            match answer {
                Ok(created) => {
                    let (_, stat) = reply::read_created(&created)?;
                    return Ok(Some(Slot { number, token: token(stat.czxid) }));
                }
                Err(Refusal::NodeExists) => {}
                Err(why) => return Err(refusal(why, format_args!("cannot take {path}"))),
            }
        }
        Ok(None)
    }

    /// The terms of a dlock before us that ours do not agree with. Other programs know of none; that their names tell
    /// no more than ours do is why the nodes have to be read.
    async fn other_terms(&mut self, ask: &Ask, ahead: &[Contender]) -> Result<Option<String>> {
        let differing: Vec<&Contender> = ahead.iter().filter(|one| one.mode.slots() != ask.mode.slots()).collect();
        if differing.is_empty() {
            return Ok(None);
        }
        let dir = self.lock_path(&ask.name);
        let read = |one: &&Contender| Request::get_data(&format!("{dir}/{}", one.name), false);
        let answers = self.ensemble.call(&differing.iter().map(read).collect::<Vec<_>>()).await?;
        for (other, answer) in differing.iter().zip(answers) {
            let Ok(answer) = answer else { continue };
            let (data, stat) = reply::read_data(&answer)?;
            let record = Record::from_bytes(&data);
            if record.is_some() || other.hold.is_some() {
                let who = crate::report::describe(&operate::holder(stat, record, None));
                let (theirs, ours) = (other.mode.slots(), ask.mode.slots());
                return Ok(Some(format!(
                    "{who} uses it with --slots {theirs}, not {ours}: all contenders must name the same number"
                )));
            }
        }
        Ok(None)
    }

    /// Watches for what has to happen before it is our turn.
    async fn wait(
        &mut self,
        ask: &Ask,
        queue: &Queue,
        position: usize,
        held_until: Option<Instant>,
    ) -> Result<Attempt> {
        let dir = self.lock_path(&ask.name);
        let head = &queue.contenders()[0];
        let alone = head.mode == Mode::Exclusive;
        let mut requests = vec![
            Request::get_data(&format!("{dir}/{}", head.name), false),
            Request::exists(&self.meta_path(&ask.name), false),
        ];
        requests.extend(ask.once.as_ref().map(|key| Request::exists(&self.once_path(&ask.name, key), false)));
        let blockers = if ask.queue { queue.blockers(position) } else { &[] };
        let others = requests.len();
        // Whoever loses its place is in others' way until it takes a new one. (A holder of a slot or a share writes to
        // its node itself, and would hear of nothing else.)
        let own = self.place.as_ref().filter(|_| ask.queue && ask.mode == Mode::Exclusive);
        requests.extend(own.map(|own| Request::exists(&own.path, true)));
        requests.extend(blockers.iter().map(|one| Request::exists(&format!("{dir}/{}", one.name), true)));
        let answers = self.ensemble.call(&requests).await?;
        if ask.once.is_some() && answers[2].is_ok() {
            self.leave().await?;
            return Ok(Attempt::AlreadyRan);
        }
        if answers[others..].contains(&Err(Refusal::NoNode)) {
            self.ensemble.poke();
        }
        let released = answers[1].as_ref().ok().map(|answer| reply::read_stat(answer)).transpose()?;
        let holder = answers[0].as_ref().ok().map(|answer| holder(answer, released.filter(|_| alone))).transpose()?;
        let ask_again = self.next_keep_alive()?;
        let ask_again = held_until.map_or(ask_again, |end| end.min(ask_again));
        if ask.queue {
            self.place.as_mut().context("we have a place")?.waited = true;
            // Whoever lets go before us leaves its record.
            self.ran_before = true;
        } else {
            self.leave().await?;
        }
        Ok(Attempt::Busy(Busy { holder, ahead: Some(position), ask_again }))
    }
}

fn holder(answer: &[u8], released: Option<Stat>) -> Result<Holder> {
    let (data, stat) = reply::read_data(answer)?;
    Ok(operate::holder(stat, Record::from_bytes(&data), released))
}
