//! Locks on this host: flock(2) on `DIR/NAME.lock`, the same lock that `flock DIR/NAME.lock cmd` takes.
//!
//! The lock file stays empty and is never unlinked by us; `DIR/NAME.d/` has what belongs to it: `token`
//! (the fencing counter), `holder.OWNER` and `waiting/waiter.OWNER` (see `record`), `slot.K` for `--slots`,
//! `last-run`, `once`, and what an operator leaves for a holder: `revoke.OWNER`, the request to stop, and `taken.OWNER`,
//! why its lock is gone.
//!
//! A token is the greater of counter + 1 and microseconds since the epoch; see `acquire`. The kernel frees a flock when its
//! last descriptor is closed or somebody who has it says so: there is no expiry, and the ttl only limits how long a
//! stopped dlock can stay in the way.

pub mod acquire;
mod folder;
pub mod record;
mod status;
mod wait;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use async_trait::async_trait;
use nix::unistd::geteuid;

use super::{
    Address, Ask, Attempt, Backend, Checkup, Ending, Forget, Forgotten, Lease, Page, Reheld, Released, Renewal, Revoke,
    Revoked,
};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Grant, Holder, LockName, LockState, OwnerId, Record};
use crate::openat::Names;
use folder::{Directory, Folder, LockFiles, Lockable, OF_ROOT, default_directory, revoke, slot, taken};
use record::{Details, HOLDER};
pub use wait::linger;
use wait::{Interference, Waiting};

pub const NAME: &str = "file";

pub struct FileBackend {
    directory: Directory,
    /// What keeps the lock ours.
    claim: Option<Claim>,
    waiting: Option<Waiting>,
    /// Tells us what happens to the claim.
    interference: Option<Interference>,
    listing: Option<(Folder, Names)>,
}

/// A lock that was taken: the locked files, and the record that tells others about it.
struct Claim {
    files: LockFiles,
    lock: Lockable,
    slot: Option<(u32, Lockable)>,
    record: Record<Details>,
    record_file: Arc<File>,
}

impl FileBackend {
    pub fn open(address: &Address) -> Result<FileBackend> {
        let directory = Directory::new(address)?;
        Ok(FileBackend { directory, claim: None, waiting: None, interference: None, listing: None })
    }
}

impl Claim {
    /// The record is the one at [`record::RECORD`].
    fn descriptors(&self) -> Vec<Arc<File>> {
        let slot = self.slot.as_ref().map(|(_, slot)| &slot.file);
        [&self.lock.file, &self.record_file].into_iter().chain(slot).cloned().collect()
    }

    /// Why the files we have locked are not the ones that others would lock, if so.
    fn displaced(&self) -> Result<Option<String>> {
        let slot = self.slot.iter().map(|(n, file)| (self.files.side_path().join(slot(*n)), file));
        for (path, file) in [(self.files.lock_path(), &self.lock)].into_iter().chain(slot) {
            if !file.is_at(&path)? {
                return Ok(Some(format!("{} was deleted or replaced", path.display())));
            }
        }
        Ok(None)
    }

    /// Unlocks explicitly, since the guardian has the same descriptors.
    fn let_go(&self, side: Option<&Folder>) {
        if let Some(side) = side {
            self.record.remove(side, HOLDER);
        }
        for file in self.descriptors() {
            let _ = file.unlock();
        }
    }
}

