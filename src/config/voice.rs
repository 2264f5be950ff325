//! The configuration is read once, and first of all for how dlock speaks, so that errors are spoken the right way.

use anyhow::Result;

use super::{Layers, values, variable};
use crate::cli;
use crate::report::{Format, Loudness};

/// The configuration, and how dlock speaks in this run.
pub struct Loaded {
    pub layers: Layers,
    pub format: Format,
    pub loudness: Loudness,
}

impl Loaded {
    /// For verbs that need no configuration.
    pub fn nothing() -> Loaded {
        Loaded { layers: Layers::default(), format: Format::Text, loudness: Loudness::Normal }
    }
}

pub fn load(common: &cli::Common) -> Result<Loaded> {
    let layers = Layers::load(common)?;
    let format = layers.get("log", common.log.as_deref(), values::format)?.unwrap_or(Format::Text);
    let verbose = common.verbose || layers.get("verbose", None, values::yes_or_no)?.unwrap_or(false);
    let quiet = common.quiet || layers.get("quiet", None, values::yes_or_no)?.unwrap_or(false);
    let loudness = match (common.verbose || !common.quiet && verbose, quiet) {
        (true, _) => Loudness::Verbose,
        (_, true) => Loudness::Quiet,
        _ => Loudness::Normal,
    };
    Ok(Loaded { layers, format, loudness })
}

/// How to speak when what was typed makes no sense, or the config file none: as far as flag and variable tell.
pub fn typed_format(words: impl Iterator<Item = String>) -> Format {
    let mut ours = words.take_while(|word| word != "--");
    let flag = loop {
        match ours.next().as_deref() {
            Some("--log") => break ours.next(),
            Some(word) if word.starts_with("--log=") => break word.strip_prefix("--log=").map(ToOwned::to_owned),
            Some(_) => {}
            None => break None,
        }
    };
    let wanted = flag.or_else(|| std::env::var(variable("log")).ok());
    wanted.and_then(|format| values::format(&format).ok()).unwrap_or(Format::Text)
}
