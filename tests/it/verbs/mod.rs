//! The verbs of each backend, called one by one against real servers: what does not show from outside. Answers that got
//! lost, requests that arrive late or twice, leases that end between two requests.

mod etcd;
mod redis;
mod redlock;
mod zookeeper;

use std::time::Duration;

use dlock::backend::{Ask, Attempt, Backend, Busy, Ending, Lease, Patience};
use dlock::lock::{Holder, Identity, LastRun, Mode, Outcome};

/// For a server on a machine that is busy with other tests.
const PATIENCE: Patience = Patience { connect: Duration::from_secs(60), attempt: Duration::from_secs(60) };

fn ask(name: &str, mode: Mode) -> Ask {
    Ask {
        name: name.parse().unwrap(),
        who: Identity::of_this_process("make all").unwrap(),
        mode,
        ttl: Duration::from_secs(60),
        queue: true,
        once: None,
    }
}

/// The end of a successful run, the same whenever it is asked for.
fn ending(lease: &Lease) -> Ending {
    let (fencing_token, acquired_at) = (Some(lease.token), Some(std::time::SystemTime::UNIX_EPOCH));
    let holder = Holder { fencing_token, acquired_at, owner: Some(lease.owner.to_string()), ..Holder::default() };
    let last_run = LastRun { outcome: Outcome::Exited, exit_code: Some(0), ..LastRun::vanished(&holder) };
    Ending { last_run: Some(last_run), keep: 20, hold_until: None }
}

async fn granted(backend: &mut dyn Backend, ask: &Ask) -> Lease {
    match backend.try_acquire(ask).await.unwrap() {
        Attempt::Granted(lease) => lease,
        other => panic!("{other:?}"),
    }
}

async fn busy(backend: &mut dyn Backend, ask: &Ask) -> Busy {
    match backend.try_acquire(ask).await.unwrap() {
        Attempt::Busy(busy) => busy,
        other => panic!("{other:?}"),
    }
}

/// Whoever is told finds it changed; a hang is the failure.
async fn told(backend: &mut dyn Backend) {
    tokio::time::timeout(Duration::from_secs(60), backend.changed()).await.expect("nobody told us").unwrap();
}
