//! Letting go, in one transaction with the record of the run.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::queue::held_name;
use super::record::{Hold, Record};
use super::reply::{self, Refusal};
use super::request::{ANY_VERSION, Kind, Request};
use super::taken::reason_for;
use super::{Place, VISIT, ZooKeeper, refusal};
use crate::backend::{Ending, Lease, Released};
use crate::lock::LastRun;

/// The parts of the transaction, to tell which of them was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Place,
    Slot,
    Sign,
    Hold,
    LastRun,
    Once,
}

/// What turned out while trying.
struct Plan<'a> {
    last_run: Option<&'a LastRun>,
    once: Option<&'a str>,
    hold: Option<Duration>,
    /// Most servers are not told to have nodes that expire. There the hold stays until a dlock passes it.
    expiring: bool,
    slot: bool,
    sign: bool,
    /// There is a node for the record of the run. If there is none, one is made in the same step.
    ran_before: bool,
}

impl ZooKeeper {
    pub(super) async fn let_go(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(VISIT).await?;
        }
        let Some(place) = &self.place else { return self.was_released(lease).await };
        let last_run = ending.last_run.as_ref();
        let mut plan = Plan {
            last_run,
            once: last_run.filter(|run| run.succeeded()).and_then(|run| run.once.as_deref()),
            hold: ending.hold_until.map(|until| until.remaining()).filter(|left| !left.is_zero()),
            expiring: true,
            slot: place.record.slot.is_some(),
            sign: true,
            ran_before: self.ran_before,
        };
        loop {
            let place = self.place.as_ref().context("we have a place")?;
            let (parts, requests): (Vec<Part>, Vec<Request>) =
                self.transaction(lease, place, &plan).into_iter().unzip();
            let answer = self.ensemble.call_one(Request::multi(&requests)).await?;
            let answer = answer.map_err(|why| refusal(why, "cannot release"))?;
            match reply::multi_refusal(&answer)?.map(|(at, why)| (parts[at], why)) {
                None => break,
                Some((Part::Place, Refusal::NoNode)) => return self.was_released(lease).await,
                Some((Part::Slot, Refusal::NoNode)) => plan.slot = false,
                Some((Part::Sign, Refusal::NoNode)) => plan.sign = false,
                Some((Part::LastRun, Refusal::NoNode)) if plan.ran_before => plan.ran_before = false,
                Some((Part::LastRun, Refusal::NodeExists)) => plan.ran_before = true,
                Some((Part::LastRun, Refusal::NoNode)) => {
                    plan.ran_before = true;
                    let meta = self.meta_path(&lease.name);
                    self.make(&[(&meta, Kind::Persistent)]).await?;
                }
                Some((Part::Once, Refusal::NodeExists)) => plan.once = None,
                Some((Part::Hold, Refusal::Unimplemented)) if plan.expiring => plan.expiring = false,
                Some((part, why)) => return Err(refusal(why, format_args!("cannot release ({part:?})"))),
            }
        }
        self.ensemble.part().await;
        self.forget_place();
        Ok(Released::Done)
    }

    fn transaction(&self, lease: &Lease, place: &Place, plan: &Plan<'_>) -> Vec<(Part, Request)> {
        let name = &lease.name;
        let mut parts = vec![(Part::Place, Request::delete(&place.path, ANY_VERSION))];
        let sign = plan.sign.then(|| self.sign_path(name, &place.node));
        parts.extend(sign.map(|sign| (Part::Sign, Request::delete(&sign, ANY_VERSION))));
        let slot = place.record.slot.filter(|_| plan.slot).map(|slot| self.slot_path(name, slot.number));
        parts.extend(slot.as_ref().map(|slot| (Part::Slot, Request::delete(slot, ANY_VERSION))));
        if let Some(lasts) = plan.hold {
            let hold = Hold::new(lasts, place.token(), plan.last_run.is_none());
            let mut record = Record { hold: Some(hold), ..place.record.clone() };
            if record.acquired_ms.is_none() {
                record.acquire_now();
            }
            let path = format!("{}/{}", self.lock_path(name), held_name(&place.node));
            parts.push((Part::Hold, self.create_hold(&path, &record, plan.expiring)));
            let keep = |slot: &String| Request::create(slot, b"", self.acl(), Kind::Persistent);
            parts.extend(slot.as_ref().map(|slot| (Part::Slot, keep(slot))));
        }
        if let Some(last_run) = plan.last_run.map(LastRun::to_json) {
            let (meta, last_run) = (self.meta_path(name), last_run.as_bytes());
            let note = match plan.ran_before {
                true => Request::set_data(&meta, last_run, ANY_VERSION),
                false => Request::create(&meta, last_run, self.acl(), Kind::Persistent),
            };
            parts.push((Part::LastRun, note));
        }
        if let Some(key) = plan.once {
            parts.push((Part::Once, Request::create(&self.once_path(name, key), b"", self.acl(), Kind::Persistent)));
        }
        parts
    }

    /// Our place is gone: whether because an earlier release was done and its answer lost, or because the
    /// lock was.
    pub(super) async fn was_released(&mut self, lease: &Lease) -> Result<Released> {
        self.forget_place();
        if !self.ensemble.is_linked() {
            self.ensemble.attach(VISIT).await?;
        }
        let path = self.meta_path(&lease.name);
        let looks = [path.clone(), self.taken_path(&lease.name)].map(|path| Request::get_data(&path, false));
        let [last_run, taken] = &self.ensemble.call(&looks).await?[..] else { bail!("two answers to two requests") };
        let last_run = match last_run {
            Ok(answer) => LastRun::from_json(&String::from_utf8_lossy(&reply::read_data(answer)?.0)),
            Err(Refusal::NoNode) => None,
            Err(why) => return Err(refusal(*why, format_args!("cannot read {path}"))),
        };
        let ours = |token| token == lease.token;
        // What an operator who freed it on the spot has put there is about our run as well, but does not know its end.
        let (own, cut_short) = match last_run.filter(|run| ours(run.fencing_token)) {
            Some(run) if run.exit_code.is_none() => (None, run.reason),
            own => (own, None),
        };
        let taken = reason_for(&lease.owner, taken).or(cut_short);
        let done =
            own.is_some() || self.hold_of(&lease.name, &lease.owner).await?.is_some_and(|held| ours(held.hold.token));
        self.ensemble.part().await;
        Ok(match taken {
            _ if done => Released::Done,
            Some(reason) => Released::Taken(reason),
            None => Released::NotOurs,
        })
    }
}
