//! Mistakes that a build for the tests makes on purpose, so that they can show that they would be noticed.
//!
//! Without the feature `mutants`, which nothing turns on but those tests, every question here is `false` at
//! compile time. With it, `DLOCK_MUTANT` names the one mistake to make.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    /// Whatever a renewal's answer is, it counts as granted.
    RenewalIgnored,
    /// The lease is counted from the answer, not from before the request.
    DeadlineFromReply,
    /// The tree is said to be dead without having been killed.
    NoSigkill,
    /// The lock is released when the command is told to go, not when it has gone.
    ReleaseBeforeDead,
    /// A Redlock token is granted without its second phase.
    NaiveRedlockToken,
    /// The guardian does not act on its deadlines.
    NoGuardian,
}

pub fn is(mutant: Mutant) -> bool {
    cfg!(feature = "mutants") && std::env::var("DLOCK_MUTANT").is_ok_and(|name| name == mutant.name())
}

impl Mutant {
    fn name(self) -> &'static str {
        match self {
            Mutant::RenewalIgnored => "renewal-ignored",
            Mutant::DeadlineFromReply => "deadline-from-reply",
            Mutant::NoSigkill => "no-sigkill",
            Mutant::ReleaseBeforeDead => "release-before-dead",
            Mutant::NaiveRedlockToken => "naive-redlock-token",
            Mutant::NoGuardian => "no-guardian",
        }
    }
}
