//! What every contender asked for and was told, and whether one lock could have answered so.
//!
//! A contender is told something no later than its line was read here, and it asked no earlier than it was
//! started; instants are ours and the witness's, on CLOCK_BOOTTIME. Whatever was not told (a dlock that was killed,
//! a release without an answer) is unknown: it may have happened or not, and a history is lawful if it is lawful
//! one way or the other.
//!
//! Tokens give the order of the grants. In that order each gets the earliest moment that is left, which is never
//! worse for those after it; a history for which that fails fits no lock.

use std::time::Duration;

use crate::support::Run;

/// One dlock from its start to its end.
#[derive(Clone, Debug)]
pub struct Contender {
    pub name: String,
    /// Before it was started, and after it was seen to have ended.
    pub invoked: u64,
    pub returned: u64,
    /// As a shell would see it.
    pub code: i32,
    /// In the order in which it was told them, with the instant by which each had been read.
    pub told: Vec<(u64, RunEvent)>,
    /// What the witness saw of its command.
    pub runs: Vec<Run>,
}

/// An event of `--log json`, as far as it says anything about the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunEvent {
    /// The grant, with its token.
    Acquired(u64),
    Busy,
    /// A renewal's result is unknown.
    Trouble,
    /// And now one is known to have been granted.
    Recovered,
    /// The server says that the lock is somebody else's, or nobody's.
    Lost,
    /// No renewal came in time.
    Expired,
    /// Its guardian was too slow for the lease, as one that is stopped for a while is, and ended it early.
    Outgrown,
    Released,
    /// The release's result is unknown.
    ReleaseFailed,
    Other,
}

impl RunEvent {
    pub fn parse(line: &str) -> RunEvent {
        let event: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let message = event["message"].as_str().unwrap_or_default();
        match event["event"].as_str().unwrap_or_default() {
            "acquired" => {
                let token = message.split("token ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok());
                RunEvent::Acquired(token.unwrap_or_else(|| panic!("no token: {line}")))
            }
            "busy" => RunEvent::Busy,
            "trouble" => RunEvent::Trouble,
            "recovered" => RunEvent::Recovered,
            "lost" => RunEvent::Lost,
            "expired" => RunEvent::Expired,
            "outgrown" => RunEvent::Outgrown,
            "released" => RunEvent::Released,
            "release-failed" => RunEvent::ReleaseFailed,
            _ => RunEvent::Other,
        }
    }
}

/// How long a lease lasts, and how long a holder leaves its command in peace without a renewal.
#[derive(Clone, Copy, Debug)]
pub struct Lease {
    pub ttl: Duration,
    pub patience: Duration,
}

/// A grant that somebody was told of, and the bounds of its hold.
#[derive(Debug)]
struct Hold<'a> {
    who: &'a Contender,
    token: u64,
    /// By now it must have begun.
    begun: u64,
    /// Before that it cannot have ended, for the command lived.
    lived: Option<u64>,
    /// By now it must have ended: the release was confirmed.
    over: Option<u64>,
}

impl Contender {
    fn when(&self, what: impl Fn(RunEvent) -> bool) -> Option<u64> {
        self.told.iter().find(|(_, told)| what(*told)).map(|(seen, _)| *seen)
    }

    fn is_told(&self, what: RunEvent) -> bool {
        self.when(|told| told == what).is_some()
    }

