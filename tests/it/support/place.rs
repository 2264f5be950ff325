//! What the tests know of a backend: how to start it, how to reach and how to break it, and what is expected of it under
//! which fault. Every launcher describes its own; the fault matrix, the storms and the rest go through [`super::PLACES`].

use std::fmt;

use super::redis::Sentinel;
use crate::matrix::Fault;

/// A backend with servers of its own.
pub struct Place {
    /// As reports call it.
    pub name: &'static str,
    /// `HOSTS` are its servers, or whom to ask for them; `DIR` is a directory.
    pub url: &'static str,
    /// How many servers a URL names.
    pub hosts: usize,
    pub start: fn(Ground) -> Started,
    /// Its servers know nothing of each other.
    pub independent: bool,
    pub leader: Leader,
    /// The grant's answers may be late by this part of a ttl: some take many round trips, or give each server a share of
    /// the time.
    pub late: u32,
    /// What it can have of the faults.
    pub faults: &'static [&'static [Fault]],
    /// What is expected of it where that is not what is usually expected of the fault.
    pub expect: &'static [(Fault, Expect)],
    /// The same for the exit codes of the holder.
    pub exit_codes: &'static [(Fault, &'static [i32])],
    /// What every run of the tests plays of the faults.
    pub short: &'static [&'static [Fault]],
    /// Whether the promise covers each of its faults, so that they can come at random.
    pub covered: bool,
    /// Its URLs, for nonsense in any part of them. A place with the URLs of another one has none.
    pub urls: &'static [Urls],
}

/// URLs that differ only in their schemes: one that makes sense, though nobody listens there, and what is nonsense in its
/// parts.
pub struct Urls {
    pub schemes: &'static [&'static str],
    /// Those of them whose connections are always encrypted.
    pub encrypted: &'static [&'static str],
    /// Without the last port. Empty where a URL names no host.
    pub host: &'static str,
    /// Whether a URL makes sense without a host.
    pub hostless: bool,
    /// `DIR` is a directory.
    pub path: &'static str,
    pub wrong_paths: &'static [&'static str],
    /// Values that a parameter refuses, where every backend has other ones; with none, any value may be meant.
    pub wrong_values: &'static [(&'static str, &'static [&'static str])],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leader {
    Nobody,
    /// By a majority of the servers.
    Elected,
    /// One server leads, and the other can take its place. Afterwards the former leader may come back, or not.
    OfPair {
        may_come_back: bool,
    },
}

/// The servers, and whom to ask which of them leads, where there is somebody.
pub struct Started {
    pub servers: Vec<Box<dyn Server>>,
    pub sentinel: Option<Sentinel>,
}

impl Started {
    pub fn of(servers: Vec<Box<dyn Server>>) -> Started {
        Started { servers, sentinel: None }
    }

    pub fn one(server: impl Server + 'static) -> Started {
        Started::of(vec![Box::new(server)])
    }
}

/// What a place has beyond the usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    Plain,
    /// Every server has a wall clock of its own.
    OwnClocks,
    /// The lock directory is on a disk of its own, with room for little.
    SmallDisk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect {
    /// No two commands ever live at once, and tokens grow.
    NoOverlap,
    /// No lock service can promise it here; but the late one's token is refused.
    TokenRefuses,
    /// No overlap; but whoever lost all its data has forgotten the tokens too, and begins anew.
    NoOverlapButTokens,
    /// Nothing was promised to us.
    Nothing,
}

impl Expect {
    pub fn text(self) -> &'static str {
        match self {
            Expect::NoOverlap => "overlap 0",
            Expect::TokenRefuses => "token refuses",
            Expect::NoOverlapButTokens => "overlap 0, tokens forgotten",
            Expect::Nothing => "-",
        }
    }
}

impl Place {
    /// `None`: it cannot have this fault, or that cannot be played.
    pub fn expectation(&self, fault: Fault) -> Option<Expect> {
        has(self.faults, fault).then(|| exception(self.expect, fault).unwrap_or(fault.expectation()))
    }

    /// How a shell would see the holder's dlock end: the contract's exit codes, or 128+N for one that was itself killed by
    /// signal N. Where the holder may keep the lock through the fault, it is killed after a lease: 137.
    pub fn exit_codes(&self, fault: Fault) -> &'static [i32] {
        exception(self.exit_codes, fault).unwrap_or(fault.exit_codes())
    }

    pub fn plays_in_short(&self, fault: Fault) -> bool {
        has(self.short, fault)
    }

    /// With these ports of its hosts.
    pub fn url(&self, ports: &[u16], directory: &std::path::Path) -> String {
        let hosts = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",");
        self.url.replace("HOSTS", &hosts).replace("DIR", &directory.display().to_string())
    }
}

fn has(groups: &[&[Fault]], fault: Fault) -> bool {
    groups.iter().any(|group| group.contains(&fault))
}

fn exception<T: Copy>(exceptions: &[(Fault, T)], fault: Fault) -> Option<T> {
    exceptions.iter().find(|(one, _)| *one == fault).map(|(_, value)| *value)
}

impl PartialEq for Place {
    fn eq(&self, other: &Place) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

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
    fn promote(&self) {}
    /// An operator makes it go on with whoever is there, if it has no majority and waits for that.
    fn begin_again(&self) {}
    /// The resource's side, where the server has one: whether it takes the newer token and then not the older one.
    fn refuses(&self, _older: u64, _newer: u64) -> bool {
        true
    }
    /// Its wall clock is so many seconds ahead from now on.
    fn set_clock_ahead(&self, _seconds: i64) {
        unreachable!("the table has no such row");
    }
}
