//! Locks on this host: flock(2) on `DIR/NAME.lock`, the same lock that `flock DIR/NAME.lock cmd` takes.
//!
//! The lock file stays empty and is never unlinked by us; `DIR/NAME.d/` has what belongs to it: `token`
//! (the fencing counter), `holder.OWNER` and `waiting/waiter.OWNER` (see `record`), `slot.K` for `--slots`,
//! `last-run`, `once`, and what an operator leaves for a holder: `revoke.OWNER`, the request to stop, and `taken.OWNER`,
//! why its lock is gone.
//!
//! A token is the greater of counter + 1 and microseconds since the epoch; see `token`. The kernel frees a flock when its
//! last descriptor is closed or somebody who has it says so: there is no expiry, and the ttl only limits how long a
//! stopped dlock can stay in the way.

mod directory;
mod doctor;
mod files;
mod foreign;
pub mod record;
mod runs;
mod status;
mod take;
pub mod token;
mod wait;
mod watch;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;

use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Reheld, Released, Renewal, Revoke,
    Revoked,
};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Grant, Holder, LockName, LockState, OwnerId, Record};
use crate::openat::Names;
pub use directory::DiskTrouble;
pub use directory::default_directory;
use directory::{Directory, OpenDirectory};
use files::LockFiles;
pub use record::linger;
use record::{Details, Kind};
use wait::Waiting;
use watch::FileEvent;

pub const NAME: &str = "file";

pub struct FileBackend {
    directory: Directory,
    /// What keeps the lock ours.
    claim: Option<Claim>,
    waiting: Waiting,
    listing: Option<(OpenDirectory, Names)>,
}

/// A lock that was taken: the locked files, and the record that tells others about it.
struct Claim {
    files: LockFiles,
    lock: Arc<OwnedFd>,
    slot: Option<(u32, Arc<OwnedFd>)>,
    record: Record<Details>,
    record_file: Arc<OwnedFd>,
}

impl FileBackend {
    pub fn open(address: &Address) -> Result<FileBackend> {
        let directory = Directory::new(address)?;
        Ok(FileBackend { directory, claim: None, waiting: Waiting::default(), listing: None })
    }
}

impl Claim {
    /// The record is the one at [`record::RECORD`].
    fn descriptors(&self) -> Vec<Arc<OwnedFd>> {
        let slot = self.slot.iter().map(|(_, file)| Arc::clone(file));
        [Arc::clone(&self.lock), Arc::clone(&self.record_file)].into_iter().chain(slot).collect()
    }

    /// Why the files we have locked are not the ones that others would lock, if so.
    fn displaced(&self) -> Result<Option<String>> {
        let slot = self.slot.as_ref().map(|(n, file)| (self.files.slot(*n), file));
        for (path, file) in [(self.files.lock.clone(), &self.lock)].into_iter().chain(slot) {
            if !self.files.leads_to(&path, file)? {
                return Ok(Some(format!("{} was deleted or replaced", self.files.path(&path).display())));
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
        self.take(ask).await
    }

    async fn changed(&mut self) -> Result<()> {
        match &self.claim {
            Some(claim) => {
                self.waiting.is_over();
                loop {
                    let (files, record) = (&claim.files, &claim.record);
                    let told = self.waiting.for_interference(files, &record.who.owner, record.details.slot).await?;
                    if matches!(told, FileEvent::Touched) || matches!(claim.displaced(), Ok(Some(_))) {
                        return Ok(());
                    }
                }
            }
            None => self.waiting.for_release().await,
        }
    }

    async fn withdraw(&mut self, _ask: &Ask) -> Result<()> {
        self.waiting = Waiting::default();
        if let Some(claim) = self.claim.take() {
            claim.record.remove(&claim.files, Kind::Holder);
            claim.unlock();
        }
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let from = clock::now();
        self.waiting.is_over();
        let claim = self.claim.as_ref().context("nothing is held")?;
        if let Some(why) = claim.displaced()? {
            let taken = claim.files.read(&claim.files.taken(&lease.owner));
            return Ok(taken.map_or(Renewal::Lost(why), Renewal::ForceReleased));
        }
        match claim.files.read(&claim.files.revoke(&lease.owner)) {
            Ok(reason) => Ok(Renewal::Revoked(reason)),
            Err(_) => Ok(Renewal::Held(Grant { from, ..lease.grant })),
        }
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let Some(claim) = self.claim.as_mut() else { return Ok(Released::NotOurs) };
        let files = claim.files.clone();
        let ours = claim.displaced().map(|why| why.is_none());
        let recorded = match &ending.last_run {
            Some(last_run) if matches!(ours, Ok(true)) => claim.files.record_run(last_run, ending.keep),
            _ => Ok(()),
        };
        match ending.hold_until.filter(|_| matches!(ours, Ok(true))) {
            // The guardian stays with the descriptors; the record keeps other dlocks out even without it.
            Some(until) => {
                claim.record.details.ended = ending.last_run.is_some();
                claim.record.hold(&claim.record_file, until, claim.record.ttl())?;
            }
            None => {
                claim.record.remove(&claim.files, Kind::Holder);
                claim.unlock();
                self.claim = None;
            }
        }
        // Only now, when others need not wait for it.
        self.waiting.is_over();
        let marked = files.remove(&files.revoke(&lease.owner)).is_ok();
        let mut taken = None;
        if marked || !matches!(ours, Ok(true)) {
            let path = files.taken(&lease.owner);
            taken = files.read(&path).ok();
            let _ = files.remove(&path);
        }
        // What could not be recorded is not tried again.
        recorded?;
        Ok(match (ours.context(Fault::Refused)?, taken) {
            (true, _) => Released::Done,
            (false, Some(reason)) => Released::ForceReleased(reason),
            (false, None) => Released::NotOurs,
        })
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        status::rehold(&self.directory.open()?.files(name), owner, ttl).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        match self.directory.open_for_reading()? {
            Some(directory) => status::inspect(&directory.files(name), name, &foreign::Locks::read()),
            None => Ok(LockState::free(name.clone(), NAME)),
        }
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let Some(directory) = self.directory.open_for_reading()? else { return Ok(Forgotten::Nothing) };
        status::forget(&directory.files(name), name, what)
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        // The directory stays open from page to page; its order is the file system's.
        if after.is_none() {
            let Some(directory) = self.directory.open_for_reading()? else { return Ok(Page::default()) };
            let names = directory.list()?;
            self.listing = Some((directory, names));
        }
        let (directory, names) = self.listing.as_mut().context("a list begins at its beginning")?;
        status::list(directory, names)
    }

    async fn examine(&mut self) -> Result<Checkup> {
        self.directory.open()?;
        Ok(Checkup { findings: doctor::examine(self.directory.path())?, clock_offset_us: None })
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        status::revoke(&self.directory.open()?.files(name), from, how).await
    }
}

/// The address of [`default_directory`].
pub fn default_address() -> Result<Address> {
    let path = default_directory()?;
    let text = path.to_str().ok_or_else(|| {
        let shown = path.display();
        Fault::Config.because(format_args!("the lock directory {shown} is not UTF-8: use --backend file:///DIR"))
    })?;
    Address::parse(&format!("file://{}", text.replace('%', "%25").replace('?', "%3F")))
}
