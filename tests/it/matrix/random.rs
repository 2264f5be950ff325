//! Many contenders, and faults at random, from a seed that is printed and plays the same plan again. What the
//! contenders were told and what the witness saw is a history, and no lock may contradict it.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::sys::signal::{Signal, kill};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::history::{self, Lease, RunEvent, contradictions};
use super::plan::{Behaviour, HOSTS, PLACES, Plan, Strike};
use super::site::{Backend, Site, named_place};
use crate::support::{Dlock, Log, Proxy, Run, Running, children_of, overlaps, until};

/// With the default kill-after a command is left in peace for 1.5 s, less what a backend takes off.
pub const LEASE: Lease = Lease { ttl: Duration::from_secs(2), patience: Duration::from_millis(1400) };

/// Fewer would show nothing. A plan whose faults let nobody through is played on until there are as many.
const ENOUGH_RUNS: usize = 4;
const LONGEST_WAIT: Duration = Duration::from_secs(180);

/// Where contenders run: a way to the servers of its own, which may fail by itself.
pub struct Host {
    pub ways: Vec<Proxy>,
    pub url: String,
}

pub struct Contender {
    name: String,
    invoked: u64,
    pub dlock: Running,
    log: Log,
    heard: Heard,
    /// What was done to its processes, so that nothing is done beside it that nobody could cover.
    struck: Option<Struck>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Struck {
    Stopped,
    /// Its guardian is dead or stopped; there is only dlock left to end the command.
    Unguarded,
}

/// Whether dlock or its guardian is left to act after this, too. One that was stopped once may be late to take its
/// guardian's place, also when it has been woken.
fn is_covered(strike: Strike, before: Option<Struck>) -> bool {
    match before {
        None => true,
        Some(Struck::Stopped) => !matches!(strike, Strike::GuardianKilled { .. } | Strike::GuardianStopped { .. }),
        Some(Struck::Unguarded) => false,
    }
}

/// The lines that a dlock says, each with the instant by which it had been said.
struct Heard(JoinHandle<Vec<(u64, RunEvent)>>);

impl Heard {
    fn from(pipe: OwnedFd) -> Heard {
        Heard(std::thread::spawn(move || {
            let lines = BufReader::new(std::fs::File::from(pipe)).lines().map_while(Result::ok);
            lines.map(|line| (now(), RunEvent::parse(&line))).collect()
        }))
    }

    /// Once everybody who could say something has ended: dlock, its guardian and the command.
    fn all(self) -> Vec<(u64, RunEvent)> {
        until("everybody behind a dlock that has ended to be gone", || self.0.is_finished());
        self.0.join().unwrap()
    }
}

pub fn now() -> u64 {
    Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap()).as_nanos().try_into().unwrap()
}

impl Contender {
    pub fn come(name: String, host: &Host, behaviour: &Behaviour, arena: &Path) -> Contender {
        let log = Log::within(arena, &name);
        let all = format!("arena={}", arena.display());
        let words: Vec<&str> = behaviour.words.iter().map(String::as_str).chain([all.as_str()]).collect();
        let (heard, said) = nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
        let invoked = now();
        let dlock = Dlock::new().env("DLOCK_BACKEND", &host.url).run("contended").args(["--ttl", "2s"]);
        let dlock = dlock.args(["--verbose", "--log", "json"]).args(behaviour.options).args(log.witness(&words));
        Contender { name, invoked, dlock: dlock.spawn_saying(said), log, heard: Heard::from(heard), struck: None }
    }

    /// Whether its command has begun.
    pub fn has_run(&self) -> bool {
        self.log.processes() > 0
    }

    /// Of one that has ended, as was seen by this instant.
    pub fn story(mut self, returned: u64) -> history::Contender {
        history::Contender {
            returned,
            code: self.dlock.code().unwrap(),
            told: self.heard.all(),
            runs: self.log.runs(),
            invoked: self.invoked,
            name: self.name,
        }
    }

