//! What the fault matrix does not tell: what costs nothing, requests that arrive late, keys that others touch.

use nix::sys::signal::Signal;

use crate::support::{Bed, Dlock, Log, Proxy, Redis, Running, Sentinel, await_waiters, status, until};

const STUBBORN: [&str; 2] = ["ignore-term", "daemons=2"];

fn waiter(server: &Redis, log: &Log) -> Running {
    let waiter = server.dlock().run("job").args(["--ttl", "3s"]).args(log.witness(&["for=50"])).spawn();
    await_waiters(server, "job", 1);
    waiter
}

#[test]
fn a_path_that_is_cut_for_a_moment_costs_nothing() {
    let (server, log) = (Redis::new(), Log::new());
    let proxy = Proxy::to(server.port());
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    let holder =
        Dlock::new().env("DLOCK_BACKEND", url).run("job").args(["--ttl", "20s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let ends = || server.does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
    let before = ends();
    proxy.cut();
    proxy.heal();
    until("a renewal", || ends() > before);
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    assert_eq!(status(&server, "job")["state"], "free");
}

#[test]
fn an_acquire_that_arrives_after_its_owner_gave_up() {
    let server = Redis::new();
    let proxy = Proxy::to(server.port());
    let url = format!("redis://127.0.0.1:{}", proxy.port());
    proxy.freeze();
    let dlock = Dlock::new().env("DLOCK_BACKEND", url).run("job").args(["--connect-timeout", "300ms"]);
    dlock.sh("echo no").ended().expect(69);
    proxy.heal();
    server.dlock().run("job").args(["-w", "20s"]).sh("exit 0").ended().expect(0);
}

#[test]
fn a_server_that_is_killed_and_comes_back_with_its_data() {
    let (server, log) = (Redis::with(&["--appendonly", "yes", "--appendfsync", "always"]), Log::new());
    let holder = server.dlock().run("job").args(["--ttl", "20s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    let waiter = waiter(&server, &log);
    server.restart();
    // Nobody noticed more than a pause: the lock is where it was.
    log.await_beat();
    let seen = status(&server, "job");
    assert_eq!((&seen["state"], &seen["holders"][0]["pid"]), (&"held".into(), &holder.pid().into()));
    holder.signal(Signal::SIGKILL);
    waiter.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn a_key_that_is_deleted() {
    for loss in [&["DEL", "dlock:job"][..], &["FLUSHALL"]] {
        let (server, log) = (Redis::new(), Log::new());
        let dlock = server.dlock().run("job").args(["--ttl", "60s"]);
        let holder = dlock.args(log.witness(&STUBBORN)).spawn();
        log.await_runs(1, 3);
        let waiter = waiter(&server, &log);
        server.does(loss);
        holder.ended().expect(79).saying("gone");
        waiter.ended().expect(0);
        log.assert_no_overlap();
    }
}

/// Whoever holds it goes through the proxy, which is frozen right after a renewal.
fn freeze_after_a_renewal(server: &Redis, proxy: &Proxy) {
    let ends = || server.does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
    let before = ends();
    until("a renewal", || ends() > before);
    proxy.freeze();
}

fn through(proxy: &Proxy) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", format!("redis://127.0.0.1:{}", proxy.port())).run("job")
}

#[test]
fn data_lost_right_after_a_renewal_that_no_waiter_has_seen() {
    let (server, log) = (Redis::new(), Log::new());
    let proxy = Proxy::to(server.port());
    let holder = through(&proxy).args(["--ttl", "6s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    let waiter = waiter(&server, &log);
    freeze_after_a_renewal(&server, &proxy);
    server.does(&["FLUSHALL"]);
    waiter.ended().expect(0);
    holder.ended().expect(79);
    log.assert_no_overlap();
}

#[test]
fn a_server_that_comes_back_with_old_data() {
    let (server, log) = (Redis::new(), Log::new());
    let proxy = Proxy::to(server.port());
    let holder = through(&proxy).args(["--ttl", "6s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    server.does(&["SAVE"]);
    let saved = server.does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
    let waiter = waiter(&server, &log);
    // What was saved has run out by now; the lock has not.
    until("the saved lease to be over", || {
        server.does(&["TIME"]).lines().next().unwrap().parse::<i64>().unwrap() * 1000 > saved
    });
    freeze_after_a_renewal(&server, &proxy);
    server.restart();
    assert!(server.dir().join("dump.rdb").exists());
    waiter.ended().expect(0);
    holder.ended().expect(79);
    log.assert_no_overlap();
}

/// One of two holders is told of the loss and lets go; the other, whom nothing reaches, still runs.
#[test]
fn data_lost_while_several_hold_the_lock() {
    let (server, log, beside) = (Redis::new(), Log::new(), Log::new());
    let proxy = Proxy::to(server.port());
    let cut_off = through(&proxy).args(["--shared", "--ttl", "6s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    let other = server.dlock().run("job").args(["--shared", "--ttl", "9s"]).args(beside.witness(&[])).spawn();
    beside.await_runs(1, 1);
    let waiter = waiter(&server, &log);
    proxy.freeze();
    server.does(&["FLUSHALL"]);
    other.ended().expect(79);
    waiter.ended().expect(0);
    cut_off.ended().expect(79);
    log.assert_no_overlap();
}

#[test]
fn a_key_that_another_program_overwrites() {
    let (server, log) = (Redis::new(), Log::new());
    let holder = server.dlock().run("job").args(["--ttl", "60s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    server.does(&["SET", "dlock:job", "a-thief"]);
    holder.ended().expect(79).saying("a-thief");
    assert_eq!(server.does(&["GET", "dlock:job"]), "a-thief", "nobody may release another's lock");
    assert_eq!(status(&server, "job")["last_run"]["outcome"], "lost");
}

#[test]
fn a_key_that_is_evicted() {
    let server = Redis::with(&["--maxmemory-policy", "allkeys-random"]);
    let log = Log::new();
    let holder = server.dlock().run("job").args(["--ttl", "60s"]).args(log.witness(&STUBBORN)).spawn();
    log.await_runs(1, 3);
    let token = log.runs()[0].token;
    server.does(&["CONFIG", "SET", "maxmemory", "1"]);
    // A server without memory evicts when somebody writes.
    until("the key to be evicted", || {
        server.does(&["SET", "anything", "x"]);
        server.does(&["EXISTS", "dlock:job"]) == "0"
    });
    server.does(&["CONFIG", "SET", "maxmemory", "0"]);
    holder.ended().expect(79);
    let next = server.dlock().run("job").args(["-w", "70s"]).sh("echo $DLOCK_FENCING_TOKEN").ended().expect(0);
    assert!(next.stdout.trim().parse::<u64>().unwrap() > token);
}

/// Full: it refuses whatever may need memory.
fn fill(server: &Redis) {
    server.does(&["CONFIG", "SET", "maxmemory", "1"]);
}

#[test]
fn a_full_server_ends_no_command_and_keeps_no_lock() {
    for mode in [&[][..], &["--shared"], &["--slots", "2"]] {
        let (server, log) = (Redis::new(), Log::new());
        let run = || server.dlock().run("job").args(["--ttl", "3s"]).args(mode);
        let holder = run().args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        fill(&server);
        let ends = || server.does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
        let before = ends();
        until("renewals for longer than a lease", || ends() > before + 3000);
        log.await_beat();
        holder.signal(Signal::SIGTERM);
        holder.ended().expect(143).silently();
        assert_eq!(server.does(&["EXISTS", "dlock:job"]), "0");
        assert_eq!(status(&server, "job")["last_run"]["outcome"], "signaled");
        run().arg("-n").sh("echo no").ended().expect(69).saying("OOM");
        server.does(&["CONFIG", "SET", "maxmemory", "0"]);
        run().arg("-n").sh("exit 0").ended().expect(0);
    }
}

#[test]
fn a_full_server_records_once() {
    let server = Redis::new();
    let go = server.dir().join("go");
    let wait = format!("until [ -e {} ]; do sleep 0.02; done", go.display());
    let run = || server.dlock().run("job").args(["--once", "today"]);
    let holder = run().sh(&wait).spawn();
    until("the lock to be taken", || server.does(&["EXISTS", "dlock:job"]) == "1");
    fill(&server);
    std::fs::write(&go, "").unwrap();
    holder.ended().expect(0).silently();
    server.does(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(run().sh("echo again").ended().expect(0).stdout, "");
}

#[test]
fn a_sentinel_that_has_fallen_silent_does_not_keep_a_holder_from_asking_the_next() {
    let (master, log) = (Redis::new(), Log::new());
    let _replica = master.replica(&[]);
    let sentinel = Sentinel::over(&master);
    let way = Proxy::to(sentinel.port());
    let (group, hosts) = (Sentinel::GROUP, [way.port(), sentinel.port()].map(|port| format!("127.0.0.1:{port}")));
    let url = format!("redis+sentinel://{}/{group}", hosts.join(","));
    // Long enough for a busy machine.
    let dlock = Dlock::new().env("DLOCK_BACKEND", url).run("job").args(["--ttl", "30s", "--connect-timeout", "60s"]);
    let mut holder = dlock.args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    way.freeze();
    // The sentinel, too, is a client here, and would take its own end for the master's; and so is who asks for the list.
    let dlocks = || -> Vec<String> {
        let clients = master.does(&["CLIENT", "LIST", "TYPE", "normal"]);
        let ours = |client: &&str| client.contains(" name= ") && !client.contains(" cmd=client|list ");
        let id = |client: &str| client.strip_prefix("id=")?.split(' ').next().map(str::to_owned);
        clients.lines().filter(ours).filter_map(id).collect()
    };
    let before = dlocks();
    before.iter().for_each(|id| _ = master.does(&["CLIENT", "KILL", "ID", id]));
    until("the holder to be back", || holder.has_ended() || dlocks().iter().any(|id| !before.contains(id)));
    assert!(!holder.has_ended(), "{}", holder.stderr());
}
