//! SQL clients take part, by hand nothing goes wrong, and the server is asked no more than it takes.

use nix::sys::signal::Signal;

use super::{holding, on, used};
use crate::databases;
use crate::support::mysql::MariaDb;
use crate::support::{Bed, Log, Mysql, unique, until};

#[test]
fn a_late_write_of_a_paused_holder_is_refused_in_its_own_transaction() {
    databases::a_late_write_of_a_paused_holder_is_refused::<MariaDb>();
}

#[test]
fn tables_are_not_changed_by_hand() {
    databases::tables_are_not_changed_by_hand::<MariaDb>("1", &[]);
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
    databases::another_prefix_is_another_set_of_locks::<MariaDb>();
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
    server.await_waiters(&name, 16);
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
    server.await_waiters(&name, 1);
    holder.signal(Signal::SIGTERM);
    holder.ended();
    waiter.ended().expect(0).silently();
    log.assert_no_overlap();
}
