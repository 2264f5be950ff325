//! What the fault matrix does not tell: no run is ended that could have gone on.

use nix::sys::signal::Signal;

use super::{await_waiters, holding, on, used};
use crate::support::{Bed, Log, Postgres, Proxy, Running, signal, unique, until};

const TTL: [&str; 2] = ["--ttl", "3s"];

/// A holder, and one that waits for it.
fn contenders(server: &Postgres, name: &str, log: &Log) -> (Running, Running) {
    used(server);
    let holder = holding(&server.url(), name, &TTL, log);
    let waiter = server.dlock().run(name).args(TTL).args(log.witness(&["for=20"])).spawn();
    await_waiters(server, name, 1);
    (holder, waiter)
}

/// Proof that the holder got through to the server again, by another connection.
fn await_another_session(server: &Postgres, name: &str, before: &[u32]) {
    let sql = format!("SELECT session FROM dlock.contenders WHERE name = '{name}' AND token IS NOT NULL");
    until("the holder to renew over another connection", || {
        let now = server.try_sql(&sql).unwrap_or_default();
        !now.is_empty() && before.iter().all(|pid| now != pid.to_string())
    });
}

/// The holder goes on beating; killed, it makes room; and the two never met.
fn goes_on_and_then_makes_room(holder: Running, waiter: Running, log: &Log) {
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
    holder.signal(Signal::SIGKILL);
    waiter.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn a_stopped_server_process_costs_a_connection_not_the_lock() {
    let (server, name, log) = (Postgres::shared(), unique("stopped-backend"), Log::new());
    let (holder, waiter) = contenders(server, &name, &log);
    let before = server.backends(&name);
    before.iter().for_each(|&pid| signal(pid, Signal::SIGSTOP));
    await_another_session(server, &name, &before);
    before.iter().for_each(|&pid| signal(pid, Signal::SIGCONT));
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn a_terminated_connection_costs_nothing() {
    let (server, name, log) = (Postgres::shared(), unique("terminated"), Log::new());
    let (holder, waiter) = contenders(server, &name, &log);
    let before = server.backends(&name);
    server.sql(&format!("SELECT pg_terminate_backend({})", before[0]));
    await_another_session(server, &name, &before);
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn a_killed_server_process_restarts_the_server_and_costs_nothing() {
    let (server, name, log) = (Postgres::with(&[]), unique("killed-backend"), Log::new());
    let (holder, waiter) = contenders(&server, &name, &log);
    let before = server.backends(&name);
    before.iter().for_each(|&pid| signal(pid, Signal::SIGKILL));
    await_another_session(&server, &name, &before);
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn a_server_that_is_back_in_time_costs_nothing() {
    let (server, name, log) = (Postgres::with(&[]), unique("restart"), Log::new());
    used(&server);
    let long = ["--ttl", "30s"];
    let holder = holding(&server.url(), &name, &long, &log);
    let before = server.backends(&name);
    server.kill();
    server.start_again();
    await_another_session(&server, &name, &before);
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
    drop(holder);
}

#[test]
fn a_path_that_is_back_in_time_costs_nothing() {
    let (server, name, log) = (Postgres::shared(), unique("blip"), Log::new());
    used(server);
    let proxy = Proxy::to(server.port());
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let holder = holding(&url, &name, &["--ttl", "30s"], &log);
    let before = server.backends(&name);
    proxy.cut();
    until("the holder to notice", || holder.stderr().contains(&name));
    proxy.heal();
    await_another_session(server, &name, &before);
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
}

#[test]
fn a_transaction_that_sits_on_the_row_lets_nobody_in() {
    let (server, name, log) = (Postgres::shared(), unique("sits"), Log::new());
    let (holder, waiter) = contenders(server, &name, &log);
    let sit = format!("BEGIN; SELECT dlock.acquire('{name}', 'sitter'); SELECT pg_sleep(8); ROLLBACK");
    let sitting = std::thread::spawn(move || server.sql(&sit));
    sitting.join().unwrap();
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn a_grant_survives_a_crash_even_where_commits_are_asynchronous() {
    let lazy = ["synchronous_commit=off", "wal_writer_delay=10s", "wal_writer_flush_after=1GB"];
    let (server, name, log) = (Postgres::with(&lazy), unique("crash"), Log::new());
    used(&server);
    let holder = holding(&server.url(), &name, &["--ttl", "30s"], &log);
    server.kill();
    server.start_again();
    let sql = format!("SELECT token FROM dlock.contenders WHERE name = '{name}'");
    assert_eq!(server.sql(&sql), log.runs()[0].token.to_string());
    on(&server.url()).run(&name).arg("-n").sh("echo no").ended().expect(75);
    drop(holder);
}
