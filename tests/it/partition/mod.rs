//! Real partitions between real hosts, which network namespaces play: the holder is cut off together with one of the
//! servers, the waiter is with the others. Packets are lost in both directions or in one, without a word to anybody.
//!
//! `tests/run` plays four of the cells; `tests/run --partitions` plays all of them and writes `target/partitions.md`.

mod service;

use std::fmt::Write as _;
use std::sync::Mutex;
use std::time::Duration;

use service::{HOLDER, Kind, Service, WAITER};

use crate::support::{Log, Network, cannot_make_networks, overlaps, to_the_end, tokens_grow, unique, until};

/// So many cells are played at once.
const AT_ONCE: usize = 3;

/// Who is cut off together with the holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Leader,
    Follower,
}

/// Which packets between the two parts are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Loss {
    All,
    /// What the part with the holder sends.
    FromHolder,
    /// What the part with the holder should receive.
    ToHolder,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    kind: Kind,
    beside: Beside,
    loss: Loss,
}

/// What a cell showed.
struct Outcome {
    overlap: Option<Duration>,
    hand_over: Option<Duration>,
    /// Everything that breaks a promise.
    wrong: Vec<String>,
}

impl Cell {
    fn all() -> Vec<Cell> {
        let losses = [Loss::All, Loss::FromHolder, Loss::ToHolder];
        let ways = [Beside::Leader, Beside::Follower].into_iter().flat_map(|one| losses.map(|loss| (one, loss)));
        let ways: Vec<_> = ways.collect();
        Kind::ALL
            .into_iter()
            .flat_map(|kind| ways.iter().map(move |&(beside, loss)| Cell { kind, beside, loss }))
            .collect()
    }

    fn name(self) -> String {
        let beside = match self.beside {
            Beside::Leader => "the leader",
            Beside::Follower => "a follower",
        };
        let loss = match self.loss {
            Loss::All => "nothing gets through",
            Loss::FromHolder => "nothing gets out",
            Loss::ToHolder => "nothing gets in",
        };
        format!("{} | {beside} | {loss}", self.kind.name())
    }

    /// Whether the part without the holder can grant the lock by itself. With `wait-replicas` a new master grants nothing
    /// before the old one is its replica.
    fn others_can_go_on(self) -> bool {
        matches!(self.kind, Kind::Etcd | Kind::ZooKeeper) || self.beside == Beside::Follower
    }

    fn part(self, net: &Network, holders: &[usize], others: &[usize]) {
        for (holder, other) in holders.iter().flat_map(|holder| others.iter().map(move |other| (*holder, *other))) {
            if self.loss != Loss::ToHolder {
                net.lose(holder, other);
            }
            if self.loss != Loss::FromHolder {
                net.lose(other, holder);
            }
        }
    }

    fn play(self) -> Outcome {
        let (service, log, name) = (Service::start(self.kind), Log::new(), unique("job"));
        let net = &service.net;
        let dlock =
            |host: usize| net.dlock(host).env("DLOCK_BACKEND", self.kind.url()).env("DLOCK_CONNECT_TIMEOUT", "30s");
        let run = |host: usize| dlock(host).run(&name).args(["--ttl", "3s"]);
        // A replica that has only just come needs a moment before it confirms anything.
        until("a first run", || run(WAITER).sh("exit 0").ended().code == Some(0));
        let mut holder = run(HOLDER).args(log.witness(&["ignore-term", "daemons=1"])).spawn();
        log.await_runs(1, 2);
        let mut waiter = run(WAITER).args(log.witness(&["for=300"])).spawn();
        until("the waiter to wait", || {
            let shown = dlock(WAITER).args(["status", "--json", &name]).ended();
            let state: serde_json::Value = serde_json::from_str(&shown.stdout).unwrap_or_default();
            state[0]["waiters"].as_array().is_some_and(|waiters| !waiters.is_empty())
        });
        let leader = service.leader(&name);
        let member = if self.beside == Beside::Leader { leader } else { service.follower(&name) };
        self.part(net, &[HOLDER, member], &service.everybody_but(member).collect::<Vec<_>>());

        if self.others_can_go_on() {
            until("the waiter to have had its turn", || waiter.has_ended());
        } else {
            until("the holder to end", || holder.has_ended());
            service.await_another_than(leader, &name);
        }
        until("the holder to end", || holder.has_ended());
        net.heal();
        until("the waiter to have had its turn", || waiter.has_ended());

        let (runs, mut wrong) = (log.runs(), Vec::new());
        let mut must = |fine: bool, what: String| {
            if !fine {
                wrong.push(what)
            }
        };
        must(holder.code() == Some(79), format!("the holder's exit code: {:?}; {}", holder.code(), holder.stderr()));
        must(waiter.code() == Some(0), format!("the waiter's exit code: {:?}; {}", waiter.code(), waiter.stderr()));
        must(runs.len() == 2, format!("not two runs: {runs:?}"));
        must(overlaps(&runs).is_empty(), format!("overlap: {:?}", overlaps(&runs)));
        must(log.survivors().is_empty(), format!("still there when the next began: {:?}", log.survivors()));
        must(tokens_grow(&runs), format!("tokens do not grow: {runs:?}"));
        Outcome {
            overlap: overlaps(&runs).iter().map(|overlap| Duration::from_nanos(overlap.nanos)).max(),
            hand_over: runs.get(1).and_then(|next| next.first.checked_sub(runs[0].last)).map(Duration::from_nanos),
            wrong,
        }
    }
}

