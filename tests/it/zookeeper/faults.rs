//! What fails between dlock and ZooKeeper, with a witness that trusts neither: overlap is zero.

use nix::sys::signal::Signal;

use crate::support::{
    Bed, Dlock, Log, Proxy, Running, ZooKeeperBed, ZooKeeperEnsemble, kazoo, kazoo_at, overlaps, unique, until,
};

fn holder(dlock: Dlock, name: &str, log: &Log) -> Running {
    let running = dlock.run(name).args(["--ttl", "4s"]).args(log.witness(&["ignore-term", "daemons=2"])).spawn();
    log.await_runs(1, 3);
    running
}

/// A waiter with a way of its own to the server, which has to get the lock in the end.
fn next(bed: &dyn Bed, name: &str, log: &Log) -> Running {
    let running = bed.dlock().run(name).args(["--ttl", "4s"]).args(log.witness(&["for=50"])).spawn();
    await_waiter(bed, name);
    running
}

#[track_caller]
fn await_waiter(bed: &dyn Bed, name: &str) {
    until("a waiter in `status`", || {
        let status = bed.dlock().args(["status", "--json", name]).ended().expect(0).stdout;
        serde_json::from_str::<serde_json::Value>(&status).unwrap()[0]["waiters"].as_array().unwrap().len() == 1
    });
}

/// Waits until the command has lived on for longer than a lease that nobody renews.
#[track_caller]
fn await_renewal(holder: &mut Running, ttl_millis: u64, log: &Log) {
    let last = || log.runs()[0].last;
    let since = last();
    until("the command to outlive a lease", || {
        assert!(!holder.has_ended(), "{}", holder.stderr());
        last() > since + (ttl_millis + 1000) * 1_000_000
    });
}

#[test]
fn a_connection_that_breaks_costs_nothing() {
    let (bed, name, log) = (ZooKeeperBed::shared(), unique("break"), Log::new());
    let proxy = Proxy::to(bed.port);
    let mut holder = holder(at(proxy.port()), &name, &log);
    let next = next(&bed, &name, &log);
    for _ in 0..2 {
        proxy.cut();
        proxy.heal();
        await_renewal(&mut holder, 4000, &log);
    }
    assert_eq!(log.runs().len(), 1);
    holder.signal(Signal::SIGKILL);
    next.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn a_server_that_is_killed_and_comes_back_still_knows_the_holder() {
    // A dlock that had no first answer yet when the server was killed does not know that it waits, and gives up.
    while !comes_back_and_knows_the_holder() {}
}

/// `false`: the waiter was not yet told that it is one.
fn comes_back_and_knows_the_holder() -> bool {
    let (bed, name, log) = (ZooKeeperBed::new(""), unique("restart"), Log::new());
    let run = || bed.dlock().run(&name).args(["--ttl", "20s"]);
    let mut holder = run().args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let mut next = run().args(log.witness(&["for=50"])).spawn();
    await_waiter(&bed, &name);
    bed.server().daemon.kill();
    bed.server().restart();
    // It says so before it lets anybody in.
    until("the server to serve again", || bed.dlock().args(["status", &name]).ended().code == Some(0));
    if next.code() == Some(69) {
        return false;
    }
    run().arg("-n").sh("echo no").ended().expect(75);
    await_renewal(&mut holder, 20_000, &log);
    assert_eq!(log.runs().len(), 1);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    next.ended().expect(0);
    log.assert_no_overlap();
    true
}

#[test]
fn a_server_that_grants_less_than_was_asked_for_is_taken_at_its_word_and_reported() {
    let (bed, name, log) = (ZooKeeperBed::new("maxSessionTimeout=4000\n"), unique("short"), Log::new());
    let run = || bed.dlock().run(&name).args(["--ttl", "1h"]);
    run().sh("exit 0").ended().expect(0).saying("1h").saying("4s");
    let mut holder = run().args(log.witness(&["ignore-term", "daemons=2"])).spawn();
    log.await_runs(1, 3);
    let status = bed.dlock().args(["status", "--json", &name]).ended().expect(0).stdout;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status[0]["holders"][0]["ttl_ms"], 4000, "{status}");
    await_renewal(&mut holder, 4000, &log);
    let next = next(&bed, &name, &log);
    holder.signal(Signal::SIGSTOP);
    next.ended().expect(0);
    log.assert_no_overlap();
    holder.signal(Signal::SIGCONT);
    holder.ended().expect(79);
}

