//! Who plays the holder and the waiter: dlock, a build of it that is broken on purpose, or somebody else's tool.

use super::fault::Fault;
use super::scene::TTL;
use super::site::{Backend, Site};
use crate::support::{Bed, Dlock, Running, etcd, file, postgres, redis, target, zookeeper};

#[derive(Clone, Copy, Debug)]
pub enum Tool {
    Dlock,
    /// The name of what is broken.
    Mutant(&'static str),
    Peer(Peer),
}

/// Another tool that runs a command under a lock.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub name: &'static str,
    pub backend: Backend,
    /// What to type before the command: PORT, DIR, NAME and TTL (in milliseconds) are filled in.
    template: &'static str,
}

pub const PEERS: [Peer; 6] = [
    Peer { name: "flock", backend: &file::FILE, template: "flock DIR/NAME" },
    Peer {
        name: "etcdctl lock",
        backend: &etcd::ETCD,
        template: "env ETCDCTL_API=3 etcdctl --endpoints=127.0.0.1:PORT lock --ttl=3 NAME",
    },
    Peer { name: "redis-cli wrapper", backend: &redis::REDIS, template: "tests/peers/cronlock.sh PORT NAME TTL" },
    Peer { name: "redis-py Lock", backend: &redis::REDIS, template: "PYTHON tests/peers/redis_py.py PORT NAME TTL" },
    Peer {
        name: "kazoo Lock",
        backend: &zookeeper::ZOOKEEPER,
        template: "PYTHON tests/peers/kazoo_lock.py PORT NAME TTL",
    },
    Peer {
        name: "advisory lock (psycopg)",
        backend: &postgres::POSTGRES,
        template: "PYTHON tests/peers/psycopg_lock.py PORT NAME TTL",
    },
];

impl Peer {
    /// What can be done to a tool of which nothing is known.
    pub fn faults(&self) -> Vec<Fault> {
        let all =
            [Fault::PathFrozen, Fault::PathCut, Fault::DlockStopped, Fault::DlockKilled, Fault::CommandLeavesDaemons];
        all.into_iter().filter(|&fault| self.backend.expectation(fault).is_some()).collect()
    }

    fn words(&self, port: u16, name: &str, site: &Site) -> Vec<String> {
        let fill = |word: &str| {
            word.replace("PYTHON", &target("test-python/bin/python").display().to_string())
                .replace("PORT", &port.to_string())
                .replace("DIR", &site.files.dir().display().to_string())
                .replace("NAME", name)
                .replace("TTL", &TTL.as_millis().to_string())
        };
        self.template.split(' ').map(fill).collect()
    }
}

/// Which of the two; a tool without tokens gets them numbered, for the witness to tell them apart.
#[derive(Clone, Copy, Debug)]
pub enum Role {
    Holder,
    Waiter,
}

impl Tool {
    pub fn name(self) -> &'static str {
        match self {
            Tool::Dlock => "dlock",
            Tool::Mutant(name) => name,
            Tool::Peer(peer) => peer.name,
        }
    }

    pub fn is_peer(self) -> bool {
        matches!(self, Tool::Peer(_))
    }

    /// Starts it on a command (`-- CMD…`) with the mark in its environment.
    pub fn start(
        self,
        role: Role,
        site: &Site,
        name: &str,
        options: &[&str],
        command: &[String],
        mark: &str,
    ) -> Running {
        let (url, port) = match role {
            Role::Holder => (site.holders_url(), site.holders_port()),
            Role::Waiter => (site.url(), site.servers.first().map(|server| server.port())),
        };
        let dlock = match self {
            Tool::Dlock => Dlock::new(),
            Tool::Mutant(which) => Dlock::played_by(super::mutants::binary(which)),
            Tool::Peer(peer) => {
                let words = peer.words(port.unwrap_or_default(), name, site);
                let tool = Dlock::played_by(&words[0]).args(&words[1..]).args(&command[1..]);
                let tool = tool.configure(|command| {
                    command.current_dir(env!("CARGO_MANIFEST_DIR"));
                });
                return tool.env("MARK", mark).env("DLOCK_FENCING_TOKEN", (role as u8 + 1).to_string()).spawn();
            }
        };
        let dlock = dlock.env("DLOCK_BACKEND", url).env("MARK", mark).run(name);
        // Servers that have only just been started may take their time; that is not what a cell is about.
        let dlock = dlock.args(["--connect-timeout", "30s", "--ttl", &format!("{}ms", TTL.as_millis())]);
        dlock.args(options).args(command).spawn()
    }
}
