//! etcd: a queue of contenders' keys, each alive as long as its owner's lease.
//!
//! The lowest create revision holds, as in Go's `concurrency.Mutex` and `etcdctl lock`, whose keys stand
//! in the same queue. See [`keys`] for where things lie. The token is the create revision of our key,
//! or with slots the revision at which we took the slot.
//!
//! etcd 3.4.23 may confirm the renewal of a lease that is revoked or that another leader looks after,
//! so nothing counts as ours before a linearizable read has shown our key in the same term of office.

mod examine;
mod failure;
mod keys;
mod lease;
mod leave;
mod members;
mod place;
mod predecessor;
pub mod queue;
mod status;
#[cfg(test)]
mod tests;
mod watch;
mod wire;

use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use etcd_client::{Client, GetOptions, SortOrder, SortTarget, Txn, TxnOp};

use self::keys::{Keys, lease_id};
use self::members::Members;
use self::place::{Entered, MARK, ONCE, Place, announcement};
use self::predecessor::{Neighbour, Predecessor};
use self::queue::{Contender, Queue, holds, other_terms};
use self::status::Listing;
use self::watch::{Glimpse, Sight, Watch, in_the_way};
use crate::backend::{
    Address, Ask, Attempt, Backend, Busy, Checkup, Ending, Lease, Page, Patience, Reheld, Released, Renewal, Revoke,
    Revoked, taken_away,
};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::{Holder, LockName, LockState, Mode, OwnerId};

/// Between two tries to watch.
const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long a new holder keeps quiet. A command that ends sooner was no trouble to anybody, and one that goes on
/// is not slowed down in its first moments by what we and the server do beside it. The watch then looks back to the
/// grant, so nothing is missed.
const SETTLING: Duration = Duration::from_millis(20);
/// Of a queue with very many waiters; the library's own limit of 4 MB is reached by some ten thousand.
const LARGEST_ANSWER: usize = 64 << 20;

pub struct Etcd {
    members: Members,
    keys: Keys,
    place: Option<Place>,
    watch: Watch,
    /// What to tell others when there is time: a waiter that is granted the lock starts its command first.
    announcement: Option<Txn>,
    /// When there is.
    settled: Option<Instant>,
    /// Whoever holds the lock while we are next.
    predecessor: Option<Predecessor>,
    /// The one directly before us, if it wants the lock for itself alone, as we do, and says when it lets go.
    neighbour: Option<Neighbour>,
    listing: Listing,
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
            watch: Watch::default(),
            announcement: None,
            settled: None,
            predecessor: None,
            neighbour: None,
            listing: Listing::default(),
        })
    }

    async fn transact(&mut self, txn: Txn) -> Result<etcd_client::TxnResponse> {
        let ask =
            async |client: Client| client.kv_client().max_decoding_message_size(LARGEST_ANSWER).txn(txn.clone()).await;
        self.members.call(ask).await
    }

    /// Reads the queue, or only what is not behind `place`, who let go last, whether an operator wants us to and, if
    /// asked for, the record of the `once` key.
    fn look(&self, ask: &Ask, place: Option<i64>) -> Vec<TxnOp> {
        let mut in_order = in_order();
        if let Some(created) = place {
            in_order = in_order.with_max_create_revision(created);
        }
        let queue = TxnOp::get(self.keys.queue(&ask.name), Some(in_order));
        std::iter::once(queue).chain(self.look_beside(ask)).collect()
    }

    fn look_beside(&self, ask: &Ask) -> impl Iterator<Item = TxnOp> {
        let released = self.keys.released(&ask.name).into_bytes();
        let own = self.keys.contender(&ask.name, lease_id(&ask.name, ask.who.owner.as_str()));
        let mark = self.keys.mark(&ask.name, own.as_bytes());
        let once = self.once_key(ask).map(String::into_bytes);
        [released, mark].into_iter().chain(once).map(|key| TxnOp::get(key, None))
    }

    fn read_queue(&self, name: &LockName) -> TxnOp {
        TxnOp::get(self.keys.queue(name), Some(in_order()))
    }

    fn once_key(&self, ask: &Ask) -> Option<String> {
        ask.once.as_deref().map(|key| self.keys.once(&ask.name, key))
    }

    /// Who is in the way, and until when to wait for a sign of their leaving.
    async fn busy(&mut self, ask: &Ask, place: Place, queue: &Queue, ahead: &[Contender]) -> Result<Busy> {
        if ask.queue {
            self.neighbour = Neighbour::among(ahead, ask.mode);
            self.watch.turn_to(in_the_way(ask.mode, ahead, &self.keys.queue(&ask.name)), queue);
        } else {
            self.withdraw(ask).await?;
        }
        let holder = ahead.first().map(Contender::holder);
        let keep_alive = place.next_keep_alive();
        let ask_again = self.look_after(ask, ahead).await.map_or(keep_alive, |look| look.min(keep_alive));
        Ok(Busy { holder, ahead: Some(ahead.len()), ask_again })
    }

    /// It is our turn, but the one before us may still be running its command.
    fn in_mourning(&mut self, ask: &Ask, place: Place, queue: &Queue, me: &Contender, until: Instant) -> Busy {
        self.watch.turn_to(self.about_us(ask, me), queue);
        Busy { holder: None, ahead: Some(0), ask_again: until.min(place.next_keep_alive()) }
    }

    /// What may happen to whoever is first in the queue.
    fn about_us(&self, ask: &Ask, me: &Contender) -> Vec<Sight> {
        vec![Sight::end_of(&me.key), Sight::of(&self.keys.mark(&ask.name, &me.key))]
    }
}

