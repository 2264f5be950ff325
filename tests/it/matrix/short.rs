//! What every run of the tests plays: each backend with the faults that tell most about it, and each fault on
//! the backend where it is cheapest.

use super::fault::Fault as F;
use super::site::Backend;

pub fn in_short(backend: Backend, fault: F) -> bool {
    match backend {
        Backend::File | Backend::Redis => true,
        Backend::Redlock5 => false,
        Backend::Etcd1 => matches!(
            fault,
            F::PathFrozen | F::PathCut | F::ServersPaused | F::RecordDeleted | F::DlockStopped | F::MachineFrozen
        ),
        Backend::ZooKeeper1 => {
            matches!(fault, F::PathFrozen | F::PathCut | F::ServersPaused | F::RecordDeleted | F::ClockForward)
        }
        Backend::Etcd3 => matches!(fault, F::LeaderKilled | F::LeaderWoken | F::ServersKilled),
        Backend::ZooKeeper3 => matches!(fault, F::LeaderKilled | F::ServersKilled),
        Backend::Redlock3 => matches!(
            fault,
            F::PathFrozen | F::PathCut | F::ServersPaused | F::OneRestartedEmpty | F::MajorityRotates | F::DlockStopped
        ),
        Backend::Postgres => matches!(
            fault,
            F::PathFrozen | F::AnswersLate | F::ServersPaused | F::ServersKilled | F::ServersRestarted | F::ClockBack
        ),
        Backend::RedisSentinel => matches!(fault, F::LeaderLost | F::DlockStopped),
        Backend::RedisReplicated => matches!(fault, F::LeaderKilled | F::ServersRestarted),
        Backend::PostgresPair => matches!(fault, F::LeaderWoken | F::FollowerKilled | F::PathFrozen),
    }
}
