//! Models of the protocols that the promise rests on, explored in every order in which their steps can happen.
//!
//! A model is small: a state, the steps that may come next, and what must never be seen. The search is breadth
//! first, so what it finds is a shortest way to get there.

mod lease;
mod redlock {
    mod exhaustive;
    mod simulation;
}

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

pub trait Model {
    type State: Clone + Eq + Hash;

    fn begin(&self) -> Self::State;

    /// Everything that may happen next, with a name for people.
    fn steps(&self, state: &Self::State) -> Vec<(String, Self::State)>;

    fn is_forbidden(&self, state: &Self::State) -> bool;
}

/// How many states there are; or a shortest way to a forbidden one.
pub fn explore<M: Model>(model: &M) -> Result<usize, Vec<String>> {
    let begin = model.begin();
    // Every state seen, by number, with the one it was first reached from and the step that led to it.
    let mut seen = HashMap::from([(begin.clone(), 0usize)]);
    let mut reached: Vec<(usize, String)> = vec![(0, "begin".into())];
    let mut ahead = VecDeque::from([begin]);
    while let Some(state) = ahead.pop_front() {
        let number = seen[&state];
        if model.is_forbidden(&state) {
            return Err(way_to(number, &reached));
        }
        for (name, next) in model.steps(&state) {
            if !seen.contains_key(&next) {
                seen.insert(next.clone(), reached.len());
                reached.push((number, name));
                ahead.push_back(next);
            }
        }
    }
    Ok(seen.len())
}

fn way_to(mut number: usize, reached: &[(usize, String)]) -> Vec<String> {
    let mut way = Vec::new();
    while number != 0 {
        let (from, name) = &reached[number];
        way.push(name.clone());
        number = *from;
    }
    way.reverse();
    way
}

/// Counts to ten, by ones or by threes.
struct Counting {
    forbidden: u8,
}

impl Model for Counting {
    type State = u8;

    fn begin(&self) -> u8 {
        0
    }

    fn steps(&self, state: &u8) -> Vec<(String, u8)> {
        [1, 3].iter().filter(|by| state + *by <= 10).map(|by| (format!("+{by}"), state + by)).collect()
    }

    fn is_forbidden(&self, state: &u8) -> bool {
        *state == self.forbidden
    }
}

#[test]
fn the_search_sees_every_state_and_the_shortest_way_to_a_forbidden_one() {
    assert_eq!(explore(&Counting { forbidden: 99 }), Ok(11));
    assert_eq!(explore(&Counting { forbidden: 7 }).map_err(|way| way.len()), Err(3));
}
