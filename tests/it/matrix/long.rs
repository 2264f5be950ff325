//! Long runs: contenders and faults at random, from a seed that is printed and can be played again; and one
//! holder that keeps its lock through one short fault after the other.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::site::{Backend, Site};
use crate::support::{Dlock, Log, Proxy, Run, Running, children_of, overlaps, tokens_grow, until};

const HOSTS: usize = 4;
const CONTENDERS: usize = 30;

/// Where contenders run: a way to the servers of its own, which may fail by itself.
struct Host {
    ways: Vec<Proxy>,
    url: String,
}

struct Contender {
    dlock: Running,
    log: Log,
}

/// What is known of a contender when all is over.
struct Story {
    code: Option<i32>,
    runs: Vec<Run>,
}

impl Story {
    /// Only what an exit code says for certain is held against the witness: a lost or killed dlock may or may not
    /// have started its command.
    fn is_told_truly(&self) -> bool {
        match self.code {
            Some(0) => self.runs.len() == 1,
            Some(69 | 75) => self.runs.is_empty(),
            _ => self.runs.len() <= 1,
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % n as u64).unwrap()
    }
}

#[test]
fn random_contenders_and_faults_never_overlap() {
    let number = |key: &str| std::env::var(key).ok().and_then(|text| text.parse::<u64>().ok());
    let seconds = number("DLOCK_RANDOM").unwrap_or(15);
    let seed = number("DLOCK_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let backend = [Backend::Redis, Backend::Redlock3, Backend::Etcd1, Backend::Postgres][random.below(4)];
    let again = format!("again with: tests/run --random {seconds} {seed}  ({})", backend.name());
    eprintln!("{again}");
    let stories = contend(backend, Duration::from_secs(seconds), &mut random);
    let mut runs: Vec<Run> = stories.iter().flat_map(|story| story.runs.clone()).collect();
    runs.sort_by_key(|run| run.first);
    assert_eq!(overlaps(&runs), [], "{again}");
    assert!(tokens_grow(&runs), "{again}\n{runs:#?}");
    let untrue = stories.iter().find(|story| !story.is_told_truly());
    assert!(untrue.is_none(), "{again}\n{:?}", untrue.map(|story| (story.code, &story.runs)));
    assert!(runs.len() > 3, "only {} runs: nothing is shown; {again}", runs.len());
    eprintln!("{} contenders, {} runs, no overlap", stories.len(), runs.len());
}

fn contend(backend: Backend, long: Duration, random: &mut Random) -> Vec<Story> {
    let site = Site::open(backend);
    let hosts: Vec<Host> = (0..HOSTS).map(|_| site.another_way()).map(|(ways, url)| Host { ways, url }).collect();
    let (mut present, mut stories) = (Vec::new(), Vec::new());
    let end = Instant::now() + long;
    while Instant::now() < end {
        while present.len() < CONTENDERS {
            present.push(come(&hosts[random.below(HOSTS)], random));
        }
        break_or_heal(&site, &hosts, &present, random);
        // The pace of the faults, not a wait for anything.
        std::thread::sleep(Duration::from_millis(20 + random.below(300) as u64));
        let (over, rest) = present.into_iter().map(ended).partition::<Vec<_>, _>(|(_, over)| *over);
        stories.extend(over.into_iter().map(|(contender, _)| story(contender)));
        present = rest.into_iter().map(|(contender, _)| contender).collect();
    }
    hosts.iter().flat_map(|host| &host.ways).for_each(Proxy::heal);
    site.servers.iter().for_each(|server| server.thaw());
    for contender in &present {
        contender.dlock.signal(Signal::SIGCONT);
        contender.dlock.signal(Signal::SIGTERM);
    }
    stories.extend(present.into_iter().map(story));
    stories
}

fn come(host: &Host, random: &mut Random) -> Contender {
    let log = Log::new();
    let length = format!("for={}", 1 + random.below(300));
    let words: &[&str] = if random.below(2) == 0 { &[&length] } else { &[&length, "ignore-term", "daemons=1"] };
    let dlock = Dlock::new().env("DLOCK_BACKEND", &host.url).run("contended").args(["--ttl", "2s"]);
    Contender { dlock: dlock.args(log.witness(words)).spawn(), log }
}

fn ended(mut contender: Contender) -> (Contender, bool) {
    let over = contender.dlock.has_ended();
    (contender, over)
}

fn story(contender: Contender) -> Story {
    let code = contender.dlock.ended().code;
    Story { code, runs: contender.log.runs() }
}

fn break_or_heal(site: &Site, hosts: &[Host], present: &[Contender], random: &mut Random) {
    let ways = &hosts[random.below(HOSTS)].ways;
    let server = &site.servers[random.below(site.servers.len())];
    let victim = &present[random.below(present.len())].dlock;
    match random.below(10) {
        0 => ways.iter().for_each(Proxy::freeze),
        1 => ways.iter().for_each(Proxy::cut),
        2 => ways.iter().for_each(Proxy::swallow_answers),
        3 => server.freeze(),
        4 => site.servers.iter().for_each(|server| server.thaw()),
        5 => victim.signal(Signal::SIGKILL),
        6 => victim.signal(Signal::SIGSTOP),
        7 => {
            for pid in children_of(victim.pid()) {
                // It may have ended since.
                let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
            }
        }
        _ => {
            hosts.iter().flat_map(|host| &host.ways).for_each(Proxy::heal);
            site.servers.iter().for_each(|server| server.thaw());
        }
    }
}

/// Memory in kilobytes and open descriptors of dlock and its guardian.
fn size(dlock: &Running) -> (usize, usize) {
    let of = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kilobytes: usize = resident.trim().trim_end_matches(" kB").parse().unwrap();
        (kilobytes, std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count())
    };
    let (ours, guardians) = (of(dlock.pid()), of(dlock.guardian()));
    (ours.0 + guardians.0, ours.1 + guardians.1)
}

/// As long as `tests/run --soak DURATION` says, and for a few faults in any case.
#[test]
fn hold_through_one_fault_after_the_other() {
    let long = humantime::parse_duration(&std::env::var("DLOCK_SOAK").unwrap_or_else(|_| "0s".into())).unwrap();
    let (site, log) = (Site::open(Backend::Redis), Log::new());
    let dlock = Dlock::new().env("DLOCK_BACKEND", site.holders_url()).run("soak").args(["--ttl", "6s"]);
    let mut holder = dlock.args(log.witness(&[])).spawn();
    log.await_runs(1, 1);
    let (end, mut faults, mut early) = (Instant::now() + long, 0, None);
    while Instant::now() < end || faults < 8 {
        let said = |holder: &Running, lines: usize| holder.stderr().lines().count() >= lines;
        site.ways(Proxy::cut);
        until("dlock to notice", || said(&holder, 2 * faults + 1));
        site.ways(Proxy::heal);
        until("dlock to recover", || said(&holder, 2 * faults + 2));
        assert!(!holder.has_ended(), "{}", holder.stderr());
        faults += 1;
        // Buffers have found their size by now.
        if faults == 5 {
            early = Some(size(&holder));
        }
    }
    let (early, late) = (early.expect("more than five faults"), size(&holder));
    eprintln!("{faults} faults in {long:?}: {early:?} kB and descriptors early, {late:?} at the end");
    assert!(late.1 <= early.1, "descriptors leak: {early:?} {late:?}");
    assert!(late.0 <= early.0 + early.0 / 4, "memory leaks: {early:?} {late:?}");
    holder.signal(Signal::SIGTERM);
    holder.ended().expect(143);
    assert_eq!(log.runs().len(), 1);
}
