//! What the fault matrix does not tell: no run is ended that could have gone on.

use nix::sys::signal::Signal;

use super::{await_waiters, holding, used};
use crate::support::{Bed, Log, Mysql, Running, unique, until};

/// Proof that the holder got through to the server again, by another connection.
fn await_another_connection(server: &Mysql, name: &str, before: &[u32]) {
    let sql = format!("SELECT session FROM dlock_contenders WHERE name = '{name}' AND token IS NOT NULL");
    until("the holder to renew over another connection", || {
        let now = server.try_sql(&sql).unwrap_or_default();
        !now.is_empty() && before.iter().all(|id| now != id.to_string())
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
fn a_connection_that_an_administrator_kills_costs_nothing() {
    let (server, name, log) = (Mysql::shared(), unique("killed"), Log::new());
    used(server);
    let holder = holding(&server.url(), &name, &["--ttl", "3s"], &log);
    let waiter = server.dlock().run(&name).args(["--ttl", "3s"]).args(log.witness(&["for=20"])).spawn();
    await_waiters(server, &name, 1);
    let before = server.connections(&name);
    server.sql(&format!("KILL {}", before[0]));
    await_another_connection(server, &name, &before);
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn a_server_that_is_back_in_time_costs_nothing() {
    let (server, name, log) = (Mysql::with(&[]), unique("restart"), Log::new());
    used(&server);
    let holder = holding(&server.url(), &name, &["--ttl", "30s"], &log);
    server.kill();
    server.start_again();
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    let renewed = format!("SELECT renewal > 0 FROM dlock_contenders WHERE name = '{name}'");
    until("the holder to renew", || server.try_sql(&renewed) == Ok("1".to_owned()));
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
    drop(holder);
}

#[test]
fn a_transaction_that_sits_on_the_row_only_delays() {
    let (server, name) = (Mysql::shared(), unique("sat-upon"));
    used(server);
    server.dlock().run(&name).sh("exit 0").ended().expect(0);
    let sit = format!(
        "START TRANSACTION; SELECT token FROM dlock_locks WHERE name = '{name}' FOR UPDATE; SELECT SLEEP(6); ROLLBACK"
    );
    let sitting = std::thread::spawn(move || server.sql(&sit));
    let asleep = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE INFO LIKE 'SELECT SLEEP(6)%'";
    until("the row to be taken", || server.sql(asleep) == "1");
    // Error 1205 after four seconds is none to show.
    server.dlock().run(&name).sh("exit 0").ended().expect(0).silently();
    sitting.join().unwrap();
}
