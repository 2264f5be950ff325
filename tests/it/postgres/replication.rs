//! Standbys: a synchronous one keeps the promise through a failover.

use super::{holding, on, used};
use crate::databases::goes_on_and_then_makes_room;
use crate::support::{Bed, Log, Postgres, unique, until};

fn both(primary: &Postgres, standby: &Postgres) -> String {
    format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres", primary.port(), standby.port())
}

#[test]
fn a_failover_to_a_synchronous_standby_costs_nothing() {
    let primary = Postgres::with(&[]);
    used(&primary);
    let standby = primary.standby();
    let doctor = || primary.dlock().arg("doctor").ended().expect(0).stdout;
    let told = doctor();
    assert!(
        told.contains("WEAK  1 standby(s), all of them asynchronous") && told.contains("WEAK  fsync is off"),
        "{told}"
    );
    primary.wait_for_standby();
    assert!(doctor().contains("ok    a commit waits for a synchronous standby"), "{}", doctor());
    on(&standby.url()).run("first").sh("echo no").ended().expect(69).saying("read-only");

    let (name, log, url) = (unique("failover"), Log::new(), both(&primary, &standby));
    let holder = holding(&url, &name, &["--ttl", "6s"], &log);
    let waiter = on(&url).run(&name).args(["--ttl", "6s"]).args(log.witness(&["for=20"])).spawn();
    primary.await_waiters(&name, 1);
    let stamp = format!("SELECT server FROM dlock.contenders WHERE name = '{name}' AND token IS NOT NULL");
    let before = primary.sql(&stamp);
    primary.kill();
    standby.promote();
    until("the holder to renew on the new primary", || {
        let now = standby.sql(&stamp);
        !now.is_empty() && now != before
    });
    goes_on_and_then_makes_room(holder, waiter, &log);
}

#[test]
fn two_servers_that_can_both_be_written_to_are_refused() {
    let (one, another) = (Postgres::shared(), Postgres::with(&[]));
    used(one);
    let url = both(&another, one);
    let words = format!("two servers can be written to: 127.0.0.1:{}/postgres and", another.port());
    for _ in 0..3 {
        on(&url).run("split").sh("echo no").ended().expect(69).saying(&words);
    }
    another.kill();
    on(&url).run("split").sh("exit 0").ended().expect(0).silently();
    let by_two_names = format!("postgres://postgres@localhost:{0},127.0.0.1:{0}/postgres", one.port());
    on(&by_two_names).run("split").sh("exit 0").ended().expect(0).silently();
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!(
        "postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres",
        deaf.local_addr().unwrap().port(),
        one.port()
    );
    on(&url).run("split").args(["--connect-timeout", "20s"]).sh("exit 0").ended().expect(0).silently();
}

#[test]
fn a_primary_that_wakes_up_after_its_standby_was_promoted_is_left_alone() {
    let primary = Postgres::with(&[]);
    used(&primary);
    let (standby, name) = (primary.standby(), unique("woken"));
    // As somebody who may do next to nothing sees it.
    primary.sql("CREATE ROLE anybody LOGIN; GRANT CREATE ON DATABASE postgres TO anybody; DROP SCHEMA dlock CASCADE");
    until("the standby to have it all", || standby.sql("SELECT to_regnamespace('dlock') IS NULL") == "t");
    standby.promote();
    // Both can be written to, and every client goes to the same.
    for url in [both(&primary, &standby), both(&standby, &primary)] {
        let url = url.replace("postgres@", "anybody@");
        let ran = on(&url).run(&name).sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0).silently().stdout;
        assert_eq!(standby.sql(&format!("SELECT token FROM dlock.locks WHERE name = '{name}'")), ran.trim());
    }
    assert_eq!(primary.sql("SELECT to_regnamespace('dlock') IS NULL"), "t");
}

#[test]
fn a_commit_that_the_standby_has_not_confirmed_is_no_grant() {
    let server = Postgres::with(&[]);
    used(&server);
    server.set("synchronous_standby_names = 'nobody'");
    let name = unique("unconfirmed");
    let dlock = server.dlock().run(&name).args(["--connect-timeout", "60s"]).sh("echo no").spawn();
    let mut pid = String::new();
    until("the grant to wait for the standby", || {
        pid = server.sql("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'");
        !pid.is_empty()
    });
    // The server then commits after all, locally, and warns.
    server.sql(&format!("SELECT pg_cancel_backend({pid})"));
    let ended = dlock.ended().expect(69).saying("standby has not confirmed");
    assert_eq!(ended.stdout, "");
}

#[test]
fn a_lease_from_before_a_restart_counts_anew() {
    let (server, name, log) = (Postgres::with(&[]), unique("skew"), Log::new());
    used(&server);
    let proxy = crate::support::Proxy::to(server.port());
    let url = format!("postgres://postgres@127.0.0.1:{}/postgres", proxy.port());
    let holder = holding(&url, &name, &["--ttl", "4s"], &log);
    proxy.freeze();
    server.kill();
    server.start_again();
    // As a new primary would see it whose clock is an hour ahead.
    let ahead = format!("UPDATE dlock.contenders SET expires = expires - interval '1 hour' WHERE name = '{name}'");
    server.sql(&format!("SET session_replication_role = replica; {ahead}"));
    server.dlock().run(&name).args(["--ttl", "4s"]).args(log.witness(&["for=20"])).ended().expect(0);
    assert_eq!(log.runs().len(), 2);
    log.assert_no_overlap();
    holder.ended().expect(79);
}
