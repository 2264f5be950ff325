//! The keys on the server, and what is written to them when a run ends or a lock is taken away.
//!
//! ```text
//! dlock/NAME/<lease id in hex>          a contender; foreign mutexes put theirs here too
//! dlock-meta/runs/NAME/last             how the last runs ended
//! dlock-meta/runs/NAME/noted/<token>    what to have on record of a run if its holder vanishes
//! dlock-meta/released/NAME              the latest token that was released
//! dlock-meta/once/NAME/KEY              a successful run with this --once key
//! dlock-meta/revoked/NAME/<as above>    why this contender is asked to release the lock, or why its key is gone; dies
//!                                       with its lease
//! ```

use anyhow::Result;
use etcd_client::{Compare, CompareOp, PutOptions, TxnOp};

use super::queue::Entry;
use crate::exit::Fault;
use crate::lock::{LastRun, LockName, OwnerId, Runs, Token};

pub struct Keys {
    contenders: String,
    meta: String,
}

impl Keys {
    /// `prefix` is the directory of the locks, with or without its last slash.
    pub fn under(prefix: &str) -> Result<Keys> {
        let root = prefix.trim_end_matches('/');
        if root.is_empty() {
            return Err(Fault::Config.because("an etcd prefix must not be empty: leave it out for dlock/"));
        }
        Ok(Keys { contenders: format!("{root}/"), meta: format!("{root}-meta") })
    }

    /// What all keys of contenders, and all of runs, begin with; a name and a slash follow.
    pub fn of_all_locks(&self) -> [String; 2] {
        [self.contenders.clone(), format!("{}/runs/", self.meta)]
    }

    /// What the keys of one lock's contenders begin with: the `pfx` of Go's `concurrency.Mutex`.
    pub fn queue(&self, name: &LockName) -> String {
        format!("{}{}/", self.contenders, name.encoded())
    }

    /// An owner's lease, and the key that is attached to it.
    pub fn own(&self, name: &LockName, owner: &OwnerId) -> (i64, String) {
        let lease = lease_id(name, owner.as_str());
        (lease, format!("{}{lease:x}", self.queue(name)))
    }

    pub fn last_run(&self, name: &LockName) -> String {
        format!("{}/runs/{}/last", self.meta, name.encoded())
    }

    /// What the notes of one lock's runs begin with; a token follows.
    pub fn all_noted(&self, name: &LockName) -> String {
        format!("{}/runs/{}/noted/", self.meta, name.encoded())
    }

    pub fn noted(&self, name: &LockName, token: Token) -> String {
        format!("{}{token}", self.all_noted(name))
    }

    pub fn released(&self, name: &LockName) -> String {
        format!("{}/released/{}", self.meta, name.encoded())
    }

    pub fn once(&self, name: &LockName, key: &str) -> String {
        format!("{}/once/{}/{key}", self.meta, name.encoded())
    }

    /// What the marks of one lock's revoked contenders begin with.
    pub fn marks(&self, name: &LockName) -> String {
        format!("{}/revoked/{}/", self.meta, name.encoded())
    }

    /// The mark for a contender, named as its key is.
    pub fn mark(&self, name: &LockName, contender: &[u8]) -> Vec<u8> {
        let own_part = contender.strip_prefix(self.queue(name).as_bytes()).unwrap_or(contender);
        [self.marks(name).as_bytes(), own_part].concat()
    }

    /// Tells the next holder that it need not wait out the one before, whose run needs no note any more.
    pub fn put_released(&self, name: &LockName, token: Token) -> Vec<TxnOp> {
        let released = TxnOp::put(self.released(name), token.to_string(), None);
        vec![released, TxnOp::delete(self.noted(name, token), None)]
    }

    /// Why a contender is asked to release the lock, or has lost its key; for as long as its lease lives.
    pub fn put_mark(&self, name: &LockName, of: &Entry, reason: &str) -> TxnOp {
        TxnOp::put(self.mark(name, &of.key), reason, Some(PutOptions::new().with_lease(of.lease)))
    }

    /// True as long as nobody else has written the history.
    pub fn unchanged(&self, name: &LockName, runs: &Runs<i64>) -> Compare {
        Compare::mod_revision(self.last_run(name), CompareOp::Equal, runs.version)
    }

    /// Adds a run to the history, after those that vanished before it.
    pub fn put_run(&self, name: &LockName, runs: &Runs<i64>, run: &LastRun, keep: usize) -> Vec<TxnOp> {
        let (history, notes) = runs.with(run, keep);
        let mut changes: Vec<_> = notes.into_iter().map(|note| TxnOp::delete(note, None)).collect();
        changes.push(TxnOp::put(self.last_run(name), history, None));
        let once = run.once.as_deref().filter(|_| run.succeeded());
        changes.extend(once.map(|once| TxnOp::put(self.once(name, once), run.fencing_token.to_string(), None)));
        changes
    }
}

/// The id of the lease that an owner's key is attached to. We choose it ourselves, the same one every time, so that a
/// grant whose answer was lost is found again, by another process too. FNV-1a: short, and the same in every version of
/// dlock.
pub fn lease_id(name: &LockName, owner: &str) -> i64 {
    let text = format!("{name} {owner}");
    let hash = text
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    // Zero would let the server choose, and a negative id reads badly in `etcdctl lease list`.
    ((hash >> 1) as i64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_etcdctl_and_nothing_else_lies_among_them() {
        let keys = Keys::under("dlock/").unwrap();
        let name: LockName = "job/sub".parse().unwrap();
        let (lease, key) = keys.own(&name, &"h.1.x".parse().unwrap());
        assert_eq!(key, format!("dlock/job%2Fsub/{lease:x}"));
        assert_eq!(keys.mark(&name, b"dlock/job%2Fsub/1f"), b"dlock-meta/revoked/job%2Fsub/1f");
        let others = [
            keys.last_run(&name),
            keys.all_noted(&name),
            keys.released(&name),
            keys.once(&name, "k"),
            keys.marks(&name),
        ];
        for other in others {
            assert!(!other.starts_with(&keys.contenders), "{other}");
        }
        assert_eq!(Keys::under("team/locks").unwrap().queue(&name), "team/locks/job%2Fsub/");
        assert!(Keys::under("/").is_err());
    }

    #[test]
    fn a_lease_belongs_to_one_owner_of_one_lock() {
        let (owner, other) = ("host.1.abc", "host.1.abd");
        let (a, b): (LockName, LockName) = ("a".parse().unwrap(), "b".parse().unwrap());
        assert_eq!(lease_id(&a, owner), lease_id(&a, owner));
        assert!(lease_id(&a, owner) != lease_id(&a, other) && lease_id(&a, owner) != lease_id(&b, owner));
        assert!(lease_id(&a, owner) > 0);
    }
}
