//! What can go wrong, in the words of the report, and what it takes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::scene::TTL;
use super::site::Site;
use crate::support::{Expect, Ground};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    PathFrozen,
    PathCut,
    PathHalfOpen,
    PathSlowHalf,
    PathSlowOnce,
    PathSlowTwice,
    AnswersLate,
    ServersPausedBriefly,
    ServersPaused,
    ServersKilled,
    ServersRestarted,
    ServersRestartedEmpty,
    OneRestartedEmpty,
    LeaderKilled,
    LeaderFrozen,
    LeaderWoken,
    LeaderLost,
    FollowerKilled,
    MajorityRotates,
    ClockForward,
    ClockBack,
    DiskFull,
    RecordDeleted,
    Flushed,
    Evicted,
    DlockStopped,
    DlockKilled,
    DlockAborted,
    DlockOutOfMemory,
    GuardianKilled,
    GuardianStopped,
    AllStopped,
    MachineFrozen,
    CommandForks,
    CommandChains,
    CommandStopped,
    CommandLeavesDaemons,
    CommandTimedOut,
    Revoked,
}

use Fault::*;

/// Faults that go together.
pub mod faults {
    use super::Fault::{self, *};

    /// What needs no server.
    pub const ANYWHERE: &[Fault] = &[
        DlockStopped,
        DlockKilled,
        DlockAborted,
        GuardianKilled,
        AllStopped,
        MachineFrozen,
        CommandForks,
        CommandChains,
        CommandStopped,
        CommandLeavesDaemons,
        CommandTimedOut,
        Revoked,
    ];
    pub const PATHS: &[Fault] =
        &[PathFrozen, PathCut, PathHalfOpen, PathSlowHalf, PathSlowOnce, PathSlowTwice, AnswersLate, GuardianStopped];
    pub const SERVERS: &[Fault] = &[ServersPausedBriefly, ServersPaused, ServersKilled, ServersRestarted];
    pub const ELECTIONS: &[Fault] = &[LeaderKilled, LeaderFrozen, LeaderWoken];
    pub const CLOCKS: &[Fault] = &[ClockForward, ClockBack];
}

impl Fault {
    pub const ALL: [Fault; 39] = [
        PathFrozen,
        PathCut,
        PathHalfOpen,
        PathSlowHalf,
        PathSlowOnce,
        PathSlowTwice,
        AnswersLate,
        ServersPausedBriefly,
        ServersPaused,
        ServersKilled,
        ServersRestarted,
        ServersRestartedEmpty,
        OneRestartedEmpty,
        LeaderKilled,
        LeaderFrozen,
        LeaderWoken,
        LeaderLost,
        FollowerKilled,
        MajorityRotates,
        ClockForward,
        ClockBack,
        DiskFull,
        RecordDeleted,
        Flushed,
        Evicted,
        DlockStopped,
        DlockKilled,
        DlockAborted,
        DlockOutOfMemory,
        GuardianKilled,
        GuardianStopped,
        AllStopped,
        MachineFrozen,
        CommandForks,
        CommandChains,
        CommandStopped,
        CommandLeavesDaemons,
        CommandTimedOut,
        Revoked,
    ];

