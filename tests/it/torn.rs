//! Answers that break off in the middle: a `run` whose server's answers get through up to the Nth byte and no further,
//! for every N of its whole conversation, while it takes, renews and releases a lock, and while it waits for one.
//! After that byte the connection is reset, or everything falls silent.
//!
//! Whatever N is: dlock ends, with an exit code that says what happened; its command runs only while it has the lock;
//! and the next one gets the lock. `tests/run` plays a few of the bytes, others each time; `tests/run --torn [BACKEND
//! [EVERY]]` plays all of them, or one in EVERY, and writes `target/torn.md`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::support::{
    Dlock, Log, PLACES, Place, Proxy, Started, Tear, overlaps, target, to_the_end, tokens_grow, unique, until,
};

/// So many runs at once, in the ordinary tests and in the long one: most of their time they wait for a lease.
const AT_ONCE: [usize; 2] = [8, 24];
/// So many bytes of each conversation are played in the ordinary tests.
const A_FEW: u64 = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Conversation {
    /// It takes the lock at once, renews it and releases it.
    Holding,
    /// It waits until somebody else has released it.
    Waiting,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    conversation: Conversation,
    /// So many bytes get through.
    after: u64,
    how: Tear,
}

/// What a run showed.
struct Outcome {
    code: Option<i32>,
    /// From the start of the dlock whose answers were torn to its end.
    took: Duration,
    answered: u64,
    wrong: Vec<String>,
}

/// Where a server is.
#[derive(Clone, Copy, Debug)]
struct Ground {
    place: &'static Place,
    port: u16,
}

/// Those with one server, which can be alone.
fn places() -> Vec<&'static Place> {
    PLACES.into_iter().filter(|place| place.hosts == 1 && place.covered).collect()
}

impl Ground {
    /// And the server, which lives as long as it is kept.
    fn open(place: &'static Place) -> (Ground, Started) {
        let started = (place.start)(super::support::Ground::Plain);
        let ground = Ground { place, port: started.servers[0].port() };
        // Whatever is made at the first use is no part of the conversation.
        until("a first run", || ground.dlock(ground.port).run("first").sh("exit 0").ended().code == Some(0));
        (ground, started)
    }

    fn dlock(&self, port: u16) -> Dlock {
        Dlock::new().env("DLOCK_BACKEND", self.place.url(&[port], Path::new("")))
    }

    /// How many bytes of answers a whole conversation has.
    fn length(&self, conversation: Conversation) -> u64 {
        let mut length = 0;
        until("a whole conversation", || {
            let whole = self.play(Case { conversation, after: u64::MAX, how: Tear::Cut });
            length = whole.answered;
            // A busy machine may be too slow for such a short lease.
            whole.code == Some(0)
        });
        length
    }

    fn play(&self, case: Case) -> Outcome {
        let (log, name, way) = (Log::new(), unique("torn"), Proxy::to(self.port));
        way.tear(case.after, case.how);
        let others = |wait: &str, words: &[&str]| {
            let dlock = self.dlock(self.port).env("DLOCK_CONNECT_TIMEOUT", "30s").run(&name);
            dlock.args(["--ttl", "60s", "--wait", wait]).args(log.witness(words)).spawn()
        };
        let before = (case.conversation == Conversation::Waiting).then(|| {
            let holder = others("50s", &["for=400"]);
            log.await_runs(1, 1);
            holder
        });
        let began = Instant::now();
        let dlock =
            self.dlock(way.port()).run(&name).args(["--ttl", "1s", "--connect-timeout", "800ms", "--wait", "2s"]);
        // Long enough for a renewal.
        let mut torn = dlock.args(log.witness(&["for=500", "ignore-term"])).spawn();
        let ran = usize::from(before.is_some()) + 1;
        until("the run to begin, or dlock to give up", || log.processes() >= ran || torn.has_ended());
        let next = others("50s", &["for=20"]);
        until("dlock to end", || torn.has_ended());
        let (took, code, said) = (began.elapsed(), torn.code(), torn.stderr());
        let next = next.ended();
        let before = before.map(crate::support::Running::ended);

        let (runs, mut wrong) = (log.runs(), Vec::new());
        let mut must = |fine: bool, what: String| {
            if !fine {
                wrong.push(what)
            }
        };
        let known = matches!(code, Some(0 | 69 | 75 | 79));
        must(known && said.lines().all(|line| line.starts_with("dlock: ")), format!("exit code {code:?}: {said}"));
        must(next.code == Some(0), format!("the next did not get the lock: {next:?}"));
        must(before.as_ref().is_none_or(|one| one.code == Some(0)), format!("the one before: {before:?}"));
        must(overlaps(&runs).is_empty(), format!("overlap: {:?}", overlaps(&runs)));
        must(log.survivors().is_empty(), format!("still there when the next began: {:?}", log.survivors()));
        must(tokens_grow(&runs), format!("tokens do not grow: {runs:?}"));
        Outcome { code, took, answered: way.answered(), wrong }
    }

