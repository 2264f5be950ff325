//! Every kind of server that a URL can name, and how each refuses us.

use std::process::Command;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::support::redis::cli;
use crate::support::{Bed, Dlock, Log, Proxy, Redis, Sentinel, await_waiters, free_port, in_time, status, until};

fn at(url: impl AsRef<str>) -> Dlock {
    Dlock::new().env("DLOCK_BACKEND", url.as_ref()).run("job")
}

#[test]
fn a_closed_port_is_69() {
    at(format!("redis://127.0.0.1:{}", free_port())).sh("echo no").ended().expect(69).saying("refused");
}

#[test]
fn a_server_that_does_not_answer_is_69_within_the_connect_timeout() {
    let server = Redis::new();
    server.daemon().freeze();
    in_time(|| at(server.url()).args(["--connect-timeout", "1s"]).sh("echo no").ended()).expect(69);
}

#[test]
fn a_wrong_password_is_77_and_shown_to_nobody() {
    let server = Redis::with(&["--requirepass", "right"]);
    let url = |login: &str| format!("redis://{login}127.0.0.1:{}", server.port());
    at(url(":right@")).sh("exit 0").ended().expect(0);
    for login in [":wr0ng@", "nobody:wr0ng@", ""] {
        let ended = at(url(login)).sh("echo no").ended().expect(77);
        assert!(!ended.stderr.contains("wr0ng"), "{ended:#?}");
    }
    at(url("")).sh("echo no").ended().expect(77).saying("wants a password").saying("password-file");
    let file = server.dir().join("password");
    std::fs::write(&file, "right\n").unwrap();
    at(format!("{}?password-file={}", url(""), file.display())).sh("exit 0").ended().expect(0).silently();
}

#[test]
fn an_acl_user_needs_only_the_keys_of_its_locks() {
    let user = ["--user", "job", "on", ">secret", "~dlock:*", "~{dlock:*", "+@all", "-@admin", "-@dangerous"];
    let server = Redis::with(&user);
    let url = |prefix: &str| format!("redis://job:secret@127.0.0.1:{}?prefix={prefix}", server.port());
    let log = Log::new();
    let holder = at(url("dlock:")).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    // Told at once: it may watch its keys.
    server.does(&["DEL", "dlock:job"]);
    holder.ended().expect(79);
    at(url("other:")).sh("echo no").ended().expect(77);
}

#[test]
fn a_failed_log_in_takes_no_lock_as_somebody_else() {
    // The default user may do everything, without a password.
    for server in [Redis::new(), Redis::with(&["--rename-command", "HELLO", ""])] {
        at(format!("redis://nobody:wrong@127.0.0.1:{}", server.port())).sh("echo no").ended().expect(77);
        at(format!("{}/99", server.url())).sh("echo no").ended().expect(78);
        assert_eq!(server.does(&["DBSIZE"]), "0");
    }
}

#[test]
fn a_database_of_its_own_has_locks_of_its_own() {
    let (server, log) = (Redis::new(), Log::new());
    let _holder = at(server.url()).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    at(server.url()).arg("-n").sh("echo no").ended().expect(75);
    at(format!("{}/3", server.url())).arg("-n").sh("exit 0").ended().expect(0);
    at(format!("{}/three", server.url())).sh("echo no").ended().expect(78);
}

#[test]
fn a_socket_works_like_a_port() {
    let server = Redis::with(&["--unixsocket", "DIR/redis.sock"]);
    let socket = server.dir().join("redis.sock");
    at(format!("redis+unix://{}", socket.display())).sh("exit 5").ended().expect(5);
    assert_eq!(status(&server, "job")["last_run"]["exit_code"], 5);
    at("redis+unix:///nowhere.sock").sh("echo no").ended().expect(69);
}

#[test]
fn the_doctor_finds_what_weakens_the_promise() {
    let weak = |server: &Redis| -> Vec<String> {
        let report = server.dlock().args(["doctor", "--json"]).ended().expect(0).stdout;
        let report: serde_json::Value = serde_json::from_str(&report).unwrap();
        let findings = report["findings"].as_array().unwrap().clone();
        let checks = findings.iter().filter(|one| one["verdict"] == "weak").map(|one| one["check"].as_str().unwrap());
        checks.filter(|check| check.starts_with("redis-")).map(ToOwned::to_owned).collect()
    };
    assert_eq!(weak(&Redis::with(&["--appendonly", "yes", "--appendfsync", "always"])), [""; 0]);
    assert_eq!(weak(&Redis::with(&["--appendonly", "yes"])), ["redis-persistence"]);
    let evicting = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    assert_eq!(weak(&Redis::with(&evicting)), ["redis-eviction", "redis-persistence"]);
}

