//! ZooKeeper: every contender is an ephemeral sequential node, and the lowest sequence number holds.
//! The recipe, the wire, the session and the reading of names are in the modules beside this one.
//! See [`paths`] for the nodes.
//!
//! The token is the czxid of our node: the number of the transaction that created it, which no loss of
//! the parent takes back, and which grows with the sequence number, in whose order the lock is granted.
//! With slots, whose holders come and go in any order, it is the czxid of the slot's node.
//!
//! The lease is the session: its timeout as negotiated is the ttl. How it is extended, and why one can
//! count on it to the millisecond, see [`ensemble`].

mod doctor;
mod ensemble;
pub mod paths;
pub mod queue;
mod recipe;
mod release;
mod status;
pub mod wire;

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use async_trait::async_trait;

use self::ensemble::Ensemble;
use self::paths::Paths;
use self::queue::Spelling;
use self::recipe::Place;
use self::release::read_place;
use self::wire::{Answer, Kind, Refusal, Request, has_expired, refusal};
use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Patience, Reheld, Released,
    Renewal, Revoke, Revoked,
};
use crate::clock::Instant;
use crate::exit::Fault;
use crate::lock::{Grant, Holder, LockName, LockState, OwnerId, Runs, SeenHolders, runs};

pub struct ZooKeeper {
    pub ensemble: Ensemble,
    pub paths: Paths,
    spelling: Spelling,
    pub place: Option<Place>,
    /// What was on record when the lock was granted to us.
    runs: Option<Runs<i32>>,
    /// A date of the server's clock, and when we got it: as of the last place that was taken.
    clock: Option<(SystemTime, Instant)>,
    /// The holders that we saw while we waited, and in which session.
    seen: SeenHolders,
    seen_in: Option<i64>,
    /// The rest of a list of all locks.
    listing: BTreeSet<LockName>,
}

pub const PARAMETERS: &[&str] = &["recipe"];

/// The ttl of a session that keeps no place in a queue.
const VISIT: Duration = Duration::from_secs(10);

impl ZooKeeper {
    pub fn open(address: &Address, patience: Patience) -> Result<ZooKeeper> {
        let spelling = match address.param("recipe") {
            None | Some("curator") => Spelling::Curator,
            Some("kazoo") => Spelling::Kazoo,
            Some(other) => {
                return Err(Fault::Config.because(format_args!("recipe is curator or kazoo, not {other:?}")));
            }
        };
        Ok(ZooKeeper {
            ensemble: Ensemble::new(address, patience)?,
            paths: Paths::at(address)?,
            spelling,
            place: None,
            runs: None,
            clock: None,
            seen: SeenHolders::default(),
            seen_in: None,
            listing: BTreeSet::new(),
        })
    }

    fn create(&self, path: &str, data: &[u8], kind: Kind) -> Request {
        let acl = if self.ensemble.is_authenticated() { wire::CREATOR } else { wire::ANYONE };
        Request::create(path, data, acl, kind)
    }

    /// Makes a node and whatever is missing above it, but not above the chroot.
    async fn make(&mut self, path: &str, kind: Kind) -> Result<()> {
        let above = path.match_indices('/').map(|(end, _)| &path[..end]);
        let parents = above.filter(|parent| parent.len() > self.paths.chroot.len());
        let parents = parents.map(|parent| self.create(parent, b"", Kind::Persistent));
        let requests: Vec<_> = parents.chain([self.create(path, b"", kind)]).collect();
        let answers = self.ensemble.call(&requests).await?;
        let refused = |answer: &Answer| answer.as_ref().err().copied().filter(|why| *why != Refusal::NODE_EXISTS);
        match answers.last().and_then(refused) {
            None => Ok(()),
            Some(Refusal::NO_NODE) if answers[0] == Err(Refusal::NO_NODE) => Err(self.no_chroot()),
            // The refusal of a parent says more.
            Some(why) => {
                let why = answers.iter().find_map(refused).unwrap_or(why);
                Err(refusal(why, format_args!("cannot create {path}")))
            }
        }
    }

    fn no_chroot(&self) -> anyhow::Error {
        let chroot = &self.paths.chroot;
        Fault::Config.because(format_args!("the chroot {chroot} does not exist on the server: create it first"))
    }

