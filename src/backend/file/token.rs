//! The fencing counter in `NAME.d/token`: the last token, a mark that no token has passed, and the boot in which the
//! last one was written.
//!
//! The mark is on the disk before any token below it is handed out. The last token need not be: as long as the
//! machine is up the kernel knows it, and after a reboot counting goes on behind the mark. So the disk is waited for
//! once in [`AHEAD`], not once in every run. The date makes tokens grow even if the counter is deleted.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::Result;
use nix::fcntl::OFlag;

use super::directory::refusal;
use super::files::Folder;
use super::record::boot_id;
use crate::clock;
use crate::lock::Token;

/// How far the mark is set ahead: tokens are microseconds since the epoch, if nothing is in the way.
const AHEAD: Duration = Duration::from_secs(3600);
/// A number beyond this is none of ours, and would leave too little room for greater ones.
const GREATEST: u64 = i64::MAX as u64 / 2;

#[derive(Debug, Default, PartialEq, Eq)]
struct Counter {
    last: u64,
    mark: u64,
    boot: String,
}

/// Counts on, durably.
pub fn next(side: &Folder) -> Result<Token> {
    const TOKEN: &str = "token";
    let date = clock::wall().duration_since(UNIX_EPOCH).map_or(0, micros);
    let count = || advance(&side.open_to_write(TOKEN, OFlag::empty())?, date, boot_id());
    count().map_err(|error| refusal(error, "cannot record the fencing token in", &side.path(TOKEN)))
}

pub fn advance(file: &File, date: u64, boot: &str) -> std::io::Result<Token> {
    let mut text = [0; 128];
    let length = file.read_at(&mut text, 0)?;
    let (counter, must_be_kept) = Counter::read(&String::from_utf8_lossy(&text[..length])).next(date, boot);
    // Always as long as before, so that it is written in one piece.
    file.write_all_at(counter.to_string().as_bytes(), 0)?;
    if must_be_kept {
        file.sync_data()?;
    }
    Ok(Token(counter.last))
}

impl Counter {
    /// What makes no sense counts as nothing: the date is ahead of it.
    fn read(text: &str) -> Counter {
        let mut words = text.split_ascii_whitespace();
        let mut number = || words.next().and_then(|word| word.parse().ok()).filter(|n| *n <= GREATEST).unwrap_or(0);
        let (last, mark) = (number(), number());
        Counter { last, mark, boot: words.next().unwrap_or_default().to_owned() }
    }

    /// The counter after one more token, and whether the disk has to have it first.
    fn next(self, date: u64, boot: &str) -> (Counter, bool) {
        let known = if self.boot == boot && !boot.is_empty() { self.last } else { self.last.max(self.mark) };
        let last = known.saturating_add(1).max(date);
        let beyond = last > self.mark;
        let mark = if beyond { last.saturating_add(micros(AHEAD)) } else { self.mark };
        (Counter { last, mark, boot: boot.to_owned() }, beyond || self.boot != boot)
    }
}

impl std::fmt::Display for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{:020} {:020} {}", self.last, self.mark, self.boot)
    }
}

fn micros(span: Duration) -> u64 {
    u64::try_from(span.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(last: u64, mark: u64, boot: &str) -> Counter {
        Counter { last, mark, boot: boot.to_owned() }
    }

    #[test]
    fn the_disk_has_a_mark_that_no_token_has_passed() {
        let mut on_disk = counter(0, 0, "");
        let mut now = counter(0, 0, "");
        for date in (0..20).map(|n| n * micros(AHEAD) / 7) {
            let (next, must_be_kept) = now.next(date, "this");
            if must_be_kept {
                on_disk = counter(next.last, next.mark, &next.boot);
            }
            assert!(next.last <= on_disk.mark, "{next:?} {on_disk:?}");
            now = next;
        }
    }

    #[test]
    fn after_a_reboot_tokens_go_on_behind_the_mark_whatever_the_date() {
        let (first, _) = counter(0, 0, "").next(1_000_000, "this");
        let lost = counter(first.last, first.mark, "this");
        let (second, _) = first.next(2_000_000, "this");
        // The second never reached the disk, and the clock has been set back.
        let (third, must_be_kept) = lost.next(0, "that");
        assert!(third.last > second.last && must_be_kept);
    }

    #[test]
    fn within_a_boot_tokens_grow_by_one_when_the_clock_does_not_move() {
        let (first, _) = counter(0, 0, "").next(1_000_000, "this");
        let (second, must_be_kept) = Counter::read(&first.to_string()).next(1_000_000, "this");
        assert_eq!((first.last, second.last, must_be_kept), (1_000_000, 1_000_001, false));
    }

    #[test]
    fn garbage_and_the_short_form_are_understood() {
        assert_eq!(Counter::read("\u{fffd}x -3"), Counter::default());
        assert_eq!(Counter::read("00000000000000000042\n"), counter(42, 0, ""));
        assert_eq!(Counter::read(&format!("{} {}", i64::MAX, u64::MAX)), Counter::default());
    }
}
