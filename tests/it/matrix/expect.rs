//! What is expected of every pair of a backend and a fault: the table that the matrix is held against.

use super::fault::Fault;
use super::site::Backend;

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

/// `None`: there is no such thing, or it cannot be played.
pub fn expectation(backend: Backend, fault: Fault) -> Option<Expect> {
    use Backend as B;
    use Expect::{NoOverlap, NoOverlapButTokens, TokenRefuses};
    use Fault as F;
    if backend.is_pair() {
        return of_a_pair(backend, fault);
    }
    match (fault, backend) {
        (
            F::PathFrozen
            | F::PathCut
            | F::PathHalfOpen
            | F::PathSlowHalf
            | F::PathSlowOnce
            | F::PathSlowTwice
            | F::AnswersLate
            | F::ServersPausedBriefly
            | F::ServersPaused
            | F::ServersKilled
            | F::ServersRestarted
            | F::ServersRestartedEmpty
            | F::OneRestartedEmpty
            | F::ClockForward
            | F::ClockBack
            | F::GuardianStopped,
            B::File,
        ) => None,
        (F::DiskFull, backend) if backend != B::File => None,
        // A dlock that holds a lock asks for no memory, unless it is answered with more than it has room for, which
        // others than Redis cannot be made to do.
        (F::DlockOutOfMemory, backend) if backend != B::Redis && !backend.is_redlock() => None,
        // A database that lost its disk is another database; one that is there refuses to have rows deleted.
        (F::ServersRestartedEmpty | F::RecordDeleted, B::Postgres) => None,
        (F::ServersRestartedEmpty, B::Etcd1 | B::ZooKeeper1) => Some(NoOverlapButTokens),
        // Members that have forgotten are replaced by their operators, not restarted.
        (F::ServersRestartedEmpty, B::Etcd3 | B::ZooKeeper3) => None,
        (F::LeaderKilled | F::LeaderFrozen | F::LeaderWoken, backend) if !backend.elects() => None,
        (F::LeaderLost | F::FollowerKilled, _) => None,
        (F::OneRestartedEmpty | F::MajorityRotates, backend) if !backend.is_redlock() => None,
        (F::Flushed | F::Evicted, backend) if backend != B::Redis && !backend.is_redlock() => None,
        // Go asks the kernel for the time, past every library that could tell it another. (By etcd's design its
        // leases do not depend on it.) What one ZooKeeper server does with its clock is what three do.
        (F::ClockForward | F::ClockBack, B::Etcd1 | B::Etcd3 | B::ZooKeeper3) => None,
        // A session lasts for so long on a clock that nobody sets.
        (F::ClockForward, B::ZooKeeper1) => Some(NoOverlap),
        // Leases end by the server's clock, and a server that believes an hour has passed has none left: whoever
        // waits is told of it in the same moment as the holder.
        (F::ClockForward, _) => Some(TokenRefuses),
        // The kernel keeps the lock for whoever has it open, awake or not.
        (F::MachineFrozen, B::File) => Some(NoOverlap),
        // Nothing on the machine runs, so nothing on it can act in time.
        (F::MachineFrozen, _) => Some(TokenRefuses),
        // Whoever is free to take the lock is told of it in the same moment as its holder.
        (F::RecordDeleted, B::File) => Some(TokenRefuses),
        (F::ServersRestartedEmpty | F::RecordDeleted | F::Flushed | F::Evicted, B::Redlock3 | B::Redlock5) => {
            Some(TokenRefuses)
        }
        _ => Some(NoOverlap),
    }
}

/// A leader and one that takes its place. What is absent here is played where there is only one server, or cannot be
/// played: docs/faults.md says which and why.
fn of_a_pair(backend: Backend, fault: Fault) -> Option<Expect> {
    use Backend as B;
    use Expect::{NoOverlap, TokenRefuses};
    use Fault as F;
    match (fault, backend) {
        // Redis tells its client before its replica: what that has not heard of when it takes over never was. A
        // waiter that saw the holder says so to the new master; but a newcomer has seen nothing, and nobody has
        // seen the last renewal for certain.
        (F::LeaderKilled | F::LeaderFrozen | F::LeaderWoken | F::LeaderLost, B::RedisSentinel) => Some(TokenRefuses),
        // With wait-replicas=1 nothing counts before the one replica has it, and a former master that still takes
        // itself for one has no replica to confirm anything: as long as the two servers' clocks agree.
        (F::LeaderKilled | F::LeaderWoken, B::RedisReplicated) => Some(NoOverlap),
        // Nor does a commit here; and a lease from before a failover counts anew, whatever the clocks say.
        (F::LeaderKilled | F::LeaderWoken, B::PostgresPair) => Some(NoOverlap),
        (F::FollowerKilled, _) => Some(NoOverlap),
        // The sentinel may make the one or the other the master when they are back.
        (F::ServersPausedBriefly | F::ServersPaused | F::ServersKilled | F::ServersRestarted, B::RedisSentinel) => {
            Some(TokenRefuses)
        }
        (F::ServersPausedBriefly | F::ServersPaused | F::ServersKilled | F::ServersRestarted, _) => Some(NoOverlap),
        (F::PathFrozen | F::PathCut | F::PathHalfOpen | F::PathSlowTwice | F::GuardianStopped, B::PostgresPair) => {
            Some(NoOverlap)
        }
        (F::RecordDeleted | F::DlockOutOfMemory, B::RedisSentinel | B::RedisReplicated) => Some(NoOverlap),
        (F::MachineFrozen, _) => Some(TokenRefuses),
        (F::DlockStopped | F::DlockKilled | F::DlockAborted | F::GuardianKilled, _) => Some(NoOverlap),
        (F::CommandForks | F::CommandChains | F::CommandStopped | F::CommandLeavesDaemons | F::CommandTimedOut, _) => {
            Some(NoOverlap)
        }
        (F::Revoked, _) => Some(NoOverlap),
        _ => None,
    }
}

/// How a shell would see the holder's dlock end: the contract's exit codes, or 128+N for one that was itself
/// killed by signal N. Where the holder may keep the lock through the fault, it is killed after a lease: 137.
pub fn exit_codes(backend: Backend, fault: Fault) -> &'static [i32] {
    use Backend as B;
    use Fault as F;
    match (fault, backend) {
        (F::CommandLeavesDaemons, _) => &[0],
        (F::CommandTimedOut, _) => &[124],
        (F::GuardianKilled, _) => &[125],
        // It ends the command itself; whether it then still finds out that the lease was over is chance.
        (F::GuardianStopped, _) => &[79, 125],
        (F::DlockAborted | F::DlockOutOfMemory, _) => &[134],
        (F::DlockKilled | F::MajorityRotates | F::DiskFull, _) => &[137],
        // The kernel has kept the lock. Whoever wakes first decides: the guardian, whose time is over; dlock, which
        // takes a guardian for dead that has not acted in time; or the keeper, who finds that all is well.
        (F::MachineFrozen, B::File) => &[79, 125, 137],
        (F::FollowerKilled, B::RedisReplicated | B::PostgresPair) => &[79],
        // ZooKeeper's sessions do not go by the wall clock, and Redlock takes nodes again that have forgotten it. On
        // PostgreSQL the holder may renew before anybody asks.
        (F::ClockForward, B::ZooKeeper1 | B::Postgres) => &[79, 137],
        (F::ClockForward | F::RecordDeleted | F::Flushed | F::Evicted | F::ServersRestartedEmpty, backend)
            if !backend.is_redlock() =>
        {
            &[79]
        }
        _ if fault.may_cost_nothing() => &[79, 137],
        _ => &[79],
    }
}