    pub fn strike(&mut self, strike: Strike) {
        if self.dlock.has_ended() || !is_covered(strike, self.struck) {
            return;
        }
        match strike {
            Strike::DlockKilled { .. } => self.signal(Signal::SIGKILL),
            Strike::DlockWoken { .. } => self.signal(Signal::SIGCONT),
            Strike::DlockStopped { .. } => {
                self.struck = Some(Struck::Stopped);
                self.signal(Signal::SIGSTOP);
            }
            _ => {
                let stopped = matches!(strike, Strike::GuardianStopped { .. });
                let signal = if stopped { Signal::SIGSTOP } else { Signal::SIGKILL };
                for guardian in children_of(self.dlock.pid()).into_iter().take(1) {
                    self.struck = Some(Struck::Unguarded);
                    // It may have ended since.
                    let _ = kill(Pid::from_raw(guardian.try_into().unwrap()), signal);
                }
            }
        }
    }

    pub fn signal(&mut self, which: Signal) {
        if !self.dlock.has_ended() {
            self.dlock.signal(which);
        }
    }
}

/// A site, whoever is on it, and what has become of those who were.
struct Arena {
    site: Site,
    /// By server.
    state: Vec<State>,
    hosts: Vec<Host>,
    /// By place, with how many have been there before.
    present: Vec<(usize, Contender)>,
    history: Vec<history::Contender>,
    plan: Plan,
    logs: TempDir,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Up,
    Frozen,
    Down,
}

impl Arena {
    fn open(backend: Backend, plan: Plan) -> Arena {
        let (site, logs) = (Site::open(backend), tempfile::tempdir().unwrap());
        let hosts: Vec<Host> = (0..HOSTS).map(|_| site.another_way()).map(|(ways, url)| Host { ways, url }).collect();
        let state = vec![State::Up; site.servers.len()];
        Arena { site, state, hosts, present: Vec::new(), history: Vec::new(), plan, logs }
    }

    fn play(mut self, long: Duration) -> (Vec<history::Contender>, Vec<String>) {
        self.present = (0..PLACES).map(|place| (0, self.next(place, 0))).collect();
        let (plan, mut due, end) = (self.plan, Instant::now(), Instant::now() + long);
        for (pause, strike) in (0..).map(|nth| plan.strike(nth)) {
            // The plan's pace, not a wait for anything; a server that takes long to come back delays the rest of it.
            due += pause;
            while Instant::now() < due {
                self.replace_ended();
                std::thread::sleep(Duration::from_millis(5));
            }
            if due >= end && (self.runs() >= ENOUGH_RUNS || due >= end + LONGEST_WAIT) {
                break;
            }
            self.strike(strike);
        }
        self.close()
    }

    fn runs(&self) -> usize {
        let over: usize = self.history.iter().map(|ended| ended.runs.len()).sum();
        over + self.present.iter().filter(|(_, contender)| contender.has_run()).count()
    }

    fn next(&self, place: usize, nth: usize) -> Contender {
        let behaviour = self.plan.behaviour(place, nth);
        Contender::come(format!("{place}-{nth}"), &self.hosts[behaviour.host], &behaviour, self.logs.path())
    }

    fn replace_ended(&mut self) {
        for place in 0..self.present.len() {
            if self.present[place].1.dlock.has_ended() {
                let nth = self.present[place].0 + 1;
                let next = self.next(place, nth);
                let (_, ended) = std::mem::replace(&mut self.present[place], (nth, next));
                self.history.push(ended.story(now()));
            }
        }
    }

    fn strike(&mut self, strike: Strike) {
        let server = |draw: usize| draw.checked_rem(self.state.len());
        match strike {
            Strike::WayFrozen { host } => self.hosts[host].ways.iter().for_each(Proxy::freeze),
            Strike::WayCut { host } => self.hosts[host].ways.iter().for_each(Proxy::cut),
            Strike::WayHalfOpen { host } => self.hosts[host].ways.iter().for_each(Proxy::swallow_answers),
            Strike::WaysHealed => self.hosts.iter().flat_map(|host| &host.ways).for_each(Proxy::heal),
            Strike::ServersBack => self.bring_servers_back(),
            Strike::ServerFrozen { draw } => {
                if let Some(number) = server(draw).filter(|&number| self.state[number] == State::Up) {
                    self.site.servers[number].freeze();
                    self.state[number] = State::Frozen;
                }
            }
            Strike::ServerKilled { draw } => {
                if let Some(number) = server(draw).filter(|&number| self.state[number] != State::Down) {
                    self.site.servers[number].kill();
                    self.state[number] = State::Down;
                }
            }
            Strike::DlockKilled { place }
            | Strike::DlockStopped { place }
            | Strike::DlockWoken { place }
            | Strike::GuardianKilled { place }
            | Strike::GuardianStopped { place } => self.present[place].1.strike(strike),
        }
    }

