//! The option file of MySQL's own clients, `~/.my.cnf`: the lines of its `[client]` group, as these clients read them.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::backend::Address;
use crate::openat;

/// The groups that a client reads whoever made it.
const GROUPS: [&str; 3] = ["client", "client-server", "client-mariadb"];

#[derive(Default)]
pub struct OptionFile(BTreeMap<String, String>);

impl OptionFile {
    /// The one that `defaults-file` names, else the user's own, if there is one. One that everybody may write is ignored,
    /// as MySQL's clients do.
    pub fn of(address: &Address) -> Result<OptionFile> {
        let named = address.param("defaults-file").map(PathBuf::from);
        let home =
            || std::env::var_os("HOME").map(|home| Path::new(&home).join(".my.cnf")).filter(|file| file.is_file());
        let Some(file) = named.or_else(home) else { return Ok(OptionFile::default()) };
        let cannot = || format!("cannot read {}", file.display());
        if file.metadata().with_context(cannot)?.permissions().mode() & 0o002 != 0 {
            return Ok(OptionFile::default());
        }
        Ok(OptionFile::parse(&openat::read_to_string(&file).with_context(cannot)?))
    }

    fn parse(text: &str) -> OptionFile {
        let (mut options, mut ours) = (BTreeMap::new(), false);
        for line in text.lines().map(str::trim) {
            if let Some(group) = line.strip_prefix('[') {
                ours = group.split_once(']').is_some_and(|(group, _)| GROUPS.contains(&group.trim()));
            } else if ours
                && !line.starts_with(['#', ';', '!'])
                && let Some((key, value)) = line.split_once('=')
            {
                options.insert(key.trim().replace('_', "-"), value_of(value.trim()));
            }
        }
        OptionFile(options)
    }

    /// What is given without being empty.
    pub fn get(&self, key: &str) -> Option<String> {
        self.0.get(key).filter(|value| !value.is_empty()).cloned()
    }
}

/// Without its quotes, or without the comment behind it; `\` escapes.
fn value_of(text: &str) -> String {
    let quote = text.chars().next().filter(|first| matches!(first, '"' | '\''));
    let inner = quote.and_then(|quote| text.strip_prefix(quote)?.strip_suffix(quote));
    let plain = inner.unwrap_or_else(|| text.split_once('#').map_or(text, |(value, _)| value).trim_end());
    let mut value = String::new();
    let mut chars = plain.chars();
    while let Some(c) = chars.next() {
        match (c, c == '\\') {
            (_, true) => match chars.next() {
                Some('b') => value.push('\u{8}'),
                Some('t') => value.push('\t'),
                Some('n') => value.push('\n'),
                Some('r') => value.push('\r'),
                Some('s') => value.push(' '),
                Some('\\') | None => value.push('\\'),
                Some(other) => value.extend(['\\', other]),
            },
            (c, false) => value.push(c),
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_option_file_is_read_as_mysql_does() {
        let text = "user=nobody\n[mysqld]\nport = 1\n[client]\n# password=no\nuser = me # the cron user\n\
                    password=\"s#e\\\\c\\sr'et\"\nssl_ca=/ca.pem\n!include /etc/x\n[client-mariadb]\nport=7\n[mysql]\nuser=x\n";
        let file = OptionFile::parse(text);
        let get = |key| file.get(key);
        assert_eq!(get("user").as_deref(), Some("me"));
        assert_eq!(get("password").as_deref(), Some("s#e\\c r'et"));
        assert_eq!((get("ssl-ca").as_deref(), get("port").as_deref()), (Some("/ca.pem"), Some("7")));
        assert_eq!(get("host"), None);
    }
}
