//! Which locks are meant: one by its name, or all whose names fit a pattern like `nightly-*`.

use std::str::FromStr;

use anyhow::Result;
use wildmatch::WildMatch;

use super::LockName;

#[derive(Clone, Debug, PartialEq)]
pub enum Selector {
    Name(LockName),
    /// `*` stands for any number of characters, `?` for one. No name has either.
    Pattern(WildMatch),
}

impl Selector {
    pub fn selects(&self, name: &LockName) -> bool {
        match self {
            Selector::Name(own) => own == name,
            Selector::Pattern(pattern) => pattern.matches(name.as_str()),
        }
    }
}

impl FromStr for Selector {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Selector> {
        if !text.contains(['*', '?']) {
            return text.parse().map(Selector::Name);
        }
        // What is no name with something in place of the signs never fits one.
        text.replace(['*', '?'], "x").parse::<LockName>()?;
        Ok(Selector::Pattern(WildMatch::new(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_as_in_a_shell() {
        for (pattern, name, expected) in [
            ("nightly-*", "nightly-report", true),
            ("nightly-*", "nightly-", true),
            ("nightly-*", "nightly", false),
            ("*", "a/b", true),
            ("*-eu", "web-us-eu", true),
            ("*-eu", "web-eu-us", false),
            ("job?", "job1", true),
            ("job?", "job", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-b-b", false),
            ("a", "a", true),
        ] {
            let selector: Selector = pattern.parse().unwrap();
            assert_eq!(selector.selects(&name.parse().unwrap()), expected, "{pattern} {name}");
        }
        let slow: Selector = format!("{}b", "*a".repeat(90)).parse().unwrap();
        assert!(!slow.selects(&"a".repeat(200).parse().unwrap()));
    }

    #[test]
    fn what_is_no_name_is_no_pattern() {
        for bad in ["", "a b*", "*//a", "[a]*", "ü*", "*\n"] {
            assert!(bad.parse::<Selector>().is_err(), "{bad:?}");
        }
    }
}
