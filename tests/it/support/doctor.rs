//! What `dlock doctor` has found.

use serde_json::Value;

use super::Dlock;

pub struct Told {
    pub findings: Vec<Value>,
    pub timeline: Value,
}

impl Told {
    /// What was found by a check, with its verdict before it.
    #[track_caller]
    pub fn about(&self, check: &str) -> Vec<String> {
        let of = |finding: &&Value| finding["check"] == check;
        let said = |finding: &Value| format!("{}: {}", finding["verdict"].as_str().unwrap(), finding["what"]);
        let found: Vec<_> = self.findings.iter().filter(of).map(said).collect();
        assert!(!found.is_empty(), "nothing about {check}: {:#?}", self.findings);
        found
    }

    #[track_caller]
    pub fn says(&self, check: &str, start: &str, words: &str) {
        let found = self.about(check);
        assert!(found.iter().any(|one| one.starts_with(start) && one.contains(words)), "{found:?}");
    }
}

#[track_caller]
pub fn examined(dlock: Dlock, code: i32) -> Told {
    let ended = dlock.args(["doctor", "--json"]).ended().expect(code).silently();
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert!(code == 0 || report["healthy"] == false);
    Told { findings: report["findings"].as_array().unwrap().clone(), timeline: report["timeline"].clone() }
}
