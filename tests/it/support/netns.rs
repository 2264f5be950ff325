//! Hosts played by network namespaces. Each has an address of its own and one cable, to a router that passes packets
//! on between them, or drops those from one host to another without a word. Namespaces have no names here: each lives
//! as long as a process in it, so nothing is left on the machine when the tests end, however they end.

use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::{Daemon, Dlock, until};

pub struct Network {
    router: Namespace,
    hosts: Vec<Namespace>,
    _home: TempDir,
}

/// A network namespace, and the process that keeps it.
struct Namespace(Daemon);

/// Why this machine cannot make such networks, if it cannot.
pub fn cannot_make_networks() -> Option<String> {
    let script = "ip link add h0 type veth peer name h1 && ip rule add pref 100 from 10.77.1.2 to 10.77.2.2 blackhole";
    let made = Command::new("unshare").args(["--net", "sh", "-c", script]).output();
    match made {
        Ok(made) if made.status.success() => None,
        Ok(made) => Some(String::from_utf8_lossy(&made.stderr).trim().to_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

impl Network {
    pub fn of(hosts: usize) -> Network {
        let home = tempfile::tempdir().unwrap();
        let router = Namespace::new(home.path());
        // Linux also drops a packet whose answer would have no way back, unless it is told not to look.
        router.sh("ip link set lo up; echo 1 >/proc/sys/net/ipv4/ip_forward; \
             echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter; echo 0 >/proc/sys/net/ipv4/conf/default/rp_filter");
        let plug_in = |number: usize| {
            let host = Namespace::new(home.path());
            let (own, gateway) = (address(number), format!("10.77.{}.1", number + 1));
            router.sh(&format!(
                "ip link add h{number} type veth peer name eth0 netns {}; ip addr add {gateway}/24 dev h{number}; \
                 ip link set h{number} up",
                host.0.pid()
            ));
            host.sh(&format!(
                "ip link set lo up; ip addr add {own}/24 dev eth0; ip link set eth0 up; \
                 ip route add default via {gateway}"
            ));
            host
        };
        let hosts = (0..hosts).map(plug_in).collect();
        Network { router, hosts, _home: home }
    }

    /// A command on one of the hosts.
    pub fn on(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args([&self.hosts[host].option(), program]);
        command
    }

    /// dlock on one of the hosts.
    pub fn dlock(&self, host: usize) -> Dlock {
        let dlock = assert_cmd::cargo::cargo_bin!("dlock");
        Dlock::played_by("nsenter").arg(self.hosts[host].option()).arg(dlock)
    }

    /// From now on nothing that the one sends reaches the other.
    pub fn lose(&self, from: usize, to: usize) {
        let (from, to) = (address(from), address(to));
        self.router.sh(&format!("ip rule add pref 100 from {from} to {to} blackhole"));
    }

    /// Everything reaches everybody again.
    pub fn heal(&self) {
        self.router.sh("while ip rule del pref 100 2>/dev/null; do :; done");
    }
}

/// Of a host, seen from everywhere in its network.
pub fn address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, u8::try_from(host + 1).unwrap(), 2)
}

impl Namespace {
    fn new(home: &Path) -> Namespace {
        let mut keep = Command::new("unshare");
        keep.args(["--net", "sleep", "infinity"]);
        let keeper = Daemon::spawn(keep, &home.join("log"));
        let net = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
        let ours = net("self");
        until("a network namespace", || net(&keeper.pid().to_string()).is_some_and(|its| Some(its) != ours));
        Namespace(keeper)
    }

    /// For nsenter, which becomes the program that it is given: one process, not two.
    fn option(&self) -> String {
        format!("--net=/proc/{}/ns/net", self.0.pid())
    }

    #[track_caller]
    fn sh(&self, script: &str) {
        let done = Command::new("nsenter").arg(self.option()).args(["sh", "-ec", script]).output().unwrap();
        assert!(done.status.success(), "{script}: {}", String::from_utf8_lossy(&done.stderr));
    }
}