#[test]
fn the_doctor_names_the_product_and_its_version() {
    for (server, product) in [(Redis::new(), "the server is Redis "), (Redis::valkey(), "the server is Valkey ")] {
        let told = server.dlock().arg("doctor").ended().expect(0).stdout;
        let version = told.split(product).nth(1).unwrap_or_else(|| panic!("{told}"));
        assert!(version.starts_with(|c: char| c.is_ascii_digit()), "{told}");
    }
}

/// A command that blocks would keep a renewal waiting.
#[test]
fn nobody_who_waits_or_holds_blocks_its_connection() {
    let (server, log) = (Redis::new(), Log::new());
    let _holder = at(server.url()).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let _waiter = at(server.url()).args(log.witness(&["for=20"])).spawn();
    await_waiters(&server, "job", 1);
    let clients = || server.does(&["CLIENT", "LIST", "TYPE", "normal"]);
    let watching = |client: &&str| client.contains("flags=t");
    until("both to watch", || clients().lines().filter(watching).count() == 2);
    assert!(!clients().lines().any(|client| client.contains("flags=b")), "{}", clients());
}

#[test]
fn a_server_that_cannot_push_works_all_the_same() {
    let (server, log) = (Redis::with(&["--rename-command", "HELLO", ""]), Log::new());
    let holder = at(server.url()).args(["--ttl", "3s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let waiter = at(server.url()).args(log.witness(&["for=20"])).spawn();
    await_waiters(&server, "job", 1);
    server.does(&["DEL", "dlock:job"]);
    holder.ended().expect(79);
    waiter.ended().expect(0).silently();
    log.assert_no_overlap();
}

/// Those of a server and a client, their authority, and another one.
pub fn certificates() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let script = "set -e; cd $0; new() { openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=$1 ${@:2}; }
        for ca in ca other; do
            new $ca -x509 -days 2 -addext basicConstraints=critical,CA:TRUE -keyout $ca.key -out $ca.pem; done
        echo subjectAltName=DNS:localhost,IP:127.0.0.1 >names
        for leaf in server client; do new $leaf -keyout $leaf.key -out $leaf.csr
            openssl x509 -req -in $leaf.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out $leaf.pem
        done";
    let made = Command::new("bash").args(["-c", script]).arg(dir.path()).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    dir
}

/// A server that wants TLS, and the port for it.
pub fn tls_server(certificates: &TempDir, options: &[&str]) -> (Redis, u16) {
    let (port, file) = (free_port(), |name: &str| certificates.path().join(name).display().to_string());
    let tls = [
        ("--tls-port", port.to_string()),
        ("--tls-cert-file", file("server.pem")),
        ("--tls-key-file", file("server.key")),
        ("--tls-ca-cert-file", file("ca.pem")),
    ];
    let tls = tls.iter().flat_map(|(option, value)| [*option, value.as_str()]);
    (Redis::with(&tls.chain(options.iter().copied()).collect::<Vec<_>>()), port)
}

#[test]
fn tls_verifies_the_server() {
    let certificates = certificates();
    let (_server, port) = tls_server(&certificates, &["--tls-auth-clients", "no"]);
    let dir = certificates.path().display();
    for host in ["127.0.0.1", "localhost"] {
        at(format!("rediss://{host}:{port}?tls-ca={dir}/ca.pem")).sh("exit 0").ended().expect(0).silently();
    }
    at(format!("rediss://127.0.0.1:{port}?tls-ca={dir}/other.pem"))
        .sh("echo no")
        .ended()
        .expect(77)
        .saying("certificate");
    at(format!("rediss://127.0.0.1:{port}")).sh("echo no").ended().expect(77).saying("certificate");
    at(format!("rediss://127.0.0.1:{port}?tls-ca={dir}/none.pem")).sh("echo no").ended().expect(78);
    at(format!("redis://127.0.0.1:{port}?tls-ca={dir}/ca.pem")).sh("echo no").ended().expect(78).saying("rediss://");
}

#[test]
fn tls_shows_the_server_who_we_are() {
    let certificates = certificates();
    let (_server, port) = tls_server(&certificates, &["--tls-auth-clients", "yes"]);
    let dir = certificates.path().display();
    let url = format!("rediss://127.0.0.1:{port}?tls-ca={dir}/ca.pem");
    let with = |name: &str| at(format!("{url}&tls-cert={dir}/{name}.pem&tls-key={dir}/{name}.key"));
    with("client").sh("exit 0").ended().expect(0).silently();
    with("other").sh("echo no").ended().expect(77);
    at(&url).sh("echo no").ended().expect(77);
    at(format!("{url}&tls-cert={dir}/client.pem")).sh("echo no").ended().expect(78);
}

#[test]
fn a_sentinel_leads_to_the_master_and_after_a_failover_to_the_next() {
    let master = Redis::new();
    let replica = master.replica(&[]);
    let sentinel = Sentinel::over(&master);
    let (port, group) = (sentinel.port(), Sentinel::GROUP);
    let url = format!("redis+sentinel://127.0.0.1:{},127.0.0.1:{port}/{group}", free_port());
    at(format!("redis+sentinel://127.0.0.1:{}/{group}", master.port()))
        .sh("echo no")
        .ended()
        .expect(78)
        .saying("is no sentinel but a Redis server");
    let log = Log::new();
    let run = || at(&url).args(["--ttl", "60s"]);
    at(format!("redis+sentinel://127.0.0.1:{port}/other")).sh("echo no").ended().expect(78).saying("other");

    // The replica has the lock; the master goes; the holder goes on under it.
    let holder = run().args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    until("the replica to have the lock", || replica.does(&["EXISTS", "dlock:job"]) == "1");
    master.kill();
    until("the replica to be promoted", || replica.is_master());
    let before = replica.does(&["PTTL", "dlock:job"]).parse::<i64>().unwrap();
    until("a renewal at the new master", || replica.does(&["PTTL", "dlock:job"]).parse::<i64>().unwrap() > before);
    log.await_beat();
    run().arg("-n").sh("echo no").ended().expect(75);
    drop(holder);
}

#[test]
fn sentinels_have_a_log_in_of_their_own() {
    let master = Redis::with(&["--requirepass", "masters"]);
    let _replica = master.replica(&["--masterauth", "masters"]);
    let lines = "sentinel auth-pass mine masters\nrequirepass sentinels\nuser watcher on >watchers +@all";
    let sentinel = Sentinel::with(&master, lines, &["-a", "sentinels"]);
    let file = |name: &str| {
        let file = master.dir().join(name);
        std::fs::write(&file, format!("{name}\n")).unwrap();
        file.display().to_string()
    };
    let url = |more: &str| {
        let port = sentinel.port();
        format!("redis+sentinel://:masters@127.0.0.1:{port}/{}?{more}", Sentinel::GROUP)
    };
    let with = |name: &str| format!("sentinel-password-file={}", file(name));
    at(url(&with("sentinels"))).sh("exit 0").ended().expect(0).silently();
    at(url(&format!("sentinel-username=watcher&{}", with("watchers")))).sh("exit 0").ended().expect(0).silently();
    at(url("")).sh("echo no").ended().expect(77).saying("sentinel-password-file");
    at(url(&with("masters"))).sh("echo no").ended().expect(77).saying("sentinel");
    at(url("sentinel-username=watcher")).sh("echo no").ended().expect(78).saying("password");
    at(url("sentinel-password-file=/nowhere")).sh("echo no").ended().expect(78).saying("/nowhere");
    let plain = format!("{}?{}", master.url(), with("sentinels"));
    at(plain).sh("echo no").ended().expect(78).saying("redis+sentinel://");
}

#[test]
fn a_failover_to_a_replica_without_the_lock_is_seen_as_its_loss() {
    let master = Redis::new();
    let replica = master.replica(&[]);
    let (sentinel, log) = (Sentinel::over(&master), Log::new());
    let holder = at(sentinel.url()).args(["--ttl", "60s"]).args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    // The replica forgets everything and cannot learn it again, and becomes the master.
    master.daemon().freeze();
    replica.restart();
    master.kill();
    holder.ended().expect(79).saying("gone");
}

/// The holder reaches neither master nor sentinel any more. Its last renewal was seen by nobody else.
#[test]
fn a_failover_to_a_replica_without_the_lock_lets_nobody_in_beside_its_holder() {
    let master = Redis::new();
    let replica = master.replica(&[]);
    let (sentinel, log) = (Sentinel::over(&master), Log::new());
    let proxy = Proxy::to(sentinel.port());
    let through = format!("redis+sentinel://127.0.0.1:{}/{}", proxy.port(), Sentinel::GROUP);
    let holder = at(through).args(["--ttl", "9s"]).args(log.witness(&["ignore-term", "daemons=2"])).spawn();
    log.await_runs(1, 3);
    let waiter = at(sentinel.url()).args(["--ttl", "3s"]).args(log.witness(&["for=50"])).spawn();
    await_waiters(&master, "job", 1);
    let ends = || master.does(&["PEXPIRETIME", "dlock:job"]).parse::<i64>().unwrap();
    let before = ends();
    until("a renewal", || ends() > before);
    proxy.freeze();
    master.daemon().freeze();
    replica.restart();
    master.kill();
    waiter.ended().expect(0);
    holder.ended().expect(79);
    log.assert_no_overlap();
}

#[test]
fn wait_replicas_counts_a_grant_only_if_the_replicas_have_it() {
    let master = Redis::new();
    let replica = master.replica(&[]);
    let guarded = |n: u32| at(format!("{}?wait-replicas={n}", master.url()));
    let doctor = |n: u32| {
        let url = format!("{}?wait-replicas={n}", master.url());
        Dlock::new().env("DLOCK_BACKEND", url).arg("doctor").ended().expect(0).stdout
    };
    assert!(doctor(0).contains("add wait-replicas=1"), "{}", doctor(0));
    assert!(doctor(1).contains("ok    1 replica(s), of which 1 must have a lock"), "{}", doctor(1));
    guarded(1).sh("exit 0").ended().expect(0).silently();
    guarded(2).sh("echo no").ended().expect(69).saying("1 of 2 replicas");
    assert_eq!(master.does(&["EXISTS", "dlock:job"]), "0", "a grant that did not count must be given back");
    replica.daemon().freeze();
    guarded(1).sh("echo no").ended().expect(69).saying("0 of 1 replicas");
    at(master.url()).arg("-n").sh("exit 0").ended().expect(0);
}

fn cluster() -> (Vec<Redis>, String) {
    let nodes: Vec<Redis> = (0..3).map(|_| Redis::with(&["--cluster-enabled", "yes"])).collect();
    let hosts: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.port())).collect();
    let mut create: Vec<&str> = vec!["--cluster", "create"];
    create.extend(hosts.iter().map(String::as_str));
    create.extend(["--cluster-replicas", "0", "--cluster-yes"]);
    cli(nodes[0].port(), &[], &create);
    let ready = |node: &Redis| node.does(&["CLUSTER", "INFO"]).contains("cluster_state:ok");
    until("the cluster to be ready", || nodes.iter().all(ready));
    (nodes, format!("redis+cluster://{}", hosts.join(",")))
}