#[test]
fn a_server_that_comes_back_without_its_data_does_not_know_the_holder() {
    let (bed, name, log) = (ZooKeeperBed::new(""), unique("amnesia"), Log::new());
    let holder = holder(bed.dlock(), &name, &log);
    bed.server().daemon.kill();
    bed.server().forget();
    bed.server().restart();
    // It refuses clients that have seen more than it has: unknown, so the lease has to run out.
    holder.ended().expect(79);
}

#[test]
fn a_waiter_waits_until_a_holder_that_the_server_forgot_is_dead() {
    // A dlock that had no first answer yet when the server was killed does not know that it waits, and gives up.
    while !waits_for_one_that_the_server_forgot() {}
}

/// `false`: the waiter was not yet told that it is one.
fn waits_for_one_that_the_server_forgot() -> bool {
    let (bed, name, log) = (ZooKeeperBed::new(""), unique("forgotten"), Log::new());
    let holder = bed.dlock().run(&name).args(["--ttl", "20s"]).args(log.witness(&["ignore-term", "daemons=2"])).spawn();
    log.await_runs(1, 3);
    // Its own session is over long before that of the holder.
    let next = next(&bed, &name, &log);
    holder.signal(Signal::SIGSTOP);
    bed.server().daemon.kill();
    bed.server().forget();
    bed.server().restart();
    let next = next.ended();
    holder.signal(Signal::SIGCONT);
    if next.code == Some(69) {
        return false;
    }
    next.expect(0);
    // Not the tokens: a server that has forgotten everything counts from the beginning.
    let runs = log.runs();
    assert_eq!(overlaps(&runs), [], "{runs:#?}");
    assert!(log.survivors().is_empty(), "still there when the next began: {:?}", log.survivors());
    holder.ended().expect(79);
    true
}

#[test]
fn a_token_that_is_not_greater_than_one_on_record_is_refused() {
    let (bed, name) = (ZooKeeperBed::shared(), unique("went-back"));
    let run = || bed.dlock().run(&name).sh("echo ran").ended();
    run().expect(0);
    let status = bed.dlock().args(["status", "--json", &name]).ended().expect(0).stdout;
    let mut record = serde_json::from_str::<serde_json::Value>(&status).unwrap()[0]["last_run"].take();
    // As after its data was copied to a new ensemble, which counts from the beginning.
    record["fencing_token"] = 9_000_000_000_000_000_000_u64.into();
    let scrawl = |text: &str| {
        let meta = format!("/dlock-meta/{name}");
        assert!(kazoo_at(bed.port, &meta, "-").args(["scrawl", text]).status().unwrap().success());
    };
    scrawl(&record.to_string());
    let refused = run().expect(125).saying("9000000000000000000").saying("went back").saying(&name).saying("zkCli.sh");
    assert_eq!((refused.stdout.as_str(), refused.stderr.lines().count()), ("", 1), "{refused:#?}");
    scrawl("");
    run().expect(0).silently();
}

#[test]
fn a_node_deleted_by_an_operator_ends_the_command_at_once() {
    let (bed, name, log) = (ZooKeeperBed::shared(), unique("deleted"), Log::new());
    // A ttl so long that a renewal cannot be what notices.
    let dlock = bed.dlock().run(&name).args(["--ttl", "1h"]);
    let holder = dlock.args(log.witness(&["ignore-term"])).spawn();
    log.await_runs(1, 1);
    assert!(kazoo(bed.port, &name, "-").arg("clear").status().unwrap().success());
    holder.ended().expect(79).saying("deleted");
}

