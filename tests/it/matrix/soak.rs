//! One holder that keeps its lock through one short fault after the other.

use std::time::Instant;

use nix::sys::signal::Signal;

use super::site::{Backend, Site};
use crate::support::{Dlock, Log, Proxy, Running, until};

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
