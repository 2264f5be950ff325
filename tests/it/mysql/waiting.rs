//! The queue.

use nix::sys::signal::Signal;

use super::{holding, on};
use crate::support::{Bed, Log, Mysql, unique, until};

/// A server takes 32 sessions that wait for each other in a row for a deadlock.
#[test]
fn however_many_wait_each_of_them_is_woken() {
    const WAITERS: usize = 70;
    let (server, name, log) = (Mysql::shared(), unique("row"), Log::new());
    let holder = holding(&server.url(), &name, &[], &log);
    let start = |_| on(&server.url()).run(&name).args(["--connect-timeout", "60s"]).sh("exit 0").spawn();
    let waiters: Vec<_> = (0..WAITERS).map(start).collect();
    let waits = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User lock'";
    let sql = format!("{waits} AND INFO LIKE '%{name}%'");
    until("all of them to wait for their turn", || server.sql(&sql) == WAITERS.to_string());
    holder.signal(Signal::SIGTERM);
    for waiter in waiters {
        waiter.ended().expect(0).silently();
    }
}
