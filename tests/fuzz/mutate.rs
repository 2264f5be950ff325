//! Valid inputs, spoilt: bits, bytes, pieces, numbers in figures and in binary, words that mean something.

/// What a number may be so that somebody forgot it.
const FIGURES: [&str; 14] = [
    "0",
    "-1",
    "1",
    "255",
    "65536",
    "2147483647",
    "-2147483648",
    "4294967296",
    "9223372036854775807",
    "-9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e999",
    "00000000000000000000",
];
const NUMBERS: [i64; 12] =
    [0, 1, -1, -2, 127, 255, 65_535, i32::MAX as i64, i32::MIN as i64, 1 << 40, i64::MAX, i64::MIN];
const LONGEST: usize = 8192;

/// Always the same for the same corpus, seed and number.
pub fn input(corpus: &[Vec<u8>], words: &[&str], seed: u64, n: u64) -> Vec<u8> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ n.wrapping_mul(0xd134_2543_de82_ef95));
    let mut bytes = corpus[random.below(corpus.len())].clone();
    // Sometimes none, so that it is seen that the corpus itself is understood.
    let changes = [0, 1, 1, 1, 2, 2, 3, 4, 6, 10][random.below(10)];
    for _ in 0..changes {
        change(&mut bytes, corpus, words, &mut random);
        bytes.truncate(LONGEST);
    }
    bytes
}

fn change(bytes: &mut Vec<u8>, corpus: &[Vec<u8>], words: &[&str], random: &mut Random) {
    let at = random.below(bytes.len() + 1);
    let piece = at..(at + 1 + random.below(16)).min(bytes.len()).max(at);
    match random.below(12) {
        0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
        1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, b'"', b'\\', b' '][random.below(8)],
        2 => bytes.insert(at, random.next() as u8),
        3 => drop(bytes.drain(piece)),
        4 => {
            let repeated = bytes[piece].repeat([2, 3, 20, 200][random.below(4)]);
            drop(bytes.splice(at..at, repeated));
        }
        5 => bytes.truncate(at),
        6 | 7 => figures(bytes, at, random),
        8 => {
            let number = NUMBERS[random.below(NUMBERS.len())].to_be_bytes();
            let number = &number[8 - [1, 2, 4, 8][random.below(4)]..];
            for (place, byte) in bytes.iter_mut().skip(at).zip(number) {
                *place = *byte;
            }
        }
        9 => {
            let other = &corpus[random.below(corpus.len())];
            bytes.truncate(at);
            bytes.extend(&other[random.below(other.len() + 1)..]);
        }
        _ if words.is_empty() => bytes.push(random.next() as u8),
        10 => drop(bytes.splice(at..at, words[random.below(words.len())].bytes())),
        _ => drop(bytes.splice(piece, words[random.below(words.len())].bytes())),
    }
}

/// Puts another number in the place of the next one that is written in figures.
fn figures(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let Some(start) = (at..bytes.len()).find(|&n| bytes[n].is_ascii_digit()) else { return };
    let end = (start..bytes.len()).find(|&n| !bytes[n].is_ascii_digit()).unwrap_or(bytes.len());
    bytes.splice(start..end, FIGURES[random.below(FIGURES.len())].bytes());
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }
}
