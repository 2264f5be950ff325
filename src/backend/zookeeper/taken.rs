//! Freeing a lock on the spot, and why: in the same transaction the run that is cut short becomes the last run, and the
//! reason goes where its holder looks for it when its place is gone.
//!
//! That is one node beside the last run, for all that were taken away of late: nothing that belongs to the holder's
//! session is left to write it on, and a node for each would stay where a holder never comes back.

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::record::Record;
use super::reply::{self, Answer, Refusal};
use super::request::{ANY_VERSION, Kind, Request};
use super::{ZooKeeper, refusal};
use crate::backend::Revoked;
use crate::lock::{Holder, LastRun, LockName, OwnerId};

/// So many can be told, however late; with a reason of the longest kind each, far below what a node may hold.
const MOST: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Taken {
    owner: String,
    reason: String,
}

/// Whatever cannot be read says nothing.
fn read(answer: &Answer) -> Vec<Taken> {
    let data = answer.as_ref().ok().and_then(|answer| reply::read_data(answer).ok());
    data.and_then(|(data, _)| serde_json::from_slice(&data).ok()).unwrap_or_default()
}

/// Why an owner's lock was freed on the spot, if it was.
pub(super) fn reason_for(owner: &OwnerId, answer: &Answer) -> Option<String> {
    read(answer).into_iter().rev().find(|taken| taken.owner == owner.as_str()).map(|taken| taken.reason)
}

impl ZooKeeper {
    pub(super) fn taken_path(&self, name: &LockName) -> String {
        format!("{}/taken", self.meta_path(name))
    }

    /// Why an owner's lock was freed on the spot, if it was.
    pub(super) async fn why_taken(&mut self, name: &LockName, owner: &OwnerId) -> Result<Option<String>> {
        let path = self.taken_path(name);
        let answer = self.ensemble.call_one(Request::get_data(&path, false)).await?;
        Ok(reason_for(owner, &answer))
    }

    /// Frees a holder's place, which is `node`, with all that goes with it.
    pub(super) async fn free(
        &mut self,
        name: &LockName,
        node: &str,
        record: Option<&Record>,
        seen: &Holder,
        reason: &str,
    ) -> Result<Revoked> {
        let (meta, path) = (self.meta_path(name), self.taken_path(name));
        let last_run = LastRun::cut_short(seen, reason).to_json();
        // What a release has left behind: how the run ended is known, or there was none.
        let runs = record.is_none_or(|record| record.hold.is_none());
        let mut places = self.belongings(name, node, record);
        for _ in 0..10 {
            let looks = [Request::get_data(&meta, false), Request::get_data(&path, false)];
            let found = self.ensemble.call(&looks).await?;
            let mut parts: Vec<Request> = places.iter().map(|path| Request::delete(path, ANY_VERSION)).collect();
            match &found[0] {
                Ok(_) if runs => parts.push(Request::set_data(&meta, last_run.as_bytes(), ANY_VERSION)),
                Ok(_) => {}
                Err(Refusal::NoNode) => {
                    let first = if runs { last_run.as_bytes() } else { b"" };
                    parts.push(Request::create(&meta, first, self.acl(), Kind::Persistent));
                }
                Err(Refusal::NoAuth) => return self.free_unrecorded(name, node, record).await,
                Err(why) => return Err(refusal(*why, format_args!("cannot read {meta}"))),
            }
            if let Some(owner) = record.map(|record| record.who.owner.to_string()) {
                let mut all = read(&found[1]);
                all.push(Taken { owner, reason: reason.to_owned() });
                let late = serde_json::to_vec(&all[all.len().saturating_sub(MOST)..])?;
                parts.push(match &found[1] {
                    Ok(answer) => Request::set_data(&path, &late, reply::read_data(answer)?.1.version),
                    Err(_) => Request::create(&path, &late, self.acl(), Kind::Persistent),
                });
            }
            let answer = self.ensemble.call_one(Request::multi(&parts)).await?;
            let answer = answer.map_err(|why| refusal(why, format_args!("cannot free {name}")))?;
            match reply::multi_refusal(&answer)? {
                None => return Ok(Revoked::Freed),
                Some((0, Refusal::NoNode)) => return Ok(Revoked::NotHeld),
                Some((at, Refusal::NoNode)) if at < places.len() => drop(places.remove(at)),
                // Nobody has ever let go of a lock here.
                Some((_, Refusal::NoNode)) => self.make(&[(&meta, Kind::Persistent)]).await?,
                // Somebody else was faster: another operator, or the first release of all.
                Some((_, Refusal::BadVersion | Refusal::NodeExists)) => {}
                Some((at, Refusal::NoAuth)) if at >= places.len() => {
                    return self.free_unrecorded(name, node, record).await;
                }
                Some((_, why)) => return Err(refusal(why, format_args!("cannot free {name}"))),
            }
        }
        bail!("{name} changes all the time")
    }

    /// Who may take a lock away need not be allowed to write anything down.
    async fn free_unrecorded(&mut self, name: &LockName, node: &str, record: Option<&Record>) -> Result<Revoked> {
        let removed = self.remove(name, node, record).await?;
        Ok(if removed { Revoked::Freed } else { Revoked::NotHeld })
    }
}
