//! What is on record of a lock's runs where a holder's own record vanishes with its lease.
//!
//! A run that lasts is noted apart, on a record that stays until its release deletes it. A note whose holder is gone is
//! of a run that vanished: looking at the lock shows it, and the next release moves it into the history.

use std::time::SystemTime;

use super::{History, Holder, Identity, LastRun, StoredHistory, Token};

/// How many runs that vanished one release moves, so that its transaction stays small.
const MOST_MOVED: usize = 100;

#[derive(Clone, Debug, Default)]
pub struct Runs<V> {
    pub history: StoredHistory,
    /// Of the stored history: nobody has written it since, as long as it has this version.
    pub version: V,
    /// The notes of the runs that vanished, each under the key where it is stored, the oldest run first.
    vanished: Vec<(String, LastRun)>,
}

impl<V> Runs<V> {
    pub fn new(history: StoredHistory, version: V) -> Runs<V> {
        Runs { history, version, vanished: Vec::new() }
    }

    pub fn add_vanished(&mut self, notes: impl IntoIterator<Item = (String, LastRun)>) {
        self.vanished.extend(notes);
        self.vanished.sort_by_key(|(_, run)| run.fencing_token);
    }

    /// As it is shown.
    pub fn into_history(self) -> History {
        add(self.history, self.vanished.into_iter().map(|(_, run)| run), usize::MAX).into()
    }

    /// The run of a holder that an operator cuts short now, unless it is on record already: what is only held on to after a
    /// run takes nothing away from how that ended.
    pub fn cut_short(&self, holder: &Holder, reason: &str) -> Option<LastRun> {
        Some(LastRun::cut_short(holder, reason)).filter(|run| !self.history.has(run))
    }

    /// The history with one more run, after those that vanished before it, and the keys of their notes.
    pub fn with(&self, run: &LastRun, keep: usize) -> (String, Vec<String>) {
        let moved = &self.vanished[..self.vanished.len().min(MOST_MOVED)];
        let mut history = add(self.history.clone(), moved.iter().map(|(_, run)| run.clone()), keep);
        history.add(run.clone(), keep);
        (history.to_json().unwrap_or_default(), moved.iter().map(|(key, _)| key.clone()).collect())
    }
}

fn add(mut history: StoredHistory, runs: impl Iterator<Item = LastRun>, keep: usize) -> StoredHistory {
    for run in runs {
        if !history.has(&run) {
            history.add(run, keep);
        }
    }
    history
}

/// What to have on record of a run, if its holder vanishes.
pub fn note(who: &Identity, token: Token, acquired_at: Option<SystemTime>) -> LastRun {
    LastRun::vanished(&Holder { fencing_token: Some(token), acquired_at, ..who.clone().into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(token: u64) -> LastRun {
        let owner = Some(format!("h.{token}.x"));
        LastRun::vanished(&Holder { owner, fencing_token: Some(Token(token)), ..Holder::default() })
    }

    fn tokens(history: &History) -> Vec<u64> {
        history.runs.iter().map(|run| run.fencing_token.0).collect()
    }

    #[test]
    fn runs_that_vanished_are_moved_in_order_once_and_not_too_many_together() {
        let mut history = StoredHistory::default();
        history.add(run(3), 20);
        let notes = [7, 3, 5].map(|token| (format!("note-{token}"), run(token)));
        let mut runs = Runs::new(history.clone(), 0);
        runs.add_vanished(notes);
        let (json, moved) = runs.with(&run(9), 20);
        assert_eq!(tokens(&StoredHistory::from_json(&json).into()), [9, 7, 5, 3]);
        assert_eq!(moved, ["note-3", "note-5", "note-7"]);
        assert_eq!(tokens(&runs.into_history()), [7, 5, 3]);
        let mut runs = Runs::new(history, 0);
        runs.add_vanished((10..200).map(|token| (token.to_string(), run(token))));
        assert_eq!(runs.with(&run(999), 20).1.len(), MOST_MOVED);
    }
}
