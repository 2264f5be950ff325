//! dlock's tables, procedures and triggers: made by whoever comes first and may, or by an administrator.

use anyhow::Result;

use super::answer::get;
use super::errors::{exists_already, explain, is_about_triggers, is_not_allowed};
use super::session::Session;
use super::settings::Settings;
use crate::exit::Fault;

/// What dlock_ask says.
const VERSION: i32 = 1;
const TABLES: &str = include_str!("tables.sql");
const PROCEDURES: &str = include_str!("procedures.sql");
const TRIGGERS: &str = include_str!("triggers.sql");
/// A procedure goes by the mode that it was made in: too long a name is to be an error.
const MODE: &str = "SET sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION'";

/// What the files write short.
const WORDS: [(&str, &str); 5] = [
    ("NAME_TEXT", "VARCHAR(200) CHARACTER SET ascii COLLATE ascii_bin"),
    ("OWNER_TEXT", "VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"),
    ("WORD_TEXT", "VARCHAR(20) CHARACTER SET ascii COLLATE ascii_bin"),
    ("LONG_TEXT", "MEDIUMTEXT CHARACTER SET utf8mb4"),
    ("ALL_OR_NOTHING;\n", include_str!("frame.sql")),
];

/// One of the files, in full.
fn in_full(file: &str, prefix: &str) -> String {
    prefixed(&WORDS.iter().fold(file.to_owned(), |sql, (word, meaning)| sql.replace(word, meaning)), prefix)
}

/// With the prefix of all names.
pub fn prefixed(sql: &str, prefix: &str) -> String {
    sql.replace("dlock_", &format!("{prefix}_"))
}

/// As an administrator would run it, with the mysql client.
pub fn script(settings: &Settings) -> String {
    let (prefix, database) = (&settings.prefix, &settings.database);
    let all = in_full(&[TABLES, PROCEDURES, TRIGGERS].concat(), prefix);
    format!(
        "-- Run it with the mysql client; with --force if a part of it is there. Then, for each user that is to take part:\n\
         --   GRANT EXECUTE ON `{database}`.* TO user;\n\
         USE `{database}`;\n{MODE};\nDELIMITER //\n{all}DELIMITER ;\n"
    )
}

/// Makes what is missing. Two that come first at the same time wait for each other, or find that it is there.
pub async fn install(session: &mut Session, settings: &Settings) -> Result<()> {
    session.query(MODE).await.map_err(explain)?;
    // Where user-level locks are forbidden, the others find that it is there already.
    let _ = session.query("DO GET_LOCK('dlock install', 4)").await;
    let made = make(session, settings).await;
    let _ = session.query("DO RELEASE_LOCK('dlock install')").await;
    made
}

async fn make(session: &mut Session, settings: &Settings) -> Result<()> {
    for (part, triggers) in [(TABLES, false), (PROCEDURES, false), (TRIGGERS, true)] {
        for statement in in_full(part, &settings.prefix).split("\n//\n").filter(|text| !text.trim().is_empty()) {
            match session.query(statement).await {
                Err(error) if exists_already(&error) || triggers && is_about_triggers(&error) => {}
                Err(error) if is_not_allowed(&error) => return Err(not_allowed(session, settings, error).await),
                made => _ = made.map_err(explain)?,
            }
        }
    }
    Ok(())
}

/// Whether a schema of this version is one that we can talk to.
pub fn check(version: i32) -> Result<()> {
    if version == VERSION {
        return Ok(());
    }
    Err(Fault::Config.because(format_args!(
        "dlock's tables are of version {version}, and this dlock speaks version {VERSION}: update the older one"
    )))
}

/// What to do about a database that has something of ours, but not all.
pub fn half_there(prefix: &str) -> String {
    format!(
        "the tables and procedures {prefix}_… are not all that this dlock needs: see what dlock doctor --print-schema \
         would make, and repair it, or choose another prefix with ?prefix="
    )
}

async fn not_allowed(session: &mut Session, settings: &Settings, error: mysql_async::Error) -> anyhow::Error {
    let asked = session.query("SELECT CURRENT_USER() AS user").await;
    let user = asked.ok().and_then(|results| get::<String>(results.first()?.first()?, "user").ok());
    let user = user.and_then(|user| user.rsplit_once('@').map(|(name, host)| format!("'{name}'@'{host}'")));
    let (user, database) = (user.unwrap_or_else(|| "USER".to_owned()), &settings.database);
    let advice = format!(
        "user {user} may not create dlock's tables and procedures in {database}; an administrator can, with the SQL that \
         dlock doctor --print-schema prints, and then: GRANT EXECUTE ON `{database}`.* TO {user}"
    );
    anyhow::Error::new(error).context(advice).context(Fault::Refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_says_everywhere_of_which_version_it_is() {
        assert_eq!(TABLES.matches(&format!("version {VERSION}: tables")).count(), 1);
        assert_eq!(PROCEDURES.matches(&format!("{VERSION} AS version")).count(), 2);
    }

    #[test]
    fn every_name_has_the_prefix() {
        let all = in_full(&[TABLES, PROCEDURES, TRIGGERS].concat(), "other");
        assert!(!all.contains("dlock_"));
        for made in all.lines().filter(|line| line.starts_with("CREATE ")) {
            assert!(made.contains(" other_"), "{made}");
        }
    }

    #[test]
    fn what_asks_is_made_after_what_it_calls() {
        let (ask, _) = PROCEDURES.split_once("CREATE PROCEDURE dlock_ask(").unwrap();
        for called in ["clock", "in_front", "sight", "remove", "remember", "tidy", "wake_up_lock"] {
            assert!(ask.contains(&format!("CREATE PROCEDURE dlock_{called}(")), "{called}");
        }
    }
}
