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

/// One that came next, and found that nobody can wake it, would sleep through its turn.
#[test]
fn the_wake_up_lock_is_held_before_others_see_the_place() {
    let (server, name, log) = (Mysql::with(&[]), unique("unseen"), Log::new());
    let _holder = holding(&server.url(), &name, &[], &log);
    let processes = |what: &str| server.sql(&format!("SELECT ID FROM information_schema.PROCESSLIST WHERE {what}"));
    std::thread::scope(|scope| {
        // As for a backup: everybody may write, but nobody may commit.
        scope.spawn(|| server.try_sql("BACKUP STAGE START; BACKUP STAGE BLOCK_COMMIT; SELECT SLEEP(200)"));
        let backup = "INFO = 'SELECT SLEEP(200)'";
        until("commits to be stopped", || !processes(backup).is_empty());
        let _waiter = server.dlock().run(&name).sh("exit 0").spawn();
        until("the waiter to be about to commit", || !processes("STATE = 'Waiting for backup lock'").is_empty());
        let held = server.sql(&format!(
            "SET SESSION TRANSACTION ISOLATION LEVEL READ UNCOMMITTED;
             SELECT ticket INTO @ticket FROM dlock_contenders WHERE name = '{name}' AND token IS NULL;
             CALL dlock_wake_up_lock('{name}', @ticket, 'is held', 0, @held); SELECT @held"
        ));
        server.sql(&format!("KILL {}", processes(backup)));
        assert_eq!(held, "1");
    });
}
