//! Waiters that sleep on the server until the one before them is gone: what is to be seen of it there, and that a queue
//! goes on whatever happens to one of them.

use nix::sys::signal::Signal;

use super::{holding, on, used};
use crate::support::{Bed, Log, Pooler, Postgres, Running, unique, until};

const ASLEEP: &str = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND NOT granted";

/// A holder until the gate is there, and waiters in the order of their numbers, each of which writes its own down.
struct Queue<'a> {
    server: &'a Postgres,
    name: String,
    holder: Running,
    waiters: Vec<Running>,
    dir: tempfile::TempDir,
}

impl<'a> Queue<'a> {
    fn of(count: usize, server: &'a Postgres, options: &[&str]) -> Queue<'a> {
        used(server);
        let (name, dir) = (unique("wake-up"), tempfile::tempdir().unwrap());
        let start = |script: String| {
            let script = format!("cd {} && mkdir alone && {script} && rmdir alone", dir.path().display());
            server.dlock().run(&name).args(options).sh(&script).spawn()
        };
        let holder = start("until test -e gate; do sleep 0.01; done".to_owned());
        let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 2 AND granted";
        until("the holder to have its wake-up lock", || dir.path().join("alone").exists() && server.sql(locks) == "1");
        let mut waiters = Vec::new();
        for number in 0..count {
            waiters.push(start(format!("echo {number} >> order")));
            server.await_waiters(&name, number + 1);
        }
        Queue { server, name, holder, waiters, dir }
    }

    fn await_sleepers(&self, count: usize) {
        until(&format!("{count} to sleep"), || self.server.sql(ASLEEP) == count.to_string());
    }

    /// The server's process that serves one of them.
    fn backend(&self, number: usize) -> String {
        let sql = "SELECT session FROM dlock.contenders";
        self.server.sql(&format!(
            "{sql} WHERE name = '{}' AND token IS NULL ORDER BY ticket OFFSET {number} LIMIT 1",
            self.name
        ))
    }

    fn await_gone(&self, backend: &str) {
        let sql = format!("SELECT count(*) FROM pg_stat_activity WHERE pid = {backend}");
        until("the server's process to be gone", || self.server.sql(&sql) == "0");
    }

    /// Everybody has had the lock but `without`, in order.
    fn drain(self, without: &[usize]) {
        std::fs::write(self.dir.path().join("gate"), "").unwrap();
        self.holder.ended().expect(0);
        let mut expected = Vec::new();
        for (number, waiter) in self.waiters.into_iter().enumerate().filter(|(number, _)| !without.contains(number)) {
            waiter.ended().expect(0);
            expected.push(number.to_string());
        }
        let order = std::fs::read_to_string(self.dir.path().join("order")).unwrap();
        assert_eq!(order.lines().collect::<Vec<_>>(), expected);
    }
}

#[test]
fn waiters_sleep_on_the_server_and_none_of_them_listens() {
    let server = Postgres::with(&["log_statement=all"]);
    let queue = Queue::of(12, &server, &[]);
    queue.await_sleepers(12);
    // The holder does: it wants to know when its lock is revoked.
    until("the holder to listen", || server.log().contains("statement: LISTEN"));
    let log = server.log();
    for backend in (0..12).map(|number| format!("[{}] LOG:  statement: LISTEN", queue.backend(number))) {
        assert!(!log.contains(&backend), "{backend}");
    }
    queue.drain(&[]);
}

#[test]
fn shared_waiters_sleep_on_the_exclusive_one_before_them() {
    let server = Postgres::with(&[]);
    used(&server);
    let (name, log) = (unique("shared"), Log::new());
    let holder = holding(&server.url(), &name, &[], &log);
    let start = || server.dlock().run(&name).arg("--shared").sh("exit 0").spawn();
    let waiters: Vec<_> = (0..4).map(|_| start()).collect();
    server.await_waiters(&name, 4);
    until("all of them to sleep", || server.sql(ASLEEP) == "4");
    holder.signal(Signal::SIGKILL);
    for waiter in waiters {
        waiter.ended().expect(0);
    }
}

#[test]
fn a_waiter_for_one_of_many_slots_gets_the_first_that_is_free() {
    let server = Postgres::with(&[]);
    used(&server);
    let (name, slots) = (unique("slots"), ["--slots", "3"]);
    let hold = || server.dlock().run(&name).args(slots).sh("echo in; exec sleep 1000").spawn();
    for position in 0..3 {
        let holders: Vec<_> = (0..3).map(|_| hold()).collect();
        until("all slots to be taken", || holders.iter().all(|holder| holder.stdout() == "in\n"));
        let waiters: Vec<_> = (0..2).map(|_| server.dlock().run(&name).args(slots).sh("exit 0").spawn()).collect();
        server.await_waiters(&name, 2);
        holders[position].signal(Signal::SIGTERM);
        for waiter in waiters {
            waiter.ended().expect(0);
        }
        for holder in &holders {
            holder.signal(Signal::SIGTERM);
        }
        until("nobody to be left", || server.sql("SELECT count(*) FROM dlock.contenders") == "0");
    }
}

#[test]
fn forty_waiters_get_the_lock_in_order() {
    let server = Postgres::with(&[]);
    let queue = Queue::of(40, &server, &[]);
    queue.await_sleepers(40);
    queue.drain(&[]);
}

#[test]
fn a_sleeper_that_is_ended_leaves_nothing_behind() {
    let server = Postgres::with(&[]);
    let queue = Queue::of(10, &server, &[]);
    queue.await_sleepers(10);
    let backend = queue.backend(8);
    queue.waiters[8].signal(Signal::SIGTERM);
    server.await_waiters(&queue.name, 9);
    queue.await_gone(&backend);
    queue.drain(&[8]);
}

#[test]
fn a_session_whose_client_was_killed_does_not_sleep_on() {
    // As long as the server looks for a deadlock, nothing else would end its sleep.
    let server = Postgres::with(&["deadlock_timeout=1h"]);
    let queue = Queue::of(3, &server, &["--ttl", "1h"]);
    queue.await_sleepers(3);
    let backend = queue.backend(2);
    queue.waiters[2].signal(Signal::SIGKILL);
    queue.await_gone(&backend);
    queue.drain(&[2]);
}

#[test]
fn a_queue_goes_on_without_a_sleeper_that_was_killed() {
    let server = Postgres::with(&[]);
    let queue = Queue::of(5, &server, &["--ttl", "2s"]);
    queue.await_sleepers(5);
    queue.waiters[2].signal(Signal::SIGKILL);
    queue.drain(&[2]);
}

#[test]
fn a_sleeper_whose_session_is_ended_keeps_its_place() {
    let server = Postgres::with(&[]);
    let queue = Queue::of(5, &server, &[]);
    queue.await_sleepers(5);
    let backend = queue.backend(2);
    server.sql(&format!("SELECT pg_terminate_backend({backend})"));
    until("it to be back", || ![String::new(), backend.clone()].contains(&queue.backend(2)));
    queue.drain(&[]);
}

#[test]
fn a_time_limit_for_statements_ends_no_wait() {
    let server = Postgres::with(&["statement_timeout=2s"]);
    let queue = Queue::of(8, &server, &[]);
    queue.await_sleepers(8);
    let times = format!("SELECT min(expires) FROM dlock.contenders WHERE name = '{}' AND token IS NULL", queue.name);
    let before = server.sql(&times);
    until("all of them to have asked again", || server.sql(&times) > before);
    let log = server.log();
    assert!(!log.contains("canceling statement"), "{log}");
    queue.drain(&[]);
}

#[test]
fn behind_a_pooler_nobody_sleeps_on_the_server() {
    let server = Postgres::with(&[]);
    used(&server);
    let (pooler, name, log) = (Pooler::to(&server), unique("pooled"), Log::new());
    for parameters in ["", "listen=off"] {
        let url = pooler.url(parameters);
        let holder = holding(&url, &name, &["--ttl", "3s"], &log);
        let waiters: Vec<_> = (0..3).map(|_| on(&url).run(&name).sh("exit 0").spawn()).collect();
        server.await_waiters(&name, 3);
        let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'";
        assert_eq!(server.sql(locks), "0", "{parameters}");
        holder.signal(Signal::SIGKILL);
        for waiter in waiters {
            waiter.ended().expect(0);
        }
        assert_eq!(server.sql(locks), "0", "{parameters}");
    }
}
