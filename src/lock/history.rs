//! What a lock keeps of its runs: how each ended, newest first, and when one last succeeded. A release, a forced release
//! and whoever finds a run that vanished add to it in the step that changes the lock.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};

use super::{Holder, Token, rfc3339};
use crate::clock;

/// One run under a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastRun {
    pub fencing_token: Token,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    pub host: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    pub user: String,
    pub command: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
    #[serde(with = "rfc3339")]
    pub started_at: SystemTime,
    /// For a run that vanished, when its lease ended, as far as that is known.
    #[serde(with = "rfc3339::option")]
    pub ended_at: Option<SystemTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waited_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    pub outcome: Outcome,
    pub exit_code: Option<i32>,
    pub once: Option<String>,
    /// Who ended it by taking the lock away, as `user@host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_by: Option<String>,
    #[serde(default, with = "rfc3339::option", skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<SystemTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Exited,
    Signaled,
    Lost,
    TimedOut,
    /// Its lease ran out because its dlock died.
    Vanished,
}

impl LastRun {
    /// Of a holder whose run ends now. Of a program other than dlock hardly anything is known.
    pub fn of_holder(holder: &Holder, outcome: Outcome) -> LastRun {
        let now = clock::wall();
        let started_at = holder.acquired_at.unwrap_or(now);
        LastRun {
            fencing_token: holder.fencing_token.unwrap_or(Token(0)),
            owner: holder.owner.clone(),
            host: holder.host.clone().unwrap_or_default(),
            pid: holder.pid,
            user: holder.user.clone().unwrap_or_default(),
            command: holder.command.clone().or(holder.owner.clone()).unwrap_or_default(),
            note: holder.note.clone(),
            started_at,
            ended_at: Some(now),
            waited_ms: None,
            duration_ms: now.duration_since(started_at).ok().map(clock::millis),
            outcome,
            exit_code: None,
            once: None,
            revoked_by: None,
            revoked_at: None,
            reason: None,
        }
    }

    /// Of a run that an operator cuts short by freeing the lock at once. Perhaps nobody will be there to tell how its
    /// command ends.
    pub fn cut_short(holder: &Holder, reason: &str) -> LastRun {
        let mut run = LastRun::of_holder(holder, Outcome::Lost);
        run.revoked(&Revocation::parse(reason));
        run
    }

    /// Of a holder whose lease ran out because nobody renewed or released it.
    pub fn vanished(holder: &Holder) -> LastRun {
        LastRun { ended_at: None, duration_ms: None, ..LastRun::of_holder(holder, Outcome::Vanished) }
    }

    /// Notes who took the lock away.
    pub fn revoked(&mut self, revocation: &Revocation) {
        self.revoked_by.clone_from(&revocation.by);
        self.revoked_at = revocation.at;
        self.reason = Some(revocation.reason.clone());
    }

    /// Whether a later run with the same `--once` key is skipped because of this one.
    pub fn succeeded(&self) -> bool {
        self.outcome == Outcome::Exited && self.exit_code == Some(0)
    }

    pub fn duration(&self) -> Option<Duration> {
        let by_date = || self.ended_at?.duration_since(self.started_at).ok();
        self.duration_ms.map(Duration::from_millis).or_else(by_date)
    }

    /// What is printed: all that is stored, and each date also in seconds.
    pub fn shown(&self) -> impl Serialize {
        ShownRun {
            run: self,
            started_at_s: rfc3339::seconds(self.started_at),
            ended_at_s: self.ended_at.map(rfc3339::seconds),
            revoked_at_s: self.revoked_at.map(rfc3339::seconds),
        }
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings and numbers always serialise")
    }

    pub fn from_json(text: &str) -> Option<LastRun> {
        serde_json::from_str(text).ok()
    }
}

#[derive(Serialize)]
struct ShownRun<'a> {
    #[serde(flatten)]
    run: &'a LastRun,
    started_at_s: u64,
    ended_at_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked_at_s: Option<u64>,
}

/// Why an operator takes a lock away, who it is and when: one line of text on every backend, which dlocks of any version
/// and programs other than dlock can show as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Revocation {
    pub reason: String,
    /// `user@host`.
    pub by: Option<String>,
    pub at: Option<SystemTime>,
}

impl Revocation {
    /// Who it is, in a sentence.
    pub fn operator(&self) -> String {
        self.by.as_ref().map_or_else(|| "an operator".into(), |by| format!("an operator ({by})"))
    }

    /// Reads what [`Display`](std::fmt::Display) writes; anything else is a reason and nothing more.
    pub fn parse(text: &str) -> Revocation {
        let signed = || {
            let (reason, signature) = text.strip_suffix(')')?.rsplit_once(" (")?;
            let (by, at) = signature.rsplit_once(", ")?;
            let at = humantime::parse_rfc3339(at).ok()?;
            Some(Revocation { reason: reason.to_owned(), by: Some(by.to_owned()), at: Some(at) })
        };
        signed().unwrap_or_else(|| Revocation { reason: text.to_owned(), by: None, at: None })
    }
}

impl std::fmt::Display for Revocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.reason)?;
        match (&self.by, self.at) {
            (Some(by), Some(at)) => write!(f, " ({by}, {})", humantime::format_rfc3339_seconds(at)),
            _ => Ok(()),
        }
    }
}

/// The runs of a lock, as an operator sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Newest first.
    pub runs: Vec<LastRun>,
    pub last_success_at: Option<SystemTime>,
}

