//! Looking at locks, and the parts of the transactions that end a run or take a lock away.

use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Compare, CompareOp, PutOptions, TxnOp};

use super::Etcd;
use super::queue::{Details, Entry, View};
use crate::backend::DEFAULT_HISTORY;
use crate::lock::queue::holders;
use crate::lock::{Contender, Holder, LastRun, LockName, LockState, Record, Runs, Token};

impl Etcd {
    /// Several at once, at most [`PAGE`](super::PAGE).
    pub(super) async fn states_of(&mut self, names: &[LockName]) -> Result<Vec<LockState>> {
        let mut states = Vec::with_capacity(names.len());
        for (name, view) in names.iter().zip(self.views_of(names).await?) {
            let mut contenders: Vec<Contender> = view.queue.iter().map(Entry::contender).collect();
            for at in holders(&view.queue) {
                contenders[at].revoked = view.reason(&self.keys.mark(name, &view.queue[at].key)).is_some();
                self.ask_rest_of_lease(view.queue[at].lease, &mut contenders[at]).await?;
            }
            states.push(LockState::of_queue(name.clone(), "etcd", contenders, view.runs.into_history()));
        }
        Ok(states)
    }

    async fn views_of(&mut self, names: &[LockName]) -> Result<Vec<View>> {
        let requests: Vec<_> = names.iter().flat_map(|name| View::requests(&self.keys, name, 0)).collect();
        let mut reads = self.members.read(requests).await?;
        names.iter().map(|_| View::read(&mut reads, 0)).collect()
    }

    pub(super) async fn view_of(&mut self, name: &LockName) -> Result<View> {
        self.views_of(std::slice::from_ref(name)).await?.pop().context("one view of each lock")
    }

    async fn ask_rest_of_lease(&mut self, lease: i64, of: &mut Contender) -> Result<()> {
        let rest = self.members.call(async |mut client| client.lease_time_to_live(lease, None).await).await?;
        let seconds = |n: i64| u64::try_from(n).ok().map(Duration::from_secs);
        of.expires_in = seconds(rest.ttl());
        of.ttl = of.ttl.or(seconds(rest.granted_ttl()));
        Ok(())
    }

    /// Attaches a key to a new lease that nobody renews: the ttl of our own cannot be changed. The key keeps its place in
    /// the queue, so that other programs wait for its end as well.
    pub(super) async fn put_on_new_lease(
        &mut self,
        key: &str,
        record: &Record<Details>,
        ttl: Duration,
    ) -> Result<TxnOp> {
        let lease = PutOptions::new().with_lease(self.members.grant_any_lease(ttl).await?);
        Ok(TxnOp::put(key, record.to_json(), Some(lease)))
    }

    /// Tells the next holder that it need not wait out the one before, whose run needs no note any more.
    pub(super) fn put_released(&self, name: &LockName, token: Token) -> Vec<TxnOp> {
        let released = TxnOp::put(self.keys.released(name), token.to_string(), None);
        vec![released, TxnOp::delete(self.keys.noted(name, token), None)]
    }

    /// True as long as nobody else has written the history.
    pub(super) fn unchanged(&self, name: &LockName, runs: &Runs<i64>) -> Compare {
        Compare::mod_revision(self.keys.last_run(name), CompareOp::Equal, runs.version)
    }

    /// Adds a run to the history, after those that vanished before it.
    pub(super) fn put_run(&self, name: &LockName, runs: &Runs<i64>, run: &LastRun, keep: usize) -> Vec<TxnOp> {
        let (history, notes) = runs.with(run, keep);
        let once = run.once.as_deref().filter(|_| run.succeeded());
        let once = once.map(|once| TxnOp::put(self.keys.once(name, once), run.fencing_token.to_string(), None));
        let history = TxnOp::put(self.keys.last_run(name), history, None);
        notes.into_iter().map(|note| TxnOp::delete(note, None)).chain([history]).chain(once).collect()
    }

    /// Why a contender is asked to release the lock, or has lost its key; for as long as its lease lives.
    pub(super) fn put_mark(&self, name: &LockName, of: &Entry, reason: &str) -> TxnOp {
        let lease = PutOptions::new().with_lease(of.lease);
        TxnOp::put(self.keys.mark(name, &of.key), reason, Some(lease))
    }

    /// After a run, how it ended is on record already.
    pub(super) fn put_cut_short(
        &self,
        name: &LockName,
        holder: &Entry,
        runs: &Runs<i64>,
        seen: &Holder,
        reason: &str,
    ) -> Vec<TxnOp> {
        let run = LastRun::cut_short(seen, reason);
        let is_recorded = holder.is_left_behind() && runs.history.has(&run);
        if is_recorded { Vec::new() } else { self.put_run(name, runs, &run, DEFAULT_HISTORY) }
    }
}
