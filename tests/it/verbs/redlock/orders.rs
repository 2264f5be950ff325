//! The requests of one contender to one node, the real scripts on a real server, in every order in which they can
//! arrive: whichever of them got no answer may do so at any time after, also when the contender has long moved on.

use redis::{Pipeline, Script, Value, pipe};

use super::late::{Arrivals, Then};

#[derive(Clone, Copy, PartialEq)]
enum Request {
    Take,
    Raise,
    Renew,
    GiveBack(Then),
    Release,
}
use Request::{GiveBack, Raise, Release, Renew, Take};

/// What contenders send to a node, in this order: who is granted at the second try, and who leaves.
const GRANTED: &[Request] = &[Take, GiveBack(Then::Wait), Take, Raise, Renew, Release];
const LEAVES: &[Request] = &[Take, GiveBack(Then::Wait), Take, GiveBack(Then::Wait), GiveBack(Then::Leave)];

/// Which requests were answered, and the order in which all of them arrived.
struct RunResult {
    story: &'static [Request],
    answered: Vec<bool>,
    order: Vec<usize>,
}

impl RunResult {
    /// An answered request arrived before the next one was sent.
    fn all(story: &'static [Request]) -> Vec<RunResult> {
        let mut all = Vec::new();
        for mask in 0..1u32 << story.len() {
            let answered: Vec<bool> = (0..story.len()).map(|i| mask >> i & 1 == 1).collect();
            let mut orders = vec![Vec::new()];
            for _ in story {
                let longer = |order: Vec<usize>| -> Vec<Vec<usize>> {
                    let here = |i: usize| order.contains(&i);
                    let may = |&i: &usize| !here(i) && (0..i).all(|j| !answered[j] || here(j));
                    let next: Vec<usize> = (0..story.len()).filter(may).collect();
                    next.into_iter().map(|i| order.iter().copied().chain([i]).collect()).collect()
                };
                orders = orders.into_iter().flat_map(longer).collect();
            }
            all.extend(orders.into_iter().map(|order| RunResult { story, answered: answered.clone(), order }));
        }
        all
    }

    /// As `nodes` numbers them and says what is given up.
    fn send(&self, i: usize, verbs: &Verbs, keys: &[String], requests: &mut Pipeline) {
        let numbered = |j: &usize| !matches!(self.story[*j], Raise | Release);
        let given_up = (0..i).filter(numbered).rfind(|&j| !self.answered[j]).map(|j| (j + 1).to_string());
        let (n, given_up) = ((i + 1).to_string(), given_up.unwrap_or_default());
        let args: &[&str] = match self.story[i] {
            Take => &["me", &n, "60000", "", "1", "0", "0", "0", "{}", "", ""],
            Raise => &["me", "9", "60000", "{}"],
            Renew => &["me", &n, "9", "60000", "{}"],
            GiveBack(and) => &["me", &n, &given_up, and.flag(), "0", "0", "60000", "{}"],
            Release => &["me", "9", "0", "", "", &given_up],
        };
        let hash = verbs.of(self.story[i]).get_hash();
        requests.cmd("EVALSHA").arg(hash).arg(keys.len()).arg(keys).arg(args);
    }

    /// What a node must never do: let go of what its holder has heard to be its own, or keep somebody who has left.
    fn goes_wrong(&self, seen: &[(bool, bool)]) -> bool {
        let (mut holds, mut left) = (false, false);
        self.order.iter().zip(seen).any(|(&i, &(ours, queued))| {
            let is_last_take = self.story[i] == Take && !self.story[i + 1..].contains(&Take);
            let granted = self.story.contains(&Raise) && (is_last_take || self.story[i] == Renew);
            holds |= granted && self.answered[i];
            left |= i + 1 == self.story.len();
            (left && (ours || queued)) || (holds && !left && !ours)
        })
    }
}

/// The scripts, perhaps with a mistake in them.
struct Verbs(Vec<(Request, Script)>);

impl Verbs {
    fn with(mistakes: &[(&str, &str)]) -> Verbs {
        let read = |file: &str| {
            let file = format!("{}/src/backend/{file}", env!("CARGO_MANIFEST_DIR"));
            std::fs::read_to_string(file).unwrap()
        };
        let script = |file: &str| {
            let text = read("redis/prelude.lua") + &read("redlock/common.lua") + &read(&format!("redlock/{file}.lua"));
            Script::new(&mistakes.iter().fold(text, |text, (right, wrong)| text.replace(right, wrong)))
        };
        Verbs(vec![
            (Take, script("take")),
            (Raise, script("raise")),
            (Renew, script("renew")),
            (GiveBack(Then::Wait), script("give_back")),
            (GiveBack(Then::Leave), script("give_back")),
            (Release, script("release")),
        ])
    }

    fn of(&self, request: Request) -> &Script {
        self.0.iter().find(|(one, _)| *one == request).map(|(_, script)| script).unwrap()
    }

    /// A course that goes wrong.
    async fn find(&self, at: &mut Arrivals, story: &'static [Request]) -> Option<String> {
        for (_, script) in &self.0 {
            at.link.load(script).await.unwrap();
        }
        let courses = RunResult::all(story);
        assert!(courses.len() > 500, "only {} courses show nothing", courses.len());
        for course in courses {
            let mut requests = pipe();
            requests.cmd("FLUSHALL");
            for &i in &course.order {
                course.send(i, self, &at.keys, &mut requests);
                requests.get("dlock:job/a").zscore("{dlock:job/a}:queue", "me");
            }
            let answers = at.link.call_all(&requests).await.unwrap();
            let seen = |part: &[Value]| (part[1] != Value::Nil, part[2] != Value::Nil);
            if course.goes_wrong(&answers[1..].chunks_exact(3).map(seen).collect::<Vec<_>>()) {
                return Some(format!("{:?} arrive, answered {:?}: {answers:?}", course.order, course.answered));
            }
        }
        None
    }
}

#[tokio::test]
async fn no_order_of_arrival_frees_what_is_held_or_keeps_who_has_left() {
    let mut at = Arrivals::new();
    for story in [GRANTED, LEAVES] {
        assert_eq!(Verbs::with(&[]).find(&mut at, story).await, None);
    }
}

#[tokio::test]
async fn each_mistake_about_late_requests_is_found() {
    let mut at = Arrivals::new();
    for (story, mistakes) in [
        (GRANTED, &[(" or taken_by(owner) > tonumber(n)", ""), ("math.max(n, taken_by(owner))", "n")][..]),
        (GRANTED, &[("redis.pcall('SET', taken, taken_as(owner, n))", "")]),
        (GRANTED, &[("if taken_by(owner) > tonumber(n) then", "if false then")]),
        (LEAVES, &[("if n ~= '' and not is_late(owner, n) then", "if n ~= '' then")]),
        (LEAVES, &[("elseif not is_late(owner, n) then", "else")]),
        (LEAVES, &[("if is_late(owner, n) or", "if")]),
    ] {
        assert!(Verbs::with(mistakes).find(&mut at, story).await.is_some(), "{mistakes:?}");
    }
}
