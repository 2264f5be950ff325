//! SQL clients take part, by hand nothing goes wrong, and the server is asked no more than it takes.

use nix::sys::signal::Signal;

use super::{await_waiters, holding, on, used};
use crate::support::{Bed, Log, Mysql, unique, until};

#[test]
fn sql_clients_and_dlock_exclude_each_other() {
    let (server, name, log) = (Mysql::shared(), unique("sql"), Log::new());
    used(server);
    let acquire = |owner: &str| {
        let row = server.sql(&format!("CALL dlock_acquire('{name}', '{owner}', 60)"));
        let mut columns = row.split('\t').map(str::to_owned);
        (columns.next().unwrap(), columns.next().unwrap())
    };
    let (outcome, token) = acquire("sql-1");
    assert_eq!(outcome, "granted");
    let token: u64 = token.parse().unwrap();
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75).saying("sql-1");
    assert_eq!(acquire("sql-2").0, "busy");
    let renew = |token: u64| {
        let row = server.sql(&format!("CALL dlock_renew('{name}', 'sql-1', {token}, 60)"));
        row.split('\t').next().unwrap().to_owned()
    };
    assert_eq!((renew(token), renew(token - 1)), ("held".into(), "lost".into()));

    let waiter = server.dlock().run(&name).args(log.witness(&[])).spawn();
    await_waiters(server, &name, 1);
    assert_eq!(acquire("sql-2").0, "busy", "nobody jumps the queue");
    let release = || {
        let row = server.sql(&format!("CALL dlock_release('{name}', 'sql-1', {token})"));
        row.split('\t').next().unwrap().to_owned()
    };
    assert_eq!((release(), release()), ("done".into(), "done".into()), "the second call repeats the first");
    assert!(log.await_runs(1, 1)[0].token > token);
    assert_eq!(renew(token), "lost");
    waiter.signal(Signal::SIGTERM);
    waiter.ended().expect(143);
    assert_eq!(acquire("sql-2").0, "granted");
}

