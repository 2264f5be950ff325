//! What can be done to a server, whatever it is.

use std::cell::RefCell;
use std::rc::Rc;

use crate::support::etcd::Etcd;
use crate::support::{Postgres, Redis, ZooKeeperBed, ZooKeeperEnsemble, kazoo};

/// A server that can be broken.
pub trait Server {
    fn port(&self) -> u16;
    /// Stops answering; connections stay open.
    fn freeze(&self);
    fn thaw(&self);
    /// As a power cut would.
    fn kill(&self);
    /// After a kill: on the same port, with what was on its disk.
    fn start_again(&self);
    /// Loses its disk. Only between a kill and a start.
    fn forget(&self) {
        unreachable!("the table has no such row");
    }
    /// An operator, or another program, deletes the lock by hand.
    fn delete_record(&self, _name: &str) {
        unreachable!("the table has no such row");
    }
    /// Says what another program would say to it.
    fn told(&self, _words: &[&str]) -> String {
        unreachable!("the table has no such row");
    }
    /// Whether it leads the others.
    fn leads(&self) -> bool {
        false
    }
    /// Makes it the leader, where servers do not see to that themselves.
    fn promote(&self) {
        unreachable!("the table has no such row");
    }
    /// Its wall clock is so many seconds ahead from now on.
    fn set_clock_ahead(&self, _seconds: i64) {
        unreachable!("the table has no such row");
    }
}

impl Server for Redis {
    fn port(&self) -> u16 {
        Redis::port(self)
    }

    fn freeze(&self) {
        self.daemon().freeze();
    }

    fn thaw(&self) {
        self.daemon().thaw();
    }

    fn kill(&self) {
        Redis::kill(self);
    }

    fn start_again(&self) {
        self.restart();
    }

    fn forget(&self) {
        std::fs::remove_dir_all(self.dir().join("appendonlydir")).unwrap();
    }

    fn delete_record(&self, name: &str) {
        self.does(&["DEL", &format!("dlock:{name}")]);
    }

    fn told(&self, words: &[&str]) -> String {
        self.does(words)
    }

    fn leads(&self) -> bool {
        self.is_master()
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.clock().unwrap().set_ahead(seconds);
    }
}

impl Server for Postgres {
    fn port(&self) -> u16 {
        Postgres::port(self)
    }

    fn freeze(&self) {
        Postgres::freeze(self);
    }

    fn thaw(&self) {
        Postgres::thaw(self);
    }

    fn kill(&self) {
        Postgres::kill(self);
    }

    fn start_again(&self) {
        Postgres::start_again(self);
    }

    fn told(&self, words: &[&str]) -> String {
        words.iter().map(|sql| self.try_sql(sql).unwrap_or_else(|error| error)).collect()
    }

    fn leads(&self) -> bool {
        self.sql("SELECT pg_is_in_recovery()") == "f"
    }

    fn promote(&self) {
        Postgres::promote(self);
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.clock().unwrap().set_ahead(seconds);
    }
}

/// One member of an etcd cluster.
pub struct Member {
    cluster: Rc<RefCell<Etcd>>,
    number: usize,
}

impl Member {
    pub fn all_of(cluster: Etcd) -> Vec<Box<dyn Server>> {
        let (count, cluster) = (cluster.members.len(), Rc::new(RefCell::new(cluster)));
        let member = |number| -> Box<dyn Server> { Box::new(Member { cluster: Rc::clone(&cluster), number }) };
        (0..count).map(member).collect()
    }
}

impl Server for Member {
    fn port(&self) -> u16 {
        let endpoint = &self.cluster.borrow().endpoints()[self.number];
        endpoint.rsplit(':').next().unwrap().parse().unwrap()
    }

    fn freeze(&self) {
        self.cluster.borrow().members[self.number].freeze();
    }

    fn thaw(&self) {
        self.cluster.borrow().members[self.number].thaw();
    }

    fn kill(&self) {
        self.cluster.borrow_mut().members[self.number].kill();
    }

    fn start_again(&self) {
        self.cluster.borrow_mut().members[self.number].restart();
    }

    fn forget(&self) {
        self.cluster.borrow().members[self.number].forget();
    }

    fn delete_record(&self, name: &str) {
        let cluster = self.cluster.borrow();
        let oldest = ["--sort-by=CREATE", "--order=ASCEND", "--limit=1", "--keys-only"];
        let prefix = format!("dlock/{name}/");
        let key = cluster.ctl(&[&["get", "--prefix", &prefix][..], &oldest].concat());
        cluster.ctl(&["del", key.trim()]);
    }

    fn leads(&self) -> bool {
        self.cluster.borrow().leader() == self.number
    }
}

impl Server for ZooKeeperBed {
    fn port(&self) -> u16 {
        self.port
    }

    fn freeze(&self) {
        self.server().daemon.freeze();
    }

    fn thaw(&self) {
        self.server().daemon.thaw();
    }

    fn kill(&self) {
        self.server().daemon.kill();
    }

    fn start_again(&self) {
        self.server().restart();
    }

    fn forget(&self) {
        self.server().forget();
    }

    fn delete_record(&self, name: &str) {
        behead(self.port, name);
    }

    fn set_clock_ahead(&self, seconds: i64) {
        self.server().clock.as_ref().unwrap().set_ahead(seconds);
    }
}

/// Deletes the node of whoever holds the lock.
fn behead(port: u16, name: &str) {
    let deleted = kazoo(port, name, "-").arg("behead").output().unwrap();
    assert!(deleted.status.success(), "{deleted:?}");
}

/// One server of a ZooKeeper ensemble.
pub struct Peer {
    ensemble: Rc<RefCell<ZooKeeperEnsemble>>,
    number: usize,
}

impl Peer {
    pub fn all_of(ensemble: ZooKeeperEnsemble) -> Vec<Box<dyn Server>> {
        let (count, ensemble) = (ensemble.servers.len(), Rc::new(RefCell::new(ensemble)));
        let peer = |number| -> Box<dyn Server> { Box::new(Peer { ensemble: Rc::clone(&ensemble), number }) };
        (0..count).map(peer).collect()
    }
}

impl Server for Peer {
    fn port(&self) -> u16 {
        self.ensemble.borrow().servers[self.number].port
    }

    fn freeze(&self) {
        self.ensemble.borrow().servers[self.number].daemon.freeze();
    }

    fn thaw(&self) {
        self.ensemble.borrow().servers[self.number].daemon.thaw();
    }

    fn kill(&self) {
        self.ensemble.borrow_mut().servers[self.number].daemon.kill();
    }

    fn start_again(&self) {
        self.ensemble.borrow_mut().servers[self.number].restart();
    }

    fn delete_record(&self, name: &str) {
        behead(self.port(), name);
    }

    fn leads(&self) -> bool {
        self.ensemble.borrow().servers[self.number].role().as_deref() == Some("leader")
    }
}