/// Those that every run of the tests plays.
fn in_short(cell: &Cell) -> bool {
    matches!(
        (cell.kind, cell.beside, cell.loss),
        (Kind::Etcd, Beside::Leader, Loss::All)
            | (Kind::ZooKeeper, Beside::Follower, Loss::FromHolder)
            | (Kind::Sentinel, Beside::Leader, Loss::All)
            | (Kind::Cluster, Beside::Follower, Loss::ToHolder)
    )
}

/// Plays several at once: most of their time they wait for a lease or an election.
fn play(cells: &[Cell]) -> Vec<(Cell, Outcome)> {
    let (waiting, played) = (Mutex::new((0..cells.len()).rev().collect::<Vec<_>>()), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(number) = { waiting.lock().unwrap().pop() } {
                    let failed = |why: String| Outcome { overlap: None, hand_over: None, wrong: vec![why] };
                    let outcome = to_the_end(|| cells[number].play()).unwrap_or_else(failed);
                    eprintln!("{}: {:?} {:?}", cells[number].name(), outcome.hand_over, outcome.wrong);
                    played.lock().unwrap().push((number, cells[number], outcome));
                }
            });
        }
    });
    let mut played = played.into_inner().unwrap();
    played.sort_by_key(|(number, ..)| *number);
    played.into_iter().map(|(_, cell, outcome)| (cell, outcome)).collect()
}

fn markdown(played: &[(Cell, Outcome)]) -> String {
    let mut text = String::from(
        "| backend | cut off with the holder | packets | overlap | hand-over | of it |\n\
         | --- | --- | --- | --- | --- | --- |\n",
    );
    let millis = |span: Option<Duration>, none: &str| {
        span.map_or_else(|| none.to_owned(), |span| format!("{} ms", span.as_millis()))
    };
    for (cell, outcome) in played {
        let when = if cell.others_can_go_on() { "during the partition" } else { "after it, by design" };
        let (overlap, hand_over) = (millis(outcome.overlap, "0"), millis(outcome.hand_over, "-"));
        writeln!(text, "| {} | {overlap} | {hand_over} | {when} |", cell.name()).unwrap();
    }
    let overlapped = played.iter().filter(|(_, outcome)| outcome.overlap.is_some()).count();
    text + &format!("\n{overlapped} of {} partitions overlapped.\n", played.len())
}

#[test]
fn a_holder_that_is_cut_off_with_a_server_never_overlaps_the_next() {
    if let Some(why) = cannot_make_networks() {
        eprintln!("not played: partitions (no network namespaces here: {why})");
        return;
    }
    let (mut cells, words) = (Cell::all(), std::env::var("DLOCK_PARTITIONS").ok());
    match &words {
        None => cells.retain(in_short),
        Some(words) => cells.retain(|cell| cell.name().contains(words.as_str())),
    }
    assert!(!cells.is_empty(), "no cell has {words:?} in its name");
    let played = play(&cells);
    if words.is_some() {
        eprintln!("{}", markdown(&played));
        let target = crate::support::target("partitions.md");
        std::fs::write(target, markdown(&played)).unwrap();
    }
    let wrong: Vec<String> = played
        .iter()
        .flat_map(|(cell, outcome)| outcome.wrong.iter().map(|what| format!("{}: {what}", cell.name())))
        .collect();
    assert!(wrong.is_empty(), "{wrong:#?}\n{}", markdown(&played));
}
