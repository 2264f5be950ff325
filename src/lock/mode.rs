//! The ways of holding a lock together.

use std::fmt;

use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    #[default]
    Exclusive,
    Shared,
    /// Up to this many holders at once, two or more.
    Slots(u32),
}

impl Mode {
    /// How many may hold the lock at once in this mode; contenders must agree on it.
    pub fn slots(self) -> u32 {
        match self {
            Mode::Exclusive | Mode::Shared => 1,
            Mode::Slots(n) => n,
        }
    }

    /// The inverse of the [`Display`](fmt::Display) form, as backends store it: `exclusive`, `shared`, `slots:3`.
    pub fn parse(text: &str) -> Option<Mode> {
        match text {
            "exclusive" => Some(Mode::Exclusive),
            "shared" => Some(Mode::Shared),
            _ => text.strip_prefix("slots:")?.parse().ok().filter(|&n| n >= 2).map(Mode::Slots),
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mode::Exclusive => f.write_str("exclusive"),
            Mode::Shared => f.write_str("shared"),
            Mode::Slots(n) => write!(f, "slots:{n}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Mode::{Exclusive, Shared, Slots};
    use super::*;

    #[test]
    fn a_mode_survives_its_text() {
        for mode in [Exclusive, Shared, Slots(2), Slots(64)] {
            assert_eq!(Mode::parse(&mode.to_string()), Some(mode));
        }
        assert_eq!(Mode::parse("slots:1"), None);
        assert_eq!(Mode::parse("slots:x"), None);
    }
}
