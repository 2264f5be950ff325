//! Names of locks: checked once when they come in, encoded where a backend has no room for a slash.

use std::fmt;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use serde::Serialize;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct LockName(String);

const LONGEST: usize = 200;

impl LockName {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name as one path segment: `job/sub` is `job%2Fsub`, so it never lies inside `job`.
    pub fn encoded(&self) -> String {
        self.0.replace('/', "%2F")
    }

    /// The inverse of [`encoded`](Self::encoded); `None` for what no name of ours encodes to.
    pub fn decode(segment: &str) -> Option<LockName> {
        segment.replace("%2F", "/").parse().ok().filter(|name: &LockName| name.encoded() == segment)
    }
}

impl FromStr for LockName {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<LockName> {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "._:@+-/".contains(c);
        ensure!(!text.is_empty(), "a lock name must not be empty");
        ensure!(text.len() <= LONGEST, "a lock name has at most {LONGEST} characters, this one has {}", text.len());
        if let Some(wrong) = text.chars().find(|&c| !allowed(c)) {
            bail!("a lock name has only A-Z a-z 0-9 . _ : @ + - and /, not {wrong:?}");
        }
        if let Some(wrong) = text.split('/').find(|segment| matches!(*segment, "" | "." | "..")) {
            bail!("a lock name must not have the segment {wrong:?} between slashes");
        }
        Ok(LockName(text.to_owned()))
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_what_the_contract_allows() {
        for good in ["a", "nightly-report", "A.b_c:d@e+f-g/h", &"x".repeat(200), "..a/b..", "..."] {
            assert!(good.parse::<LockName>().is_ok(), "{good}");
        }
    }

    #[test]
    fn refuses_everything_else() {
        for bad in
            ["", "/", "a/", "/a", "a//b", ".", "..", "a/./b", "a/..", "a b", "ä", "a\n", "a%2Fb", &"x".repeat(201)]
        {
            assert!(bad.parse::<LockName>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn encoding_keeps_names_apart() {
        let name: LockName = "job/sub".parse().unwrap();
        assert_eq!(name.encoded(), "job%2Fsub");
        assert_eq!(LockName::decode("job%2Fsub"), Some(name));
        assert_eq!(LockName::decode("job%2fsub"), None);
        assert_eq!(LockName::decode("job/sub"), None);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_name_or_refused_and_names_survive_their_encoding(text in ".{0,220}") {
            if let Ok(name) = text.parse::<LockName>() {
                assert_eq!(name.as_str(), text);
                assert!(!name.encoded().contains('/'));
                assert_eq!(LockName::decode(&name.encoded()), Some(name));
            }
            let _ = LockName::decode(&text);
        }

        #[test]
        fn two_names_are_never_encoded_alike(a in "[a%2F/.]{1,6}", b in "[a%2F/.]{1,6}") {
            if let (Ok(a), Ok(b)) = (a.parse::<LockName>(), b.parse::<LockName>()) {
                assert_eq!(a == b, a.encoded() == b.encoded());
            }
        }
    }
}
