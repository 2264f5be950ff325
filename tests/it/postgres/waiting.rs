//! The queue under conditions of its own: no notifications, no connections, other isolation levels.

use nix::sys::signal::Signal;

use super::{await_waiters, holding, on, used};
use crate::support::{Bed, Log, Pooler, Postgres, unique};

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
    let channels =
        Postgres::shared().sql("SELECT count(*) FROM dlock.contenders WHERE name LIKE 'deaf%' AND wake IS NOT NULL");
    assert_eq!(channels, "0");
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
    await_waiters(server, &name, 1);
    let next = server.dlock().run(&name).args(log.witness(&["for=10"])).spawn();
    await_waiters(server, &name, 2);
    dead.signal(Signal::SIGKILL);
    holder.signal(Signal::SIGKILL);
    next.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn more_waiters_than_connections_all_get_their_turn() {
    const WAITERS: usize = 80;
    let server = Postgres::with(&["max_connections=75"]);
    used(&server);
    let (name, log) = (unique("crowd"), Log::new());
    let holder = holding(&server.url(), &name, &["--ttl", "10s"], &log);
    let start = |_| server.dlock().run(&name).args(["--connect-timeout", "30s"]).sh("exit 0").spawn();
    let waiters: Vec<_> = (0..WAITERS).map(start).collect();
    await_waiters(&server, &name, WAITERS);
    holder.signal(Signal::SIGKILL);
    for waiter in waiters {
        waiter.ended().expect(0).silently();
    }
}
