//! What may stand between dlock and PostgreSQL.

use std::process::Command;

use tempfile::TempDir;

use super::database::{as_account, directory};
use super::postgres::PostgreSql;
use super::{Daemon, Postgres, free_port, until};

/// A transaction pooler in front of a server.
pub struct Pooler {
    port: u16,
    _daemon: Daemon,
    _dir: TempDir,
}

impl Pooler {
    /// Lends each transaction one of two connections.
    pub fn to(server: &Postgres) -> Pooler {
        let (dir, port) = (directory::<PostgreSql>(), free_port());
        let config = dir.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr=127.0.0.1\n\
             listen_port={port}\nunix_socket_dir=\nauth_type=any\npool_mode=transaction\ndefault_pool_size=2\n",
            server.port()
        );
        std::fs::write(&config, text).unwrap();
        let mut pgbouncer = as_account::<PostgreSql>(Command::new("pgbouncer"));
        pgbouncer.arg(config);
        let daemon = Daemon::spawn(pgbouncer, &dir.path().join("log"));
        until("the pooler to listen", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        Pooler { port, _daemon: daemon, _dir: dir }
    }

    pub fn url(&self, parameters: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres?{parameters}", self.port)
    }
}
