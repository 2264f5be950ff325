//! What the fault matrix does not tell: no run is ended that could have gone on.

use nix::sys::signal::Signal;

use super::{holding, on, used};
use crate::databases::{await_another_session, contenders, goes_on_and_then_makes_room};
use crate::support::{Bed, Log, Postgres, signal, unique};

#[test]
fn a_stopped_server_process_costs_a_connection_not_the_lock() {
    let (server, name, log) = (Postgres::shared(), unique("stopped-backend"), Log::new());
    let (holder, waiter) = contenders(server, &name, &log);
    let before = server.sessions(&name);
    before.iter().for_each(|&pid| signal(pid, Signal::SIGSTOP));
    await_another_session(server, &name, &before);
    before.iter().for_each(|&pid| signal(pid, Signal::SIGCONT));
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn a_killed_server_process_restarts_the_server_and_costs_nothing() {
    let (server, name, log) = (Postgres::with(&[]), unique("killed-backend"), Log::new());
    let (holder, waiter) = contenders(&server, &name, &log);
    let before = server.sessions(&name);
    before.iter().for_each(|&pid| signal(pid, Signal::SIGKILL));
    await_another_session(&server, &name, &before);
    goes_on_and_then_makes_room(holder, waiter, &log);
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
