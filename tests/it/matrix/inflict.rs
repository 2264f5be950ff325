//! How a fault is done to a scene.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::fault::Fault::{self, *};
use super::scene::{Scene, TTL};
use crate::support::{Bed, Leader, Proxy, living_with, signal, unique, until};

/// How far clocks are set.
const HOUR: i64 = 3600;

impl Fault {
    /// Breaks something, and repairs what has to work again for the waiter to get on.
    pub fn inflict(self, scene: &mut Scene) {
        match self {
            PathFrozen | AnswersLate => scene.site.ways(Proxy::freeze),
            PathCut => scene.site.ways(Proxy::cut),
            PathHalfOpen => scene.site.ways(Proxy::swallow_answers),
            PathSlowHalf => scene.site.slow_ways(TTL / 2),
            PathSlowOnce => scene.site.slow_ways(TTL),
            PathSlowTwice => scene.site.slow_ways(TTL * 2),
            CommandLeavesDaemons | CommandTimedOut => {}
            ServersPausedBriefly
            | ServersPaused
            | ServersKilled
            | ServersRestarted
            | ServersRestartedEmpty
            | OneRestartedEmpty
            | MajorityRotates
            | ClockForward
            | ClockBack => self.inflict_on_servers(scene),
            LeaderKilled | LeaderFrozen | LeaderWoken | LeaderLost | FollowerKilled => self.inflict_on_one(scene),
            DiskFull => fill_disk(scene),
            RecordDeleted | Flushed | Evicted => self.inflict_on_data(scene),
            Revoked => {
                let order = scene.site.dlock().args(["force-release", &scene.name, "--yes"]);
                order.ended().expect(0);
            }
            DlockStopped | DlockKilled | DlockAborted | DlockOutOfMemory | GuardianKilled | GuardianStopped
            | AllStopped | MachineFrozen | CommandForks | CommandChains | CommandStopped => {
                self.inflict_on_processes(scene)
            }
        }
    }

    fn inflict_on_servers(self, scene: &mut Scene) {
        let back = |forgetting: bool, count: usize| {
            for server in &scene.site.servers[..count] {
                server.kill();
                if forgetting {
                    server.forget();
                }
                server.start_again();
            }
        };
        let majority = scene.site.majority().len();
        match self {
            ServersPausedBriefly => {
                scene.site.majority().iter().for_each(|server| server.freeze());
                // This is the fault itself: a pause of this length.
                std::thread::sleep(TTL / 2);
                scene.site.majority().iter().for_each(|server| server.thaw());
            }
            ServersPaused => {
                scene.site.majority().iter().for_each(|server| server.freeze());
                scene.await_holders_end();
                scene.site.majority().iter().for_each(|server| server.thaw());
            }
            ServersKilled => {
                scene.site.majority().iter().for_each(|server| server.kill());
                scene.await_holders_end();
                scene.site.majority().iter().for_each(|server| server.start_again());
            }
            ServersRestarted => back(false, majority),
            ServersRestartedEmpty => back(true, majority),
            OneRestartedEmpty => back(true, 1),
            ClockForward => scene.site.set_clocks_ahead(HOUR),
            ClockBack => scene.site.set_clocks_ahead(-HOUR),
            // The holder had the first nodes; the next one gets the last ones.
            _ => {
                scene.holder.signal(Signal::SIGKILL);
                scene.await_holders_end();
                scene.site.servers.last().unwrap().start_again();
                scene.site.servers[0].freeze();
            }
        }
    }

    /// On one of several servers that are not all the same.
    fn inflict_on_one(self, scene: &mut Scene) {
        if self == FollowerKilled {
            let killed = scene.site.follower();
            scene.site.servers[killed].kill();
            scene.await_end_or_lease();
            return scene.site.servers[killed].start_again();
        }
        let leader = scene.site.leader();
        match self {
            LeaderKilled => leader.kill(),
            LeaderLost => {
                let replica = &scene.site.servers[scene.site.follower()];
                leader.freeze();
                replica.kill();
                replica.forget();
                replica.start_again();
                leader.kill();
            }
            _ => leader.freeze(),
        }
        match self {
            LeaderWoken => {
                scene.site.await_another_than(leader);
                leader.thaw();
            }
            LeaderKilled | LeaderLost => {
                if let Leader::OfPair { may_come_back } = scene.site.place.leader {
                    scene.site.await_another_than(leader);
                    if may_come_back {
                        leader.start_again();
                    }
                }
            }
            _ => {}
        }
    }

