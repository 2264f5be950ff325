//! The places a cell of the matrix is played in: a backend with all its servers, a way to them that is the
//! holder's alone, and another for everybody else.

use std::time::Duration;

use crate::support::redis::Sentinel;
use crate::support::{Bed, Dlock, FileBed, Ground, PLACES, Place, Proxy, Server, Started, until};

pub type Backend = &'static Place;

/// The one that reports call so.
pub fn named_place(name: &str) -> Backend {
    let names = || PLACES.map(|place| place.name).join("; ");
    PLACES.into_iter().find(|one| one.name == name).unwrap_or_else(|| panic!("not one of: {}", names()))
}

/// Those whose every fault the promise covers.
pub fn covered() -> Vec<Backend> {
    PLACES.into_iter().filter(|place| place.covered).collect()
}

pub struct Site {
    pub place: Backend,
    pub servers: Vec<Box<dyn Server>>,
    /// Whom to ask which of the servers leads, where there is somebody.
    sentinel: Option<Sentinel>,
    /// The holder's way to each of the servers.
    ways: Vec<Proxy>,
    /// Where the file backend keeps its locks, and where resources to be fenced lie.
    pub files: FileBed,
}

impl Site {
    pub fn open(place: Backend) -> Site {
        Site::on(Ground::Plain, place)
    }

    pub fn on(ground: Ground, place: Backend) -> Site {
        let Started { servers, sentinel } = (place.start)(ground);
        let asked = Site::asked(&servers, sentinel.as_ref());
        let ways = asked.into_iter().map(Proxy::to).collect();
        let files = if ground == Ground::SmallDisk { FileBed::on_small_disk() } else { FileBed::new() };
        let site = Site { place, servers, sentinel, ways, files };
        // Whatever is made at the first use is there when the clock begins to matter.
        until("the first run", || site.dlock().run("first").sh("exit 0").ended().code == Some(0));
        site
    }

    /// The ports that a URL names.
    fn asked(servers: &[Box<dyn Server>], sentinel: Option<&Sentinel>) -> Vec<u16> {
        let all = || servers.iter().map(|server| server.port()).collect();
        sentinel.map_or_else(all, |sentinel| vec![sentinel.port()])
    }

    pub fn holders_url(&self) -> String {
        let ports: Vec<u16> = self.ways.iter().map(Proxy::port).collect();
        self.place.url(&ports, self.files.dir())
    }

    pub fn holders_port(&self) -> Option<u16> {
        self.ways.first().map(Proxy::port)
    }

    /// One more way to all servers, for whoever shares it.
    pub fn another_way(&self) -> (Vec<Proxy>, String) {
        let asked = Site::asked(&self.servers, self.sentinel.as_ref());
        let ways: Vec<Proxy> = asked.into_iter().map(Proxy::to).collect();
        let ports: Vec<u16> = ways.iter().map(Proxy::port).collect();
        let url = self.place.url(&ports, self.files.dir());
        (ways, url)
    }

    /// Does something to every way of the holder's.
    pub fn ways(&self, fault: impl Fn(&Proxy)) {
        self.ways.iter().for_each(fault);
    }

    /// Makes the holder's ways slow, there and back together by so much.
    pub fn slow_ways(&self, round_trip: Duration) {
        self.ways(|way| way.slow(round_trip / 2, round_trip / 2));
    }

    /// As many servers as it takes for the others to be no majority.
    pub fn majority(&self) -> &[Box<dyn Server>] {
        &self.servers[..self.servers.len() / 2 + 1]
    }

    pub fn leader(&self) -> &dyn Server {
        let mut leader = None;
        until("a leader", || {
            leader = self.servers.iter().find(|server| server.leads());
            leader.is_some()
        });
        leader.unwrap().as_ref()
    }

    /// The number of one that follows.
    pub fn follower(&self) -> usize {
        self.servers.iter().position(|server| !server.leads()).unwrap()
    }

    /// Waits until somebody else leads, who may have to be told to.
    pub fn await_another_than(&self, leader: &dyn Server) {
        let others = self.servers.iter().filter(|server| server.port() != leader.port());
        others.clone().for_each(|server| server.promote());
        until("another leader", || others.clone().any(|server| server.leads()));
    }

    /// Sets the clocks of a majority of the servers, and waits for proof that they go by them.
    pub fn set_clocks_ahead(&self, seconds: i64) {
        self.majority().iter().for_each(|server| server.set_clock_ahead(seconds));
        until("the server to have another time", || {
            let told = self.dlock().args(["doctor", "--json"]).ended().stdout;
            let told: serde_json::Value = serde_json::from_str(&told).unwrap_or_default();
            let offset = told["clock_offset_ms"].as_f64().unwrap_or_default() / 1000.0;
            (offset - seconds as f64).abs() < 60.0
        });
    }

    /// The resource's side: whether it takes the newer token and, from then on, not the older one.
    pub fn refuses(&self, older: u64, newer: u64) -> bool {
        let resource = self.files.dir().join("resource");
        let write = |token: u64| {
            let dlock = Dlock::new().arg("fence").arg(&resource).args(["--token", &token.to_string()]);
            dlock.args(["--", "true"]).ended().code
        };
        let by_file = (write(newer), write(older)) == (Some(0), Some(79));
        // Of several servers, the first may be one that has been left alone and cannot write.
        by_file
            && match &self.servers[..] {
                [only] => only.refuses(older, newer),
                _ => true,
            }
    }
}

impl Bed for Site {
    fn url(&self) -> String {
        self.place.url(&Site::asked(&self.servers, self.sentinel.as_ref()), self.files.dir())
    }
}
