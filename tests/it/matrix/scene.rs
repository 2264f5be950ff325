//! One cell, played once: a holder behind its own way, a waiter behind another, a fault; and what the witness
//! saw of it.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::fault::Fault;
use super::site::{Backend, Site};
use super::tool::{Role, Tool};
use crate::support::{Bed, Log, Proxy, Running, living_with, overlaps, to_the_end, tokens_grow, unique, until};

pub const TTL: Duration = Duration::from_secs(3);

/// So often a scene is set before it is given up.
const TRIES: usize = 3;

pub struct Scene {
    pub site: Site,
    pub name: String,
    /// In the environment of the holder and of all it starts.
    pub mark: String,
    pub holder: Running,
    pub waiter: Running,
    log: Log,
    /// The holder's last beat before anything was broken.
    before: u64,
}

/// What the witness saw.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// How long two commands lived at once, if they did at all; the second ends after 300 ms.
    pub overlap: Option<Duration>,
    /// From the last beat of the first command to the first of the second.
    pub hand_over: Option<Duration>,
    pub tokens_grow: bool,
    /// Whether a resource that has seen the second command's token refuses the first one's.
    pub token_refuses: bool,
    /// What of the first command still existed, awake or not, when the second began: `PID STATE`.
    pub survivors: Vec<String>,
    /// The longest time between two beats of one process: a shorter overlap might not have been seen.
    pub silence: Duration,
    /// How the holder ended, if it was waited for.
    pub code: Option<i32>,
}

/// Plays a cell; an `Err` says how it did not come to its end.
pub fn play(tool: Tool, backend: Backend, fault: Fault) -> Result<Outcome, String> {
    to_the_end(|| play_to_the_end(tool, backend, fault, TRIES))
}

fn play_to_the_end(tool: Tool, backend: Backend, fault: Fault, tries: usize) -> Outcome {
    let mut scene = Scene::set(tool, backend, fault);
    fault.inflict(&mut scene);
    if fault.may_cost_nothing() {
        scene.await_end_or_lease();
        scene.holder.kill();
    }
    scene.await_waiters_end();
    // Its place is seen before it has its first answer, without which it gives up: then it never waited for a turn.
    let never_waited = scene.waiter.code() == Some(69) && scene.log.runs().len() == 1;
    if matches!(tool, Tool::Dlock) && never_waited && tries > 1 {
        eprintln!("{} / {}: once more: {:?}", backend.name, fault.name(), scene.waiter.stderr());
        drop(scene);
        return play_to_the_end(tool, backend, fault, tries - 1);
    }
    scene.site.ways(Proxy::heal);
    // Of the others nobody knows whether they ever will.
    if matches!(tool, Tool::Dlock) || (overlaps(&scene.log.runs()).is_empty() && !tool.is_peer()) {
        scene.await_holders_end();
    }
    scene.outcome()
}

impl Scene {
    fn set(tool: Tool, backend: Backend, fault: Fault) -> Scene {
        let set = (0..TRIES).find_map(|_| Scene::try_to_set(tool, backend, fault));
        set.expect("a holder that keeps its lock until something is broken")
    }

    /// The holder runs, and the waiter waits; `None` if one of them has ended already, as it may where a lease runs
    /// out because nobody gets a processor in time.
    fn try_to_set(tool: Tool, backend: Backend, fault: Fault) -> Option<Scene> {
        let (site, log, mark, name) = (Site::on(fault.ground(), backend), Log::new(), unique("mark"), unique("job"));
        fault.prepare(&site, &name);
        let command = log.witness(fault.witness());
        let mut holder = tool.start(Role::Holder, &site, &name, fault.options(), &command, &mark);
        let runs = |log: &Log| log.runs().iter().any(|run| run.processes >= fault.processes());
        until("the holder to run", || runs(&log) || holder.has_ended());
        let command = log.witness(&["for=300"]);
        let mut waiter = tool.start(Role::Waiter, &site, &name, &[], &command, "");
        // A peer tells nobody that it waits; whenever it begins to is soon enough for what is measured of it.
        until("the waiter to wait", || tool.is_peer() || is_waited_for(&site, &name) || holder.has_ended());
        let too_early = !fault.ends_by_itself() && (holder.has_ended() || waiter.has_ended());
        if too_early || !runs(&log) {
            eprintln!("{} / {}: once more: {:?} {:?}", backend.name, fault.name(), holder.stderr(), waiter.stderr());
            return None;
        }
        let before = log.runs()[0].last;
        Some(Scene { site, name, mark, holder, waiter, log, before })
    }

    /// Until the holder has ended, or has lived on for longer than a lease that nobody renews.
    pub fn await_end_or_lease(&mut self) {
        let outlived = self.before + u64::try_from(TTL.as_nanos()).unwrap();
        until("the holder to end, or to outlive its lease", || {
            self.holder.has_ended() || self.log.runs()[0].last > outlived
        });
    }

    /// The same, counted from its next beat.
    pub fn await_end_or_another_lease(&mut self) {
        let last = |log: &Log| log.runs()[0].last;
        let before = last(&self.log);
        until("the holder to end, or to beat", || self.holder.has_ended() || last(&self.log) > before);
        self.before = last(&self.log);
        self.await_end_or_lease();
    }

    /// Servers that do not find each other again may need an operator, who looks after them now and then.
    pub fn await_waiters_end(&mut self) {
        const LOOKS_EVERY: Duration = Duration::from_secs(20);
        let mut looked = Instant::now();
        until("the waiter to have had its turn", || {
            if looked.elapsed() > LOOKS_EVERY {
                self.site.servers.last().into_iter().for_each(|server| server.begin_again());
                looked = Instant::now();
            }
            self.waiter.has_ended()
        });
    }

    /// Of its own accord; a stopped one is woken for it.
    pub fn await_holders_end(&mut self) {
        if !self.holder.has_ended() {
            self.holder.signal(Signal::SIGCONT);
        }
        until("the holder to end", || self.holder.has_ended());
    }

    fn outcome(&mut self) -> Outcome {
        let runs = self.log.runs();
        let [first, second] = &runs[..] else { panic!("not two runs: {runs:#?}\n{}", self.waiter.stderr()) };
        Outcome {
            overlap: overlaps(&runs).iter().map(|overlap| Duration::from_nanos(overlap.nanos)).max(),
            hand_over: second.first.checked_sub(first.last).map(Duration::from_nanos),
            tokens_grow: tokens_grow(&runs),
            token_refuses: self.site.refuses(first.token, second.token),
            survivors: self.log.survivors(),
            silence: self.log.longest_silence(),
            code: self.holder.code(),
        }
    }
}

fn is_waited_for(site: &Site, name: &str) -> bool {
    let shown = site.dlock().args(["status", "--json", name]).ended();
    let state: serde_json::Value = serde_json::from_str(&shown.stdout).unwrap_or_default();
    state[0]["waiters"].as_array().is_some_and(|waiters| !waiters.is_empty())
}

impl Drop for Scene {
    /// Whatever a tool that does not keep the promise has left running.
    fn drop(&mut self) {
        for pid in living_with(&self.mark) {
            // It may end between the look and the kill.
            let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGKILL);
        }
    }
}
