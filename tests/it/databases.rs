//! What SQL clients and faults may do on every database, in the same words. What only one of them has is in its own folder.

use nix::sys::signal::Signal;

use crate::support::database::{Database, Kind};
use crate::support::{Bed, Dlock, Log, Proxy, Running, unique, until};

macro_rules! on {
    ($database:ident, $kind:ty) => {
        mod $database {
            on! { $kind:
                sql_clients_and_dlock_exclude_each_other
                everybody_may_come_first
                a_connection_that_an_administrator_ends_costs_nothing
                a_server_that_is_back_in_time_costs_nothing
                a_path_that_is_back_in_time_costs_nothing
            }
        }
    };
    ($kind:ty: $($case:ident)*) => { $(
        #[test]
        fn $case() {
            super::$case::<$kind>();
        }
    )* };
}

on!(mysql, crate::support::mysql::MariaDb);
on!(postgres, crate::support::postgres::PostgreSql);

/// Starts a run that beats, and waits until it does.
pub fn beating(dlock: Dlock, log: &Log) -> Running {
    let before = log.runs().len();
    let running = dlock.spawn();
    log.await_runs(before + 1, 1);
    running
}

/// A run that beats until it is killed, and does not end for less.
pub fn holding(dlock: Dlock, name: &str, options: &[&str], log: &Log) -> Running {
    beating(dlock.run(name).args(options).args(log.witness(&["ignore-term"])), log)
}

/// One run, so that the tables are there.
pub fn used(server: &dyn Bed) {
    server.dlock().run("first").sh("exit 0").ended().expect(0).silently();
}

/// A holder, and one that waits for it.
pub fn contenders<K: Kind>(server: &Database<K>, name: &str, log: &Log) -> (Running, Running) {
    const TTL: [&str; 2] = ["--ttl", "3s"];
    used(server);
    let holder = holding(server.dlock(), name, &TTL, log);
    let waiter = server.dlock().run(name).args(TTL).args(log.witness(&["for=20"])).spawn();
    server.await_waiters(name, 1);
    (holder, waiter)
}

/// Proof that the holder got through to the server again, by another connection.
pub fn await_another_session<K: Kind>(server: &Database<K>, name: &str, before: &[u32]) {
    assert!(!before.is_empty());
    until("the holder to renew over another connection", || {
        let now = server.sessions(name);
        !now.is_empty() && now.iter().all(|session| !before.contains(session))
    });
}

/// The holder goes on beating; killed, it makes room; and the two never met.
pub fn goes_on_and_then_makes_room(holder: Running, waiter: Running, log: &Log) {
    goes_on(log);
    holder.signal(Signal::SIGKILL);
    waiter.ended().expect(0);
    log.assert_no_overlap();
}

fn goes_on(log: &Log) {
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
}

fn sql_clients_and_dlock_exclude_each_other<K: Kind>() {
    let (server, name, log) = (Database::<K>::shared(), unique("sql"), Log::new());
    used(server);
    let acquire = |owner: &str| server.called("acquire", &format!("'{name}', '{owner}', '60'"));
    let granted = acquire("sql-1");
    assert_eq!(granted[0], "granted");
    let token: u64 = granted[1].parse().unwrap();
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75).saying("sql-1");
    assert_eq!(acquire("sql-2")[..2], ["busy", K::NULL]);
    let renew = |token: u64| server.called("renew", &format!("'{name}', 'sql-1', {token}, '60'")).swap_remove(0);
    assert_eq!((renew(token), renew(token - 1)), ("held".into(), "lost".into()));

    let waiter = server.dlock().run(&name).args(log.witness(&[])).spawn();
    server.await_waiters(&name, 1);
    assert_eq!(acquire("sql-2")[0], "busy", "nobody jumps the queue");
    let release = || server.called("release", &format!("'{name}', 'sql-1', {token}")).swap_remove(0);
    assert_eq!((release(), release()), (K::DONE.into(), K::DONE.into()), "the second call repeats the first");
    assert!(log.await_runs(1, 1)[0].token > token);
    assert_eq!((acquire("sql-2").swap_remove(0), renew(token)), ("busy".into(), "lost".into()));
    waiter.signal(Signal::SIGTERM);
    waiter.ended().expect(143);
    assert_eq!(acquire("sql-2")[0], "granted");
}

