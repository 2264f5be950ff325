//! `dlock words`: what the completions offer for a word, one a line. Whoever presses the tab key is not
//! made to wait for a backend that does not answer.

use std::time::Duration;

use anyhow::Result;

use super::block_on;
use super::doctor::is_spent_probe;
use crate::backend::{self, within};
use crate::cli::{Words, WordsArgs};
use crate::config::{Layers, Service};
use crate::exit::Exit;
use crate::report::print;

const PATIENCE: Duration = Duration::from_secs(1);
const MOST: usize = 1000;

pub fn words(args: WordsArgs, mut layers: Layers) -> Result<Exit> {
    let words = match args.kind {
        Words::Profiles => layers.profiles(),
        Words::Names => {
            let service = Service::from_layers(&mut layers, &args.common, None)?;
            let mut backend = backend::open(&service.address, service.patience)?;
            block_on(within(PATIENCE, async {
                let mut names: Vec<String> = Vec::new();
                let mut next = None;
                loop {
                    let page = backend.list(next).await?;
                    let locks = page.locks.iter().filter(|lock| !is_spent_probe(lock));
                    names.extend(locks.map(|lock| lock.name.to_string()));
                    next = page.next;
                    if next.is_none() || names.len() >= MOST {
                        return Ok(names);
                    }
                }
            }))?
        }
    };
    let text: String = words.iter().map(|word| format!("{word}\n")).collect();
    print(text)?;
    Ok(Exit::OK)
}