#[async_trait(?Send)]
impl Backend for FileBackend {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.take(ask).await
    }

    async fn changed(&mut self) -> Result<()> {
        /// A run that is over by then is not watched over: closing a watch costs the kernel many milliseconds.
        const SHORT_RUN: Duration = Duration::from_millis(300);
        let Some(claim) = &self.claim else {
            return match &mut self.waiting {
                Some(waiting) => waiting.for_release().await,
                None => std::future::pending().await,
            };
        };
        self.waiting = None;
        let Some(interference) = &mut self.interference else {
            tokio::time::sleep(SHORT_RUN).await;
            self.interference = Some(Interference::watch(&claim.files, &claim.record));
            // Whatever came before the watch has to be looked for once.
            return Ok(());
        };
        interference.next().await
    }

    async fn withdraw(&mut self, _ask: &Ask) -> Result<()> {
        self.waiting = None;
        if let Some(claim) = self.claim.take() {
            claim.let_go(claim.files.look().ok().flatten().as_ref());
        }
        Ok(())
    }

    async fn renew(&mut self, lease: &Lease) -> Result<Renewal> {
        let from = clock::now();
        self.waiting = None;
        let claim = self.claim.as_ref().context("nothing is held")?;
        let mark = |name: String| claim.files.look().ok().flatten()?.read(&name).ok();
        if let Some(why) = claim.displaced()? {
            return Ok(mark(taken(&lease.owner)).map_or(Renewal::Lost(why), Renewal::ForceReleased));
        }
        let held = Renewal::Held(Grant { from, ..lease.grant });
        Ok(mark(revoke(&lease.owner)).map_or(held, Renewal::Revoked))
    }

    async fn release(&mut self, lease: &Lease, ending: &Ending) -> Result<Released> {
        let Some(claim) = self.claim.as_mut() else { return Ok(Released::NotOurs) };
        let ours = claim.displaced().map(|why| why.is_none());
        let is_ours = matches!(ours, Ok(true));
        // Somebody may have deleted it.
        let side = if is_ours { claim.files.side().map(Some) } else { claim.files.look() };
        let recorded = match &ending.last_run {
            Some(last_run) if is_ours => record::record_run(&side, last_run, ending.keep),
            _ => Ok(()),
        };
        let side = side.ok().flatten();
        match ending.hold_until.filter(|_| is_ours) {
            // The guardian stays with the descriptors; the record keeps other dlocks out even without it.
            Some(until) => {
                claim.record.details.ended = ending.last_run.is_some();
                claim.record.hold(&claim.record_file, until, claim.record.ttl())?;
            }
            None => {
                claim.let_go(side.as_ref());
                self.claim = None;
            }
        }
        // Only now, when others need not wait for it.
        self.waiting = None;
        let mut reason = None;
        if let Some(side) = side {
            let marked = side.remove(&revoke(&lease.owner)).is_ok();
            if marked || !is_ours {
                reason = side.read(&taken(&lease.owner)).ok();
                let _ = side.remove(&taken(&lease.owner));
            }
        }
        // What could not be recorded is not tried again.
        recorded?;
        Ok(match (ours.context(Fault::Refused)?, reason) {
            (true, _) => Released::Done,
            (false, Some(reason)) => Released::ForceReleased(reason),
            (false, None) => Released::NotOurs,
        })
    }

    async fn rehold(&mut self, name: &LockName, owner: &OwnerId, ttl: Duration) -> Result<Reheld> {
        status::rehold(&self.directory.files(name)?, owner, ttl).await
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        match self.directory.look()? {
            Some(folder) => status::inspect(&LockFiles::new(folder, name), name, &status::HeldFlocks::read()),
            None => Ok(LockState::free(name.clone(), NAME)),
        }
    }

    async fn forget(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let Some(folder) = self.directory.look()? else { return Ok(Forgotten::Nothing) };
        status::forget(&LockFiles::new(folder, name), name, what)
    }

    async fn list(&mut self, after: Option<String>) -> Result<Page> {
        // The directory stays open from page to page; its order is the file system's.
        if after.is_none() {
            let Some(folder) = self.directory.look()? else { return Ok(Page::default()) };
            let names = folder.list()?;
            self.listing = Some((folder, names));
        }
        let (folder, names) = self.listing.as_mut().context("a list begins at its beginning")?;
        status::list(folder, names)
    }

    async fn examine(&mut self) -> Result<Checkup> {
        self.directory.open()?;
        Ok(Checkup { findings: status::examine(&self.directory.path)?, clock_offset_us: None })
    }

    async fn revoke(&mut self, name: &LockName, from: &Holder, how: &Revoke) -> Result<Revoked> {
        status::revoke(&self.directory.files(name)?, from, how).await
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

/// Root's lock of this name, if it is held and what a user means by default is another one: the user may not know.
pub fn held_by_root(address: &Address, name: &LockName) -> Option<PathBuf> {
    let is_own = address.scheme() == "file" && default_directory().is_ok_and(|own| own == Path::new(address.path()));
    let lock = Path::new(OF_ROOT).join(format!("{}.lock", name.encoded()));
    let held = || lock.exists() && status::HeldFlocks::read().holder_of(&lock).is_some();
    (is_own && !geteuid().is_root() && held()).then_some(lock)
}
