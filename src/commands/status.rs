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
use table::LockTable;

/// What is to be shown, and how.
struct Query {
    service: Service,
    /// All there are, if nothing is selected.
    wanted: Vec<Selector>,
    held: bool,
    layout: Layout,
    /// A table on a terminal: all locks are laid out together, and sorted.
    on_terminal: bool,
    /// A terminal gets a description of the only lock that was asked for.
    describe: bool,
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
    let on_terminal = matches!(layout, None | Some(Layout::Table)) && std::io::stdout().is_terminal();
    let is_one = !args.held && matches!(wanted.as_slice(), [Selector::Name(_)]);
    let describe = on_terminal && layout.is_none() && is_one;
    let layout = layout.unwrap_or(Layout::Table);
    let query = &Query { service, wanted, held: args.held, layout, on_terminal, describe, color, backend_flag };
    let mut backend = query.service.open()?;
    block_on(async {
        if let Some(every) = watch_every {
            return watch(query, every.max(Duration::from_millis(100)), backend.as_mut(), voice).await;
        }
        let mut printer = Printer::new(query, Screen::of_stdout(query.color));
        let mut held = false;
        each_wanted(query, backend.as_mut(), |states| {
            held |= states.iter().any(is_held);
            printer.add(&states)
        })
        .await?;
        printer.finish()?;
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

fn is_held(state: &LockState) -> bool {
    state.state != State::Free
}

async fn watch(query: &Query, every: Duration, backend: &mut dyn Backend, voice: &mut Voice) -> Result<Exit> {
    let (mut drawn, mut trouble) = (false, None);
    loop {
        let mut picture = Vec::new();
        let fetched = each_wanted(query, backend, |states| {
            picture.extend(states);
            Ok(())
        });
        match fetched.await {
            Ok(()) => {
                if trouble.take().is_some() {
                    voice.tell(None, &Event::recovered());
                }
                draw(query, &picture, drawn)?;
                drawn = true;
            }
            // What never worked will not do so by itself; what did is shown until it does again.
            Err(error) if !drawn => return Err(error),
            Err(error) => {
                let why = Some(causes(&error, ""));
                if why != trouble {
                    voice.tell(None, &Event::waiting_for_backend(why.as_deref().unwrap_or_default()));
                    trouble = why;
                }
            }
        }
        tokio::time::sleep(every).await;
    }
}

/// Hands over the locks that were asked for: page by page or, for a terminal, all of them, sorted.
async fn each_wanted(
    query: &Query,
    backend: &mut dyn Backend,
    mut show: impl FnMut(Vec<LockState>) -> Result<()>,
) -> Result<()> {
    let mut all = Vec::new();
    each_page(&query.wanted, query.service.patience.connect, backend, |mut page| {
        page.retain(|state| !query.held || is_held(state));
        if query.on_terminal {
            all.extend(page);
            return Ok(());
        }
        show(page)
    })
    .await?;
    table::sort(&mut all);
    if query.on_terminal { show(all) } else { Ok(()) }
}

/// In the place of what a terminal shows already, and never more than it has room for.
fn draw(query: &Query, picture: &[LockState], again: bool) -> Result<()> {
    let screen = Screen { strict: true, ..Screen::of_stdout(query.color) };
    if !query.on_terminal {
        let mut printer = Printer::new(query, screen);
        printer.add(picture)?;
        return printer.finish();
    }
    let table = if picture.is_empty() { nothing(query).to_owned() } else { table::lines(&mut None, picture, screen) };
    let text = on_one_screen(&table, screen.height);
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

/// Prints pages as they come. But all samples of a metric stand together: metrics wait until every lock is known, so that
/// whoever collects them never gets half of them.
struct Printer<'a> {
    query: &'a Query,
    screen: Screen,
    table: LockTable,
    samples: Vec<prometheus::Samples>,
    printed: usize,
}

impl Printer<'_> {
    fn new(query: &Query, screen: Screen) -> Printer<'_> {
        Printer { query, screen, table: None, samples: Vec::new(), printed: 0 }
    }

    fn add(&mut self, states: &[LockState]) -> Result<()> {
        match (self.query.layout, states) {
            (Layout::Table, []) => {}
            (Layout::Table, [only]) if self.query.describe => {
                print(describe::describe(only, self.query, self.screen))?;
            }
            (Layout::Table, _) => print(table::lines(&mut self.table, states, self.screen))?,
            (Layout::Json, _) => {
                let mut text = String::new();
                for (at, state) in states.iter().enumerate() {
                    text += if self.printed + at == 0 { "[" } else { ",\n " };
                    text += &json_escaped(&serde_json::to_string(state)?);
                }
                print(text)?;
            }
            (Layout::Prometheus, _) => self.samples.extend(states.iter().map(prometheus::samples)),
        }
        self.printed += states.len();
        Ok(())
    }

    fn finish(self) -> Result<()> {
        match (self.query.layout, self.printed) {
            (Layout::Table, 0) => print(nothing(self.query)),
            (Layout::Table, _) => Ok(()),
            (Layout::Json, 0) => print("[]\n"),
            (Layout::Json, _) => print("]\n"),
            (Layout::Prometheus, _) => prometheus::expose(&self.query.service.address.to_string(), &self.samples),
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