fn in_order() -> GetOptions {
    GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend)
}

#[async_trait(?Send)]
impl Backend for Etcd {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        loop {
            let (queue, entered) = match self.look_again(ask).await? {
                Some(queue) => (queue, Entered::Before),
                None => self.enter(ask).await?,
            };
            if queue.beside(ONCE).is_some() {
                self.withdraw(ask).await?;
                return Ok(Attempt::AlreadyRan);
            }
            let place = self.place.context("nobody takes a place without keeping it in mind")?;
            let me = queue.find(&self.keys.contender(&ask.name, place.lease));
            let ahead = &queue.contenders[..me.unwrap_or(queue.contenders.len())];
            if let Some(text) = other_terms(ask.mode, ahead) {
                self.withdraw(ask).await?;
                return Ok(Attempt::OtherTerms(text));
            }
            let Some(me) = me.filter(|_| holds(ask.mode, ahead)).map(|at| &queue.contenders[at]) else {
                return self.busy(ask, place, &queue, ahead).await.map(Attempt::Busy);
            };
            if let Some(reason) = queue.beside(MARK) {
                self.withdraw(ask).await?;
                return Err(taken_away(&reason));
            }
            if let Some(until) = self.predecessor.as_mut().and_then(|before| before.may_live_until(&queue)) {
                return Ok(Attempt::Busy(self.in_mourning(ask, place, &queue, me, until)));
            }
            let (token, slot) = match ask.mode {
                Mode::Slots(_) => match self.take_slot(ask, &queue, me).await? {
                    Some((token, slot)) => (token, Some(slot)),
                    None => continue,
                },
                Mode::Exclusive | Mode::Shared => (me.token(), None),
            };
            if slot.is_none() && entered == Entered::Before {
                self.announcement = Some(announcement(me, &ask.who)?);
            }
            self.watch.turn_to(self.about_us(ask, me), &queue);
            self.settled = Some(clock::now() + SETTLING);
            let (name, owner) = (ask.name.clone(), ask.who.owner.clone());
            return Ok(Attempt::Granted(Lease { name, owner, token, slot, term: place.term, descriptors: Vec::new() }));
        }
    }

    /// Heals its own connection, with pauses, and never fails: the verbs will tell.
    async fn changed(&mut self) -> Result<()> {
        if let Some(settled) = self.settled {
            clock::sleep_until(settled).await;
            self.settled = None;
        }
        if self.watch.has_turned() {
            self.members.end_watch();
        }
        if let Some(announcement) = self.announcement.as_ref() {
            let announced = self.members.beside(async |mut client| client.txn(announcement.clone()).await).await;
            self.announcement.take_if(|_| announced.is_ok());
        }
        let mut pause = SHORTEST_PAUSE;
        loop {
            if self.watch.is_idle() {
                std::future::pending::<()>().await;
            }
            let glimpse = match self.members.stream(&self.watch).await {
                Ok(stream) => stream.glimpse().await,
                Err(_) => {
                    self.members.leave();
                    Glimpse::Over
                }
            };
            match glimpse {
                Glimpse::Change(revision) => {
                    self.watch.seen_until(revision);
                    return Ok(());
                }
                Glimpse::Compacted(revision) => {
                    self.watch.seen_until(revision);
                    self.members.end_watch();
                    return Ok(());
                }
                Glimpse::Over => {
                    self.members.end_watch();
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
            }
        }
    }

    async fn withdraw(&mut self, ask: &Ask) -> Result<()> {
        self.place = None;
        self.drop_lease(lease_id(&ask.name, ask.who.owner.as_str())).await
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let id = lease_id(&lease.name, lease.owner.as_str());
        let Some(kept) = self.keep_alive(id).await? else {
            return Ok(Renewal::Lost("its etcd lease is gone".to_owned()));
        };
        let key = self.keys.contender(&lease.name, id);
        let look = [TxnOp::get(key.as_str(), None), TxnOp::get(self.keys.mark(&lease.name, key.as_bytes()), None)];
        let read = Queue::read(&self.transact(Txn::new().and_then(look)).await?)?;
        let term = kept.confirmed_by(&read)?;
        self.watch.seen_until(read.revision);
        Ok(match (read.contenders.first(), read.beside(0)) {
            (None, Some(reason)) => Renewal::Taken(reason),
            (None, None) => Renewal::Lost("its etcd key was deleted".to_owned()),
            (Some(key), _) if key.token() != lease.token => {
                Renewal::Lost(format!("its etcd key was deleted and made again: its token is now {}", key.token()))
            }
            (_, Some(reason)) => Renewal::Revoked(reason),
            (Some(_), None) => Renewal::Held(term),
        })
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        self.let_go(lease, ending).await
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        self.hold_for(name, owner, ttl).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        self.state_of(name).await
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        self.page(after).await
    }

    async fn examine(&mut self) -> Result<Checkup> {
        self.check_up().await
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        self.take_away(name, from, how).await
    }
}
