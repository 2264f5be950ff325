//! Redlock on real nodes: majorities that come and go, redlock-py on the same keys, and tokens that grow
//! whichever nodes answer.

mod doctor;

use std::time::Instant;

use nix::sys::signal::Signal;

use crate::redis::interop::Foreign;
use crate::redis::kinds::{certificates, tls_server};
use crate::redis::queue::calls;
use crate::support::{Bed, Dlock, Log, Proxy, Redis, Redlock, Running, await_waiters, status, until};

const STUBBORN: [&str; 2] = ["ignore-term", "daemons=2"];

/// redlock-py, holding the lock until it is told to let go, or saying that it could not get it.
const REDLOCK_PY: &str = "
import sys
from redlock import Redlock
manager = Redlock([{'host': '127.0.0.1', 'port': int(port)} for port in sys.argv[2:]], retry_count=1)
lock = manager.lock(sys.argv[1], 60000)
print('got it' if lock else 'busy', flush=True)
if sys.stdin.readline() and lock:
    manager.unlock(lock)
    print('released', flush=True)
";

fn redlock_py(bed: &Redlock, name: &str) -> Foreign {
    let ports: Vec<String> = bed.nodes.iter().map(|node| node.port().to_string()).collect();
    let key = format!("dlock:{name}");
    let args: Vec<&str> = std::iter::once(key.as_str()).chain(ports.iter().map(String::as_str)).collect();
    Foreign::start(REDLOCK_PY, &args)
}

fn holder(bed: &Redlock, ttl: &str, log: &Log) -> Running {
    let holder = bed.dlock().run("job").args(["--ttl", ttl]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    holder
}

#[test]
fn redlock_py_keeps_dlock_out_and_its_release_is_seen_at_once() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let mut foreign = redlock_py(&bed, "job");
    assert_eq!(foreign.says(), "got it");
    bed.dlock().run("job").arg("-n").sh("echo no").ended().expect(75);
    let seen = status(&bed, "job");
    assert_eq!((&seen["state"], &seen["holders"][0]["host"]), (&"held".into(), &serde_json::Value::Null));
    bed.dlock().args(["force-release", "job", "--yes"]).ended().expect(77).saying("--now");
    let waiter = bed.dlock().run("job").args(log.witness(&["for=20"])).spawn();
    await_waiters(&bed, "job", 1);
    assert_eq!(foreign.release(), "released");
    waiter.ended().expect(0).silently();
}

#[test]
fn why_a_foreign_lock_was_taken_away_is_on_record() {
    let bed = Redlock::of(3);
    let mut foreign = redlock_py(&bed, "job");
    assert_eq!(foreign.says(), "got it");
    bed.dlock().args(["force-release", "job", "--yes", "--now", "--reason", "stuck"]).ended().expect(0);
    let state = status(&bed, "job");
    assert_eq!((&state["state"], &state["last_run"]["reason"]), (&"free".into(), &"stuck".into()), "{state}");
    bed.dlock().run("job").arg("-n").sh("exit 0").ended().expect(0).silently();
    assert_eq!(status(&bed, "job")["last_run"]["outcome"], "exited");
}

/// As when an operator reached only one of them: all were meant.
#[test]
fn whoever_is_told_by_one_node_that_it_was_taken_away_lets_go_of_the_others() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("job").args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let owner = status(&bed, "job")["holders"][0]["owner"].as_str().unwrap().to_owned();
    bed.nodes[0].does(&["SET", &format!("{{dlock:job}}:note:{owner}"), "taken stuck"]);
    bed.nodes[0].does(&["DEL", "dlock:job"]);
    holder.ended().expect(79).saying("force-release --now (stuck)");
    assert_eq!(status(&bed, "job")["state"], "free");
    assert_eq!(status(&bed, "job")["last_run"]["reason"], "stuck");
}

#[test]
fn dlock_keeps_redlock_py_out() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    assert_eq!(redlock_py(&bed, "job").says(), "busy");
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    assert_eq!(redlock_py(&bed, "job").says(), "got it");
}

#[test]
fn an_even_or_single_number_of_nodes_is_refused_with_the_reason() {
    for hosts in ["a", "a,b", "a,b,c,d"] {
        let dlock = Dlock::new().env("DLOCK_BACKEND", format!("redlock://{hosts}"));
        dlock.run("job").sh("echo no").ended().expect(78).saying("odd number");
    }
}

#[test]
fn tls_shows_the_nodes_who_we_are_and_us_who_they_are() {
    let certificates = certificates();
    let nodes: Vec<_> = (0..3).map(|_| tls_server(&certificates, &["--tls-auth-clients", "yes"])).collect();
    let hosts: Vec<String> = nodes.iter().map(|(_, port)| format!("127.0.0.1:{port}")).collect();
    let (hosts, dir) = (hosts.join(","), certificates.path().display());
    let run = |ca: &str, who: &str| {
        let dlock = Dlock::new().env("DLOCK_BACKEND", format!("redlocks://{hosts}?tls-ca={dir}/{ca}.pem{who}"));
        dlock.run("job").sh("exit 0").ended()
    };
    let client = format!("&tls-cert={dir}/client.pem&tls-key={dir}/client.key");
    run("ca", &client).expect(0).silently();
    assert!(nodes.iter().all(|(node, _)| node.does(&["EXISTS", "{dlock:job}:last"]) == "1"));
    run("ca", "").expect(77).saying("CertificateRequired");
    run("other", &client).expect(77).saying("certificate");
}

