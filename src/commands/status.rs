//! `dlock status`: who holds what, since when, who waits, how the last run ended.

mod describe;
pub mod prometheus;
pub mod table;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::Result;

use super::block_on;
use super::selected::each_page;
use super::table::Screen;
use crate::backend::{Backend, held_by_root};
use crate::cli::StatusArgs;
use crate::config::{Color, Layers, Layout, Service, flag, values};
use crate::exit::{Exit, Fault};
use crate::lock::{LockState, Selector, State};
use crate::report::{Event, Voice, causes, json_escaped, print};
use prometheus::Exposition;
use table::LockTable;

/// What is to be shown, and how.
struct Query {
    service: Service,
    /// All there are, if nothing is selected.
    wanted: Vec<Selector>,
    /// `None`: a table, or the description of one lock on a terminal.
    layout: Option<Layout>,
    held: bool,
    color: Color,
    /// What has to be typed to reach the same backend again.
    backend_flag: String,
}

pub fn status(args: StatusArgs, mut layers: Layers, voice: &mut Voice) -> Result<Exit> {
    let wanted = values::locks(&args.locks)?;
    let watch_every = flag("--watch", &args.watch, values::duration)?;
    let layout = if args.json { &Some("json".to_owned()) } else { &args.format };
    let layout = flag("--format", layout, values::choice)?;
    if args.exit_code && wanted.is_empty() {
        return Err(Fault::Usage.because("which lock? dlock status NAME --exit-code"));
    }
    if watch_every.is_some() && layout == Some(Layout::Prometheus) {
        return Err(Fault::Usage.because("--format prometheus is printed once, not with --watch"));
    }
    let color = flag("--color", &args.color, values::choice)?.unwrap_or(Color::Auto);
    let service = layers.service(None)?;
    let backend_flag = match layers.typed.backend {
        Some(url) if url.contains("://") => format!("-b '{}' ", service.address),
        Some(profile) => format!("-b {profile} "),
        None => String::new(),
    };
    let query = &Query { service, wanted, layout, held: args.held, color, backend_flag };
    let mut backend = query.service.open()?;
    block_on(async {
        if let Some(every) = watch_every {
            return watch(query, every.max(Duration::from_millis(100)), backend.as_mut(), voice).await;
        }
        let screen = Screen::of_stdout(query.color);
        let mut held = false;
        if is_table_on_terminal(query) {
            let picture = whole_picture(query, backend.as_mut()).await?;
            held = picture.iter().any(is_held);
            print(match picture.as_slice() {
                [only] if wants_description(query) => describe::describe(only, query, screen),
                all => as_table(query, all, screen),
            })?;
        } else {
            let mut printer = Printer::new(query, screen);
            each_wanted(query, backend.as_mut(), |page| {
                held |= page.iter().any(is_held);
                printer.add(&page)
            })
            .await?;
            printer.finish(query)?;
        }
        for selector in &query.wanted {
            if let Selector::Name(name) = selector
                && let Some(lock) = held_by_root(&query.service.address, name)
            {
                voice.tell(name, &Event::another_lock(&lock));
            }
        }
        Ok(if held && args.exit_code { Exit::Code(Exit::BUSY) } else { Exit::OK })
    })
}

/// Pages are laid out together and sorted there.
fn is_table_on_terminal(query: &Query) -> bool {
    matches!(query.layout, None | Some(Layout::Table)) && std::io::stdout().is_terminal()
}

fn is_held(state: &LockState) -> bool {
    state.state != State::Free
}

/// One lock was asked for, and nothing was said about how to show it.
fn wants_description(query: &Query) -> bool {
    query.layout.is_none() && !query.held && matches!(query.wanted.as_slice(), [Selector::Name(_)])
}

async fn watch(query: &Query, every: Duration, backend: &mut dyn Backend, voice: &mut Voice) -> Result<Exit> {
    let (mut drawn, mut trouble) = (false, None);
    loop {
        match whole_picture(query, backend).await {
            Ok(picture) => {
                if trouble.take().is_some() {
                    voice.say(&Event::recovered());
                }
                draw(query, &picture, drawn)?;
                drawn = true;
            }
            // What never worked will not do so by itself; what did is shown until it does again.
            Err(error) if !drawn => return Err(error),
            Err(error) => {
                let why = Some(causes(&error, ""));
                if why != trouble {
                    voice.say(&Event::waiting_for_backend(why.as_deref().unwrap_or_default()));
                    trouble = why;
                }
            }
        }
        tokio::time::sleep(every).await;
    }
}

