//! The verbs as Lua, which the server runs each in one atomic step. Sent by their hash; the text goes
//! along only to a server that has not seen it yet.

use aws_lc_rs::digest::{SHA1_FOR_LEGACY_USE_ONLY, digest};

use super::resp::{Command, command};

pub struct Script {
    text: &'static str,
    hash: String,
}

/// A verb of one Redis: the file named, after what all of them share.
macro_rules! script {
    ($file:literal) => {
        $crate::backend::redis::script::Script::new(concat!(include_str!("common.lua"), include_str!($file)))
    };
}
pub(super) use script;

impl Script {
    pub fn new(text: &'static str) -> Script {
        let digest = digest(&SHA1_FOR_LEGACY_USE_ONLY, text.as_bytes());
        Script { text, hash: digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect() }
    }

    pub fn by_hash(&self, keys: &[String], args: &[&str]) -> Command {
        invoke("EVALSHA", &self.hash, keys, args)
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