    fn bring_servers_back(&mut self) {
        for (server, state) in self.site.servers.iter().zip(&mut self.state) {
            match std::mem::replace(state, State::Up) {
                State::Up => {}
                State::Frozen => server.thaw(),
                State::Down => server.start_again(),
            }
        }
    }

    /// Everything is repaired, and everybody told to go. What has happened, and what was found of runs that should
    /// have been over.
    fn close(mut self) -> (Vec<history::Contender>, Vec<String>) {
        self.strike(Strike::WaysHealed);
        self.bring_servers_back();
        for (_, contender) in &mut self.present {
            contender.signal(Signal::SIGCONT);
            contender.signal(Signal::SIGTERM);
        }
        let logs: Vec<_> = std::fs::read_dir(self.logs.path()).unwrap().flatten().map(|entry| entry.path()).collect();
        for (_, mut contender) in self.present {
            until("a contender to end", || contender.dlock.has_ended());
            self.history.push(contender.story(now()));
        }
        (self.history, logs.iter().flat_map(|path| Log::at(path).survivors()).collect())
    }
}

#[test]
fn dlock_and_its_guardian_are_never_both_kept_from_acting() {
    let (killed, stopped) = (Strike::DlockKilled { place: 0 }, Strike::DlockStopped { place: 0 });
    let unguarded = Strike::GuardianKilled { place: 0 };
    let blind = Strike::GuardianStopped { place: 0 };
    assert!([killed, stopped, unguarded, blind].into_iter().all(|strike| is_covered(strike, None)));
    assert!(is_covered(killed, Some(Struck::Stopped)), "the guardian sees to it");
    assert!(!is_covered(unguarded, Some(Struck::Stopped)) && !is_covered(blind, Some(Struck::Stopped)));
    assert!(![killed, stopped, unguarded, blind].into_iter().any(|strike| is_covered(strike, Some(Struck::Unguarded))));
}

#[test]
fn random_contenders_and_faults_never_contradict_one_lock() {
    let number = |key: &str| std::env::var(key).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("DLOCK_RANDOM").unwrap_or(15);
    let plan = Plan { seed: number("DLOCK_SEED").unwrap_or_else(|| u64::from(std::process::id())) };
    let named = std::env::var("DLOCK_RANDOM_BACKEND").unwrap_or_default();
    let backend = if named.is_empty() { plan.backend() } else { named_place(&named) };
    let again = format!("again with: tests/run --random {seconds} {} '{}'", plan.seed, backend.name);
    eprintln!("{again}");
    let (history, survivors) = Arena::open(backend, plan).play(Duration::from_secs(seconds));
    let found = contradictions(&history, LEASE);
    assert!(found.is_empty(), "{found:#?}\n{again}\n{history:#?}");
    let mut runs: Vec<Run> = history.iter().flat_map(|one| one.runs.clone()).collect();
    runs.sort_by_key(|run| run.first);
    assert_eq!(overlaps(&runs), [], "{again}");
    assert!(survivors.is_empty(), "still there when the next began: {survivors:?}\n{again}");
    assert!(runs.len() >= ENOUGH_RUNS, "only {} runs: nothing is shown; {again}", runs.len());
    eprintln!("{} contenders, {} runs, {}: no overlap, no contradiction", history.len(), runs.len(), told(&history));
}

/// How much of everything the history has, so that a check of nothing is seen.
fn told(history: &[history::Contender]) -> String {
    let count = |what: fn(&RunEvent) -> bool| {
        history.iter().flat_map(|one| &one.told).filter(|(_, told)| what(told)).count().to_string()
    };
    let known = [
        ("granted", count(|told| matches!(told, RunEvent::Acquired(_)))),
        ("busy", count(|told| *told == RunEvent::Busy)),
        ("times without an answer", count(|told| *told == RunEvent::Trouble)),
        ("lost", count(|told| matches!(told, RunEvent::Lost | RunEvent::Expired))),
        ("released", count(|told| *told == RunEvent::Released)),
        ("unknown releases", count(|told| *told == RunEvent::ReleaseFailed)),
        ("killed", history.iter().filter(|one| one.code == 137).count().to_string()),
    ];
    known.map(|(what, count)| format!("{count} {what}")).join(", ")
}
