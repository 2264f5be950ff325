//! Locks on this host: flock(2) on `DIR/NAME.lock`, the same lock that `flock DIR/NAME.lock cmd` takes.
//!
//! The lock file stays empty and is never unlinked by us; `DIR/NAME.d/` has what belongs to it: `token`
//! (the fencing counter), `holder.OWNER` and `waiter.OWNER` (see `record`), `slot.K` for `--slots`,
//! `last-run`, `once`, and `revoke.OWNER`, the mark that an operator leaves for a holder.
//!
//! A token is the greater of counter + 1 and microseconds since the epoch; see `token`. The kernel frees a flock when its last descriptor is closed or somebody who has it says
//! so: there is no expiry, and the ttl only limits how long a stopped dlock can stay in the way.

mod directory;
mod examine;
mod foreign;
mod linger;
mod record;
mod status;
mod take;
mod token;
mod wait;

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;

use super::{
    Address, Ask, Attempt, Backend, Busy, Checkup, Ending, Lease, Page, Reheld, Released, Renewal, Revoke, Revoked,
};
use crate::clock;
use crate::lock::{Holder, LockName, LockState, OwnerId, Term};
pub use directory::default_directory;
use directory::{Directory, Paths, same_file};
pub use linger::linger;
use record::{Kind, Record};
use wait::Waiting;

pub const NAME: &str = "file";

pub struct FileBackend {
    directory: Directory,
    /// What keeps the lock ours.
    claim: Option<Claim>,
    waiting: Waiting,
    listing: Option<std::fs::ReadDir>,
}

/// A lock that was taken: the locked files, and the record that tells others about it.
struct Claim {
    paths: Paths,
    lock: Arc<OwnedFd>,
    slot: Option<(u32, Arc<OwnedFd>)>,
    record: Record,
    record_file: Arc<OwnedFd>,
}

impl FileBackend {
    pub fn open(address: &Address) -> Result<FileBackend> {
        let directory = Directory::new(address)?;
        Ok(FileBackend { directory, claim: None, waiting: Waiting::default(), listing: None })
    }
}

impl Claim {
    fn descriptors(&self) -> Vec<Arc<OwnedFd>> {
        let slot = self.slot.iter().map(|(_, file)| Arc::clone(file));
        [Arc::clone(&self.lock), Arc::clone(&self.record_file)].into_iter().chain(slot).collect()
    }

    /// Why the files we have locked are not the ones that others would lock, if so.
    fn displaced(&self) -> Result<Option<String>> {
        let slot = self.slot.as_ref().map(|(n, file)| (self.paths.slot(*n), file));
        for (path, file) in [(self.paths.lock.clone(), &self.lock)].into_iter().chain(slot) {
            if !same_file(file, &path)? {
                return Ok(Some(format!("{} was deleted or replaced", path.display())));
            }
        }
        Ok(None)
    }

    /// Explicitly, since the guardian has the same descriptors.
    fn unlock(&self) {
        for descriptor in self.descriptors() {
            if let Ok(file) = descriptor.try_clone() {
                let _ = File::from(file).unlock();
            }
        }
    }
}

#[async_trait(?Send)]
impl Backend for FileBackend {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let from = clock::now();
        let attempt = self.take(ask).await?;
        Ok(match attempt {
            take::Taken::Ours(claim) => {
                let lease = Lease {
                    name: ask.name.clone(),
                    owner: ask.who.owner.clone(),
                    token: claim.record.token,
                    slot: claim.record.slot,
                    term: Term { from, ttl: ask.ttl, slack: Duration::ZERO },
                    descriptors: claim.descriptors(),
                };
                self.claim = Some(*claim);
                Attempt::Granted(lease)
            }
            take::Taken::Busy { holder, ask_again } => Attempt::Busy(Busy { holder, ahead: None, ask_again }),
            take::Taken::OtherTerms(why) => Attempt::OtherTerms(why),
            take::Taken::AlreadyRan => Attempt::AlreadyRan,
        })
    }

    async fn changed(&mut self) -> Result<()> {
        match &self.claim {
            Some(claim) => {
                self.waiting.is_over();
                self.waiting.for_interference(&claim.paths, &claim.record.who.owner).await
            }
            None => self.waiting.for_release().await,
        }
    }

    async fn withdraw(&mut self, _ask: &Ask) -> Result<()> {
        self.waiting = Waiting::default();
        if let Some(claim) = self.claim.take() {
            claim.record.remove(&claim.paths, Kind::Holder);
            claim.unlock();
        }
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let from = clock::now();
        let claim = self.claim.as_ref().context("nothing is held")?;
        if let Some(why) = claim.displaced()? {
            return Ok(Renewal::Lost(why));
        }
        match std::fs::read_to_string(claim.paths.revoke(&lease.owner)) {
            Ok(reason) => Ok(Renewal::Revoked(reason)),
            Err(_) => Ok(Renewal::Held(Term { from, ..lease.term })),
        }
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let Some(claim) = self.claim.as_mut() else { return Ok(Released::NotOurs) };
        self.waiting.is_over();
        let ours = claim.displaced()?.is_none();
        if let Some(last_run) = ending.last_run.as_ref().filter(|_| ours) {
            if let Some(key) = last_run.once.as_ref().filter(|_| last_run.succeeded()) {
                record_once(&claim.paths, key)?;
            }
            claim.paths.write_last_run(last_run)?;
        }
        let _ = std::fs::remove_file(claim.paths.revoke(&lease.owner));
        match ending.hold_until.filter(|_| ours) {
            // The guardian stays with the descriptors; the record keeps other dlocks out even without it.
            Some(until) => claim.record.hold(&claim.record_file, until, claim.record.ttl())?,
            None => {
                claim.record.remove(&claim.paths, Kind::Holder);
                claim.unlock();
                self.claim = None;
            }
        }
        Ok(if ours { Released::Done } else { Released::NotOurs })
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        self.directory.check()?;
        status::rehold(&self.directory.paths(name), owner, ttl).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        self.directory.check_for_reading()?;
        status::inspect(&self.directory.paths(name), name, &foreign::Locks::read())
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        self.directory.check_for_reading()?;
        status::list(&self.directory, &mut self.listing, after)
    }

    async fn examine(&mut self) -> Result<Checkup> {
        self.directory.check()?;
        Ok(Checkup { findings: examine::examine(self.directory.path())?, clock_offset_us: None })
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        self.directory.check()?;
        status::revoke(&self.directory.paths(name), from, how)
    }
}

fn record_once(paths: &Paths, key: &str) -> Result<()> {
    let path = paths.once();
    let mut file = paths.options().append(true).open(&path).with_context(|| path.display().to_string())?;
    file.write_all(format!("{key}\n").as_bytes())
        .and_then(|()| file.sync_data())
        .context("cannot record the --once key")
}

/// The address of [`default_directory`].
pub fn default_address() -> Result<Address> {
    let path: PathBuf = default_directory()?;
    Address::parse(&format!("file://{}", path.display()))
}
