//! Under which circumstances a report came about.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::scene::TTL;

#[derive(Clone, Debug)]
pub struct Facts {
    /// What was typed.
    command: String,
    /// How often each cell was to be played.
    times: usize,
    began: SystemTime,
    cores: usize,
    kernel: String,
    /// The machine's load (of the last minute) when it began, and the highest since.
    load: (f64, f64),
}

impl Facts {
    pub fn new(command: String, times: usize) -> Facts {
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap().trim().to_owned();
        let cores = std::thread::available_parallelism().unwrap().get();
        let now = load();
        Facts { command, times, began: SystemTime::now(), cores, kernel, load: (now, now) }
    }

    pub fn look_at_load(&mut self) {
        self.load.1 = self.load.1.max(load());
    }

    fn took(&self) -> Duration {
        Duration::from_secs(self.began.elapsed().unwrap_or_default().as_secs())
    }

    pub fn markdown(&self) -> String {
        format!(
            "`{}`, begun {}, took {}; {} cores, Linux {}, load {:.1} at first and {:.1} at most; ttl {}, \
             n = {} a cell.\n",
            self.command,
            humantime::format_rfc3339_seconds(self.began),
            humantime::format_duration(self.took()),
            self.cores,
            self.kernel,
            self.load.0,
            self.load.1,
            humantime::format_duration(TTL),
            self.times,
        )
    }

    pub fn json(&self) -> Value {
        json!({
            "command": self.command,
            "times": self.times,
            "began": humantime::format_rfc3339_seconds(self.began).to_string(),
            "took_seconds": self.took().as_secs(),
            "cores": self.cores,
            "kernel": self.kernel,
            "load_at_first": self.load.0,
            "load_at_most": self.load.1,
            "ttl_ms": TTL.as_millis(),
        })
    }
}

fn load() -> f64 {
    std::fs::read_to_string("/proc/loadavg").unwrap().split(' ').next().unwrap().parse().unwrap()
}
