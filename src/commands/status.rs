//! `dlock status`: who holds what, since when, who waits, how the last run ended.

pub mod table;

use std::io::IsTerminal;

use anyhow::Result;

use super::block_on;
use super::doctor::is_spent_probe;
use crate::backend::{self, Backend, within};
use crate::config::StatusQuery;
use crate::exit::Exit;
use crate::lock::{LockState, State};
use crate::report::{Event, Voice, causes, json_escaped, print};
use table::Table;

pub fn status(query: &StatusQuery, mut voice: Voice) -> Result<Exit> {
    let mut backend = backend::open(&query.service.address, query.service.patience)?;
    block_on(async {
        let Some(every) = query.watch else {
            let mut printer = Printer::new(query.json);
            let held = each_page(query, backend.as_mut(), |page| printer.print(page)).await?;
            printer.finish()?;
            return Ok(if held && query.exit_code { Exit::Code(Exit::BUSY) } else { Exit::OK });
        };
        let (mut drawn, mut trouble) = (false, None);
        loop {
            match whole_picture(query, backend.as_mut()).await {
                Ok(picture) => {
                    if trouble.take().is_some() {
                        voice.say(&Event::Recovered);
                    }
                    draw(query.json, &picture)?;
                    drawn = true;
                }
                // What never worked will not do so by itself; what did is shown until it does again.
                Err(error) if !drawn => return Err(error),
                Err(error) => {
                    let why = Some(causes(&error, ""));
                    if why != trouble {
                        voice.say(&Event::WaitingForBackend { why: why.as_deref().unwrap_or_default() });
                        trouble = why;
                    }
                }
            }
            tokio::time::sleep(every).await;
        }
    })
}

async fn whole_picture(query: &StatusQuery, backend: &mut dyn Backend) -> Result<Vec<LockState>> {
    let mut all = Vec::new();
    each_page(query, backend, |page| {
        all.extend_from_slice(page);
        Ok(())
    })
    .await?;
    Ok(all)
}

/// In the place of what a terminal shows already.
fn draw(json: bool, picture: &[LockState]) -> Result<()> {
    if !json && std::io::stdout().is_terminal() {
        print("\x1b[H\x1b[2J")?;
    }
    let mut printer = Printer::new(json);
    printer.print(picture)?;
    printer.finish()
}

/// Fetches what was asked for; says whether any of it is held.
async fn each_page(
    query: &StatusQuery,
    backend: &mut dyn Backend,
    mut show: impl FnMut(&[LockState]) -> Result<()>,
) -> Result<bool> {
    let patience = query.service.patience.connect;
    let is_held = |state: &LockState| state.state != State::Free;
    if !query.names.is_empty() {
        let mut states = Vec::new();
        for name in &query.names {
            states.push(within(patience, backend.inspect(name)).await?);
        }
        show(&states)?;
        return Ok(states.iter().any(is_held));
    }
    let (mut held, mut next) = (false, None);
    loop {
        let mut page = within(patience, backend.list(next)).await?;
        page.locks.retain(|state| !is_spent_probe(state));
        held |= page.locks.iter().any(is_held);
        show(&page.locks)?;
        next = page.next;
        if next.is_none() {
            return Ok(held);
        }
    }
}

/// Prints pages as they come: one JSON array, or one table.
struct Printer {
    json: bool,
    table: Option<Table>,
    printed: usize,
}

impl Printer {
    fn new(json: bool) -> Printer {
        Printer { json, table: None, printed: 0 }
    }

    fn print(&mut self, states: &[LockState]) -> Result<()> {
        let mut text = String::new();
        if self.json {
            for state in states {
                text += if self.printed == 0 { "[" } else { ",\n " };
                text += &json_escaped(&serde_json::to_string(state)?);
                self.printed += 1;
            }
        } else if !states.is_empty() {
            text = Table::of(&mut self.table, states);
            self.printed += states.len();
        }
        print(text)
    }

    fn finish(&mut self) -> Result<()> {
        print(match (self.json, self.printed) {
            (true, 0) => "[]\n",
            (true, _) => "]\n",
            (false, 0) => "no locks\n",
            (false, _) => "",
        })
    }
}