    /// Connects, with a short session unless there is one.
    pub async fn visit(&mut self) -> Result<()> {
        self.ensemble.refresh(VISIT).await
    }

    /// Closes the session, unless it has a place in a queue to keep.
    pub async fn end_visit(&mut self) {
        if self.place.is_none() {
            self.ensemble.end_unused().await;
        }
    }

    async fn visiting<T>(&mut self, verb: impl AsyncFnOnce(&mut ZooKeeper) -> Result<T>) -> Result<T> {
        self.visit().await?;
        let answer = verb(self).await?;
        self.end_visit().await;
        Ok(answer)
    }

    /// Ends our session, and our place in the queue with it.
    async fn leave(&mut self) -> Result<()> {
        self.ensemble.close().await?;
        self.forget_place();
        Ok(())
    }

    fn forget_place(&mut self) {
        (self.place, self.runs, self.seen) = (None, None, SeenHolders::default());
    }

    /// Not later than it is on the server, without asking it.
    fn server_time(&self) -> Option<SystemTime> {
        self.clock.map(|(date, read)| date + read.elapsed())
    }

    fn lease_grant(&self) -> Result<Grant> {
        let session = self.ensemble.session()?;
        Ok(Grant { from: session.proven, ttl: session.ttl, slack: Duration::ZERO })
    }
}

#[async_trait(?Send)]
impl Backend for ZooKeeper {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let mut attempt = self.contend(ask).await;
        if attempt.as_ref().is_err_and(has_expired) {
            self.place = None;
            attempt = self.contend(ask).await;
        }
        self.ensemble.answered |= attempt.is_ok();
        if ask.is_over(&attempt) {
            self.leave().await?;
        }
        attempt
    }

    async fn changed(&mut self) -> Result<()> {
        self.ensemble.changed().await;
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        // Of a run that never began.
        if let Some(place) = self.place.as_ref().filter(|place| place.noted) {
            let note = Request::delete(&self.paths.note(&ask.name, &place.node), wire::ANY_VERSION);
            let _ = self.ensemble.call_one(note).await;
        }
        self.leave().await
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        match self.extend(lease).await {
            Err(error) if has_expired(&error) => Ok(Renewal::Lost(error.to_string())),
            renewal => renewal,
        }
    }

    /// Notes that a run began, and since when we hold the lock; watches our place from now on. Nothing happens if the lock
    /// was released before this arrives.
    async fn note_start(&mut self, lease: &Lease) -> Result<()> {
        let Some(place) = &mut self.place else { return Ok(()) };
        // It may be applied without an answer.
        place.noted = true;
        let (path, note_path) = (place.path.clone(), self.paths.note(&lease.name, &place.node));
        // Another version is an operator's, or our own: with slots from when we took one, or from an earlier try.
        let held = Request::set_data(&path, place.record.to_json().as_bytes(), place.stat.version);
        let note = runs::note(&place.record.who, lease.token, place.record.details.acquired_at()).to_json();
        let note = self.create(&note_path, note.as_bytes(), Kind::Persistent);
        let parts = vec![Request::check(&path), held.unless(Refusal::BAD_VERSION), note.unless(Refusal::NODE_EXISTS)];
        self.commit(parts, &lease.name, "cannot note the run").await?;
        let ours = read_place(&self.ensemble.call_one(Request::get_data(&path).watched()).await?)?;
        // Whatever we were notified of until now is our own doing, or has been read just now.
        self.ensemble.set_notified(!matches!(ours, Some((None, _))));
        Ok(())
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        match self.release_place(lease, ending).await {
            Err(error) if has_expired(&error) => {
                self.forget_place();
                self.release_place(lease, ending).await
            }
            released => released,
        }
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        self.visiting(async |here| here.move_end(name, owner, ttl).await).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        self.visiting(async |here| here.state_of(name).await).await
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        self.visiting(async |here| here.forget_runs(name, what).await).await
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        self.visiting(async |here| here.page(after).await).await
    }

    async fn examine(&mut self) -> Result<Checkup> {
        self.visiting(doctor::examine).await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        self.visiting(async |here| here.take_away(name, from, how).await).await
    }
}