#[test]
fn a_late_write_of_a_paused_holder_is_refused_in_its_own_transaction() {
    let (server, name, log) = (Mysql::with(&[]), unique("fence"), Log::new());
    used(&server);
    server.sql("CREATE TABLE account (balance INT); INSERT INTO account VALUES (0)");
    let write = |token: u64, balance: i32| {
        let fence = format!("CALL dlock_fence('account', {token})");
        server.try_sql(&format!("START TRANSACTION; {fence}; UPDATE account SET balance = {balance}; COMMIT"))
    };
    let paused = holding(&server.url(), &name, &["--ttl", "2s"], &log);
    let old = log.runs()[0].token;
    write(old, 1).unwrap();
    // Its last write is on its way.
    paused.signal(Signal::SIGSTOP);
    let next = holding(&server.url(), &name, &["--ttl", "2s"], &log);
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

#[test]
fn tables_are_not_changed_by_hand() {
    let (server, name, log) = (Mysql::shared(), unique("hand"), Log::new());
    let holder = holding(&server.url(), &name, &["--ttl", "5s"], &log);
    server.sql("CALL dlock_fence('kept', 2)");
    for table in ["dlock_locks", "dlock_fences"] {
        for wrong in [format!("DELETE FROM {table}"), format!("UPDATE {table} SET token = 1")] {
            assert!(server.try_sql(&wrong).unwrap_err().contains("never goes"), "{wrong}");
        }
    }
    for wrong in [
        format!("DELETE FROM dlock_contenders WHERE name = '{name}'"),
        format!("UPDATE dlock_contenders SET expires = 1 WHERE name = '{name}'"),
    ] {
        assert!(server.try_sql(&wrong).unwrap_err().contains("not by hand"), "{wrong}");
    }
    server.dlock().run(&name).arg("-n").sh("echo no").ended().expect(75);
    log.await_beat();
    drop(holder);
}

#[test]
fn every_isolation_level_and_binary_log_will_do() {
    for settings in [
        &["--transaction-isolation=READ-COMMITTED"][..],
        &["--transaction-isolation=SERIALIZABLE"],
        &["--log-bin=binlog", "--binlog-format=STATEMENT"],
        &["--autocommit=0", "--completion-type=CHAIN", "--sql-mode=NO_BACKSLASH_ESCAPES,ANSI,ORACLE"],
    ] {
        let (server, log) = (Mysql::with(settings), Log::new());
        used(&server);
        let start = |n: usize| {
            let shared: &[&str] = if n % 4 == 3 { &["--shared"] } else { &[] };
            server.dlock().run("both").args(shared).args(log.witness(&["for=10"])).spawn()
        };
        let all: Vec<_> = (0..16).map(start).collect();
        for one in all {
            one.ended().expect(0).silently();
        }
        assert_eq!(log.runs().len(), 16, "{settings:?}");
    }
}

#[test]
fn contenders_for_different_locks_are_not_in_each_others_way() {
    let server = Mysql::with(&["--max-connections=200"]);
    used(&server);
    let deadlocks = || server.status("Innodb_deadlocks").parse::<u64>().unwrap();
    let start = |n| server.dlock().run(&format!("job-{n}")).sh("sleep 0.1").spawn();
    let before = deadlocks();
    for one in (0..24).map(start).collect::<Vec<_>>() {
        one.ended().expect(0).silently();
    }
    assert_eq!(deadlocks() - before, 0);
}

#[test]
fn another_prefix_is_another_set_of_locks() {
    let (server, name, log) = (Mysql::shared(), unique("prefix"), Log::new());
    let _holder = holding(&server.url(), &name, &[], &log);
    let other = server.url_as("root", "prefix=apart");
    on(&other).run(&name).arg("-n").sh("exit 0").ended().expect(0).silently();
    assert_eq!(server.sql(&format!("SELECT COUNT(*) FROM apart_locks WHERE name = '{name}'")), "1");
}

#[test]
fn everybody_may_come_first() {
    let (server, log) = (Mysql::with(&[]), Log::new());
    let start = |_| server.dlock().run("first").args(log.witness(&["for=10"])).spawn();
    for one in (0..6).map(start).collect::<Vec<_>>() {
        one.ended().expect(0).silently();
    }
    assert_eq!(log.runs().len(), 6);
    log.assert_no_overlap();
}

#[test]
fn an_uncontended_run_is_one_connection_and_two_calls_and_leaves_no_warning() {
    let server = Mysql::with(&["--general-log=1", "--log-output=TABLE"]);
    used(&server);
    let mut log = String::new();
    until("a run too short to be renewed", || {
        server.sql("TRUNCATE mysql.general_log");
        server.dlock().run("first").sh("exit 0").ended().expect(0).silently();
        // What a procedure does is logged as well.
        let calls = "command_type IN ('Connect', 'Quit') OR argument LIKE 'CALL dlock%'";
        let sql = format!(
            "SELECT command_type, LEFT(argument, 16) FROM mysql.general_log WHERE ({calls}) AND user_host LIKE '%127.0.0.1%'"
        );
        until("the end to be in the log", || {
            log = server.sql(&sql);
            log.contains("Quit")
        });
        !log.contains("dlock_extend")
    });
    let calls = log.lines().filter(|line| line.contains("dlock_ask(") || line.contains("dlock_end(")).count();
    assert_eq!((log.matches("Connect").count(), calls), (1, 2), "{log}");
    assert!(!server.log().contains("Aborted connection"), "{}", server.log());
}

#[test]
fn waiters_do_not_ask_until_the_one_in_front_has_gone() {
    let (server, name, log) = (Mysql::with(&["--max-connections=200"]), unique("crowd"), Log::new());
    used(&server);
    let holder = holding(&server.url(), &name, &["--ttl", "1m"], &log);
    let start = |_| server.dlock().run(&name).args(["--ttl", "1m"]).args(log.witness(&["for=20"])).spawn();
    let waiters: Vec<_> = (0..16).map(start).collect();
    await_waiters(&server, &name, 16);
    let waiting = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User lock'";
    until("all of them to wait for a wake-up lock", || server.sql(waiting) == "16");
    holder.signal(Signal::SIGTERM);
    holder.ended();
    for waiter in waiters {
        waiter.ended().expect(0).silently();
    }
    log.assert_no_overlap();
}

#[test]
fn where_wake_up_locks_are_off_waiters_are_served_all_the_same() {
    let (server, name, log) = (Mysql::shared(), unique("asleep"), Log::new());
    let url = server.url_as("root", "wake-up=off");
    let holder = holding(&url, &name, &[], &log);
    let waiter = on(&url).run(&name).args(log.witness(&["for=20"])).spawn();
    await_waiters(server, &name, 1);
    holder.signal(Signal::SIGTERM);
    holder.ended();
    waiter.ended().expect(0).silently();
    log.assert_no_overlap();
}