#[test]
fn the_next_waits_until_the_holder_that_an_operator_deleted_is_dead() {
    let bed = ZooKeeperBed::shared();
    for what in ["behead", "clear"] {
        let (name, log) = (unique("deleted"), Log::new());
        let holder = holder(bed.dlock(), &name, &log);
        let next = next(&bed, &name, &log);
        // Stopped, it cannot notice before its own time is over.
        holder.signal(Signal::SIGSTOP);
        assert!(kazoo(bed.port, &name, "-").arg(what).status().unwrap().success());
        // This one has seen nothing of it.
        bed.dlock().run(&name).args(log.witness(&["for=50"])).ended().expect(0);
        next.ended().expect(0);
        log.assert_no_overlap();
        holder.signal(Signal::SIGCONT);
        holder.ended().expect(79);
    }
}

#[test]
fn a_turn_that_is_taken_away_while_dlock_stands_still_starts_nothing() {
    let (bed, name, log) = (ZooKeeperBed::shared(), unique("early"), Log::new());
    let holder = bed.dlock().run(&name).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let next = bed.dlock().run(&name).args(["--ttl", "1h"]).args(log.witness(&[])).spawn();
    await_waiter(&bed, &name);
    next.signal(Signal::SIGSTOP);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    let told = bed.dlock().args(["force-release", &name, "--yes", "--reason", "not now"]).ended().expect(0);
    assert!(told.stdout.contains(&format!("pid {}", next.pid())), "{told:#?}");
    next.signal(Signal::SIGCONT);
    next.ended().expect(79).saying("not now");
    assert_eq!(log.runs().len(), 1);
}

#[test]
fn whichever_server_is_killed_the_ensemble_keeps_the_lock() {
    let (mut ensemble, name, log) = (ZooKeeperEnsemble::new(), unique("killed"), Log::new());
    let mut holder = ensemble.dlock().run(&name).args(["--ttl", "20s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    for victim in 0..3 {
        ensemble.servers[victim].daemon.kill();
        await_renewal(&mut holder, 20_000, &log);
        ensemble.servers[victim].restart();
        ensemble.await_whole();
    }
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    assert_eq!(log.runs().len(), 1);
}

#[test]
fn whichever_server_stands_still_the_ensemble_keeps_the_lock() {
    let (ensemble, name, log) = (ZooKeeperEnsemble::new(), unique("standing"), Log::new());
    let mut holder = ensemble.dlock().run(&name).args(["--ttl", "20s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    for server in &ensemble.servers {
        server.daemon.freeze();
        await_renewal(&mut holder, 20_000, &log);
        server.daemon.thaw();
        ensemble.await_whole();
    }
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    assert_eq!(log.runs().len(), 1);
}

/// A server cut off from its leader goes on answering for `syncLimit` ticks, here 40 s, while the leader
/// expires the sessions of its clients. A client that takes its answers for a renewal overlaps.
#[test]
fn a_server_that_has_lost_its_leader_renews_nothing() {
    let (ensemble, name, log) = (ZooKeeperEnsemble::divisible(), unique("partition"), Log::new());
    assert_eq!(ensemble.servers[0].role().as_deref(), Some("follower"));
    let holder = holder(at(ensemble.servers[0].port), &name, &log);
    let others = format!("zookeeper://127.0.0.1:{},127.0.0.1:{}", ensemble.servers[1].port, ensemble.servers[2].port);
    let next = Dlock::new().env("DLOCK_BACKEND", others).run(&name).args(["--ttl", "4s"]);
    let next = next.args(log.witness(&["for=50"])).spawn();
    ensemble.cut_off_first();
    next.ended().expect(0);
    assert_eq!(ensemble.servers[0].role().as_deref(), Some("follower"), "it still serves");
    log.assert_no_overlap();
    holder.ended().expect(79);
}

fn at(port: u16) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", format!("zookeeper://127.0.0.1:{port}"))
}
