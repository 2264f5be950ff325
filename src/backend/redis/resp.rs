//! The Redis protocol: what commands and answers look like as bytes. Knows no socket.

use anyhow::{Result, bail};

/// A command and its arguments.
pub type Command = Vec<Vec<u8>>;

/// `command!["GET", key]`, from anything that is bytes.
macro_rules! command {
    ($($part:expr),+ $(,)?) => { vec![$(AsRef::<[u8]>::as_ref(&$part).to_vec()),+] };
}
pub(in crate::backend) use command;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    Nil,
    Integer(i64),
    Text(Vec<u8>),
    Array(Vec<Value>),
    Error(String),
    /// Not an answer: the server has news, of the keys that are named in it.
    Push(Vec<Value>),
}

impl Value {
    /// What a person could read of it; programs of other people put any bytes into their locks.
    pub fn text(&self) -> Option<String> {
        match self {
            Value::Text(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            Value::Integer(number) => Some(number.to_string()),
            _ => None,
        }
    }

    pub fn number<T: std::str::FromStr>(&self) -> Option<T> {
        self.text()?.parse().ok()
    }

    pub fn items(&self) -> &[Value] {
        match self {
            Value::Array(items) => items,
            _ => &[],
        }
    }
}

pub fn encode(command: &Command, out: &mut Vec<u8>) {
    out.extend_from_slice(format!("*{}\r\n", command.len()).as_bytes());
    for part in command {
        out.extend_from_slice(format!("${}\r\n", part.len()).as_bytes());
        out.extend_from_slice(part);
        out.extend_from_slice(b"\r\n");
    }
}

const DEEPEST: usize = 16;
/// What a value takes in memory beside its text: itself, and what is allocated for it.
const COST: usize = 2 * size_of::<Value>();
/// Errors, numbers and lengths are short.
const LONGEST_LINE: usize = 64 << 10;

/// The first value in `input` and how many bytes it took; `None` while it is not complete. Neither the value in memory
/// nor its bytes may have more than `limit`.
pub fn decode(input: &[u8], limit: usize) -> Result<Option<(Value, usize)>> {
    let mut reader = Reader { rest: input, left: limit };
    match reader.value(0) {
        Ok(value) => Ok(Some((value, input.len() - reader.rest.len()))),
        Err(Stop::Incomplete) if input.len() < limit => Ok(None),
        Err(Stop::Incomplete | Stop::TooLong) => bail!("the answer is longer than any that Redis would give"),
        Err(Stop::Foreign) => bail!("this is not the protocol of Redis"),
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    /// How much memory values may still take.
    left: usize,
}

enum Stop {
    Incomplete,
    TooLong,
    Foreign,
}

impl Reader<'_> {
    fn value(&mut self, depth: usize) -> Result<Value, Stop> {
        let (&kind, tail) = self.rest.split_first().ok_or(Stop::Incomplete)?;
        self.rest = tail;
        self.spend(COST)?;
        let line = self.line()?;
        Ok(match kind {
            b'+' | b',' | b'(' | b'#' => Value::Text(line.to_vec()),
            b'-' => Value::Error(String::from_utf8_lossy(line).into_owned()),
            b':' => Value::Integer(number(line)?),
            b'_' => Value::Nil,
            b'$' | b'=' | b'!' if number(line)? < 0 => Value::Nil,
            b'$' | b'=' => Value::Text(self.bulk(number(line)?)?),
            b'!' => Value::Error(String::from_utf8_lossy(&self.bulk(number(line)?)?).into_owned()),
            b'*' if number(line)? < 0 => Value::Nil,
            b'*' | b'~' => Value::Array(self.values(number(line)?, depth)?),
            b'%' => Value::Array(self.values(number(line)?.saturating_mul(2), depth)?),
            b'>' => Value::Push(self.values(number(line)?, depth)?),
            _ => return Err(Stop::Foreign),
        })
    }

    fn values(&mut self, count: i64, depth: usize) -> Result<Vec<Value>, Stop> {
        if depth == DEEPEST {
            return Err(Stop::Foreign);
        }
        let mut values = Vec::with_capacity(usize::try_from(count).unwrap_or(0).min(16));
        for _ in 0..count {
            values.push(self.value(depth + 1)?);
        }
        Ok(values)
    }

    fn bulk(&mut self, length: i64) -> Result<Vec<u8>, Stop> {
        let length = usize::try_from(length).map_err(|_| Stop::Foreign)?;
        self.spend(length)?;
        let bytes = self.rest.get(..length).ok_or(Stop::Incomplete)?.to_vec();
        self.rest = match self.rest.get(length..length + 2) {
            Some(b"\r\n") => &self.rest[length + 2..],
            Some(_) => return Err(Stop::Foreign),
            None => return Err(Stop::Incomplete),
        };
        Ok(bytes)
    }
}

impl<'a> Reader<'a> {
    fn spend(&mut self, bytes: usize) -> Result<(), Stop> {
        self.left = self.left.checked_sub(bytes).ok_or(Stop::TooLong)?;
        Ok(())
    }

