//! Replicas and clusters: what is granted is there afterwards, and `dlock doctor` says where it might not be.

use nix::sys::signal::Signal;

use super::{holding, on, used};
use crate::support::{Bed, Dlock, Log, Mysql, examined, unique, until};

fn url_of(servers: &[&Mysql]) -> String {
    let hosts: Vec<_> = servers.iter().map(|server| format!("127.0.0.1:{}", server.port())).collect();
    format!("mysql://root@{}/jobs", hosts.join(","))
}

#[test]
fn an_asynchronous_replica_is_reported() {
    let (primary, replica) = Mysql::with_replica();
    used(&primary);
    let told = examined(on(&primary.url()), 0);
    told.says("mysql-replicas", "weak", "asynchronous");
    on(&url_of(&[&replica, &primary])).run("door").sh("exit 0").ended().expect(0).silently();
    on(&replica.url()).run("door").sh("exit 0").ended().expect(69).saying("read-only");
    replica.sql("SET GLOBAL read_only = 0");
    let both = on(&url_of(&[&primary, &replica])).run("door").sh("exit 0").ended();
    both.expect(69).saying("two servers can be written to");
}

#[test]
fn a_grant_is_none_before_the_replica_has_it() {
    let (primary, replica) = Mysql::pair();
    used(&primary);
    let told = examined(on(&primary.url()), 0);
    told.says("mysql-replicas", "fine", "semi-synchronous");
    replica.freeze();
    let dlock = || Dlock::new().env("DLOCK_BACKEND", primary.url()).run("door").args(["--connect-timeout", "5s"]);
    // First it waits for the replica, then it goes on without: neither is a grant.
    for _ in 0..2 {
        dlock().sh("echo no").ended().expect(69);
    }
    dlock().sh("echo no").ended().expect(69).saying("no replica has confirmed");
    replica.thaw();
    until("the replica to catch up", || dlock().sh("exit 0").ended().code == Some(0));
}

#[test]
fn a_lock_survives_the_failover_to_a_semi_synchronous_replica() {
    let (primary, replica) = Mysql::pair();
    let (name, log, url) = (unique("failover"), Log::new(), url_of(&[&primary, &replica]));
    used(&primary);
    let holder = holding(&url, &name, &["--ttl", "20s"], &log);
    let waiter = on(&url).run(&name).args(["--ttl", "3s"]).args(log.witness(&["for=20"])).spawn();
    primary.await_waiters(&name, 1);
    let asleep = "SELECT COUNT(*) FROM information_schema.PROCESSLIST WHERE STATE = 'User lock'";
    until("the waiter to have had an answer", || primary.sql(asleep) == "1");
    primary.kill();
    replica.sql("STOP SLAVE; RESET SLAVE ALL; SET GLOBAL read_only = 0");
    let renewed = format!("SELECT renewal > 0 FROM dlock_contenders WHERE name = '{name}' AND token IS NOT NULL");
    until("the holder to renew there", || replica.try_sql(&renewed) == Ok("1".to_owned()));
    on(&url).run(&name).arg("-n").sh("echo no").ended().expect(75);
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
    holder.signal(Signal::SIGTERM);
    holder.ended();
    waiter.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn a_cluster_keeps_its_locks_whichever_node_is_lost() {
    let nodes = Mysql::cluster();
    let all: Vec<&Mysql> = nodes.iter().collect();
    let url = url_of(&all);
    used(&nodes[0]);
    examined(on(&url), 0).says("mysql-cluster", "fine", "cluster of 3");

    // Every node alone is as good as all of them.
    let log = Log::new();
    let patient = |n: usize| nodes[n % 3].dlock().run("everywhere").args(["--connect-timeout", "3m"]);
    let start = |n: usize| patient(n).args(log.witness(&["for=20"])).spawn();
    // Nodes that share a busy disk may suspect each other, and answer nobody until they have agreed again.
    for one in (0..9).map(start).collect::<Vec<_>>() {
        one.ended().expect(0);
    }
    assert_eq!(log.runs().len(), 9);
    log.assert_no_overlap();

    // A node that the others cannot see grants nothing, and its holder is lost in time.
    let (name, log) = (unique("partition"), Log::new());
    let alone = holding(&nodes[0].url(), &name, &["--ttl", "5s"], &log);
    let next = on(&nodes[1].url()).run(&name).args(["--ttl", "5s"]).args(log.witness(&["for=20"])).spawn();
    nodes[1].await_waiters(&name, 1);
    nodes[0].isolate(true);
    until("the node to know that it is alone", || nodes[0].status("wsrep_cluster_status") == "non-Primary");
    let refused = on(&nodes[0].url()).run("other").args(["--connect-timeout", "2s"]).sh("echo no").ended();
    refused.expect(69).saying("majority");
    next.ended().expect(0);
    alone.ended().expect(79);
    log.assert_no_overlap();
    // With the others in its URL, nobody is kept from its lock.
    on(&url).run("other").sh("exit 0").ended().expect(0);
    nodes[0].isolate(false);
    nodes[0].await_ready();

    // A node that is killed takes no lock with it.
    let (name, log) = (unique("killed-node"), Log::new());
    let holder = holding(&url, &name, &["--ttl", "30s"], &log);
    let owner = format!("SELECT server FROM dlock_contenders WHERE name = '{name}'");
    let before = nodes[1].sql(&owner);
    nodes[0].kill();
    until("the holder to renew on another node", || nodes[1].try_sql(&owner).is_ok_and(|now| now != before));
    on(&url).run(&name).arg("-n").sh("echo no").ended().expect(75);
    log.await_beat();
    assert_eq!(log.runs().len(), 1);
    drop(holder);
}
