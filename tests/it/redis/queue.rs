//! The queue under load: who is woken, and what that costs the server.

use super::await_waiters;
use crate::support::{Bed, Log, Redis};

pub fn calls(server: &Redis, command: &str) -> u64 {
    let stats = server.does(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
    line.and_then(|line| line.split(['=', ',']).nth(1)).map_or(0, |calls| calls.parse().unwrap())
}

/// How many keys the server sets in one hand-over, with so many in the queue. Whoever is woken has a note
/// set for it; signs of life, of which there are more the longer it takes, set none.
fn cost_of_a_hand_over(waiters: usize) -> u64 {
    let (server, log) = (Redis::new(), Log::new());
    let mut holder = server.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let mut queue: std::collections::VecDeque<_> = (0..waiters)
        .map(|n| {
            let waiter = server.dlock().run("job").args(log.witness(&[])).spawn();
            await_waiters(&server, "job", n + 1);
            waiter
        })
        .collect();
    let mut fewest = u64::MAX;
    for n in 0..4 {
        let before = calls(&server, "set");
        holder.signal(nix::sys::signal::Signal::SIGTERM);
        log.await_runs(n + 2, 1);
        fewest = fewest.min(calls(&server, "set") - before);
        holder = queue.pop_front().unwrap();
    }
    fewest
}

#[test]
fn a_hand_over_wakes_one_waiter_not_all() {
    let (few, many) = (cost_of_a_hand_over(6), cost_of_a_hand_over(24));
    assert!((1..=few).contains(&many), "{few} with 6 waiters, {many} with 24");
}

/// Not because its place has run out: that it never does here.
#[test]
fn a_dead_waiter_is_passed_over() {
    let (server, log) = (Redis::new(), Log::new());
    let holder = server.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let dead = server.dlock().run("job").sh("echo no").spawn();
    await_waiters(&server, "job", 1);
    let next: Vec<_> = (0..2).map(|_| server.dlock().run("job").args(log.witness(&["for=20"])).spawn()).collect();
    await_waiters(&server, "job", 3);
    dead.signal(nix::sys::signal::Signal::SIGKILL);
    let owner = server.does(&["ZRANGE", "{dlock:job}:queue", "0", "0"]);
    server.does(&["ZADD", "{dlock:job}:places", "9999999999999", &owner]);
    holder.signal(nix::sys::signal::Signal::SIGTERM);
    for waiter in next {
        waiter.ended().expect(0).silently();
    }
    assert_eq!(dead.stdout(), "");
    log.assert_no_overlap();
}
