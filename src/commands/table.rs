//! Tables. The columns are laid out by the first page and stay where they are for all that follow.
//!
//! Piped, nothing is cut off: what does not fit into its column moves the rest of its line. On a terminal all rows are the
//! first page. The last column takes the room that is left, and is cut off where the terminal ends; a narrow one does
//! without some of the others. A name that would take too much room from them stands on a line of its own.

use std::io::IsTerminal;

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::config::Color;

const GAP: usize = 2;

pub struct Layout<const N: usize> {
    pub heads: [&'static str; N],
    /// The columns that a narrow terminal does without, the first of them first: each if the last column would get less
    /// room than stands here, and needs it.
    pub dispensable: &'static [(usize, usize)],
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
        let code = match paint {
            Paint::Good if self.color => "32",
            Paint::Odd if self.color => "1;35",
            Paint::Bad if self.color => "1;31",
            _ => return text.to_owned(),
        };
        format!("\x1b[{code}m{text}\x1b[0m")
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
        let longest_name = screen.width.map_or(usize::MAX, |room| room * 2 / 5);
        let counted = |n: usize, width: usize| match n {
            0 if width > longest_name && !screen.strict => 0,
            0 => width.min(longest_name),
            _ => width,
        };
        let widest = |n: usize| {
            let all = rows.iter().map(|row| counted(n, row[n].text.width()));
            all.chain([layout.heads[n].width()]).max()
        };
        let mut widths: [Option<usize>; N] = std::array::from_fn(|n| widest(n).filter(|width| *width > 0));
        if let Some(room) = screen.width {
            let left = |widths: &[Option<usize>; N]| {
                room.saturating_sub(widths[..N - 1].iter().flatten().map(|width| width + GAP).sum())
            };
            for (column, least) in layout.dispensable {
                if left(&widths) < widths[N - 1].map_or(0, |width| width.min(*least)) {
                    widths[*column] = None;
                }
            }
            widths[N - 1] = Some(left(&widths));
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
        let mut line = String::new();
        for (n, (cell, width)) in row.iter().zip(self.widths).enumerate() {
            let Some(width) = width else { continue };
            let mut text = cell.text.clone();
            if self.screen.width.is_some() && text.width() > width {
                let stands_alone = n == 0 && !self.screen.strict;
                text = if stands_alone { format!("{text}\n") } else { clipped(&text, width) };
            }
            let used = text.rsplit('\n').next().unwrap_or_default().width();
            line += &self.screen.paint(cell.paint, &text);
            line.extend(std::iter::repeat_n(' ', width.saturating_sub(used) + GAP));
        }
        line.truncate(line.trim_end().len());
        line + "\n"
    }
}

/// As much of a text as there is room for.
pub fn clipped(text: &str, room: usize) -> String {
    if text.width() <= room {
        return text.to_owned();
    }
    if room == 0 {
        return String::new();
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

    static LAYOUT: Layout<4> = Layout { heads: ["NAME", "STATE", "SPARE", "HOLDER"], dispensable: &[(2, 20)] };
    const HOLDER: &str = "root@web1:4242 ./report.sh --and-more";

    fn screen(width: Option<usize>) -> Screen {
        Screen { width, height: None, color: false, strict: false }
    }

    fn laid_out(names: &[&str], screen: Screen) -> (Table<4>, String) {
        let row = |name: &&str| [name, "held", "something to spare", HOLDER].map(Cell::from);
        let rows: Vec<_> = names.iter().map(row).collect();
        let table = Table::for_rows(&LAYOUT, &rows, screen);
        let text = table.head() + &rows.iter().map(|row| table.line(row)).collect::<String>();
        (table, text)
    }

    #[test]
    fn a_narrow_screen_cuts_off_the_last_column_and_breaks_no_other() {
        for room in [60, 80, 120, 300] {
            let (table, text) = laid_out(&["nightly-report"], screen(Some(room)));
            assert!(text.lines().all(|line| line.width() <= room), "{text}");
            assert!(text.lines().count() == 2 && text.contains("\nnightly-report  held   "), "{text}");
            assert!(text.contains("root@web1:4242 ./rep"), "{text}");
            assert_eq!(table.shows(2), room > 60, "{text}");
        }
        let (_, piped) = laid_out(&["nightly-report"], screen(None));
        assert!(piped.ends_with("--and-more\n"), "{piped}");
    }

    #[test]
    fn a_long_name_takes_no_room_from_other_locks() {
        let name = "long-".repeat(30);
        for room in [60, 80, 120, 200] {
            let (_, text) = laid_out(&["a", &name, "b"], screen(Some(room)));
            let lines: Vec<_> = text.lines().collect();
            let column = |line: &str| line.find("held");
            assert_eq!((lines.len(), lines[2]), (5, name.as_str()), "{text}");
            assert_eq!(column(lines[1]), Some(6), "{text}");
            assert!([3, 4].iter().all(|n| column(lines[*n]) == column(lines[1])), "{text}");
            assert!(lines[3].contains("root@web1:4242"), "{text}");
        }
    }

    #[test]
    fn a_strict_screen_is_never_left() {
        for room in [40, 60, 80] {
            let (_, text) = laid_out(&[&"long-".repeat(30)], Screen { strict: true, ..screen(Some(room)) });
            assert!(text.lines().count() == 2 && text.lines().all(|line| line.width() <= room), "{room}: {text}");
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
        assert_eq!((clipped("abc", 1), clipped("abc", 0)), ("…".into(), String::new()));
    }
}
