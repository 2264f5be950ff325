//! What the README and the pages under docs/ tell people to type works: every block of every page is run, on real servers
//! where it takes any.

mod pages;
mod tour;
mod transcript;

use std::process::Command;

use crate::redis::kinds::{certificates, tls_server};
use crate::support::etcd::Etcd;
use crate::support::{Bed, Dlock, Mysql, Postgres, Redis, Redlock, Sentinel, ZooKeeperBed, lines, until};
use tour::{Tour, root};

#[test]
fn readme() {
    let mut tour = Tour::of("README.md");
    let redis = Redis::new();
    share_with_our_group(&mut tour);
    tour.replace("redis://cache.example", &redis.url());
    tour.set("CI_JOB_URL", "https://ci.example/7");
    let first = tour.block("sh");
    tour.sh(&first);
    tour.hold("nightly-report", "./report.sh");
    tour.up_to("## Triage");
    tour.backend(&redis.url());
    tour.hold("nightly-report", "./report.sh");
    tour.wait_for("nightly-report", "./report.sh");
    for _ in ["status", "force-release"] {
        let block = tour.block("console");
        tour.console(&block);
    }
    until("the run to be on record", || tour.sh("dlock history nightly-report").contains("taken away"));
    tour.finish();
}

/// A group that the user of the tests can give a directory to, and a place for it.
fn share_with_our_group(tour: &mut Tour) {
    tour.replace("-g jobs", &format!("-g {}", nix::unistd::getegid()));
    tour.replace("/srv/dlock", &tour.path("srv").display().to_string());
}

#[test]
fn getting_started() {
    let mut tour = Tour::of("docs/getting-started.md");
    let redis = Redis::new();
    share_with_our_group(&mut tour);
    tour.replace("redis://cache.example", &redis.url());
    tour.replace("/usr/local", &tour.path("usr").display().to_string());
    tour.up_to("## Somebody else has it");
    tour.hold("backup", "./backup.sh");
    tour.up_to("## When it ends");
    tour.end_holders();
    tour.finish();
}

#[test]
fn cron() {
    Tour::of("docs/cron.md").finish();
}

/// Runs each step as the service does: in a shell of its own, with the variables that earlier steps left.
#[test]
fn ci() {
    let mut tour = Tour::of("docs/ci.md");
    tour.set("CI_JOB_URL", "https://ci.example/7");
    let variables = tour.path("github.env");
    std::fs::write(&variables, "").unwrap();
    tour.set("GITHUB_ENV", &variables.display().to_string());
    let is_free = |tour: &Tour| drop(tour.sh("dlock status --exit-code deploy"));

    let github = tour.block("yaml");
    let steps: Vec<_> = github.lines().filter_map(|line| line.trim().strip_prefix("run: ")).collect();
    assert_eq!(steps.len(), 5);
    for step in steps {
        tour.sh(&format!("set -a; . $GITHUB_ENV; set +a; {step}"));
    }
    is_free(&tour);

    let gitlab = tour.block("yaml");
    let (script, after) = gitlab.split_once("after_script:").unwrap();
    for part in [script, after] {
        let lines: Vec<_> = part.lines().filter_map(|line| line.trim().strip_prefix("- ")).collect();
        assert!(!lines.is_empty());
        tour.sh(&lines.join("\n"));
    }
    is_free(&tour);
    let page = tour.path("work");
    tour.up_to("## What is different from `dlock run`");
    let free = Dlock::new().env("DLOCK_BACKEND", format!("file://{}", page.with_file_name("locks").display()));
    free.args(["status", "--exit-code", "deploy"]).ended().expect(0);
    tour.finish();
}

/// systemd itself says whether the units are valid, where it is installed.
#[test]
fn leader_election() {
    let mut tour = Tour::of("docs/leader-election.md");
    tour.stand_in("systemctl", "exit 0");
    let service = tour.block("ini");
    let line = service.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/dlock run ")).unwrap();
    tour.sh(&format!("dlock run --explain {}", line.replace("--backend prod", "")));
    let timer = tour.block("ini");
    let dir = tempfile::tempdir().unwrap();
    for (name, unit) in [("scheduler.service", service), ("scheduler.timer", timer)] {
        let unit = unit.replace("/usr/bin/dlock", "/bin/true").replace("/usr/bin/scheduler", "/bin/true");
        std::fs::write(dir.path().join(name), unit).unwrap();
        if let Ok(out) = Command::new("systemd-analyze").arg("verify").arg(dir.path().join(name)).output() {
            let said = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(!said.contains("scheduler."), "{said}");
        }
    }
    tour.finish();
}

