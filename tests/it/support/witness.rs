//! Heartbeats of the commands, and whether two of them ever lived at the same time. Nothing here trusts
//! a word of dlock's: a run is the processes that wrote under one token, from their first beat to their last.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use super::until;

/// Where witnesses write.
pub struct Log(TempDir);

/// One run of the command: all processes that had the same token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    pub token: u64,
    /// Nanoseconds on CLOCK_BOOTTIME.
    pub first: u64,
    pub last: u64,
    pub processes: usize,
}

/// Two runs that lived at the same time.
#[derive(Debug, PartialEq, Eq)]
pub struct Overlap {
    pub tokens: (u64, u64),
    pub nanos: u64,
}

impl Log {
    pub fn new() -> Log {
        Log(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// `-- witness LOG WORD…`, for the end of a command line.
    pub fn witness(&self, words: &[&str]) -> Vec<String> {
        let dlock: PathBuf = assert_cmd::cargo::cargo_bin!("dlock").into();
        let witness = dlock.parent().unwrap().join("examples/witness");
        let fixed = ["--".to_owned(), witness.display().to_string(), self.path().display().to_string()];
        fixed.into_iter().chain(words.iter().map(|word| (*word).to_owned())).collect()
    }

    /// Every run so far, in the order in which they began.
    pub fn runs(&self) -> Vec<Run> {
        let mut runs: BTreeMap<u64, Run> = BTreeMap::new();
        for entry in std::fs::read_dir(self.path()).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            let token: u64 = name.split('.').next().unwrap().parse().unwrap();
            let text = std::fs::read_to_string(entry.path()).unwrap();
            // The last line may be cut off by SIGKILL in mid-write only if the disk is full; it is one write.
            let mut beats = text.lines().filter_map(|line| line.parse::<u64>().ok());
            let Some(first) = beats.next() else { continue };
            let last = beats.next_back().unwrap_or(first);
            let run = runs.entry(token).or_insert(Run { token, first, last, processes: 0 });
            run.first = run.first.min(first);
            run.last = run.last.max(last);
            run.processes += 1;
        }
        let mut runs: Vec<_> = runs.into_values().collect();
        runs.sort_by_key(|run| run.first);
        runs
    }

    /// Waits until so many runs, each of so many processes, have begun.
    #[track_caller]
    pub fn await_runs(&self, runs: usize, processes: usize) -> Vec<Run> {
        until(&format!("{runs} run(s) of {processes} process(es)"), || {
            self.runs().iter().filter(|run| run.processes >= processes).count() >= runs
        });
        self.runs()
    }

    /// Waits until whatever beats now has beaten again: proof that it lives.
    #[track_caller]
    pub fn await_beat(&self) {
        let last = |log: &Log| log.runs().iter().map(|run| run.last).max().unwrap_or(0);
        let before = last(self);
        until("another heartbeat", || last(self) > before);
    }

    /// The promise, from the outside: no two runs lived at once, and tokens grew.
    #[track_caller]
    pub fn assert_no_overlap(&self) {
        let runs = self.runs();
        assert_eq!(overlaps(&runs), [], "{runs:#?}");
        assert!(tokens_grow(&runs), "tokens do not grow: {runs:#?}");
    }
}

pub fn overlaps(runs: &[Run]) -> Vec<Overlap> {
    let mut found = Vec::new();
    for (n, a) in runs.iter().enumerate() {
        for b in &runs[n + 1..] {
            let (begin, end) = (a.first.max(b.first), a.last.min(b.last));
            if begin <= end {
                found.push(Overlap { tokens: (a.token, b.token), nanos: end - begin });
            }
        }
    }
    found
}

/// Whether runs that began later have greater tokens.
pub fn tokens_grow(runs: &[Run]) -> bool {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|run| run.first);
    runs.windows(2).all(|pair| pair[0].token < pair[1].token)
}

mod tests {
    use super::{Overlap, Run, overlaps, tokens_grow};

    fn run(token: u64, first: u64, last: u64) -> Run {
        Run { token, first, last, processes: 1 }
    }

    #[test]
    fn the_checker_lets_a_good_history_pass() {
        let good = [run(1, 0, 10), run(2, 11, 20), run(5, 30, 30)];
        assert_eq!(overlaps(&good), []);
        assert!(tokens_grow(&good));
    }

    #[test]
    fn the_checker_finds_every_kind_of_overlap() {
        let touching = [run(1, 0, 10), run(2, 10, 20)];
        assert_eq!(overlaps(&touching), [Overlap { tokens: (1, 2), nanos: 0 }]);
        let inside = [run(1, 0, 100), run(2, 40, 60)];
        assert_eq!(overlaps(&inside), [Overlap { tokens: (1, 2), nanos: 20 }]);
        let not_neighbours = [run(1, 0, 100), run(2, 101, 102), run(3, 50, 60)];
        assert_eq!(overlaps(&not_neighbours), [Overlap { tokens: (1, 3), nanos: 10 }]);
    }

    #[test]
    fn the_checker_finds_a_token_that_goes_back() {
        assert!(!tokens_grow(&[run(2, 0, 10), run(1, 11, 20)]));
        assert!(!tokens_grow(&[run(2, 0, 10), run(2, 11, 20)]));
    }
}