    pub fn name(self) -> &'static str {
        match self {
            PathFrozen => "holder's path frozen (black hole)",
            PathCut => "holder's path cut (RST)",
            PathHalfOpen => "holder's path half-open: requests arrive, answers do not",
            PathSlowHalf => "holder's path slowed to 0.5 ttl",
            PathSlowOnce => "holder's path slowed to 1 ttl",
            PathSlowTwice => "holder's path slowed to 2 ttl",
            AnswersLate => "the grant's answers late, then the path frozen",
            ServersPausedBriefly => "server (a majority) stopped for less than the ttl",
            ServersPaused => "server (a majority) stopped for more than the ttl",
            ServersKilled => "server (a majority) killed, back after the ttl",
            ServersRestarted => "server (a majority) killed, back at once with its data",
            ServersRestartedEmpty => "server (a majority) killed, back at once without its data",
            OneRestartedEmpty => "one node killed, back at once without its data",
            LeaderKilled => "leader killed",
            LeaderFrozen => "leader stopped",
            LeaderWoken => "leader stopped, woken when another leads",
            LeaderLost => "leader killed before its replica heard of the grant",
            FollowerKilled => "replica killed, back after the ttl",
            MajorityRotates => "another majority, one node's clock ahead",
            ClockForward => "clock of the server (a majority) set an hour ahead",
            ClockBack => "clock of the server (a majority) set an hour back",
            DiskFull => "disk full, the tool SIGKILLed",
            RecordDeleted => "the lock's record deleted by hand",
            Flushed => "FLUSHALL (on a majority)",
            Evicted => "the lock's key evicted (on a majority)",
            DlockStopped => "the tool SIGSTOPped",
            DlockKilled => "the tool SIGKILLed",
            DlockAborted => "dlock aborted (SIGABRT)",
            DlockOutOfMemory => "dlock out of memory (RLIMIT_DATA)",
            GuardianKilled => "guardian SIGKILLed",
            GuardianStopped => "guardian SIGSTOPped, path frozen",
            AllStopped => "dlock, guardian and command SIGSTOPped",
            MachineFrozen => "dlock, guardian and command frozen together, and woken",
            CommandForks => "command forks in a loop, dlock SIGSTOPped",
            CommandChains => "command is 6 chains of processes that fork and end without a pause, dlock SIGSTOPped",
            CommandStopped => "command stopped, dlock SIGSTOPped",
            CommandLeavesDaemons => "command ends and leaves daemons behind",
            CommandTimedOut => "command ignores TERM past its --timeout",
            Revoked => "lock taken away by an operator, command ignores TERM",
        }
    }

    /// What the holder's command is like. It never gives way by itself, unless that is the point.
    pub fn witness(self) -> &'static [&'static str] {
        match self {
            CommandForks => &["fork-loop", "ignore-term"],
            CommandChains => &["chains=6", "ignore-term"],
            CommandStopped => &["stop", "ignore-term"],
            CommandLeavesDaemons => &["for=1500", "daemons=3"],
            _ => &["ignore-term", "daemons=2"],
        }
    }

    /// Processes to wait for before anything is broken.
    pub fn processes(self) -> usize {
        match self {
            CommandForks => 10,
            CommandChains => 7,
            CommandStopped => 1,
            CommandLeavesDaemons => 4,
            _ => 3,
        }
    }

    pub fn options(self) -> &'static [&'static str] {
        if self == CommandTimedOut { &["--timeout", "1500ms"] } else { &[] }
    }

    /// Whether the holder comes to its end without anybody's doing.
    pub fn ends_by_itself(self) -> bool {
        matches!(self, CommandLeavesDaemons | CommandTimedOut)
    }

    /// Whether the holder may keep the lock through it; it is ended by SIGKILL when it has outlived a lease.
    pub fn may_cost_nothing(self) -> bool {
        match self {
            ServersPausedBriefly | ServersRestarted | ClockBack => true,
            LeaderKilled | LeaderFrozen | LeaderWoken | LeaderLost | FollowerKilled => true,
            // ZooKeeper does not care.
            ClockForward => true,
            // Redlock takes nodes again that have forgotten it.
            ServersRestartedEmpty | OneRestartedEmpty | RecordDeleted | Flushed | Evicted => true,
            _ => false,
        }
    }

    /// What is usually expected.
    pub fn expectation(self) -> Expect {
        match self {
            // Nothing on the machine runs, so nothing on it can act in time.
            MachineFrozen => Expect::TokenRefuses,
            // Leases end by the server's clock, and a server that believes an hour has passed has none left: whoever
            // waits is told of it in the same moment as the holder.
            ClockForward => Expect::TokenRefuses,
            _ => Expect::NoOverlap,
        }
    }

    /// How the holder's dlock usually ends.
    pub fn exit_codes(self) -> &'static [i32] {
        match self {
            CommandLeavesDaemons => &[0],
            CommandTimedOut => &[124],
            GuardianKilled => &[125],
            // It ends the command itself; whether it then still finds out that the lease was over is chance.
            GuardianStopped => &[79, 125],
            DlockAborted | DlockOutOfMemory => &[134],
            DlockKilled | MajorityRotates | DiskFull => &[137],
            ClockForward | RecordDeleted | Flushed | Evicted | ServersRestartedEmpty => &[79],
            _ if self.may_cost_nothing() => &[79, 137],
            _ => &[79],
        }
    }

    /// Whether it keeps a living command from beating.
    pub fn silences(self) -> bool {
        matches!(self, AllStopped | MachineFrozen | CommandStopped)
    }

    /// What the place has to have for it.
    pub fn ground(self) -> Ground {
        match self {
            ClockForward | ClockBack => Ground::OwnClocks,
            DiskFull => Ground::SmallDisk,
            _ => Ground::Plain,
        }
    }

    /// What has to be so before the holder comes.
    pub fn prepare(self, site: &Site, name: &str) {
        match self {
            // As late as its grant can bear.
            AnswersLate => site.ways(|way| way.slow(Duration::ZERO, TTL / site.place.late)),
            MajorityRotates => {
                // As if its clock had been an hour ahead when it granted the lock to somebody before.
                let ahead = SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_secs(3600);
                let counter = format!("{{dlock:{name}}}:token");
                site.servers[0].told(&["SET", &counter, &ahead.as_micros().to_string()]);
                site.servers.last().unwrap().kill();
            }
            _ => {}
        }
    }
}