    /// The bytes after which to tear, and how.
    fn cases(&self, every: Option<u64>, seed: u64) -> Vec<Case> {
        let mut cases = Vec::new();
        for conversation in [Conversation::Holding, Conversation::Waiting] {
            // No two are of exactly the same length.
            let length = self.length(conversation) + 8;
            let step = every.unwrap_or(length.div_ceil(A_FEW));
            for how in [Tear::Cut, Tear::Freeze] {
                let begin = seed % step;
                cases.extend((begin..=length).step_by(step as usize).map(|after| Case { conversation, after, how }));
            }
        }
        cases
    }
}

/// Everything that was played on one backend.
#[derive(Default)]
struct Tally {
    runs: usize,
    bytes: BTreeMap<Conversation, u64>,
    codes: BTreeMap<i32, usize>,
    longest: Duration,
    wrong: Vec<String>,
}

impl Tally {
    fn add(&mut self, case: Case, outcome: Result<Outcome, String>) {
        self.runs += 1;
        let most = self.bytes.entry(case.conversation).or_default();
        *most = case.after.max(*most);
        let wrong = match outcome {
            Ok(outcome) => {
                *self.codes.entry(outcome.code.unwrap_or(-1)).or_default() += 1;
                self.longest = outcome.took.max(self.longest);
                outcome.wrong
            }
            Err(why) => vec![why],
        };
        self.wrong.extend(wrong.into_iter().map(|what| format!("{case:?}: {what}")));
    }

    fn markdown(&self, backend: &str) -> String {
        let codes: Vec<String> = self.codes.iter().map(|(code, count)| format!("{count} × {code}")).collect();
        let bytes = |which: Conversation| self.bytes.get(&which).copied().unwrap_or_default();
        format!(
            "| {backend} | {} | {} | {} | {} | {} ms | {} |\n",
            bytes(Conversation::Holding),
            bytes(Conversation::Waiting),
            self.runs,
            codes.join(", "),
            self.longest.as_millis(),
            self.wrong.len(),
        )
    }
}

#[test]
fn answers_that_break_off_at_any_byte_break_no_promise() {
    let named = std::env::var("DLOCK_TORN").ok();
    let seed = std::env::var("DLOCK_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let every = std::env::var("DLOCK_TORN_EVERY").ok().and_then(|every| every.parse().ok()).unwrap_or(1);
    let every = named.is_some().then_some(every);
    let mut places = places();
    places.retain(|place| named.as_deref().is_none_or(|name| name.is_empty() || place.name == name));
    assert!(!places.is_empty(), "not one of redis, etcd …: {named:?}");
    let grounds: Vec<(Ground, Started)> = places.iter().map(|place| Ground::open(place)).collect();
    let tallies: Vec<Mutex<Tally>> = places.iter().map(|_| Mutex::default()).collect();
    let cases = grounds
        .iter()
        .zip(&tallies)
        .flat_map(|((ground, _), tally)| ground.cases(every, seed).into_iter().map(move |case| (*ground, case, tally)));
    let waiting = Mutex::new(cases.collect::<Vec<_>>());
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE[usize::from(every.is_some())] {
            scope.spawn(|| {
                while let Some((ground, case, tally)) = { waiting.lock().unwrap().pop() } {
                    let outcome = to_the_end(|| ground.play(case));
                    tally.lock().unwrap().add(case, outcome);
                }
            });
        }
    });
    let mut table = String::from(
        "| backend | bytes while holding | while waiting | runs | exit codes | longest run | broken |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let mut wrong = Vec::new();
    for (place, tally) in places.iter().zip(tallies) {
        let (backend, tally) = (place.name, tally.into_inner().unwrap());
        table += &tally.markdown(backend);
        wrong.extend(tally.wrong.into_iter().map(|what| format!("{backend}: {what}")));
    }
    eprintln!("{table}");
    if named.is_some() {
        std::fs::write(target("torn.md"), table).unwrap();
    }
    assert!(wrong.is_empty(), "{wrong:#?}\nagain with: DLOCK_SEED={seed} tests/run torn::");
}
