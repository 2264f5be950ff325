//! The configuration is read once, and first of all for how dlock speaks, so that errors are spoken the right way.

use anyhow::Result;

use super::{Layers, values, variable};
use crate::cli;
use crate::report::{Format, Loudness, Voice};

pub fn load(common: &cli::Common) -> Result<(Layers, Voice)> {
    let mut layers = Layers::load(common)?;
    let format = layers.value("log", common.log.as_deref(), values::choice, "text")?;
    let verbose = common.verbose || layers.value("verbose", None, values::yes_or_no, "false")?;
    let quiet = common.quiet || layers.value("quiet", None, values::yes_or_no, "false")?;
    let loudness = match (common.verbose || !common.quiet && verbose, quiet) {
        (true, _) => Loudness::Verbose,
        (_, true) => Loudness::Quiet,
        _ => Loudness::Normal,
    };
    // Nothing that `--explain` has to show.
    layers.explained.clear();
    Ok((layers, Voice::new(format, loudness)))
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
    wanted.and_then(|format| values::choice(&format).ok()).unwrap_or(Format::Text)
}