#[test]
fn a_minority_may_be_gone_but_not_a_majority() {
    let bed = Redlock::of(5);
    bed.nodes[0].kill();
    bed.nodes[3].daemon().freeze();
    bed.dlock().run("job").sh("exit 4").ended().expect(4).silently();
    let seen = status(&bed, "job");
    assert_eq!((&seen["state"], &seen["last_run"]["exit_code"]), (&"free".into(), &4.into()));
    let errors = seen["nodes"].as_array().unwrap().iter().filter(|node| !node["error"].is_null()).count();
    assert_eq!(errors, 2, "{seen}");
    bed.nodes[1].kill();
    bed.dlock().run("job").args(["--connect-timeout", "1s"]).sh("echo no").ended().expect(69).saying("majority");
}

/// Leaves on a node what a process leaves there that dies right after it has taken it.
fn taken_by_the_dead(node: &Redis, owner: &str) {
    assert_eq!(node.does(&["SET", "dlock:job", owner, "NX", "PX", "600000"]), "OK");
}

#[test]
fn what_a_dead_process_has_on_a_minority_keeps_nobody_out() {
    for (count, minority) in [(3, 1), (5, 2)] {
        let bed = Redlock::of(count);
        bed.nodes[..minority].iter().for_each(|node| taken_by_the_dead(node, "dead"));
        bed.dlock().run("job").sh("exit 4").ended().expect(4).silently();
        assert_eq!(bed.nodes[0].does(&["GET", "dlock:job"]), "dead", "nobody takes what may be somebody's");
    }
}

#[test]
fn dead_processes_that_have_split_the_nodes_are_in_the_way_until_their_time_is_over() {
    let bed = Redlock::of(3);
    taken_by_the_dead(&bed.nodes[0], "one");
    taken_by_the_dead(&bed.nodes[1], "other");
    bed.dlock().run("job").arg("-n").sh("echo no").ended().expect(75);
    let waiter = bed.dlock().run("job").sh("exit 4").spawn();
    await_waiters(&bed, "job", 1);
    assert_eq!(bed.nodes[1].does(&["PEXPIRE", "dlock:job", "1"]), "1");
    waiter.ended().expect(4);
}

#[test]
fn status_shows_what_each_node_says() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let _holder = holder(&bed, "60s", &log);
    // One that is much slower than the others is not waited for.
    until("every node to say whose it is", || {
        let seen = status(&bed, "job");
        let owner = &seen["holders"][0]["owner"];
        owner.is_string() && seen["nodes"].as_array().unwrap().iter().all(|node| node["owner"] == *owner)
    });
    bed.nodes[1].kill();
    let table = bed.dlock().args(["status", "job"]).ended().expect(0).stdout;
    assert!(table.contains("held 2/3"), "{table}");
}

#[test]
fn nodes_that_restart_empty_one_after_the_other_cost_nothing() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = holder(&bed, "9s", &log);
    let owner = status(&bed, "job")["holders"][0]["owner"].as_str().unwrap().to_owned();
    for node in bed.nodes.iter().chain(&bed.nodes) {
        node.restart();
        until("the node to be taken again", || node.does(&["GET", "dlock:job"]) == owner);
        // It counts again once it has been renewed as ours.
        let ends = || node.does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
        let before = ends();
        until("a renewal", || ends() > before);
    }
    log.await_beat();
    drop(holder);
}

#[test]
fn data_that_all_nodes_lose_right_after_a_renewal() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let proxies: Vec<Proxy> = bed.nodes.iter().map(|node| Proxy::to(node.port())).collect();
    let hosts: Vec<String> = proxies.iter().map(|proxy| format!("127.0.0.1:{}", proxy.port())).collect();
    let through = Dlock::new().env("DLOCK_BACKEND", format!("redlock://{}", hosts.join(",")));
    let holder = through.run("job").args(["--ttl", "6s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    let waiter = bed.dlock().run("job").args(["--ttl", "3s"]).args(log.witness(&["for=50"])).spawn();
    await_waiters(&bed, "job", 1);
    let ends = || bed.nodes[0].does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
    let before = ends();
    until("a renewal", || ends() > before);
    proxies.iter().for_each(Proxy::freeze);
    for node in &bed.nodes {
        node.does(&["FLUSHALL"]);
    }
    waiter.ended().expect(0);
    holder.ended().expect(79);
    log.assert_no_overlap();
}

#[test]
fn a_majority_that_somebody_else_has_is_the_loss_of_the_lock() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = holder(&bed, "60s", &log);
    bed.nodes[0].daemon().freeze();
    bed.nodes[1].does(&["SET", "dlock:job", "a-thief"]);
    log.await_beat();
    bed.nodes[2].does(&["SET", "dlock:job", "a-thief"]);
    holder.ended().expect(79);
}

