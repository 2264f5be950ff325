//! Text from elsewhere, made harmless.

use std::fmt::Display;

/// Makes text from elsewhere harmless on a terminal: no control characters, no change of direction.
pub fn escape(text: impl Display) -> String {
    let mut safe = String::new();
    for c in text.to_string().chars() {
        if is_hidden(c) { safe.extend(c.escape_default()) } else { safe.push(c) }
    }
    safe
}

/// The same for JSON, which means what it meant before: the generator leaves all but the first controls as they are.
pub fn json_escaped(json: &str) -> String {
    let mut safe = String::new();
    for c in json.chars() {
        if is_hidden(c) {
            safe.extend(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")));
        } else {
            safe.push(c);
        }
    }
    safe
}

/// Control characters, old and newer, separators of lines, and all that Unicode calls a format character: what turns
/// the direction of writing around, joins, hides or marks.
fn is_hidden(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{ad}' | '\u{600}'..='\u{605}' | '\u{61c}' | '\u{6dd}' | '\u{70f}' | '\u{890}' | '\u{891}' | '\u{8e2}'
            | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
            | '\u{fff9}'..='\u{fffb}' | '\u{110bd}' | '\u{110cd}' | '\u{13430}'..='\u{1343f}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn foreign_text_cannot_move_the_cursor_or_turn_around() {
        assert_eq!(escape("a\x1b[2Jb\n\u{202e}c"), "a\\u{1b}[2Jb\\n\\u{202e}c");
        assert_eq!(escape("\u{61c}\u{9b}2J\u{85}\u{fff9}\u{ad}"), "\\u{61c}\\u{9b}2J\\u{85}\\u{fff9}\\u{ad}");
        assert_eq!(escape("grüße 東京 👍🏽"), "grüße 東京 👍🏽");
    }

    #[test]
    fn json_hides_nothing_either_and_says_the_same() {
        let hostile = "a\x1b\u{9b}2J\u{61c}\u{202e}\u{e0041}ü";
        let json = json_escaped(&json!({"message": hostile}).to_string());
        assert_eq!(json, "{\"message\":\"a\\u001b\\u009b2J\\u061c\\u202e\\udb40\\udc41ü\"}");
        assert_eq!(serde_json::from_str::<Value>(&json).unwrap()["message"], hostile);
    }
}
