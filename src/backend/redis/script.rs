//! The verbs as Lua, which the server runs each in one atomic step. Sent by their hash; the text goes
//! along only to a server that has not seen it yet.

use super::resp::{Command, command};

pub struct Script {
    pub text: &'static str,
    /// What the server knows it by: SHA-1, in hexadecimal.
    hash: [u8; 40],
}

/// A verb of one Redis: the file named, after what all of them share.
macro_rules! script {
    ($file:literal) => {
        $crate::backend::redis::script::Script::new(concat!(
            include_str!("prelude.lua"),
            include_str!("common.lua"),
            include_str!($file)
        ))
    };
}
pub(super) use script;

impl Script {
    /// Hashed by the compiler: a short run would spend a twentieth of its time on it.
    pub const fn new(text: &'static str) -> Script {
        const DIGITS: [u8; 16] = *b"0123456789abcdef";
        let digest = const_sha1::sha1(text.as_bytes()).as_bytes();
        let mut hash = [0; 40];
        let mut at = 0;
        while at < digest.len() {
            hash[2 * at] = DIGITS[(digest[at] >> 4) as usize];
            hash[2 * at + 1] = DIGITS[(digest[at] & 15) as usize];
            at += 1;
        }
        Script { text, hash }
    }

    pub fn by_hash(&self, keys: &[String], args: &[&str]) -> Command {
        let hash = str::from_utf8(&self.hash).expect("hexadecimal digits are ASCII");
        invoke("EVALSHA", hash, keys, args)
    }

    /// So that a later command of the same batch finds it by its hash.
    pub fn load(&self) -> Command {
        command!["SCRIPT", "LOAD", self.text]
    }

    pub fn by_text(&self, keys: &[String], args: &[&str]) -> Command {
        invoke("EVAL", self.text, keys, args)
    }
}

fn invoke(verb: &str, script: &str, keys: &[String], args: &[&str]) -> Command {
    let count = keys.len().to_string();
    let head = [verb, script, &count].into_iter();
    head.chain(keys.iter().map(String::as_str)).chain(args.iter().copied()).map(|part| part.into()).collect()
}

#[cfg(test)]
mod tests {
    use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

    use super::*;

    #[test]
    fn a_script_goes_by_its_sha1() {
        for length in [0, 1, 55, 56, 63, 64, 65, 119, 1000, 20_000] {
            let text = "return 1 ".chars().cycle().take(length).collect::<String>().leak();
            let digest = digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
            let expected: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(str::from_utf8(&Script::new(text).hash).unwrap(), expected, "{length} bytes");
        }
    }
}