/// Contenders come and go while the nodes are out of reach in turn, so every grant has another majority.
#[test]
fn tokens_grow_over_rotating_outages_and_no_two_runs_overlap() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let start = || bed.dlock().run("job").args(["--ttl", "3s"]).args(log.witness(&["for=30"])).spawn();
    let mut contenders: Vec<Running> = (0..3).map(|_| start()).collect();
    for round in 0..9 {
        let node: &Redis = &bed.nodes[round % 3];
        node.daemon().freeze();
        contenders.push(start());
        log.await_runs(round + 1, 1);
        node.daemon().thaw();
    }
    for contender in contenders {
        contender.ended().expect(0);
    }
    assert_eq!(log.runs().len(), 12);
    log.assert_no_overlap();
}

fn waiters(bed: &Redlock, log: &Log, count: usize) -> Vec<Running> {
    let start = |n| {
        let waiter = bed.dlock().run("job").args(log.witness(&[])).spawn();
        await_waiters(bed, "job", n + 1);
        waiter
    };
    (0..count).map(start).collect()
}

/// How many requests all nodes together get in one hand-over, with so many in the queue, and until somebody has looked
/// who has the lock now; of several the fewest. Not counted is what they cost by just waiting: each of them may ask each
/// node once in two seconds.
fn cost_of_a_hand_over(count: usize) -> f64 {
    let (bed, log) = (Redlock::of(3), Log::new());
    let mut holder = bed.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let mut queue = waiters(&bed, &log, count);
    let requests = || bed.nodes.iter().map(|node| calls(node, "evalsha")).sum::<u64>();
    let at_rest = (count * bed.nodes.len()) as f64 / 2.0;
    let mut fewest = f64::MAX;
    for n in 0..4 {
        let (before, began) = (requests(), Instant::now());
        holder.signal(Signal::SIGTERM);
        log.await_runs(n + 2, 1);
        let pid = status(&bed, "job")["holders"][0]["pid"].as_u64().unwrap();
        fewest = fewest.min((requests() - before) as f64 - began.elapsed().as_secs_f64() * at_rest);
        holder = queue.swap_remove(queue.iter().position(|waiter| u64::from(waiter.pid()) == pid).unwrap());
    }
    fewest
}

#[test]
fn a_hand_over_costs_the_nodes_no_more_with_many_waiters() {
    let (few, many) = (cost_of_a_hand_over(4), cost_of_a_hand_over(24));
    assert!(many < few.max(12.0) * 2.0, "{few} with 4 waiters, {many} with 24");
}

#[test]
fn waiters_that_die_or_stop_are_passed_over() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let gone = waiters(&bed, &Log::new(), 2);
    let next = bed.dlock().run("job").args(log.witness(&["for=20"])).spawn();
    await_waiters(&bed, "job", 3);
    gone[0].signal(Signal::SIGKILL);
    gone[1].signal(Signal::SIGSTOP);
    holder.signal(Signal::SIGTERM);
    next.ended().expect(0).silently();
    gone[1].signal(Signal::SIGCONT);
    log.assert_no_overlap();
}

/// It misses an answer while a node is frozen, and tells that node so; as a holder it has to be at rest all the same.
#[test]
fn a_holder_that_missed_an_answer_while_it_waited_is_at_rest() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("job").args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let _waiter = waiters(&bed, &log, 1);
    let before = calls(&bed.nodes[1], "evalsha");
    bed.nodes[0].daemon().freeze();
    until("the waiter to ask twice, and to give up", || calls(&bed.nodes[1], "evalsha") >= before + 4);
    bed.nodes[0].daemon().thaw();
    until("the late requests to arrive", || bed.nodes[0].does(&["DBSIZE"]) != "0");
    holder.signal(Signal::SIGTERM);
    log.await_runs(2, 1);
    let requests = || bed.nodes.iter().map(|node| calls(node, "evalsha")).sum::<u64>();
    let (before, began) = (requests(), Instant::now());
    until("a second to pass", || began.elapsed().as_secs() > 0);
    let asked = requests() - before;
    assert!(asked < 30, "{asked} requests in {:?}", began.elapsed());
}

#[test]
fn full_nodes_end_no_command_and_keep_no_lock() {
    let (bed, log) = (Redlock::of(3), Log::new());
    let holder = bed.dlock().run("job").args(["--ttl", "3s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    for node in &bed.nodes {
        node.does(&["CONFIG", "SET", "maxmemory", "1"]);
    }
    let ends = || bed.nodes[0].does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
    let before = ends();
    until("renewals for longer than a lease", || ends() > before + 3000);
    log.await_beat();
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143).silently();
    assert!(bed.nodes.iter().all(|node| node.does(&["EXISTS", "dlock:job"]) == "0"));
    bed.dlock().run("job").arg("-n").sh("echo no").ended().expect(69).saying("OOM");
}
