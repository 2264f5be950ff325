//! Heartbeats of the commands, and whether two of them ever lived at the same time. Nothing here trusts
//! a word of dlock's: a run is a witness and the processes it started, from their first beat to their last,
//! whatever token it was given.

use std::collections::BTreeMap;
use std::fs::DirEntry;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use super::until;

/// Where witnesses write.
pub struct Log {
    path: PathBuf,
    /// Whose end is the log's.
    _home: Option<TempDir>,
}

/// One run of the command: all processes that one witness started, and itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The process id and the first instant of its first process.
    pub id: String,
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
        let home = tempfile::tempdir().unwrap();
        Log { path: home.path().to_owned(), _home: Some(home) }
    }

    /// One of several in the same place; whoever made that removes it.
    pub fn within(arena: &Path, name: &str) -> Log {
        let path = arena.join(name);
        std::fs::create_dir(&path).unwrap();
        Log::at(&path)
    }

    pub fn at(path: &Path) -> Log {
        Log { path: path.to_owned(), _home: None }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `-- witness LOG WORD…`, for the end of a command line.
    pub fn witness(&self, words: &[&str]) -> Vec<String> {
        let dlock: PathBuf = assert_cmd::cargo::cargo_bin!("dlock").into();
        let witness = dlock.parent().unwrap().join("examples/witness");
        assert!(
            witness.exists(),
            "the witness is not built; `cargo test`, as tests/run calls it, or `cargo build --examples` does"
        );
        let fixed = ["--".to_owned(), witness.display().to_string(), self.path().display().to_string()];
        fixed.into_iter().chain(words.iter().map(|word| (*word).to_owned())).collect()
    }

    fn files(&self) -> impl Iterator<Item = DirEntry> {
        std::fs::read_dir(self.path()).unwrap().flatten()
    }

    /// Every run so far, in the order in which they began.
    pub fn runs(&self) -> Vec<Run> {
        let mut runs: BTreeMap<String, Run> = BTreeMap::new();
        for entry in self.files() {
            let Some((id, token)) = run_of(&entry) else { continue };
            let text = std::fs::read_to_string(entry.path()).unwrap();
            let mut beats = beats(&text);
            let Some(first) = beats.next() else { continue };
            let last = beats.next_back().unwrap_or(first);
            let run = runs.entry(id.clone()).or_insert(Run { id, token, first, last, processes: 0 });
            run.first = run.first.min(first);
            run.last = run.last.max(last);
            run.processes += 1;
        }
        let mut runs: Vec<_> = runs.into_values().collect();
        runs.sort_by_key(|run| run.first);
        runs
    }

    /// How many processes of all runs have begun so far.
    pub fn processes(&self) -> usize {
        self.files().filter_map(|entry| run_of(&entry)).count()
    }

    /// What a witness found of other runs when its own began, awake or not: `PID STATE`.
    pub fn survivors(&self) -> Vec<String> {
        let told = self.files().filter(|entry| entry.path().extension().is_some_and(|name| name == "survivors"));
        told.flat_map(|entry| super::lines(&entry.path())).collect()
    }

    /// The longest time between two beats of one process: nothing shorter than that is seen for certain.
    pub fn longest_silence(&self) -> Duration {
        let longest = |entry: DirEntry| {
            run_of(&entry)?;
            let text = std::fs::read_to_string(entry.path()).unwrap();
            beats(&text).zip(beats(&text).skip(1)).map(|(one, next)| next.saturating_sub(one)).max()
        };
        Duration::from_nanos(self.files().filter_map(longest).max().unwrap_or(0))
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

    /// The promise, from the outside: no two runs lived at once, nothing of one was left when the next began, and
    /// tokens grew.
    #[track_caller]
    pub fn assert_no_overlap(&self) {
        let runs = self.runs();
        assert_eq!(overlaps(&runs), [], "{runs:#?}");
        assert!(self.survivors().is_empty(), "still there when the next began: {:?}\n{runs:#?}", self.survivors());
        assert!(tokens_grow(&runs), "tokens do not grow: {runs:#?}");
    }
}

/// Whose heartbeats are in a file, if any: `RUN.TOKEN.PID.START`.
fn run_of(entry: &DirEntry) -> Option<(String, u64)> {
    let name = entry.file_name().into_string().ok()?;
    let [id, token, _pid, _start] = name.split('.').collect::<Vec<_>>()[..] else { return None };
    Some((id.to_owned(), token.parse().unwrap()))
}

/// The last line may be cut off by SIGKILL in mid-write only if the disk is full; it is one write.
fn beats(text: &str) -> impl DoubleEndedIterator<Item = u64> {
    text.lines().filter_map(|line| line.parse::<u64>().ok())
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

/// Whether runs that began later have greater tokens; two runs with the same one break that, too.
pub fn tokens_grow(runs: &[Run]) -> bool {
    let mut runs = runs.to_vec();
    runs.sort_by_key(|run| run.first);
    runs.windows(2).all(|pair| pair[0].token < pair[1].token)
}

mod tests {
    use std::time::Duration;

    use super::{Log, Overlap, Run, overlaps, tokens_grow};

    fn run(token: u64, first: u64, last: u64) -> Run {
        Run { id: format!("{first}-{last}"), token, first, last, processes: 1 }
    }

    /// As a witness would have written it.
    fn wrote(log: &Log, name: &str, beats: &[u64]) {
        let text: String = beats.iter().map(|beat| format!("{beat}\n")).collect();
        std::fs::write(log.path().join(name), text).unwrap();
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
    #[test]
    fn two_runs_with_one_token_are_two_runs() {
        let log = Log::new();
        wrote(&log, "10-0.7.10.0", &[0, 10]);
        wrote(&log, "10-0.7.11.1", &[1, 40]);
        wrote(&log, "12-30.7.12.30", &[30, 60]);
        let runs = log.runs();
        assert_eq!(runs.iter().map(|run| run.processes).collect::<Vec<_>>(), [2, 1]);
        assert_eq!(overlaps(&runs), [Overlap { tokens: (7, 7), nanos: 10 }]);
        assert!(!tokens_grow(&runs));
        assert_eq!(log.longest_silence(), Duration::from_nanos(39));
    }

    /// It cannot beat, so only who looks for it knows of it.
    #[test]
    fn a_witness_finds_a_stopped_process_of_the_run_before() {
        let log = Log::new();
        let start = |words: &[&str]| {
            let command = log.witness(words);
            std::process::Command::new(&command[1]).args(&command[2..]).spawn().unwrap()
        };
        let mut stopped = start(&["stop"]);
        log.await_runs(1, 1);
        super::until("it to be stopped", || {
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", stopped.id())).unwrap();
            stat.contains(") T ")
        });
        assert!(start(&["for=1"]).wait().unwrap().success());
        assert_eq!(log.survivors(), [format!("{} T", stopped.id())]);
        assert_eq!(overlaps(&log.runs()), []);
        stopped.kill().unwrap();
        stopped.wait().unwrap();
        assert!(start(&["for=1"]).wait().unwrap().success());
        assert_eq!(log.survivors().len(), 1, "the dead do not survive");
    }
}
