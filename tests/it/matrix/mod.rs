//! The fault matrix: every backend, every fault, and what is expected of each pair. Each cell is played by the
//! same runner and judged by the witness alone, never by dlock's own word.
//!
//! Beside it, contenders and faults at random, whose history is held against one lock; and one long hold.
//!
//! `tests/run` plays a selection once. `tests/run --faults N` plays everything N times and writes
//! `target/faults.md` and `target/faults.json`.

mod facts;
mod fault;
mod history;
mod history_checked;
mod inflict;
mod mutants;
mod plan;
mod random;
mod report;
mod scene;
mod site;
mod soak;
mod storm;
mod tokens;
mod tool;

use std::sync::Mutex;

use facts::Facts;
pub use fault::{Fault, faults};
use report::{Report, Row};
use site::Backend;
use tool::PEERS;

use crate::support::{Ground, PLACES, may_mount};

/// So many cells are played at once: most of their time they wait for a lease to run out.
const AT_ONCE: usize = 4;

/// Every cell of the table that is wanted, with no run yet; and those that this machine cannot play.
fn table(wanted: impl Fn(Backend, Fault) -> bool) -> (Vec<Row>, Vec<String>) {
    let pairs = PLACES.into_iter().flat_map(|backend| Fault::ALL.map(|fault| (backend, fault)));
    let pairs = pairs.filter(|&(backend, fault)| wanted(backend, fault));
    let (mut rows, mut not_played) = (Vec::new(), Vec::new());
    let may_mount = may_mount();
    for (row, fault) in pairs.filter_map(|(backend, fault)| Some((Row::of_dlock(backend, fault)?, fault))) {
        if fault.ground() == Ground::SmallDisk && !may_mount {
            let why = format!("{} (needs root, to mount a small disk)", row.name());
            eprintln!("not played: {why}");
            not_played.push(why);
        } else {
            rows.push(row);
        }
    }
    (rows, not_played)
}

/// What others make of it, measured beside dlock.
fn peers() -> Vec<Row> {
    PEERS.into_iter().flat_map(|peer| peer.faults().into_iter().map(move |fault| Row::of_peer(peer, fault))).collect()
}

/// Plays every row so many times, several at once.
fn play(mut report: Report, times: usize) -> Report {
    let numbers = (0..times).flat_map(|_| 0..report.rows.len()).rev().collect::<Vec<_>>();
    report.facts.look_at_load();
    let (waiting, report) = (Mutex::new(numbers), Mutex::new(report));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(number) = { waiting.lock().unwrap().pop() } {
                    let (tool, backend, fault) = report.lock().unwrap().rows[number].cell();
                    let outcome = scene::play(tool, backend, fault);
                    let mut report = report.lock().unwrap();
                    report.rows[number].add(outcome);
                    report.facts.look_at_load();
                }
            });
        }
    });
    report.into_inner().unwrap()
}

#[test]
fn nothing_ever_overlaps() {
    let times: Option<usize> = std::env::var("DLOCK_FAULTS").ok().map(|times| times.parse().unwrap());
    let words = std::env::var("DLOCK_FAULTS_ONLY").unwrap_or_default();
    let (mut rows, not_played) = table(|backend, fault| times.is_some() || backend.plays_in_short(fault));
    if times.is_some() {
        rows.extend(peers());
        rows.retain(|row| row.name().contains(&words));
    }
    assert!(!rows.is_empty(), "no cell has {words:?} in its name");
    let command = format!("tests/run --faults {} {words}", times.unwrap_or(1)).trim_end().to_owned();
    let facts = Facts::new(command, times.unwrap_or(1));
    let report = play(Report { rows, facts, not_played }, times.unwrap_or(1));
    if times.is_some() {
        report.write();
        eprintln!("{}", report.markdown());
    }
    let broken = report.broken();
    assert!(broken.is_empty(), "{broken:#?}\n{}", report.markdown());
}

/// Whoever adds a backend or a fault plays it and publishes what came of it.
#[test]
fn the_published_table_has_every_cell() {
    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/faults.md")).unwrap();
    let published: Vec<&str> =
        page.lines().filter(|line| line.starts_with("| dlock |") && line.ends_with("| ok |")).collect();
    let (rows, _) = table(|_, _| true);
    for row in &rows {
        assert!(published.iter().any(|line| line.starts_with(&row.markdown_head())), "{}", row.markdown_head());
    }
    assert_eq!(published.len(), rows.len());
}