    fn line(&mut self) -> Result<&'a [u8], Stop> {
        let head = &self.rest[..self.rest.len().min(LONGEST_LINE)];
        let end = head.windows(2).position(|pair| pair == b"\r\n");
        let stop = if head.len() < LONGEST_LINE { Stop::Incomplete } else { Stop::TooLong };
        let end = end.ok_or(stop)?;
        let line = &self.rest[..end];
        self.rest = &self.rest[end + 2..];
        Ok(line)
    }
}

fn number(line: &[u8]) -> Result<i64, Stop> {
    std::str::from_utf8(line).ok().and_then(|text| text.parse().ok()).ok_or(Stop::Foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(input: &[u8]) -> Result<Option<(Value, usize)>> {
        super::decode(input, 1 << 20)
    }

    #[test]
    fn a_command_becomes_an_array_of_strings() {
        let mut out = Vec::new();
        encode(&command!["GET", "a b"], &mut out);
        assert_eq!(out, b"*2\r\n$3\r\nGET\r\n$3\r\na b\r\n");
    }

    #[test]
    fn every_prefix_of_an_answer_is_incomplete_and_the_whole_is_read_exactly() {
        let whole = b"*5\r\n$3\r\na\r\n\r\n:-7\r\n$-1\r\n*1\r\n+OK\r\n_\r\n";
        for end in 0..whole.len() {
            assert!(decode(&whole[..end]).unwrap().is_none(), "{end}");
        }
        let text = |text: &str| Value::Text(text.into());
        let expected = Value::Array(vec![
            text("a\r\n"),
            Value::Integer(-7),
            Value::Nil,
            Value::Array(vec![text("OK")]),
            Value::Nil,
        ]);
        let more = [whole.as_slice(), b"+next\r\n"].concat();
        assert_eq!(decode(&more).unwrap(), Some((expected, whole.len())));
    }

    #[test]
    fn errors_maps_and_pushes_are_told_apart() {
        let value = |bytes: &[u8]| decode(bytes).unwrap().unwrap().0;
        assert_eq!(value(b"-NOAUTH no\r\n"), Value::Error("NOAUTH no".into()));
        assert_eq!(value(b"%1\r\n+a\r\n:1\r\n"), Value::Array(vec![Value::Text("a".into()), Value::Integer(1)]));
        let news = vec![Value::Text("invalidate".into()), Value::Array(vec![Value::Text("k".into())])];
        assert_eq!(value(b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nk\r\n"), Value::Push(news));
    }

    #[test]
    fn what_is_not_redis_is_an_error_not_a_wait() {
        for foreign in ["HTTP/1.1 400 Bad Request\r\n", "$x\r\n", "$99999999999\r\n", "$1\r\nab\r\n"] {
            assert!(decode(foreign.as_bytes()).is_err(), "{foreign:?}");
        }
        assert!(decode("*1\r\n".repeat(100).as_bytes()).is_err());
    }

    #[test]
    fn no_answer_takes_more_memory_than_it_may() {
        let nils = |count: usize| format!("*{count}\r\n{}", "_\r\n".repeat(count));
        let most = (1 << 20) / COST - 1;
        assert!(decode(nils(most).as_bytes()).unwrap().is_some());
        assert!(decode(nils(most + 1).as_bytes()).is_err());
        assert!(decode(format!("*{}\r\n", i64::MAX).as_bytes()).unwrap().is_none());
        assert!(decode(format!("${}\r\n", 2 << 20).as_bytes()).is_err());
        assert!(decode(format!("-{}", "x".repeat(100_000)).as_bytes()).is_err());
    }

    proptest::proptest! {
        /// Whatever somebody sends who is no Redis: an answer, a wait for more or an error, but no panic,
        /// and never more bytes used than there were.
        #[test]
        fn no_bytes_make_the_reader_panic(bytes in "[-+:$*%>_=~!#,(0-9a\r\n]{0,60}") {
            if let Ok(Some((_, used))) = decode(bytes.as_bytes()) {
                proptest::prop_assert!(used <= bytes.len());
            }
        }
    }
}
