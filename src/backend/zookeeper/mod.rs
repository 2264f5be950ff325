//! ZooKeeper: every contender is an ephemeral sequential node, and the lowest sequence number holds.
//! The recipe, the wire, the session and the reading of names are in the modules beside this one.
//!
//! ```text
//! /dlock/NAME                    a container, which the server removes some time after its last child
//! /dlock/NAME/_c_<uuid>-lock-N   a contender; its data is a [`queue::Details`], with the mark of a revoke
//! /dlock/NAME/_c_<uuid>-hold-…   a place kept without a session: see [`release`]
//! /dlock-meta/NAME               how the last runs ended; kept
//! /dlock-meta/NAME/once-KEY      a successful run with this key; kept
//! /dlock-meta/NAME/taken         whose lock was freed at once recently, and why: see [`status`]; kept
//! /dlock-meta/NAME/slot-K        ephemeral: the slot is taken
//! /dlock-meta/~noted/NAME/…      a run that lasts: see [`status`]
//! /dlock-meta/~alive/NAME/…      ephemeral: a contender's sign of life: see [`recipe`]
//! ```
//!
//! The token is the czxid of our node: the number of the transaction that created it, which no loss of
//! the parent takes back, and which grows with the sequence number, in whose order the lock is granted.
//! With slots, whose holders come and go in any order, it is the czxid of the slot's node.
//!
//! The lease is the session: its timeout as negotiated is the ttl. How it is extended, and why one can
//! count on it to the millisecond, see [`ensemble`].

mod doctor;
mod ensemble;
pub mod queue;
mod recipe;
mod release;
mod status;
pub mod wire;

use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;

use self::ensemble::Ensemble;
use self::queue::{ServerClock, Spelling, sign_of};
use self::recipe::Place;
use self::wire::{Acl, Answer, Kind, Refusal, Request, has_expired, refusal};
use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Listing, Page, Patience, Reheld,
    Released, Renewal, Revoke, Revoked,
};
use crate::exit::Fault;
use crate::lock::{Grant, Holder, LockName, LockState, OwnerId, Runs, SeenHolders, Token};

pub struct ZooKeeper {
    pub ensemble: Ensemble,
    /// Where all our paths lie; must exist.
    chroot: String,
    root: String,
    meta: String,
    spelling: Spelling,
    pub place: Option<Place>,
    /// What was on record when the lock was granted to us.
    runs: Option<Runs<i32>>,
    /// As of the last place that was taken.
    clock: Option<ServerClock>,
    /// The holders that we saw while we waited, and in which session.
    seen: SeenHolders,
    seen_in: Option<i64>,
    /// The rest of a list of all locks.
    listing: Listing,
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
        let chroot = address.path().trim_end_matches('/').to_owned();
        let root = format!("{chroot}/{}", address.param("prefix").unwrap_or("dlock").trim_matches('/'));
        if root.split('/').skip(1).any(|part| matches!(part, "" | "." | "..")) {
            return Err(Fault::Config.because(format_args!("{root:?} is not the path of a node")));
        }
        let ensemble = Ensemble::new(address, patience)?;
        Ok(ZooKeeper {
            ensemble,
            meta: format!("{root}-meta"),
            root,
            chroot,
            spelling,
            place: None,
            runs: None,
            clock: None,
            seen: SeenHolders::default(),
            seen_in: None,
            listing: Listing::default(),
        })
    }

    fn acl(&self) -> Acl {
        if self.ensemble.is_authenticated() { Acl::Creator } else { Acl::Anyone }
    }

    fn lock_path(&self, name: &LockName) -> String {
        format!("{}/{}", self.root, name.encoded())
    }

    fn place_path(&self, name: &LockName, node: &str) -> String {
        format!("{}/{node}", self.lock_path(name))
    }

    pub fn meta_path(&self, name: &LockName) -> String {
        format!("{}/{}", self.meta, name.encoded())
    }

    /// Where the signs of life of a lock's contenders are. No lock is named so.
    fn signs_path(&self, name: &LockName) -> String {
        format!("{}/~alive/{}", self.meta, name.encoded())
    }

    /// Where the notes of a lock's runs are. No lock is named so.
    fn notes_path(&self, name: &LockName) -> String {
        format!("{}/~noted/{}", self.meta, name.encoded())
    }

    fn note_path(&self, name: &LockName, node: &str) -> String {
        format!("{}/{node}", self.notes_path(name))
    }

    /// The sign of the contender that has, or is about to get, the place of this name.
    fn sign_path(&self, name: &LockName, node: &str) -> String {
        format!("{}/{}", self.signs_path(name), sign_of(node))
    }

    /// Whose lock was freed at once recently, and why.
    fn taken_path(&self, name: &LockName) -> String {
        format!("{}/taken", self.meta_path(name))
    }

    fn slot_path(&self, name: &LockName, number: u32) -> String {
        format!("{}/slot-{number}", self.meta_path(name))
    }

    fn once_path(&self, name: &LockName, key: &str) -> String {
        let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
        let escaped: String = key
            .bytes()
            .map(|byte| if plain(&byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
            .collect();
        format!("{}/once-{escaped}", self.meta_path(name))
    }

    /// Makes a node and whatever is missing above it, but not above the chroot.
    async fn make(&mut self, path: &str, kind: Kind) -> Result<()> {
        let parents = path[self.chroot.len()..].match_indices('/').skip(1).map(|(at, _)| at + self.chroot.len());
        let parents = parents.map(|end| Request::create(&path[..end], b"", self.acl(), Kind::Persistent));
        let requests: Vec<_> = parents.chain([Request::create(path, b"", self.acl(), kind)]).collect();
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
        let chroot = &self.chroot;
        Fault::Config.because(format_args!("the chroot {chroot} does not exist on the server: create it first"))
    }

    /// Connects, with a short session unless there is one.
    pub async fn visit(&mut self) -> Result<()> {
        if !self.ensemble.is_fresh() {
            self.ensemble.attach(VISIT).await?;
        }
        Ok(())
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

    fn lease_grant(&self) -> Result<Grant> {
        let session = self.ensemble.session()?;
        Ok(Grant { from: session.proven, ttl: session.ttl, slack: Duration::ZERO })
    }
}

fn token(czxid: i64) -> Token {
    Token(u64::try_from(czxid).unwrap_or(0))
}

#[async_trait(?Send)]
impl Backend for ZooKeeper {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let attempt = match self.contend(ask).await {
            Err(error) if has_expired(&error) => {
                self.place = None;
                self.contend(ask).await
            }
            attempt => attempt,
        };
        self.ensemble.answered |= attempt.is_ok();
        attempt
    }

    async fn changed(&mut self) -> Result<()> {
        self.ensemble.changed().await;
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        // Of a run that never began.
        if let Some(place) = self.place.as_ref().filter(|place| place.noted) {
            let note = Request::delete(&self.note_path(&ask.name, &place.node), wire::ANY_VERSION);
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

    async fn note_start(&mut self, lease: &Lease) -> Result<()> {
        self.note(lease).await
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        match self.release_place(lease, ending).await {
            Err(error) if has_expired(&error) => self.was_released(lease, ending).await,
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
