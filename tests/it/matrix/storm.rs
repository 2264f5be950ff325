//! A crowd of contenders for one lock, whose processes are stopped and killed all the time, the holder's more often
//! than any other's; never so that neither dlock nor its guardian could act. The history checker judges, and somebody
//! has to be granted the lock after the storm, too.
//!
//! `tests/run` plays a small one; `tests/run --storm [SECONDS [SEED [BACKEND]]]` plays 200 contenders on each backend
//! and writes `target/storm.md`. What happens is drawn from the seed, as for the random runs.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::history::{self, RunEvent, contradictions};
use super::plan::{Behaviour, Plan, Strike};
use super::random::{Contender, Host, LEASE, now};
use super::site::{Backend, Site, covered, named_place};
use crate::support::{Bed, Log, Run, children_of, overlaps, target, until};

#[derive(Clone, Copy, Debug)]
struct Storm {
    plan: Plan,
    contenders: usize,
}

/// Whom a blow is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Victim {
    /// Whoever runs its command at that moment; nobody, if there is none.
    Holder,
    Place(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blow {
    Strike(Victim, Strike),
    /// Everything that was stopped goes on.
    AllWoken,
}

impl Storm {
    /// Most wait for as long as it takes, and are quickly done; some hold the lock for a renewal or two.
    fn behaviour(self, place: usize, nth: usize) -> Behaviour {
        let mut dice = self.plan.dice(1 + place as u64, nth as u64);
        // So many that start at once may take their time.
        let patient = &["--connect-timeout", "30s", "--wait", "3s"];
        let options = [&patient[..], &patient[..2]][dice.below(8).min(1)];
        let longest = if dice.below(25) == 0 { 2500 } else { 40 };
        let mut words = vec![format!("for={}", 1 + dice.below(longest))];
        if dice.below(3) == 0 {
            words.extend(["ignore-term".into(), "daemons=1".into()]);
        }
        Behaviour { host: 0, options, words }
    }

    /// The nth, and how long after the one before it.
    fn blow(self, nth: usize) -> (Duration, Blow) {
        let mut dice = self.plan.dice(0, 1 + nth as u64);
        let pause = Duration::from_millis(20 + dice.below(200) as u64);
        let place = dice.below(self.contenders);
        let victim = if dice.below(6) == 0 { Victim::Holder } else { Victim::Place(place) };
        let strike = match dice.below(12) {
            0..=3 => Strike::DlockKilled { place },
            4..=5 => Strike::DlockStopped { place },
            6..=7 => Strike::GuardianKilled { place },
            8 => Strike::GuardianStopped { place },
            _ => return (pause, Blow::AllWoken),
        };
        (pause, Blow::Strike(victim, strike))
    }

    fn rage(self, backend: Backend, long: Duration) -> Aftermath {
        let (site, logs) = (Site::open(backend), tempfile::tempdir().unwrap());
        let host = Host { ways: Vec::new(), url: site.url() };
        let mut crowd = Crowd { storm: self, host, present: Vec::new(), ended: Vec::new(), logs };
        crowd.present = (0..self.contenders).map(|place| (0, crowd.next(place, 0))).collect();
        let (begun, mut blows) = (Instant::now(), 0);
        let mut due = begun;
        for (pause, blow) in (0..).map(|nth| self.blow(nth)) {
            // The plan's pace, not a wait for anything.
            due += pause;
            while Instant::now() < due {
                crowd.replace_ended();
                std::thread::sleep(Duration::from_millis(10));
            }
            if due >= begun + long {
                break;
            }
            crowd.suffer(blow);
            blows += 1;
        }
        let took = begun.elapsed();
        let before = crowd.grants();
        crowd.suffer(Blow::AllWoken);
        until("a grant after the storm", || {
            crowd.replace_ended();
            crowd.grants() > before
        });
        let (history, survivors) = crowd.go_home();
        Aftermath { backend, took, blows, before, history, survivors }
    }
}

/// Everybody there, and who has been.
struct Crowd {
    storm: Storm,
    host: Host,
    /// By place, with how many have been there before.
    present: Vec<(usize, Contender)>,
    /// With the instant by which each was seen to have ended.
    ended: Vec<(u64, Contender)>,
    logs: TempDir,
}

impl Crowd {
    fn next(&self, place: usize, nth: usize) -> Contender {
        let behaviour = self.storm.behaviour(place, nth);
        Contender::come(format!("{place}-{nth}"), &self.host, &behaviour, self.logs.path())
    }

    fn replace_ended(&mut self) {
        for place in 0..self.present.len() {
            if self.present[place].1.dlock.has_ended() {
                let (seen, nth) = (now(), self.present[place].0 + 1);
                let next = self.next(place, nth);
                let (_, ended) = std::mem::replace(&mut self.present[place], (nth, next));
                self.ended.push((seen, ended));
            }
        }
    }

    fn suffer(&mut self, blow: Blow) {
        match blow {
            Blow::AllWoken => self.present.iter_mut().for_each(|(_, contender)| wake(contender)),
            Blow::Strike(Victim::Place(place), strike) => self.present[place].1.strike(strike),
            Blow::Strike(Victim::Holder, strike) => {
                if let Some((_, holder)) = self.present.iter_mut().find(|(_, one)| one.has_run()) {
                    holder.strike(strike);
                }
            }
        }
    }

    /// How many commands have begun.
    fn grants(&self) -> usize {
        let present = self.present.iter().map(|(_, contender)| contender);
        present.chain(self.ended.iter().map(|(_, contender)| contender)).filter(|one| one.has_run()).count()
    }

    /// What has happened, and what was found of runs that should have been over.
    fn go_home(mut self) -> (Vec<history::Contender>, Vec<String>) {
        for (_, contender) in &mut self.present {
            wake(contender);
            contender.signal(Signal::SIGTERM);
        }
        let mut history: Vec<_> = self.ended.into_iter().map(|(seen, contender)| contender.story(seen)).collect();
        for (_, mut contender) in self.present {
            until("a contender to end", || contender.dlock.has_ended());
            history.push(contender.story(now()));
        }
        let logs = std::fs::read_dir(self.logs.path()).unwrap().flatten();
        (history, logs.flat_map(|entry| Log::at(&entry.path()).survivors()).collect())
    }
}

/// dlock and its guardian both go on, whichever of them was stopped.
fn wake(contender: &mut Contender) {
    if !contender.dlock.has_ended() {
        for pid in children_of(contender.dlock.pid()) {
            // It may have ended since.
            let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGCONT);
        }
    }
    contender.signal(Signal::SIGCONT);
}

