//! `--keep-trying`: contend for the lock again after a loss or a failure, until a run succeeds or a signal ends it.
//!
//! The next round is another program: dlock executes itself. It keeps its process id, which is what systemd watches, and
//! the guardian is again forked before any thread exists.

use std::ffi::CString;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use anyhow::{Context, Result};

use super::Run;
use crate::exit::Exit;
use crate::report::Event;

/// How many rounds in a row were over almost at once. Kept from the command.
pub const VARIABLE: &str = "DLOCK_SHORT_ROUNDS";

const SHORT: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub fn begin(mut run: Run) -> Result<Exit> {
    let before: u32 = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let short_rounds = if run.tally.held < SHORT { before.saturating_add(1) } else { 0 };
    let pause = pause_after(short_rounds);
    run.voice.tell(&run.job.name, &Event::stands_again(pause));

    let environment = std::env::vars_os().filter(|(key, _)| key != VARIABLE);
    let environment = environment.chain([(VARIABLE.into(), short_rounds.to_string().into())]);
    let pairs = environment.map(|(key, value)| [key.into_vec(), value.into_vec()].join(&b'='));
    let environment = pairs.map(CString::new).collect::<Result<Vec<_>, _>>()?;
    let argv = std::env::args_os().map(|word| CString::new(word.into_vec())).collect::<Result<Vec<_>, _>>()?;

    // Nothing is held and nothing runs.
    run.signals.let_go()?;
    std::thread::sleep(pause);
    let error = nix::unistd::execve(c"/proc/self/exe", &argv, &environment).unwrap_err();
    Err(error).context("cannot begin another round")
}

/// None after a round worth its name; then 1 s, 2 s, 4 s, up to a minute.
fn pause_after(short_rounds: u32) -> Duration {
    match short_rounds.checked_sub(1) {
        None => Duration::ZERO,
        Some(doublings) => Duration::from_secs(1u64 << doublings.min(6)).min(LONGEST_PAUSE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_minute() {
        let pauses: Vec<_> = (0..9).map(|rounds| pause_after(rounds).as_secs()).collect();
        assert_eq!(pauses, [0, 1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(pause_after(u32::MAX), LONGEST_PAUSE);
    }
}
