//! Tables. The columns are laid out by the first page and stay where they are for all that follow; what does not fit into
//! its column moves the rest of its line, and is never broken. The last column takes the room that is left, and is cut off
//! where a terminal ends; a narrow one does without some of the others.

use std::io::IsTerminal;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::config::Color;

const GAP: usize = 2;
/// The least that is worth reading of the last column.
const ENOUGH: usize = 24;

/// The heads, and which of the columns a narrow terminal does without, the first of them first.
pub struct Layout<const N: usize> {
    pub heads: [&'static str; N],
    pub dispensable: &'static [usize],
}

pub type Row<const N: usize> = [Cell; N];

#[derive(Clone, Debug, Default)]
pub struct Cell {
    pub text: String,
    pub paint: Paint,
}

/// Colours that can be read on a light and on a dark ground.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Paint {
    #[default]
    Plain,
    Good,
    Odd,
    Bad,
}

impl Paint {
    pub fn on(self, text: &str) -> String {
        let code = match self {
            Paint::Plain => return text.to_owned(),
            Paint::Good => "32",
            Paint::Odd => "1;35",
            Paint::Bad => "1;31",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Cell {
        text.to_owned().into()
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Cell {
        Cell { text, paint: Paint::Plain }
    }
}

/// Where a table is shown.
#[derive(Clone, Copy, Debug)]
pub struct Screen {
    /// In columns; `None` if it does not end.
    pub width: Option<usize>,
    /// In lines.
    pub height: Option<usize>,
    pub color: bool,
    /// Nothing may be wider than the screen, not even a name.
    pub strict: bool,
}

impl Screen {
    /// What standard output leads to. Some terminals do not know how large they are, and say 0.
    pub fn of_stdout(color: Color) -> Screen {
        const NARROWEST: u16 = 40;
        let size = terminal_size::terminal_size_of(std::io::stdout());
        let is_set = |variable: &str| std::env::var_os(variable).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Screen {
            width: size.filter(|(width, _)| width.0 >= NARROWEST).map(|(width, _)| width.0.into()),
            height: size.filter(|(_, height)| height.0 > 0).map(|(_, height)| height.0.into()),
            color: match color {
                Color::Always => true,
                Color::Never => false,
                Color::Auto => std::io::stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb,
            },
            strict: false,
        }
    }

    pub fn paint(&self, paint: Paint, text: &str) -> String {
        if self.color { paint.on(text) } else { text.to_owned() }
    }
}

pub struct Table<const N: usize> {
    layout: &'static Layout<N>,
    screen: Screen,
    /// `None` for a column that is left out.
    widths: [Option<usize>; N],
}

impl<const N: usize> Table<N> {
    pub fn for_rows(layout: &'static Layout<N>, rows: &[Row<N>], screen: Screen) -> Table<N> {
        let last = N - 1;
        let widest = |n: usize| rows.iter().map(|row| row[n].text.width()).chain([layout.heads[n].width()]).max();
        let mut widths: [Option<usize>; N] = std::array::from_fn(|n| widest(n).filter(|width| *width > 0));
        if let (true, Some(room), Some(first)) = (screen.strict, screen.width, widths[0]) {
            widths[0] = Some(first.min(room / 2));
        }
        for dispensable in layout.dispensable {
            let tail = widths[last].map_or(0, |width| width.min(ENOUGH));
            let others: usize = widths[..last].iter().flatten().map(|width| width + GAP).sum();
            if screen.width.is_some_and(|room| others + tail > room) {
                widths[*dispensable] = None;
            }
        }
        Table { layout, screen, widths }
    }

    pub fn shows(&self, column: usize) -> bool {
        self.widths[column].is_some()
    }

    pub fn head(&self) -> String {
        self.line(&self.layout.heads.map(Cell::from))
    }

    pub fn line(&self, row: &Row<N>) -> String {
        let (last, mut used, mut line) = (N - 1, 0, String::new());
        for (cell, width) in row[..last].iter().zip(self.widths) {
            let Some(width) = width else { continue };
            let text = if self.screen.strict { clipped(&cell.text, width) } else { cell.text.clone() };
            let padding = width.saturating_sub(text.width()) + GAP;
            used += text.width() + padding;
            line += &self.screen.paint(cell.paint, &text);
            line.extend(std::iter::repeat_n(' ', padding));
        }
        line += &match self.screen.width {
            Some(room) if self.screen.strict && used >= room => String::new(),
            Some(room) => self.screen.paint(row[last].paint, &clipped(&row[last].text, room.saturating_sub(used))),
            None => self.screen.paint(row[last].paint, &row[last].text),
        };
        line.truncate(line.trim_end().len());
        line + "\n"
    }
}

/// As much of a text as there is room for.
pub fn clipped(text: &str, room: usize) -> String {
    if text.width() <= room {
        return text.to_owned();
    }
    let mut used = 1;
    let fits = |c: &char| {
        used += c.width().unwrap_or_default();
        used <= room
    };
    let start: String = text.chars().take_while(fits).collect();
    start + "…"
}

#[cfg(test)]
mod tests {
    use super::*;

    static LAYOUT: Layout<4> = Layout { heads: ["NAME", "STATE", "SPARE", "HOLDER"], dispensable: &[2] };

    fn screen(width: Option<usize>) -> Screen {
        Screen { width, height: None, color: false, strict: false }
    }

    #[test]
    fn a_narrow_screen_cuts_off_the_last_column_and_breaks_no_other() {
        let row =
            ["nightly-report-of-the-sales", "held", "something to spare", "root@web1:4242 ./report.sh --and-more"];
        let row = row.map(Cell::from);
        for room in [60, 80, 120, 300] {
            let table = Table::for_rows(&LAYOUT, std::slice::from_ref(&row), screen(Some(room)));
            let line = table.line(&row);
            assert!(line.trim_end().width() <= room && line.lines().count() == 1, "{line}");
            assert!(line.starts_with("nightly-report-of-the-sales  held   "), "{line}");
            assert!(line.contains("root@web1:4242 ./repo"), "{line}");
            assert_eq!(table.shows(2), room > 60, "{line}");
        }
        let piped = Table::for_rows(&LAYOUT, std::slice::from_ref(&row), screen(None)).line(&row);
        assert!(piped.ends_with("--and-more\n"), "{piped}");
    }

    #[test]
    fn a_strict_screen_is_never_left() {
        let row = [&"long-".repeat(30), "revoked 2/3", "x", &"y".repeat(90)].map(Cell::from);
        for room in [40, 60, 80] {
            let screen = Screen { strict: true, ..screen(Some(room)) };
            let table = Table::for_rows(&LAYOUT, std::slice::from_ref(&row), screen);
            for line in [table.head(), table.line(&row)] {
                assert!(line.trim_end().width() <= room, "{room}: {line}");
            }
        }
    }

    #[test]
    fn colours_take_no_room() {
        let row = |paint| ["a".into(), Cell { text: "held".into(), paint }, "b".into(), "c".into()];
        let colored = Screen { color: true, ..screen(Some(80)) };
        let table = Table::for_rows(&LAYOUT, &[row(Paint::Good)], colored);
        assert_eq!(
            table.line(&row(Paint::Good)).replace("\x1b[32m", "").replace("\x1b[0m", ""),
            table.line(&row(Paint::Plain))
        );
    }

    #[test]
    fn wide_characters_are_counted_as_wide() {
        assert_eq!(clipped("東京東京", 5), "東京…");
        assert_eq!(clipped("abcdef", 5), "abcd…");
        assert_eq!(clipped("abcde", 5), "abcde");
        assert_eq!(clipped("abc", 0), "…");
    }
}
