//! libpq's password file.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::openat;

/// The password for this host, and for this database and user; a file that is none is no obstacle.
pub fn password(file: &Path, host: &str, port: u16, whose: [&str; 2]) -> Result<Option<String>> {
    if !file.is_file() {
        return Ok(None);
    }
    let mode = file.metadata().with_context(|| format!("cannot look at {}", file.display()))?.permissions().mode();
    ensure!(mode & 0o077 == 0, "{} can be read by others: chmod 600 it", file.display());
    let text = openat::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    // A socket in the usual place goes by localhost, in any other by its directory.
    let other = if host.starts_with('/') { "localhost" } else { host };
    let (port, [database, user]) = (port.to_string(), whose);
    let of = |line, host| password_in(line, [host, &port, database, user]);
    Ok(text.lines().find_map(|line| of(line, host).or_else(|| of(line, other))))
}

/// The password of a line `host:port:database:user:password` if it is about us; `*` fits all, `\` escapes.
fn password_in(line: &str, wanted: [&str; 4]) -> Option<String> {
    let mut fields = vec![String::new()];
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            ':' if fields.len() < 5 => fields.push(String::new()),
            '\\' => fields.last_mut()?.extend(chars.next()),
            _ => fields.last_mut()?.push(c),
        }
    }
    let password = fields.pop().filter(|_| fields.len() == 4 && !line.starts_with('#'))?;
    fields.iter().zip(wanted).all(|(field, wanted)| field == "*" || field == wanted).then_some(password)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_file_is_read_as_libpq_does() {
        let wanted = ["db", "5432", "jobs", "me"];
        assert_eq!(password_in("db:5432:jobs:me:s\\:e\\\\c:ret", wanted).as_deref(), Some("s:e\\c:ret"));
        assert_eq!(password_in("*:*:*:me:secret", wanted).as_deref(), Some("secret"));
        assert_eq!(password_in("other:*:*:me:secret", wanted), None);
        assert_eq!(password_in("#b:5432:jobs:me:secret", ["#b", "5432", "jobs", "me"]), None);
        assert_eq!(password_in("db:5432:jobs:me", wanted), None);
    }

    #[test]
    fn a_password_file_knows_a_socket_by_its_directory_and_is_no_device() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pgpass");
        std::fs::write(&file, "/run/db:*:*:me:there\nlocalhost:*:*:me:here\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let password = |file, host| password(file, host, 5432, ["jobs", "me"]).unwrap();
        assert_eq!(password(&file, "/run/db").as_deref(), Some("there"));
        assert_eq!(password(&file, "/var/run/postgresql").as_deref(), Some("here"));
        assert_eq!(password(Path::new("/dev/null"), "h"), None);
    }
}
