//! Keeping the lease.

use anyhow::{Context, Result, bail};

use super::record::Record;
use super::reply::{self, Refusal};
use super::request::Request;
use super::taken::reason_for;
use super::{ZooKeeper, refusal};
use crate::backend::{Lease, Renewal};

impl ZooKeeper {
    pub(super) async fn extend(&mut self, lease: &Lease) -> Result<Renewal> {
        let ttl = self.ensemble.session()?.ttl;
        self.ensemble.attach(ttl).await?;
        let place = self.place.as_ref().context("we have a place")?;
        let mut held = vec![Request::check(&place.path)];
        held.extend(place.record.slot.map(|slot| Request::check(&self.slot_path(&lease.name, slot.number))));
        let taken = Request::get_data(&self.taken_path(&lease.name), false);
        let requests = [Request::multi(&held), Request::get_data(&place.path, true), taken];
        let [committed, ours, taken] = &self.ensemble.call(&requests).await?[..] else {
            bail!("three answers to three requests")
        };
        let place = self.place.as_ref().context("we have a place")?;
        let deleted = || {
            let lost = || Renewal::Lost(format!("{} was deleted", place.path));
            reason_for(&lease.owner, taken).map_or_else(lost, Renewal::Taken)
        };
        match reply::multi_refusal(committed.as_ref().map_err(|why| refusal(*why, "cannot renew"))?)? {
            None => {}
            Some((_, Refusal::NoNode)) => return Ok(deleted()),
            Some((_, why)) => return Err(refusal(why, "cannot renew")),
        }
        let (data, stat) = match ours {
            Ok(answer) => reply::read_data(answer)?,
            Err(Refusal::NoNode) => return Ok(deleted()),
            Err(why) => return Err(refusal(*why, "cannot renew")),
        };
        if stat.czxid != place.czxid {
            return Ok(Renewal::Lost(format!("{} is another one now", place.path)));
        }
        self.ensemble.prove();
        match Record::from_bytes(&data).and_then(|record| record.revoked) {
            Some(reason) => Ok(Renewal::Revoked(reason)),
            None => Ok(Renewal::Held(self.term()?)),
        }
    }
}