struct Aftermath {
    backend: Backend,
    took: Duration,
    blows: usize,
    /// Commands that had begun when the storm was over.
    before: usize,
    history: Vec<history::Contender>,
    survivors: Vec<String>,
}

impl Aftermath {
    fn runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = self.history.iter().flat_map(|one| one.runs.clone()).collect();
        runs.sort_by_key(|run| run.first);
        runs
    }

    /// Everything that no lock could have answered, or that two commands had at the same time.
    fn wrong(&self) -> Vec<String> {
        let mut wrong = contradictions(&self.history, LEASE);
        wrong.extend(overlaps(&self.runs()).iter().map(|overlap| format!("{overlap:?}")));
        wrong.extend(self.survivors.iter().map(|one| format!("still there when the next began: {one}")));
        wrong
    }

    fn markdown(&self) -> String {
        let told = |what: fn(&RunEvent) -> bool| {
            self.history.iter().filter(|one| one.told.iter().any(|(_, told)| what(told))).count()
        };
        format!(
            "| {} | {} s | {} | {} | {} | {} | {} | {} | {:.0} |\n",
            self.backend.name,
            self.took.as_secs(),
            self.history.len(),
            self.blows,
            self.history.iter().filter(|one| one.code == 137).count(),
            told(|told| matches!(told, RunEvent::Lost | RunEvent::Expired)),
            self.before,
            overlaps(&self.runs()).len(),
            self.before as f64 * 60.0 / self.took.as_secs_f64(),
        )
    }
}

const HEAD: &str = "| backend | storm | contenders in all | blows | dlocks killed | leases lost | runs | overlaps | \
                    runs a minute |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n";

#[test]
fn a_storm_of_kills_breaks_no_promise() {
    let variable = |key: &str| std::env::var(key).ok().filter(|text| !text.is_empty());
    let number = |key: &str| variable(key).and_then(|text| text.parse::<u64>().ok());
    let seconds = number("DLOCK_STORM");
    let plan = Plan { seed: number("DLOCK_SEED").unwrap_or_else(|| u64::from(std::process::id())) };
    let storm = Storm { plan, contenders: if seconds.is_some() { 200 } else { 24 } };
    let backends = match (variable("DLOCK_STORM_BACKEND"), seconds) {
        (Some(named), _) => vec![named_place(&named)],
        (None, Some(_)) => covered(),
        (None, None) => vec![plan.backend()],
    };
    let (long, mut table) = (seconds.unwrap_or(5), HEAD.to_owned());
    for backend in backends {
        let again = format!("again with: tests/run --storm {long} {} '{}'", plan.seed, backend.name);
        eprintln!("{again}");
        let aftermath = storm.rage(backend, Duration::from_secs(long));
        table += &aftermath.markdown();
        eprintln!("{}", aftermath.markdown());
        let wrong = aftermath.wrong();
        assert!(wrong.is_empty(), "{wrong:#?}\n{again}\n{:#?}", aftermath.history);
        assert!(aftermath.before > 0, "nobody got anywhere: nothing is shown; {again}");
    }
    if seconds.is_some() {
        eprintln!("{table}");
        std::fs::write(target("storm.md"), table).unwrap();
    }
}

#[test]
fn the_same_seed_is_the_same_storm() {
    let all = |seed: u64| {
        let storm = Storm { plan: Plan { seed }, contenders: 200 };
        let blows: Vec<_> = (0..100).map(|nth| storm.blow(nth)).collect();
        (blows, (0..100).map(|place| storm.behaviour(place, 0)).collect::<Vec<_>>())
    };
    assert_eq!(all(7), all(7));
    assert_ne!(all(7).0, all(8).0);
    assert_ne!(all(7).1, all(8).1);
}
