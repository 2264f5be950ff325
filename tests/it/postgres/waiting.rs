//! The queue under conditions of its own: no notifications, no connections, other isolation levels.

use nix::sys::signal::Signal;

use super::{holding, on, used};
use crate::support::{Bed, Log, Pooler, Postgres, Proxy, Running, unique, until};

fn contend(url: &str, name: &str, contenders: usize) {
    let log = Log::new();
    let start = |_| on(url).run(name).args(["--ttl", "10s"]).args(log.witness(&["for=10"])).spawn();
    let all: Vec<_> = (0..contenders).map(start).collect();
    for one in all {
        one.ended().expect(0).silently();
    }
    assert_eq!(log.runs().len(), contenders);
    log.assert_no_overlap();
}

#[test]
fn stricter_isolation_changes_nothing() {
    for level in ["serializable", "repeatable%5C%20read"] {
        let options = format!("options=-c%20default_transaction_isolation%3D{level}");
        contend(&Postgres::shared().url_as("postgres", &options), &unique("isolated"), 8);
    }
}

#[test]
fn without_notifications_waiters_ask_by_themselves() {
    let url = Postgres::shared().url_as("postgres", "listen=off");
    contend(&url, &unique("deaf"), 4);
    assert_eq!(
        Postgres::shared().sql("SELECT count(*) FROM dlock.contenders WHERE name LIKE 'deaf%' AND wake IS NOT NULL"),
        "0"
    );
}

#[test]
fn a_transaction_pooler_changes_nothing() {
    let (server, name) = (Postgres::with(&[]), unique("pooled"));
    used(&server);
    let pooler = Pooler::to(&server);
    contend(&pooler.url("listen=off"), &name, 4);
    let listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'";
    assert_eq!(server.sql(listening), "0");
    // Who forgets to say so leaves a LISTEN behind on the pooler's connections, and nothing worse.
    contend(&pooler.url(""), &name, 4);
}

#[test]
fn a_dead_waiter_does_not_hold_up_the_queue() {
    let (server, name, log) = (Postgres::shared(), unique("dead"), Log::new());
    let holder = holding(&server.url(), &name, &["--ttl", "3s"], &log);
    let dead = server.dlock().run(&name).args(["--ttl", "2s"]).sh("echo no").spawn();
    server.await_waiters(&name, 1);
    let next = server.dlock().run(&name).args(log.witness(&["for=10"])).spawn();
    server.await_waiters(&name, 2);
    dead.signal(Signal::SIGKILL);
    holder.signal(Signal::SIGKILL);
    next.ended().expect(0);
    log.assert_no_overlap();
}

/// Takes the lock as an SQL client does, and releases it.
fn held_by_sql(server: &Postgres, name: &str) -> impl Fn() {
    used(server);
    let token = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql-1')"));
    let release = format!("SELECT dlock.release('{name}', 'psql-1', {token})");
    move || assert_eq!(server.sql(&release), "t")
}

#[test]
fn a_waiter_that_slept_through_its_turn_asks_again() {
    let (server, name, log) = (Postgres::shared(), unique("slept"), Log::new());
    let release = held_by_sql(server, &name);
    let waiter = server.dlock().run(&name).args(["--ttl", "1s"]).args(log.witness(&["for=10"])).spawn();
    server.await_waiters(&name, 1);
    waiter.signal(Signal::SIGSTOP);
    release();
    let mut next = String::new();
    until("its place to be lost", || {
        next = server.sql(&format!("SELECT outcome, token FROM dlock.acquire('{name}', 'psql-2')"));
        next.starts_with("granted|")
    });
    let next: u64 = next["granted|".len()..].parse().unwrap();
    waiter.signal(Signal::SIGCONT);
    server.await_waiters(&name, 1);
    assert_eq!(log.runs().len(), 0);
    server.sql(&format!("SELECT dlock.release('{name}', 'psql-2', {next})"));
    waiter.ended().expect(0);
    assert!(log.runs()[0].token > next);
}

#[test]
fn a_grant_whose_answer_is_lost_comes_back_with_the_same_token() {
    for parameters in ["", "?listen=off"] {
        let (server, name, log) = (Postgres::shared(), unique("lost-answer"), Log::new());
        used(server);
        let token = server.sql(&format!("SELECT token FROM dlock.acquire('{name}', 'psql-1', '1 h')"));
        let proxy = Proxy::to(server.port());
        let url = format!("postgres://postgres@127.0.0.1:{}/postgres{parameters}", proxy.port());
        let waiter = on(&url).run(&name).args(log.witness(&["for=10"])).spawn();
        server.await_waiters(&name, 1);
        // Somebody has the lock's row when the lease ends, so that the waiter's question takes its time. Other tests use
        // this server too, and other sessions may wait.
        let sit = format!("BEGIN; SELECT FROM dlock.locks WHERE name = '{name}' FOR UPDATE; SELECT pg_sleep(600)");
        let sitter = format!("SELECT pid FROM pg_stat_activity WHERE query = '{}'", sit.replace('\'', "''"));
        let sitting = std::thread::spawn(move || server.try_sql(&sit));
        let sits = format!("{sitter} AND wait_event = 'PgSleep'");
        until("the row to be taken", || !server.sql(&sits).is_empty());
        server.sql(&format!("SELECT outcome FROM dlock.renew('{name}', 'psql-1', {token}, '1 ms')"));
        let blocked = format!("SELECT count(*) FROM pg_stat_activity WHERE pg_blocking_pids(pid) && ARRAY({sitter})");
        until("the waiter to ask", || server.sql(&blocked) == "1");
        proxy.swallow_answers();
        server.sql(&format!("SELECT pg_terminate_backend(pid) FROM ({sitter}) sitter"));
        let mut granted = String::new();
        let whose = format!("name = '{name}' AND token IS NOT NULL AND owner <> 'psql-1'");
        until("the waiter to be granted the lock", || {
            granted = server.sql(&format!("SELECT token FROM dlock.contenders WHERE {whose}"));
            !granted.is_empty()
        });
        proxy.cut();
        proxy.heal();
        waiter.ended().expect(0);
        assert_eq!(log.runs()[0].token.to_string(), granted, "{parameters}");
        assert!(sitting.join().unwrap().is_err());
    }
}

#[test]
fn more_waiters_than_a_default_server_has_connections_all_get_their_turn() {
    let server = Postgres::with(&[]);
    used(&server);
    let (name, log) = (unique("many"), Log::new());
    let holder = holding(&server.url(), &name, &["--ttl", "10s"], &log);
    let start = || server.dlock().run(&name).args(["--connect-timeout", "60s"]).sh("exit 0").spawn();
    let mut waiters = Vec::new();
    for count in [50, 100, 150, 200] {
        waiters.resize_with(count, start);
        server.await_waiters(&name, count);
    }
    holder.signal(Signal::SIGKILL);
    while !waiters.is_empty() {
        let mut next = None;
        until("the next to have its turn", || {
            next = waiters.iter_mut().position(Running::has_ended);
            next.is_some()
        });
        waiters.swap_remove(next.unwrap()).ended().expect(0);
    }
}