    fn inflict_on_data(self, scene: &mut Scene) {
        let name = &scene.name;
        match self {
            RecordDeleted if scene.site.servers.is_empty() => {
                std::fs::remove_file(scene.site.files.lock_file(name)).unwrap();
            }
            RecordDeleted if scene.site.place.independent => {
                scene.site.majority().iter().for_each(|server| server.delete_record(name));
            }
            RecordDeleted => scene.site.servers[0].delete_record(name),
            Flushed => scene.site.majority().iter().for_each(|server| drop(server.told(&["FLUSHALL"]))),
            _ => {
                for server in scene.site.majority() {
                    server.told(&["CONFIG", "SET", "maxmemory-policy", "allkeys-random"]);
                    server.told(&["CONFIG", "SET", "maxmemory", "1"]);
                    // A server without memory evicts when somebody writes.
                    until("the key to be evicted", || {
                        server.told(&["SET", "anything", "x"]);
                        server.told(&["EXISTS", &format!("dlock:{name}")]) == "0"
                    });
                    server.told(&["CONFIG", "SET", "maxmemory", "0"]);
                }
            }
        }
    }

    fn inflict_on_processes(self, scene: &mut Scene) {
        match self {
            DlockStopped | CommandForks | CommandChains | CommandStopped => scene.holder.signal(Signal::SIGSTOP),
            DlockKilled => scene.holder.signal(Signal::SIGKILL),
            DlockAborted => scene.holder.signal(Signal::SIGABRT),
            DlockOutOfMemory => exhaust_memory(scene),
            GuardianKilled => signal(scene.holder.guardian(), Signal::SIGKILL),
            GuardianStopped => {
                signal(scene.holder.guardian(), Signal::SIGSTOP);
                scene.site.ways(Proxy::freeze);
            }
            _ => {
                let mut everything = living_with(&scene.mark);
                // Where there is none, stopping is as good as it gets; then the guardian wakes up by itself.
                let freezer = Some(&everything).filter(|_| self == MachineFrozen).and_then(|all| Freezer::of(all));
                if freezer.is_none() {
                    everything.iter().for_each(|&pid| signal(pid, Signal::SIGSTOP));
                }
                match scene.site.servers[..] {
                    // The fault itself: no lease runs out behind its back, so nobody gets on before it is over.
                    [] => std::thread::sleep(TTL * 3 / 2),
                    _ => scene.await_waiters_end(),
                }
                drop(freezer);
                // The command first, the worst order; who wakes early may end those behind it.
                everything.sort_unstable_by_key(|&pid| std::cmp::Reverse(pid));
                for pid in everything {
                    let _ = kill(Pid::from_raw(pid.try_into().unwrap()), Signal::SIGCONT);
                }
                if scene.site.servers.is_empty() {
                    scene.await_end_or_another_lease();
                    scene.holder.kill();
                }
            }
        }
    }
}

/// Processes that do not run at all, whatever is sent to them, until this is dropped: a cgroup, of either version, that
/// root can make.
struct Freezer {
    group: PathBuf,
    state: (&'static str, &'static str),
}

impl Freezer {
    fn of(processes: &[u32]) -> Option<Freezer> {
        let first = ("/sys/fs/cgroup/freezer", "freezer.state", "FROZEN", "THAWED");
        let second = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(|base| (base, "cgroup.freeze", "1", "0"));
        [first].into_iter().chain(second).find_map(|(base, file, freeze, thaw)| {
            let group = Path::new(base).join(unique("frozen"));
            std::fs::create_dir(&group).ok()?;
            let freezer = Freezer { group, state: (file, thaw) };
            processes.iter().try_for_each(|pid| freezer.write("cgroup.procs", &pid.to_string())).ok()?;
            freezer.write(file, freeze).ok()?;
            Some(freezer)
        })
    }

    /// Into what is there: in an ordinary directory nothing is frozen.
    fn write(&self, file: &str, text: &str) -> std::io::Result<()> {
        File::options().write(true).open(self.group.join(file))?.write_all(text.as_bytes())
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let _ = self.write(self.state.0, self.state.1);
        // Its processes may leave it late, or be killed; an empty group is nobody's concern.
        let base = self.group.parent().unwrap();
        for pid in std::fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = std::fs::write(base.join("cgroup.procs"), pid);
        }
        let _ = std::fs::remove_dir(&self.group);
    }
}

/// A holder needs no room; whoever comes after it does.
fn fill_disk(scene: &mut Scene) {
    scene.site.files.fill();
    scene.await_end_or_lease();
    scene.holder.kill();
    until("the waiter to find no room", || {
        // What the holder left is cleared away, and would be room.
        scene.site.files.fill();
        scene.waiter.stderr().contains("No space left") || scene.waiter.has_ended()
    });
    scene.site.files.clear();
}

/// Leaves dlock no memory but what it has, and has it answered with more than fits in there. A limit on the
/// address space would not do: glibc reserves that beforehand for each thread.
fn exhaust_memory(scene: &mut Scene) {
    let limit = ["--pid", &scene.holder.pid().to_string(), "--data=1"];
    let limited = std::process::Command::new("prlimit").args(limit).output().unwrap();
    assert!(limited.status.success(), "{limited:?}");
    let large = "return redis.call('SET', KEYS[1], string.rep('x', 2^20), 'PX', 1000)";
    scene.site.servers[0].told(&["EVAL", large, "1", &format!("dlock:{}", scene.name)]);
}
