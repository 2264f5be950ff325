//! One Redis: what the tests share.

mod holding;
mod waiting;

use dlock::backend::redis::Redis;
use dlock::backend::redis::{server, target::Target};
use dlock::backend::{Address, Ask};
use dlock::lock::Mode;

use redis::{Value, cmd};

use super::PATIENCE;
use crate::support::{self, Bed};

/// A Redis of this test's own, without data.
pub struct Server(support::Redis);

impl Server {
    pub fn start() -> Server {
        Server::with(&[])
    }

    pub fn with(options: &[&str]) -> Server {
        Server(support::Redis::with(options))
    }

    pub fn port(&self) -> u16 {
        self.0.port()
    }

    /// Does not answer any more; whoever it is connected with cannot tell why.
    pub fn freeze(&self) {
        self.0.daemon().freeze();
    }

    pub fn thaw(&self) {
        self.0.daemon().thaw();
    }

    fn client(&self) -> Redis {
        Redis::open(&self.address(), PATIENCE).unwrap()
    }

    fn address(&self) -> Address {
        Address::parse(&self.0.url()).unwrap()
    }

    /// A connection of its own.
    pub fn link(&self) -> server::Server {
        server::Server::new(Target::new(&self.address()).unwrap(), PATIENCE)
    }

    /// What an operator or a foreign program would do.
    pub async fn does(&self, command: &[&str]) -> Value {
        self.link().call(cmd(command[0]).arg(&command[1..])).await.unwrap()
    }
}

pub fn ask(mode: Mode) -> Ask {
    super::ask("job/a", mode)
}
