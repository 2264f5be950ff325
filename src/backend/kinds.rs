//! The table of backends: which URLs mean which of them, and how it is opened.

use anyhow::Result;

use super::{Address, Backend, Patience, file};
use crate::config::nearest;
use crate::exit::Fault;

/// A backend, as an address names it.
pub struct Kind {
    pub schemes: &'static [&'static str],
    /// What its URLs take beside the [`COMMON`](super::COMMON) parameters.
    pub parameters: &'static [&'static str],
    /// Nothing is sent yet: the first verb connects.
    open: fn(&Address, Patience) -> Result<Box<dyn Backend>>,
    /// What an administrator can create beforehand, where locks live in a schema.
    schema: Option<fn(&Address) -> Result<String>>,
}

impl Kind {
    const fn new(
        schemes: &'static [&'static str],
        parameters: &'static [&'static str],
        open: fn(&Address, Patience) -> Result<Box<dyn Backend>>,
    ) -> Kind {
        Kind { schemes, parameters, open, schema: None }
    }
}

/// Every backend that was built in. A feature of the crate stands for each but files.
pub const KINDS: &[Kind] = &[
    Kind::new(&["file"], &[], |address, _| Ok(Box::new(file::FileBackend::open(address)?))),
    #[cfg(feature = "redis")]
    Kind::new(
        &["redis", "rediss", "redis+unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"],
        super::redis::PARAMETERS,
        |address, patience| Ok(Box::new(super::redis::Redis::open(address, patience)?)),
    ),
    #[cfg(feature = "redis")]
    Kind::new(&["redlock", "redlocks"], &[], |address, patience| {
        Ok(Box::new(super::redlock::Redlock::open(address, patience)?))
    }),
    #[cfg(feature = "etcd")]
    Kind::new(&["etcd", "etcds"], &[], |address, patience| Ok(Box::new(super::etcd::Etcd::open(address, patience)?))),
    #[cfg(feature = "zookeeper")]
    Kind::new(&["zookeeper", "zk", "zookeepers"], super::zookeeper::PARAMETERS, |address, patience| {
        Ok(Box::new(super::zookeeper::ZooKeeper::open(address, patience)?))
    }),
    #[cfg(feature = "postgres")]
    Kind {
        schema: Some(super::postgres::schema),
        ..Kind::new(&["postgres", "postgresql"], super::postgres::PARAMETERS, |address, patience| {
            Ok(Box::new(super::postgres::Postgres::open(address, patience)?))
        })
    },
    #[cfg(feature = "mysql")]
    Kind {
        schema: Some(super::mysql::schema),
        ..Kind::new(&["mysql", "mariadb"], super::mysql::PARAMETERS, |address, patience| {
            Ok(Box::new(super::mysql::Mysql::open(address, patience)?))
        })
    },
];

/// The backends of this dlock, by their names.
pub fn built_in() -> Vec<&'static str> {
    KINDS.iter().map(|kind| kind.schemes[0]).collect()
}

/// Which backend an address means; an error also if that does not know the address's parameters.
pub fn kind(address: &Address) -> Result<&'static Kind> {
    let scheme = address.scheme();
    let Some(kind) = KINDS.iter().find(|kind| kind.schemes.contains(&scheme)) else {
        return Err(Fault::Config.because(format_args!("dlock has no backend {scheme}://; {}", other_scheme(scheme))));
    };
    address.expect_params(kind.parameters)?;
    Ok(kind)
}

/// What to write instead of a scheme that no backend has.
fn other_scheme(scheme: &str) -> String {
    let meant = match scheme {
        "http" => "etcd",
        "https" => "etcds",
        "keydb" | "valkey" => "redis",
        "pg" => "postgres",
        "valkeys" => "rediss",
        other => other,
    };
    match nearest(meant, KINDS.iter().flat_map(|kind| kind.schemes.iter().copied())) {
        Some(near) => format!("did you mean {near}://?"),
        None => format!("this dlock has {}", built_in().join(", ")),
    }
}

/// Opens what an address names.
pub fn open(address: &Address, patience: Patience) -> Result<Box<dyn Backend>> {
    (kind(address)?.open)(address, patience)
}

pub fn schema(address: &Address) -> Result<String> {
    let Some(schema) = kind(address)?.schema else {
        let what = format!("{}:// has no schema; --backend postgres://… and mysql://… have", address.scheme());
        return Err(Fault::Usage.because(what));
    };
    schema(address)
}