#[test]
fn fencing() {
    let server: &'static Postgres = Box::leak(Box::new(Postgres::with(&[])));
    let mut tour = Tour::of("docs/fencing.md");
    tour.on(|sql| server.sql(sql));
    tour.replace("postgres://app@db.example/jobs", &server.url());
    server.sql("CREATE TABLE accounts (id int PRIMARY KEY, balance int); INSERT INTO accounts VALUES (7, 100)");
    // The schema is there as soon as dlock has been.
    tour.sh(&format!("dlock run --backend '{}' --name accounts -- true", server.url()));
    server.sql("CREATE TABLE reports (made timestamptz)");
    tour.finish();
    assert_eq!(server.sql("SELECT count(*) FROM reports"), "1");
    assert_eq!(server.sql("SELECT balance FROM accounts"), "80", "both examples have written");
    let write = |token: u32| server.try_sql(&format!("SET app.token = {token}; UPDATE accounts SET balance = 0"));
    assert!(write(41).unwrap_err().contains("stale fencing token") && write(43).is_ok());
    assert!(server.try_sql("SELECT dlock.fence('accounts', 42)").unwrap_err().contains("stale"));
}

/// With stand-ins for what it takes a network, a cluster or a repository to run.
#[test]
fn monitoring() {
    let mut tour = Tour::of("docs/monitoring.md");
    let (work, called) = (tour.work(), tour.path("called"));
    for name in ["curl", "terraform", "git"] {
        tour.stand_in(name, &format!("echo {name} \"$*\" | tee -a {}", called.display()));
    }
    tour.replace("/var/lib/node_exporter", &work.display().to_string());
    tour.set("CI_JOB_URL", "https://ci/7");
    tour.set("DB", "sales");
    tour.up_to("## Icinga, Nagios, Zabbix, Sensu");
    tour.sh("dlock run --name nightly-report -- true");
    tour.hold("nightly-report", "./report.sh");
    tour.replace("--held-at-most 2h", "--held-at-most 1ms");
    // The plugin understands every argument that Icinga may give it.
    let icinga = tour.block("text");
    let options: Vec<_> = icinga.split('"').filter(|word| word.starts_with("--")).collect();
    assert_eq!(options.len(), 6);
    tour.end_holders();
    let value = |option: &&str| match *option {
        "--name" => "nightly-report",
        "--backend" => "\"$DLOCK_BACKEND\"",
        "--warn" => "80%",
        _ => "26h",
    };
    let check: Vec<_> = options.iter().map(|option| format!("{option} {}", value(option))).collect();
    tour.sh(&format!("dlock check {}", check.join(" ")));
    let history = |name: &str| {
        let dlock = Dlock::new().env("DLOCK_BACKEND", format!("file://{}", work.with_file_name("locks").display()));
        dlock.args(["history", name]).ended().expect(0).stdout
    };
    tour.up_to("### A maintenance window");
    until("both hooks to call", || lines(&called).len() == 2);
    tour.up_to("### Database migrations");
    assert!(history("terraform/production").contains("note: https://ci/7"));
    let migration = tour.block("sh");
    tour.sh(&migration);
    assert!(history("migrate/sales").contains("once: git rev-parse HEAD"), "once for a commit");
    let mut calls = lines(&called);
    tour.finish();
    calls.sort();
    let at = |what: &str| format!("curl -fsS -m 8 https://hc-ping.com/UUID/{what}");
    assert_eq!(
        calls,
        [at("0"), at("start"), "git rev-parse HEAD".into(), "terraform apply -auto-approve -lock=false".into()]
    );
}

#[test]
fn troubleshooting() {
    let mut tour = Tour::of("docs/troubleshooting.md");
    let redis = Redis::new();
    tour.replace("redis://cache.example", &redis.url());
    tour.backend(&redis.url());
    tour.sh("dlock run --name nightly-report -- ./report.sh");
    tour.hold("nightly-report", "./report.sh");
    tour.wait_for("nightly-report", "./report.sh");
    let token = tour.sh("dlock status nightly-report --json | jq -j '.[0].holders[0].fencing_token'");
    tour.replace("1794884671104008", &token);
    tour.finish();
}

#[test]
fn file_backend() {
    let mut tour = Tour::of("docs/backends/file.md");
    share_with_our_group(&mut tour);
    tour.finish();
}