/// A slot on its way from one node to another, as `redis-cli --cluster reshard` moves it.
struct Move<'a> {
    slot: String,
    from: &'a Redis,
    to: &'a Redis,
}

impl Move<'_> {
    /// From here on the old node sends us to the new one for keys that it does not have.
    fn begins(&self) {
        let id = |node: &Redis| node.does(&["CLUSTER", "MYID"]);
        self.to.does(&["CLUSTER", "SETSLOT", &self.slot, "IMPORTING", &id(self.from)]);
        self.from.does(&["CLUSTER", "SETSLOT", &self.slot, "MIGRATING", &id(self.to)]);
    }

    fn carries_keys(&self) {
        let port = self.to.port().to_string();
        until("all keys to be moved", || {
            let keys = self.from.does(&["CLUSTER", "GETKEYSINSLOT", &self.slot, "100"]);
            keys.lines().for_each(|key| _ = self.from.does(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]));
            keys.is_empty()
        });
    }

    /// From here on the old node says that the slot has moved.
    fn ends(&self, nodes: &[Redis]) {
        let id = self.to.does(&["CLUSTER", "MYID"]);
        let told = [self.to, self.from].into_iter().chain(nodes);
        told.for_each(|node| _ = node.does(&["CLUSTER", "SETSLOT", &self.slot, "NODE", &id]));
    }
}