async fn each_wanted(
    query: &Query,
    backend: &mut dyn Backend,
    mut show: impl FnMut(Vec<LockState>) -> Result<()>,
) -> Result<()> {
    each_page(&query.wanted, query.service.patience.connect, backend, |mut page| {
        page.retain(|state| !query.held || is_held(state));
        show(page)
    })
    .await
}

async fn whole_picture(query: &Query, backend: &mut dyn Backend) -> Result<Vec<LockState>> {
    let mut all = Vec::new();
    each_wanted(query, backend, |page| {
        all.extend(page);
        Ok(())
    })
    .await?;
    if is_table_on_terminal(query) {
        table::sort(&mut all);
    }
    Ok(all)
}

fn as_table(query: &Query, picture: &[LockState], screen: Screen) -> String {
    match picture {
        [] => nothing(query).to_owned(),
        _ => LockTable::new(screen).of(picture),
    }
}

/// In the place of what a terminal shows already, and never more than it has room for.
fn draw(query: &Query, picture: &[LockState], again: bool) -> Result<()> {
    let screen = Screen { strict: true, ..Screen::of_stdout(query.color) };
    if !is_table_on_terminal(query) {
        let mut printer = Printer::new(query, screen);
        printer.add(picture)?;
        return printer.finish(query);
    }
    let text = on_one_screen(&as_table(query, picture, screen), screen.height);
    // A terminal that is told to clear itself moves what it shows to where one can scroll back to: that is wanted once.
    let clear = if again { "" } else { "\x1b[2J" };
    print(format!("{clear}\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n")))
}

/// The beginning of a text, and how much is left out. Two lines stay free: for the cursor, and for what is said on
/// standard error.
fn on_one_screen(text: &str, height: Option<usize>) -> String {
    let (lines, room) = (text.lines().count(), height.map_or(usize::MAX, |height| height.saturating_sub(2).max(2)));
    if lines <= room {
        return text.to_owned();
    }
    let shown: String = text.split_inclusive('\n').take(room - 1).collect();
    format!("{shown}… and {} more\n", lines + 1 - room)
}

fn nothing(query: &Query) -> &'static str {
    match (query.held, query.wanted.is_empty()) {
        (true, _) => "no lock is held\n",
        (false, true) => "no locks\n",
        (false, false) => "no lock has such a name\n",
    }
}

/// Prints pages as they come.
enum Printer {
    Table { table: Box<LockTable>, printed: usize },
    Json { printed: usize },
    Prometheus(Box<Exposition>),
}

impl Printer {
    fn new(query: &Query, screen: Screen) -> Printer {
        match query.layout {
            None | Some(Layout::Table) => Printer::Table { table: Box::new(LockTable::new(screen)), printed: 0 },
            Some(Layout::Json) => Printer::Json { printed: 0 },
            Some(Layout::Prometheus) => {
                Printer::Prometheus(Box::new(Exposition::new(&query.service.address.to_string())))
            }
        }
    }

    fn add(&mut self, states: &[LockState]) -> Result<()> {
        match self {
            Printer::Table { .. } if states.is_empty() => Ok(()),
            Printer::Table { table, printed } => {
                *printed += states.len();
                print(table.of(states))
            }
            Printer::Json { printed } => {
                let mut text = String::new();
                for state in states {
                    text += if *printed == 0 { "[" } else { ",\n " };
                    text += &json_escaped(&serde_json::to_string(state)?);
                    *printed += 1;
                }
                print(text)
            }
            Printer::Prometheus(exposition) => exposition.add(states),
        }
    }

    fn finish(self, query: &Query) -> Result<()> {
        match self {
            Printer::Table { printed: 0, .. } => print(nothing(query)),
            Printer::Table { .. } => Ok(()),
            Printer::Json { printed: 0 } => print("[]\n"),
            Printer::Json { .. } => print("]\n"),
            Printer::Prometheus(exposition) => exposition.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_keeps_the_head_and_counts_what_does_not_fit() {
        let text = "NAME\na\nb\nc\nd\n";
        assert_eq!(on_one_screen(text, Some(6)), "NAME\na\nb\n… and 2 more\n");
        assert_eq!(on_one_screen(text, Some(7)), text);
        assert_eq!(on_one_screen(text, None), text);
        assert_eq!(on_one_screen(text, Some(1)), "NAME\n… and 4 more\n");
    }
}