/// The server has no default user, but the one that the page makes; and it shows a certificate.
#[test]
fn redis_backend() {
    let mut tour = Tour::of("docs/backends/redis.md");
    let certificates = certificates();
    let (server, port) = tls_server(&certificates, &["--tls-auth-clients", "no"]);
    let etc = etc(&mut tour);
    std::fs::copy(certificates.path().join("ca.pem"), etc.join("ca.pem")).unwrap();
    tour.replace("rediss://cache.example", &format!("rediss://127.0.0.1:{port}"));
    tour.replace("redis://cache.example", &server.url());
    let master = Redis::new();
    let _replica = master.replica(&[]);
    let sentinel = Sentinel::over(&master);
    tour.replace("redis+sentinel://s1,s2,s3/mymaster", &sentinel.url());
    tour.replace("redis-cli -h cache.example", &format!("redis-cli -p {}", server.port()));
    tour.backend(&server.url());
    tour.up_to("## Least privileges");
    let acl = tour.block("sh");
    tour.sh(&acl);
    tour.sh(&format!("redis-cli -p {} ACL SETUSER default off", server.port()));
    tour.finish();
}

#[test]
fn redlock_backend() {
    let mut tour = Tour::of("docs/backends/redlock.md");
    let nodes = Redlock::of(3);
    tour.replace("redlock://r1,r2,r3", &nodes.url());
    tour.finish();
}

#[test]
fn etcd_backend() {
    let mut tour = Tour::of("docs/backends/etcd.md");
    let etcd = Etcd::cluster();
    etc(&mut tour);
    tour.replace("etcd://etcd1,etcd2,etcd3", &etcd.url());
    tour.set("ETCDCTL_ENDPOINTS", &etcd.endpoints().join(","));
    tour.set("ETCDCTL_API", "3");
    tour.up_to("## Least privileges");
    let users = tour.block("sh");
    tour.sh(&users);
    let login = tour.block("sh");
    until("all members to have heard of it", || tour.succeeds(&login));
    tour.finish();
}

#[test]
fn zookeeper_backend() {
    let mut tour = Tour::of("docs/backends/zookeeper.md");
    let bed = ZooKeeperBed::shared();
    etc(&mut tour);
    tour.replace("zookeeper://zk1,zk2,zk3", &bed.url());
    tour.finish();
}

#[test]
fn postgresql_backend() {
    let server: &'static Postgres = Box::leak(Box::new(Postgres::with(&[])));
    let mut tour = Tour::of("docs/backends/postgresql.md");
    etc(&mut tour);
    tour.on(|sql| server.sql(sql));
    server.sql("CREATE ROLE app LOGIN; CREATE ROLE reports LOGIN");
    tour.replace("postgres://app@db.example/jobs", &server.url_as("app", ""));
    tour.replace("postgres://reports@db.example/jobs", &server.url_as("reports", ""));
    tour.finish();
    // What an SQL client holds keeps dlock out.
    server.dlock().run("from-sql").arg("-n").sh("echo no").ended().expect(75);
}

#[test]
fn mysql_backend() {
    let server = Mysql::with(&[]);
    let mut tour = Tour::of("docs/backends/mysql.md");
    server.sql("CREATE USER app; GRANT ALL ON jobs.* TO app; CREATE TABLE accounts (id INT, balance INT)");
    tour.replace("mysql://app@db.example/jobs", &server.url_as("app", ""));
    let first = tour.block("sh");
    tour.sh(&first);
    for _ in ["privileges", "calls", "fencing"] {
        let block = tour.block("sql");
        server.sql(&block);
    }
    tour.finish();
}

/// Where the pages keep certificates and passwords.
fn etc(tour: &mut Tour) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let etc = tour.path("etc");
    std::fs::create_dir(&etc).unwrap();
    let certificates = certificates();
    for (file, name) in [("ca.pem", "ca.pem"), ("client.pem", "client.pem"), ("client.key", "client.key")] {
        std::fs::copy(certificates.path().join(file), etc.join(name)).unwrap();
    }
    std::fs::write(etc.join("password"), "secret\n").unwrap();
    std::fs::set_permissions(etc.join("password"), std::fs::Permissions::from_mode(0o600)).unwrap();
    tour.replace("/etc/dlock/", &format!("{}/", etc.display()));
    etc
}

#[test]
fn every_other_page() {
    for page in pages::without_a_test_of_their_own() {
        Tour::of(&page).finish();
    }
}
