//! One etcd, and what can happen to it, to the way to it, and to what lies in it.

use nix::sys::signal::Signal;

use super::{next, stubborn};
use crate::support::etcd::{Etcd, shared};
use crate::support::{Bed, Ended, Log, Proxy, lines, unique, until};

/// The same etcd by another way.
struct Detour(Proxy);

impl Bed for Detour {
    fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.0.port())
    }
}

#[test]
fn a_path_that_is_interrupted_for_a_while_costs_nothing() {
    let (name, log, detour) = (unique("blip"), Log::new(), Detour(Proxy::to(shared().port())));
    let holder = detour.dlock().run(&name).args(["--ttl", "20s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    detour.0.cut();
    until("dlock to notice", || holder.stderr().contains("etcd at"));
    detour.0.heal();
    until("dlock to notice again", || holder.stderr().lines().count() >= 2);
    log.await_beat();
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
}

#[test]
fn a_server_that_is_killed_and_comes_back_with_its_data_costs_nothing() {
    let (name, log, mut etcd) = (unique("restart"), Log::new(), Etcd::new());
    let holder = etcd.dlock().run(&name).args(["--ttl", "20s"]).args(log.witness(&[])).spawn();
    let ours = log.await_runs(1, 1);
    let next = next(&etcd, &etcd, &name, &log);
    etcd.members[0].kill();
    etcd.members[0].restart();
    etcd.await_health();
    assert_eq!(etcd.contenders(&name).len(), 2, "both are in the queue still");
    // Long enough for a renewal, and for the lease to have run out without one.
    until("the run to outlive its first lease", || log.runs()[0].last > ours[0].first + 25_000_000_000);
    assert_eq!(log.runs().len(), 1);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    next.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn a_server_that_comes_back_empty_is_a_lost_lock() {
    let (name, log, mut etcd) = (unique("amnesia"), Log::new(), Etcd::new());
    let holder = etcd.dlock().run(&name).args(["--ttl", "20s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    etcd.members[0].kill();
    etcd.members[0].forget();
    etcd.members[0].restart();
    holder.ended().expect(79).saying("lost");
}

/// How an operator may delete a contender.
#[derive(Clone, Copy)]
enum Deletion {
    OfItsLease,
    OfItsKey,
}

const DELETIONS: [Deletion; 2] = [Deletion::OfItsLease, Deletion::OfItsKey];

fn delete(key: &str, how: Deletion) {
    match how {
        Deletion::OfItsLease => shared().ctl(&["lease", "revoke", key.rsplit('/').next().unwrap()]),
        Deletion::OfItsKey => shared().ctl(&["del", key]),
    };
}

#[test]
fn an_operator_who_revokes_the_lease_or_deletes_the_key_is_noticed_at_once() {
    for how in DELETIONS {
        let (name, log) = (unique("operator"), Log::new());
        // A ttl so long that a renewal cannot be what notices.
        let holder = shared().dlock().run(&name).args(["--ttl", "1h"]).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        delete(&shared().contenders(&name)[0], how);
        holder.ended().expect(79).saying("lost");
    }
}

#[test]
fn the_next_waits_until_the_holder_that_an_operator_deleted_is_dead() {
    for how in DELETIONS {
        let (name, log) = (unique("deleted"), Log::new());
        let holder = stubborn(shared(), &name, "4s", &log);
        let key = shared().contenders(&name).remove(0);
        let next = next(shared(), shared(), &name, &log);
        // Stopped, it cannot notice before its own time is over.
        holder.signal(Signal::SIGSTOP);
        delete(&key, how);
        next.ended().expect(0);
        log.assert_no_overlap();
        holder.signal(Signal::SIGCONT);
        holder.ended().expect(79);
    }
}

#[test]
fn every_waiter_waits_until_a_holder_that_an_operator_deleted_with_all_others_is_dead() {
    let (name, log) = (unique("wiped"), Log::new());
    let holder = stubborn(shared(), &name, "6s", &log);
    let first = next(shared(), shared(), &name, &log);
    let second = shared().dlock().run(&name).args(["--ttl", "3s"]).args(log.witness(&["for=20"])).spawn();
    until("both to be in the queue", || shared().contenders(&name).len() == 3);
    // The holder cannot notice, and the waiter that was next comes back last.
    holder.signal(Signal::SIGSTOP);
    first.signal(Signal::SIGSTOP);
    shared().ctl(&["del", "--prefix", &format!("dlock/{name}/")]);
    second.ended().expect(0);
    first.signal(Signal::SIGCONT);
    first.ended().expect(0);
    log.assert_no_overlap();
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(79);
}

/// How a waiter with these options ends whose turn comes while it is stopped, and is taken away before it goes on.
fn ended_after_its_turn_was_taken_away(log: &Log, options: &[&str]) -> Ended {
    let name = unique("early");
    let holder = shared().dlock().run(&name).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let next = shared().dlock().run(&name).args(["--ttl", "1h"]).args(options).args(log.witness(&["for=20"])).spawn();
    until("the next to be in the queue", || shared().contenders(&name).len() == 2);
    next.signal(Signal::SIGSTOP);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    let told = shared().dlock().args(["force-release", &name, "--yes", "--reason", "not now"]).ended().expect(0);
    assert!(told.stdout.contains(&format!("pid {}", next.pid())), "{told:#?}");
    next.signal(Signal::SIGCONT);
    next.ended()
}

#[test]
fn a_turn_that_is_taken_away_while_dlock_stands_still_starts_nothing() {
    let log = Log::new();
    ended_after_its_turn_was_taken_away(&log, &[]).expect(79).saying("not now");
    assert_eq!(log.runs().len(), 1);
}

#[test]
fn whoever_keeps_trying_stands_again_when_its_turn_is_taken_away() {
    let log = Log::new();
    ended_after_its_turn_was_taken_away(&log, &["-v", "--keep-trying"])
        .expect(0)
        .saying("trying to acquire the lock again");
    assert_eq!(log.runs().len(), 2);
}

#[test]
fn a_waiter_whose_lease_is_revoked_takes_a_new_place() {
    let (name, log, dir) = (unique("requeue"), Log::new(), tempfile::tempdir().unwrap());
    let order = dir.path().join("order");
    let holder = shared().dlock().run(&name).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiters = || {
        let state = shared().dlock().args(["status", "--json", &name]).ended().expect(0).stdout;
        let state: serde_json::Value = serde_json::from_str(&state).unwrap();
        let waiters = state[0]["waiters"].as_array().unwrap().clone();
        waiters.iter().map(|waiter| waiter["pid"].as_u64().unwrap() as u32).collect::<Vec<_>>()
    };
    let start = |who: &str| {
        let script = format!("echo {who} >>{}", order.display());
        let waiter = shared().dlock().run(&name).args(["--ttl", "6s"]).sh(&script).spawn();
        until("it to be the last in the queue", || waiters().last() == Some(&waiter.pid()));
        waiter
    };
    let (first, second) = (start("first"), start("second"));
    let value = |key: &String| shared().ctl(&["get", "--print-value-only", key]);
    let mine = format!("\"pid\":{},", first.pid());
    let key = shared().contenders(&name).into_iter().find(|key| value(key).contains(&mine)).unwrap();
    shared().ctl(&["lease", "revoke", key.rsplit('/').next().unwrap()]);
    until("it to be in the queue again, at its end", || waiters() == [second.pid(), first.pid()]);
    holder.signal(Signal::SIGTERM);
    first.ended().expect(0);
    second.ended().expect(0);
    assert_eq!(lines(&order), ["second", "first"]);
}