/// In the transaction of that write, if it asks there.
pub fn a_late_write_of_a_paused_holder_is_refused<K: Kind>() {
    let (server, name, log) = (Database::<K>::with(&[]), unique("fence"), Log::new());
    used(&server);
    server.sql("CREATE TABLE account (balance INT); INSERT INTO account VALUES (0)");
    let write = |token: u64, balance: i32| {
        let fence = Database::<K>::call("fence", &format!("'account', {token}"));
        server.try_sql(&format!("BEGIN; {fence}; UPDATE account SET balance = {balance}; COMMIT"))
    };
    let paused = holding(server.dlock(), &name, &["--ttl", "2s"], &log);
    let old = log.runs()[0].token;
    write(old, 1).unwrap();
    // Its last write is on its way.
    paused.signal(Signal::SIGSTOP);
    let next = holding(server.dlock(), &name, &["--ttl", "2s"], &log);
    let new = log.runs().iter().map(|run| run.token).max().unwrap();
    assert!(new > old);
    write(new, 2).unwrap();

    let refused = write(old, 3).unwrap_err();
    assert!(refused.contains("stale fencing token"), "{refused}");
    assert_eq!(server.sql("SELECT balance FROM account"), "2");
    write(new, 4).unwrap();
    assert_eq!(server.sql("SELECT balance FROM account"), "4");
    drop((paused, next));
}

/// `expired` is a date that is over. `more` is what else is refused, and with which words.
pub fn tables_are_not_changed_by_hand<K: Kind>(expired: &str, more: &[(&str, &str)]) {
    let (server, name, log) = (Database::<K>::shared(), unique("hand"), Log::new());
    let _holder = holding(server.dlock(), &name, &["--ttl", "5s"], &log);
    server.called("fence", "'kept', 2");
    let (prefix, this) = (K::PREFIX, format!("WHERE name = '{name}'"));
    let wrong = ["locks", "fences"].map(|table| {
        let ways = [format!("DELETE FROM {prefix}{table}"), format!("UPDATE {prefix}{table} SET token = 1")];
        ways.map(|wrong| (wrong, "never goes"))
    });
    let by_hand = [
        (format!("DELETE FROM {prefix}contenders {this}"), "not by hand"),
        (format!("UPDATE {prefix}contenders SET expires = {expired} {this}"), "not by hand"),
    ];
    let more = more.iter().map(|&(wrong, said)| (wrong.to_owned(), said));
    for (wrong, said) in wrong.into_iter().flatten().chain(by_hand).chain(more) {
        assert!(server.try_sql(&wrong).unwrap_err().contains(said), "{wrong}");
    }
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    log.await_beat();
}

pub fn another_prefix_is_another_set_of_locks<K: Kind>() {
    let (server, name, log) = (Database::<K>::shared(), unique("prefix"), Log::new());
    let _holder = holding(server.dlock(), &name, &[], &log);
    let apart = server.dlock().env("DLOCK_BACKEND", server.url_as(K::URL[1], "prefix=apart"));
    apart.run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
    let locks = K::PREFIX.replace("dlock", "apart") + "locks";
    assert_eq!(server.sql(&format!("SELECT COUNT(*) FROM {locks} WHERE name = '{name}'")), "1");
}

fn everybody_may_come_first<K: Kind>() {
    let (server, log) = (Database::<K>::with(&[]), Log::new());
    let start = |_| server.dlock().run("first").args(log.witness(&["for=10"])).spawn();
    for one in (0..6).map(start).collect::<Vec<_>>() {
        one.ended().expect(0).silently();
    }
    assert_eq!(log.runs().len(), 6);
    log.assert_no_overlap();
}

fn a_connection_that_an_administrator_ends_costs_nothing<K: Kind>() {
    let (server, name, log) = (Database::<K>::shared(), unique("terminated"), Log::new());
    let (holder, waiter) = contenders(server, &name, &log);
    let before = server.sessions(&name);
    server.sql(&K::end_session(before[0]));
    await_another_session(server, &name, &before);
    goes_on_and_then_makes_room(holder, waiter, &log);
}

fn a_server_that_is_back_in_time_costs_nothing<K: Kind>() {
    let (server, name, log) = (Database::<K>::with(&[]), unique("restart"), Log::new());
    used(&server);
    let _holder = holding(server.dlock(), &name, &["--ttl", "30s"], &log);
    // A server that was restarted may call another connection by the same number.
    let expires = format!("SELECT expires FROM {}contenders WHERE name = '{name}'", K::PREFIX);
    let before = server.sql(&expires);
    server.kill();
    server.start_again();
    until("the holder to renew", || server.sql(&expires) != before);
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    goes_on(&log);
}

fn a_path_that_is_back_in_time_costs_nothing<K: Kind>() {
    let (server, name, log) = (Database::<K>::shared(), unique("blip"), Log::new());
    used(server);
    let proxy = Proxy::to(server.port());
    let there = server.dlock().env("DLOCK_BACKEND", Database::<K>::url_at(proxy.port()));
    let holder = holding(there, &name, &["--ttl", "30s"], &log);
    let before = server.sessions(&name);
    proxy.cut();
    until("the holder to notice", || holder.stderr().contains(&name));
    proxy.heal();
    await_another_session(server, &name, &before);
    goes_on(&log);
}
