//! Leases: each contender hangs on one of its own.

use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Error, LeaseGrantOptions, ResponseHeader};

use super::Etcd;
use super::failure::{lease_exists, no_such_lease};
use super::queue::Queue;
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::Term;

/// A lease that the server says to have set or extended.
pub struct Kept {
    term: Term,
    /// In whose term of office; `None` for what the members agreed on, as they do for a new lease.
    raft_term: Option<u64>,
}

impl Kept {
    fn new(from: Instant, ttl: i64, raft_term: Option<u64>) -> Kept {
        let ttl = Duration::from_secs(ttl.unsigned_abs());
        Kept { term: Term { from, ttl, slack: Duration::ZERO }, raft_term }
    }

    /// The term, if a later linearizable read shows that the same leader was in office all the time: a
    /// deposed one goes on confirming renewals that its successor knows nothing of.
    pub fn confirmed_by(self, read: &Queue) -> Result<Term> {
        if self.raft_term.is_some_and(|raft_term| raft_term != read.raft_term) {
            return Err(Fault::Unreachable.because("etcd changed its leader while the lease was renewed"));
        }
        Ok(self.term)
    }
}

impl Etcd {
    /// Frees a lease, and with it whatever hangs on it.
    pub(super) async fn drop_lease(&mut self, lease: i64) -> Result<()> {
        match self.members.call(async |mut client| client.lease_revoke(lease).await.map(drop)).await {
            Err(error) if !no_such_lease(&error) => Err(error),
            _ => Ok(()),
        }
    }

    pub(super) async fn grant(&mut self, lease: i64, ttl: Duration) -> Result<Kept> {
        let granted = self.members.call(async |mut client| {
            let from = clock::now();
            let answer = client.lease_grant(seconds(ttl), Some(LeaseGrantOptions::new().with_id(lease))).await?;
            Ok(Kept::new(from, answer.ttl(), None))
        });
        match granted.await {
            // An earlier request of ours was not answered, but applied, and who knows when.
            Err(error) if lease_exists(&error) => {
                self.keep_alive(lease).await?.context("our lease ran out while we asked for it")
            }
            granted => granted,
        }
    }

    /// A lease whose id the server chooses: for one that is granted anew if the answer is lost.
    pub(super) async fn grant_any(&mut self, ttl: Duration) -> Result<i64> {
        self.members.call(async |mut client| Ok(client.lease_grant(seconds(ttl), None).await?.id())).await
    }

    /// Extends a lease; `None` if there is no such lease.
    pub(super) async fn keep_alive(&mut self, lease: i64) -> Result<Option<Kept>> {
        let kept = self.members.call(async |mut client| {
            // This hides its answer from us, so the one that counts is the second.
            let (mut keeper, mut answers) = match client.lease_keep_alive(lease).await {
                Err(Error::LeaseKeepAliveError(why)) if why == "lease not found" => return Ok(None),
                opened => opened?,
            };
            let from = clock::now();
            keeper.keep_alive().await?;
            match answers.message().await? {
                Some(answer) if answer.ttl() > 0 => {
                    let raft_term = answer.header().map_or(0, ResponseHeader::raft_term);
                    Ok(Some(Kept::new(from, answer.ttl(), Some(raft_term))))
                }
                Some(_) => Ok(None),
                None => Err(Error::LeaseKeepAliveError("the stream ended without an answer".to_owned())),
            }
        });
        kept.await
    }
}

/// etcd counts in seconds.
fn seconds(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX)
}
