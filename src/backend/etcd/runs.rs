//! What is kept of a lock's runs, and how it is forgotten.
//!
//! A holder's key vanishes with its lease. So a run that lasts is noted on a key that stays until its release deletes it.
//! A note whose holder is gone is of a run that vanished: looking at the lock shows it, and the next release moves it
//! into the history.

use anyhow::Result;
use etcd_client::{Compare, CompareOp, DeleteOptions, GetOptions, GetResponse, Txn, TxnOp, TxnOpResponse};

use super::Etcd;
use super::keys::lease_id;
use super::queue::Entry;
use super::recipe::still_ours;
use crate::backend::{Forget, Forgotten, Lease};
use crate::lock::{History, LastRun, LockName, Token};

/// How many runs that vanished one release moves: a transaction has 128 requests at the most.
const MOST_MOVED: usize = 100;

/// What we know of a lock from when it was granted to us.
pub(super) struct Granted {
    pub token: Token,
    pub runs: Runs,
    /// What to have on record if we vanish.
    pub note: LastRun,
    pub is_noted: bool,
}

/// What is on record of a lock's runs.
#[derive(Clone, Default)]
pub(super) struct Runs {
    pub history: History,
    /// The revision at which the history was written; 0 if there is none.
    modified: i64,
    /// Runs that were noted and have not been released, in the order in which they began.
    noted: Vec<LastRun>,
}

impl Runs {
    /// Reads the answers to [`Etcd::read_runs`].
    pub fn read(history: &GetResponse, noted: &GetResponse) -> Runs {
        let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
        let kv = history.kvs().first();
        let mut noted: Vec<_> = noted.kvs().iter().filter_map(|kv| LastRun::from_json(&text(kv.value()))).collect();
        noted.sort_by_key(|run| run.fencing_token);
        Runs {
            history: kv.map(|kv| History::from_json(&text(kv.value()))).unwrap_or_default(),
            modified: kv.map_or(0, |kv| kv.mod_revision()),
            noted,
        }
    }

    /// Leaves of the noted runs those that vanished. Later ones than `before` are not judged: whoever looks at the queue
    /// as far as its own place does not see all that share the lock.
    pub fn vanished(mut self, queue: &[Entry], before: Token) -> Runs {
        self.noted.retain(|run| {
            let token = run.fencing_token;
            token < before && !queue.iter().any(|one| one.may_have(token)) && !self.history.has(run)
        });
        self
    }

    /// As it is shown.
    pub fn into_history(mut self) -> History {
        self.noted.into_iter().for_each(|run| self.history.add(run, usize::MAX));
        self.history
    }
}

impl Etcd {
    pub(super) fn read_runs(&self, name: &LockName) -> [TxnOp; 2] {
        let noted = TxnOp::get(self.keys.all_noted(name), Some(GetOptions::new().with_prefix()));
        [TxnOp::get(self.keys.last_run(name), None), noted]
    }

    /// True as long as nobody else has written the history.
    pub(super) fn unchanged(&self, name: &LockName, runs: &Runs) -> Compare {
        Compare::mod_revision(self.keys.last_run(name), CompareOp::Equal, runs.modified)
    }

    /// Adds a run to the history, after those that vanished before it.
    pub(super) fn put_run(&self, name: &LockName, runs: &Runs, run: &LastRun, keep: usize) -> Vec<TxnOp> {
        let mut history = runs.history.clone();
        let mut then = Vec::new();
        for vanished in runs.noted.iter().take(MOST_MOVED) {
            then.push(self.delete_note(name, vanished.fencing_token));
            history.add(vanished.clone(), keep);
        }
        history.add(run.clone(), keep);
        then.push(TxnOp::put(self.keys.last_run(name), history.to_json().unwrap_or_default(), None));
        let once = run.once.as_deref().filter(|_| run.succeeded());
        then.extend(once.map(|once| TxnOp::put(self.keys.once(name, once), run.fencing_token.to_string(), None)));
        then
    }

    pub(super) fn delete_note(&self, name: &LockName, token: Token) -> TxnOp {
        TxnOp::delete(self.keys.noted(name, token), None)
    }

    /// Nothing happens if the lock was released before this arrives; nor if its key was left behind, which then is on
    /// another lease.
    pub(super) async fn note(&mut self, lease: &Lease) -> Result<()> {
        let id = lease_id(&lease.name, lease.owner.as_str());
        let key = self.keys.contender(&lease.name, id);
        let Some(granted) = self.granted.as_mut().filter(|granted| granted.token == lease.token) else {
            return Ok(());
        };
        // It may be applied without an answer.
        granted.is_noted = true;
        let put = TxnOp::put(self.keys.noted(&lease.name, lease.token), granted.note.to_json(), None);
        let held = [still_ours(&key, lease), Compare::lease(key, CompareOp::Equal, id)];
        let note = Txn::new().when(held).and_then([put]);
        self.members.beside(async |mut client| client.txn(note.clone()).await).await?;
        Ok(())
    }

    /// Of a run that never began.
    pub(super) async fn take_note_back(&mut self, name: &LockName) -> Result<()> {
        if let Some(granted) = self.granted.take_if(|granted| granted.is_noted) {
            self.members.transact(Txn::new().and_then([self.delete_note(name, granted.token)])).await?;
        }
        Ok(())
    }

    /// The latest token that was released stays.
    pub(super) async fn forget_runs(&mut self, name: &LockName, what: &Forget) -> Result<Forgotten> {
        let below = |prefix| TxnOp::delete(prefix, Some(DeleteOptions::new().with_prefix()));
        let forget = match what {
            Forget::Once(key) => Txn::new().and_then([TxnOp::delete(self.keys.once(name, key), None)]),
            Forget::Everything => Txn::new().when([self.nobody_came(name, 0)]).and_then([
                TxnOp::delete(self.keys.last_run(name), None),
                below(self.keys.all_noted(name)),
                below(self.keys.once(name, "")),
            ]),
        };
        let answer = self.members.transact(forget).await?;
        let removed = |one| matches!(one, TxnOpResponse::Delete(deleted) if deleted.deleted() > 0);
        Ok(match () {
            () if !answer.succeeded() => Forgotten::InUse,
            () if answer.op_responses().into_iter().any(removed) => Forgotten::Done,
            () => Forgotten::Nothing,
        })
    }
}
