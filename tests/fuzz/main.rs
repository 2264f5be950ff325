//! Every parser of bytes that somebody else has written, fed with valid inputs that were spoilt at random. None may
//! panic, take much memory or take long.
//!
//! Input `n` of a seed is always the same, so whatever fails is reproduced by its seed and number. The ordinary suite
//! tries a few thousand inputs; `tests/run --fuzz` tries ten million of each.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod heap;
mod mutate;
mod targets;

use std::cell::RefCell;
use std::panic::{catch_unwind, set_hook, take_hook};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use targets::{TARGETS, Target};

/// No input is longer than some kilobytes; nothing that is read from one may reserve more than this. Most of it is for the
/// redis crate: it reserves room for 4,096 values in every array, and arrays may be nested a hundred deep.
const MOST_MEMORY: usize = 32 << 20;
/// Of the processor, for one input.
const LONGEST: Duration = Duration::from_secs(1);
/// So long an input may take before it counts as endless, on however busy a machine.
const ENDLESS: Duration = Duration::from_secs(120);
/// In the ordinary suite.
const FEW: u64 = 10_000;

/// What one target has gone through.
struct Tally {
    inputs: u64,
    /// How many were understood rather than refused.
    understood: u64,
    slowest: Duration,
    most_memory: usize,
    took: Duration,
}

thread_local! {
    /// What the last panic in a target said. `None` outside of targets: there a panic is the test's own.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// The input that is being tried, for whoever watches that none is endless.
static AT: AtomicU64 = AtomicU64::new(0);

#[test]
fn no_input_makes_a_parser_panic() {
    let number = |key: &str, default: u64| match std::env::var(key).unwrap_or_default().as_str() {
        "" => default,
        text => text.parse().unwrap_or_else(|_| panic!("{key} is not a number")),
    };
    let (count, seed, from) = (number("DLOCK_FUZZ", FEW), number("DLOCK_SEED", 1), number("DLOCK_FUZZ_FROM", 0));
    let only = std::env::var("DLOCK_FUZZ_TARGET").unwrap_or_default();
    let wanted: Vec<_> = TARGETS.iter().filter(|target| only.is_empty() || target.name == only).collect();
    assert!(!wanted.is_empty(), "no such target; there are {:?}", TARGETS.map(|target| target.name));
    catch_panics();
    watch();
    println!("seed {seed}\n\n| parser | inputs | understood | panics | slowest | most memory | seconds |");
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for target in wanted {
        let tally = run(target, seed, from, count).unwrap_or_else(|failure| panic!("{failure}"));
        println!(
            "| {} | {} | {:.1} % | 0 | {:.1} ms | {} kB | {:.0} |",
            target.name,
            tally.inputs,
            100.0 * tally.understood as f64 / tally.inputs.max(1) as f64,
            tally.slowest.as_secs_f64() * 1000.0,
            tally.most_memory / 1000,
            tally.took.as_secs_f64(),
        );
        // Or the corpus is not what the parser reads, and nothing was tried but its first line.
        assert!(tally.understood > 0 || count < FEW, "{}: no input was understood", target.name);
    }
}

/// Whoever finds nothing has to show that it would.
#[test]
fn what_is_wrong_is_found_and_can_be_found_again() {
    fn bytes() -> Vec<Vec<u8>> {
        vec![b"length 7".to_vec()]
    }
    fn trusting(input: &[u8]) -> bool {
        let number = input.strip_prefix(b"length ").and_then(|digits| str::from_utf8(digits).ok()?.parse().ok());
        number.is_some_and(|length: u32| !vec![0u8; length as usize / 32].is_empty())
    }
    fn careless(input: &[u8]) -> bool {
        assert!(!input.ends_with(b"65536"), "put in to be found");
        true
    }
    catch_panics();
    for (parse, why) in [(careless as fn(&[u8]) -> bool, "put in to be found"), (trusting, "bytes of memory")] {
        let target = Target { name: "wrong", corpus: bytes, words: &[], parse };
        let found = run(&target, 1, 0, FEW).err().unwrap();
        assert!(found.contains(why), "{found}");
        let n = found.split_whitespace().last().unwrap().parse().unwrap();
        assert_eq!(run(&target, 1, n, 1).err(), Some(found));
    }
}

fn run(target: &Target, seed: u64, from: u64, count: u64) -> Result<Tally, String> {
    let corpus = (target.corpus)();
    let mut tally = Tally { inputs: 0, understood: 0, slowest: Duration::ZERO, most_memory: 0, took: Duration::ZERO };
    let began = processor_time();
    for n in from..from + count {
        let input = mutate::input(&corpus, target.words, seed, n);
        let failed = |why: &str| {
            let (name, text) = (target.name, input.escape_ascii());
            format!("{name}: {why}\ninput {n} of seed {seed}: \"{text}\"\nagain: tests/run --fuzz 1 {name} {seed} {n}")
        };
        AT.store(n + 1, Relaxed);
        let before = heap::start_counting();
        let start = processor_time();
        PANIC.set(Some(String::new()));
        let done = catch_unwind(|| (target.parse)(&input));
        let panic = PANIC.take().unwrap_or_default();
        let (took, memory) = (processor_time() - start, heap::most_since(before));
        match done {
            Err(_) => return Err(failed(&panic)),
            _ if took > LONGEST => return Err(failed(&format!("it took {took:?}"))),
            _ if memory > MOST_MEMORY => return Err(failed(&format!("it took {memory} bytes of memory"))),
            Ok(understood) => tally.understood += u64::from(understood),
        }
        tally.inputs += 1;
        tally.slowest = tally.slowest.max(took);
        tally.most_memory = tally.most_memory.max(memory);
    }
    tally.took = processor_time() - began;
    Ok(tally)
}

/// Of this thread: what others do on the machine does not count.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap().into()
}

fn catch_panics() {
    let usual = take_hook();
    set_hook(Box::new(move |info| {
        let ours = PANIC.with_borrow_mut(|said| said.as_mut().map(|said| *said = info.to_string()));
        if ours.is_none() {
            usual(info);
        }
    }));
}

/// Ends everything if one input takes for ever, and says which.
fn watch() {
    std::thread::spawn(|| {
        let mut seen = AT.load(Relaxed);
        loop {
            std::thread::sleep(ENDLESS);
            let now = AT.load(Relaxed);
            if now == seen && now > 0 {
                eprintln!("input {} takes for ever: the target is the one behind the last line above", now - 1);
                std::process::abort();
            }
            seen = now;
        }
    });
}
