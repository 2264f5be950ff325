//! An etcd, or a cluster of it, that lives as long as a test.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::time::timeout;

use crate::backend::etcd::Etcd;
use crate::backend::{Address, Backend, Patience};

pub const LONG: Duration = Duration::from_secs(20);
const PATIENCE: Patience = Patience { connect: LONG, attempt: LONG };

pub struct Server {
    processes: Vec<Child>,
    directory: PathBuf,
    ports: Vec<u16>,
}

impl Server {
    pub fn start(members: usize) -> Server {
        let sockets: Vec<_> = (0..2 * members).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<_> = sockets.iter().map(|socket| socket.local_addr().unwrap().port()).collect();
        drop(sockets);
        let (clients, peers) = ports.split_at(members);
        // In memory, if possible: a disk that others keep busy would delay elections.
        let memory = PathBuf::from("/dev/shm");
        let root = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let directory = root.join(format!("dlock-etcd-{}-{}", std::process::id(), ports[0]));
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        let cluster = peers.iter().map(|peer| format!("m{peer}={}", url(*peer))).collect::<Vec<_>>().join(",");
        let start = |(client, peer): (&u16, &u16)| {
            Command::new("etcd")
                .args(["--name", &format!("m{peer}"), "--initial-cluster", &cluster])
                .args(["--data-dir".as_ref(), directory.join(peer.to_string()).as_os_str()])
                .args(["--listen-client-urls", &url(*client), "--advertise-client-urls", &url(*client)])
                .args(["--listen-peer-urls", &url(*peer), "--initial-advertise-peer-urls", &url(*peer)])
                .args(["--logger", "zap", "--log-level", "error"])
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        };
        let processes = clients.iter().zip(peers).map(start).collect();
        Server { processes, directory, ports: clients.to_vec() }
    }

    pub async fn open(&self) -> Etcd {
        self.open_member(0).await
    }

    pub async fn open_member(&self, member: usize) -> Etcd {
        let url = format!("etcd://127.0.0.1:{}", self.ports[member]);
        let mut etcd = Etcd::open(&Address::parse(&url).unwrap(), PATIENCE).unwrap();
        timeout(LONG, async {
            while etcd.list(None).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        })
        .await
        .expect("etcd comes up");
        etcd
    }

    pub fn signal(&self, member: usize, signal: Signal) {
        let pid = Pid::from_raw(self.processes[member].id().try_into().unwrap());
        kill(pid, signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for process in &mut self.processes {
            let _ = process.kill();
            let _ = process.wait();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
