//! etcd: a queue of contenders' keys, each alive as long as its owner's lease.
//!
//! The lowest create revision holds, as in Go's `concurrency.Mutex` and `etcdctl lock`, whose keys stand
//! in the same queue. See [`keys`] for the keys. The token is the create revision of our key,
//! or with slots the revision at which we took the slot.
//!
//! etcd 3.4.23 may confirm the renewal of a lease that is revoked or that another leader looks after,
//! so nothing counts as ours before a linearizable read has shown our key in the same raft term.

mod client;
mod doctor;
mod errors;
mod keys;
pub mod queue;
mod recipe;
mod status;

use std::collections::{BTreeSet, btree_set};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;

use self::client::{Members, Watch};
use self::keys::Keys;
pub use self::keys::lease_id;
use self::recipe::{Granted, Place};
use crate::backend::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Patience, Reheld, Released,
    Renewal, Revoke, Revoked,
};
use crate::exit::Fault;
use crate::lock::{Holder, LockName, LockState, OwnerId, SeenHolders};

/// Between two tries to watch.
const PAUSE: Duration = Duration::from_millis(500);

pub struct Etcd {
    pub members: Members,
    pub keys: Keys,
    place: Option<Place>,
    granted: Option<Granted>,
    watch: Watch,
    /// Whom we saw hold the lock while we waited.
    seen: SeenHolders,
    /// What of a list of all locks is still to come.
    listing: btree_set::IntoIter<LockName>,
}

impl Etcd {
    pub fn open(address: &Address, patience: Patience) -> Result<Etcd> {
        if !matches!(address.path(), "" | "/") {
            return Err(Fault::Config.because("an etcd URL has no path; to put locks elsewhere use ?prefix=…"));
        }
        Ok(Etcd {
            members: Members::at(address, patience)?,
            keys: Keys::under(address.param("prefix").unwrap_or("dlock/"))?,
            place: None,
            granted: None,
            watch: Watch::default(),
            seen: SeenHolders::default(),
            listing: BTreeSet::new().into_iter(),
        })
    }
}

#[async_trait(?Send)]
impl Backend for Etcd {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let attempt = self.contend(ask).await;
        self.members.connected |= attempt.is_ok();
        attempt
    }

    /// Reconnects by itself, with pauses, and never fails: the other verbs report what is wrong.
    async fn changed(&mut self) -> Result<()> {
        if self.watch.is_idle() {
            std::future::pending::<()>().await;
        }
        while self.members.changed(&mut self.watch).await.is_err() {
            self.members.end_watch();
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        self.give_up_place(ask).await?;
        self.take_note_back(&ask.name).await
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        self.extend(lease).await
    }

    async fn note_start(&mut self, lease: &Lease) -> Result<()> {
        self.note(lease).await
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        self.release_place(lease, ending).await
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        self.move_end(name, owner, ttl).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        self.state_of(name).await
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        self.forget_runs(name, what).await
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        self.page(after).await
    }

    async fn examine(&mut self) -> Result<Checkup> {
        doctor::examine(&mut self.members).await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        self.take_away(name, from, how).await
    }
}