impl From<Option<LastRun>> for History {
    fn from(run: Option<LastRun>) -> History {
        let last_success_at = run.as_ref().filter(|run| run.succeeded()).and_then(|run| run.ended_at);
        History { runs: run.into_iter().collect(), last_success_at }
    }
}

/// The runs of a lock as backends store them that keep one text a lock: the last run, as every version of dlock reads it,
/// with the earlier ones and the last success inside.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct StoredHistory {
    #[serde(flatten)]
    pub last: Option<LastRun>,
    /// Newest first, as the text they are: a release adds to them while the next waiter is waiting.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    earlier: Vec<Box<RawValue>>,
    #[serde(default, with = "rfc3339::option", skip_serializing_if = "Option::is_none")]
    last_success_at: Option<SystemTime>,
}

impl StoredHistory {
    /// Adds a run, and forgets those beyond the last and `keep`.
    pub fn add(&mut self, run: LastRun, keep: usize) {
        if run.succeeded() {
            self.last_success_at = run.ended_at.or(self.last_success_at);
        }
        if let Some(last) = self.last.replace(run) {
            self.earlier.insert(0, to_raw_value(&last).expect("strings and numbers always serialise"));
        }
        self.earlier.truncate(keep.saturating_sub(1));
    }

    /// Whether this run is in it.
    pub fn has(&self, run: &LastRun) -> bool {
        self.of_owner(run).any(|one| one.fencing_token == run.fencing_token)
    }

    /// Whether this run is in it with the same ending. An operator who cuts a run short records another one.
    pub fn has_ending(&self, run: &LastRun) -> bool {
        let json = run.to_json();
        self.of_owner(run).any(|one| one.to_json() == json)
    }

    fn of_owner(&self, run: &LastRun) -> impl Iterator<Item = LastRun> {
        let owner = run.owner.as_ref().map(|owner| serde_json::json!(owner).to_string());
        let earlier = self.earlier.iter().map(|one| one.get());
        let mentions = move |json: &&str| owner.as_ref().is_some_and(|owner| json.contains(owner));
        let runs = self.last.clone().into_iter().chain(earlier.filter(mentions).filter_map(LastRun::from_json));
        runs.filter(|one| one.owner.is_some() && one.owner == run.owner)
    }

    /// `None` if there was no run.
    pub fn to_json(&self) -> Option<String> {
        self.last.as_ref()?;
        Some(serde_json::to_string(self).expect("strings and numbers always serialise"))
    }

    /// Reads what a dlock of any version has stored; what makes no sense is no run.
    pub fn from_json(text: &str) -> StoredHistory {
        let Ok(StoredHistory { last: Some(last), earlier, last_success_at }) = serde_json::from_str(text) else {
            return StoredHistory::default();
        };
        let last_success_at = last_success_at.or(last.ended_at.filter(|_| last.succeeded()));
        StoredHistory { last: Some(last), earlier, last_success_at }
    }
}

impl From<StoredHistory> for History {
    fn from(StoredHistory { last, earlier, last_success_at }: StoredHistory) -> History {
        let earlier = earlier.iter().filter_map(|run| LastRun::from_json(run.get()));
        History { runs: last.into_iter().chain(earlier).collect(), last_success_at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(token: u64, exit_code: i32) -> LastRun {
        let mut run = LastRun::of_holder(&Holder::default(), Outcome::Exited);
        run.fencing_token = Token(token);
        run.exit_code = Some(exit_code);
        LastRun::from_json(&run.to_json()).unwrap()
    }

    #[test]
    fn a_record_of_an_older_dlock_is_a_history_of_one() {
        let old = r#"{"fencing_token":7,"host":"h","user":"u","command":"c","started_at":"2026-01-01T00:00:00.000Z",
                      "ended_at":"2026-01-01T00:00:02.000Z","outcome":"exited","exit_code":0,"once":null}"#;
        let history = History::from(StoredHistory::from_json(old));
        assert_eq!(history.runs.len(), 1);
        assert_eq!(history.runs[0].duration(), Some(Duration::from_secs(2)));
        assert_eq!(history.last_success_at, history.runs[0].ended_at);
    }

    #[test]
    fn an_older_dlock_reads_the_last_run_of_a_history() {
        let mut history = StoredHistory::default();
        for token in 1..=30 {
            history.add(run(token, i32::from(token > 1)), 20);
        }
        let json = history.to_json().unwrap();
        assert_eq!(LastRun::from_json(&json).unwrap().fencing_token, Token(30));
        assert_eq!(StoredHistory::from_json(&json).to_json(), Some(json));
        let history = History::from(history);
        assert_eq!(history.runs.len(), 20);
        assert!(history.last_success_at.is_some(), "kept although that run has long been forgotten");
    }

    #[test]
    fn a_revocation_is_one_line_for_everybody() {
        let at = humantime::parse_rfc3339("2026-11-18T03:00:00Z").unwrap();
        for reason in ["disk full", "", "a (b, c)", "no (2026-11-18T03:00:00Z)"] {
            let signed = Revocation { reason: reason.into(), by: Some("ann@ops, 1".into()), at: Some(at) };
            assert_eq!(Revocation::parse(&signed.to_string()), signed);
        }
        assert_eq!(Revocation::parse("disk (full)"), Revocation { reason: "disk (full)".into(), by: None, at: None });
    }
}