    fn hold(&self) -> Option<Hold<'_>> {
        let (seen, token) = self.told.iter().find_map(|(seen, told)| match told {
            RunEvent::Acquired(token) => Some((*seen, *token)),
            _ => None,
        })?;
        let begun = self.runs.iter().map(|run| run.first).fold(seen, u64::min);
        let lived = self.runs.iter().map(|run| run.last).max();
        Some(Hold { who: self, token, begun, lived, over: self.when(|told| told == RunEvent::Released) })
    }

    /// Whether it was killed, so that nobody knows what it would have said next.
    fn is_cut_short(&self) -> bool {
        self.code == 137
    }

    /// What in its own story does not fit together.
    fn contradiction(&self, lease: Lease) -> Option<String> {
        let (hold, runs) = (self.hold(), self.runs.len());
        let lost = self.when(|told| matches!(told, RunEvent::Lost | RunEvent::Expired));
        let wrong = match self.code {
            _ if runs > 1 => "its command ran more than once",
            _ if runs == 1 && hold.is_none() => "its command ran without a grant",
            _ if hold.as_ref().is_some_and(|hold| self.runs.iter().any(|run| run.token != hold.token)) => {
                "its command had another token than was granted"
            }
            0 if runs == 0 => "success, and its command never ran",
            0 if lost.is_some() => "success, and the lock was lost",
            0 if !self.is_told(RunEvent::Released) && !self.is_told(RunEvent::ReleaseFailed) => {
                "success, and the lock was never released"
            }
            69 | 75 if runs > 0 || hold.is_some() => "refused, and granted all the same",
            75 if !self.is_told(RunEvent::Busy) => "refused, and nobody said busy",
            79 if lost.is_none() && !self.is_told(RunEvent::Outgrown) => "lost, and nobody said so",
            79 if hold.is_none() => "lost what was never granted",
            _ if lost.is_some_and(|seen| seen < self.invoked + nanos(lease.patience)) => {
                "lost sooner than any lease runs out"
            }
            _ if self.outlives_its_lease(lease) => "its command lived on after the last renewal's lease",
            _ => return None,
        };
        Some(format!("{}: {wrong}", self.name))
    }

    /// After a renewal that is unknown, the last that is known had been asked for before.
    fn outlives_its_lease(&self, lease: Lease) -> bool {
        let renewals = self.told.iter().skip_while(|(_, told)| !matches!(told, RunEvent::Acquired(_)));
        let last = renewals.filter(|(_, told)| matches!(told, RunEvent::Trouble | RunEvent::Recovered)).last();
        let Some(&(seen, RunEvent::Trouble)) = last else { return false };
        // One that was killed may have been granted another before it could say so.
        !self.is_cut_short() && self.runs.iter().any(|run| run.last > seen + nanos(lease.ttl))
    }

    /// Whether it may have been in the way of somebody at some time in between: as a holder, as one that nobody
    /// knows of, or as one that waits in front.
    fn may_be_there(&self, from: u64, to: u64, lease: Lease) -> bool {
        let surely_gone = match self.hold() {
            // One that was refused leaves nothing; one that was killed may leave a lease.
            None if self.is_cut_short() => self.returned + nanos(lease.ttl),
            None => self.returned,
            Some(Hold { over: Some(over), .. }) => over,
            Some(_) => self.returned + nanos(lease.ttl),
        };
        self.invoked <= to && surely_gone >= from
    }
}

fn nanos(span: Duration) -> u64 {
    span.as_nanos().try_into().unwrap()
}

/// Everything that no lock could have answered; empty for a lawful history.
pub fn contradictions(history: &[Contender], lease: Lease) -> Vec<String> {
    let mut found: Vec<String> = history.iter().filter_map(|one| one.contradiction(lease)).collect();
    for one in history.iter().filter(|one| one.is_told(RunEvent::Busy)) {
        let others = history.iter().filter(|other| other.name != one.name);
        if !others.clone().any(|other| other.may_be_there(one.invoked, one.returned, lease)) {
            found.push(format!("{}: busy, and nobody else was there", one.name));
        }
    }
    found.extend(order(history));
    found
}

/// One after the other in the order of their tokens, each as early as it can.
fn order(history: &[Contender]) -> Vec<String> {
    let mut holds: Vec<Hold> = history.iter().filter_map(Contender::hold).collect();
    holds.sort_by_key(|hold| hold.token);
    let mut found = Vec::new();
    let mut before: Option<(&Hold, u64)> = None;
    for hold in &holds {
        let name = &hold.who.name;
        if let Some((last, free)) = before {
            if last.token == hold.token {
                found.push(format!("{name}: token {}, which {} had", hold.token, last.who.name));
            }
            if free > hold.begun {
                let late = Duration::from_nanos(free - hold.begun);
                found.push(format!("{name}: held the lock {late:?} before {} was done with it", last.who.name));
            }
        }
        let granted = before.map_or(0, |(_, free)| free).max(hold.who.invoked);
        let end = granted.max(hold.lived.unwrap_or(0));
        if hold.over.is_some_and(|over| over < end) {
            found.push(format!("{name}: released before its command was dead, or before it was granted"));
        }
        before = Some((hold, end));
    }
    found
}