#[test]
fn a_lock_is_taken_kept_and_released_while_its_slot_moves() {
    let (nodes, url) = cluster();
    let dlock =
        || Dlock::new().env("DLOCK_BACKEND", &url).run("job").args(["--ttl", "20s", "--connect-timeout", "30s"]);
    let slot = nodes[0].does(&["CLUSTER", "KEYSLOT", "dlock:job"]);
    let owner = |node: &&Redis| node.does(&["CLUSTER", "COUNTKEYSINSLOT", &slot]) != "0";
    let refused = |node: &Redis, error: &str| {
        let errors = node.does(&["INFO", "errorstats"]);
        errors.lines().any(|line| line.starts_with(&format!("errorstat_{error}:")))
    };
    dlock().sh("exit 0").ended().expect(0).silently();
    let first = nodes.iter().position(|node| owner(&node)).unwrap();
    let moves: Vec<Move> = (0..4)
        .map(|n| Move { slot: slot.clone(), from: &nodes[(first + n) % 3], to: &nodes[(first + n + 1) % 3] })
        .collect();

    // Taken: it has to wait until its keys are together again, and no longer.
    moves[0].begins();
    let log = Log::new();
    let holder = dlock().args(log.witness(&[])).spawn();
    until("the old node to be asked in vain", || refused(moves[0].from, "TRYAGAIN"));
    moves[0].carries_keys();
    until("the old node to send it on", || refused(moves[0].from, "ASK"));
    moves[0].ends(&nodes);
    log.await_runs(1, 1);

    // Kept.
    for step in &moves[1..3] {
        let left = |node: &Redis| node.does(&["PTTL", "dlock:job"]).parse::<i64>().unwrap();
        step.begins();
        step.carries_keys();
        until("a renewal to be sent on", || refused(step.from, "ASK"));
        step.ends(&nodes);
        let before = left(step.to);
        until("a renewal at the new node", || left(step.to) > before);
        log.await_beat();
    }
    let next = dlock().args(log.witness(&["for=20"])).spawn();
    until("a waiter", || {
        let told = Dlock::new().env("DLOCK_BACKEND", &url).args(["status", "--json", "job"]).ended().expect(0).stdout;
        serde_json::from_str::<serde_json::Value>(&told).unwrap()[0]["waiters"].as_array().unwrap().len() == 1
    });

    // Released.
    moves[3].begins();
    holder.signal(Signal::SIGTERM);
    moves[3].carries_keys();
    moves[3].ends(&nodes);
    holder.ended().expect(143);
    next.ended().expect(0);
    log.assert_no_overlap();
}

#[test]
fn a_cluster_has_every_lock_at_its_own_node() {
    let (nodes, url) = cluster();
    let dlock = || Dlock::new().env("DLOCK_BACKEND", &url);
    for name in ["a", "b/c", "d", "e:f", "g"] {
        dlock().run(name).args(["--once", "k"]).sh("exit 0").ended().expect(0).silently();
        let log = Log::new();
        let holder = dlock().run(name).args(log.witness(&[])).spawn();
        log.await_runs(1, 1);
        dlock().run(name).arg("-n").sh("echo no").ended().expect(75);
        dlock().args(["force-release", name, "--yes"]).ended().expect(0);
        holder.ended().expect(79);
    }
    assert!(
        nodes.iter().filter(|node| node.does(&["DBSIZE"]) != "0").count() > 1,
        "all locks on one node prove nothing"
    );
    let all = dlock().args(["status", "--json"]).ended().expect(0).stdout;
    let all: serde_json::Value = serde_json::from_str(&all).unwrap();
    let mut names: Vec<&str> = all.as_array().unwrap().iter().map(|lock| lock["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, ["a", "b/c", "d", "e:f", "g"]);
}
