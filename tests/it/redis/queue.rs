//! The queue under load: who is woken, and what that costs the server.

use crate::support::{Bed, Log, Redis, assert_hand_overs_wake_one, await_waiters};

pub fn calls(server: &Redis, command: &str) -> u64 {
    let stats = server.does(&["INFO", "commandstats"]);
    let line = stats.lines().find(|line| line.starts_with(&format!("cmdstat_{command}:")));
    line.and_then(|line| line.split(['=', ',']).nth(1)).map_or(0, |calls| calls.parse().unwrap())
}

/// Whoever is woken has a note set for it. Signs of life, of which there are more the longer it takes, set none.
#[test]
fn a_hand_over_wakes_one_waiter_not_all() {
    let server = Redis::new();
    assert_hand_overs_wake_one(&server, || calls(&server, "set"));
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
