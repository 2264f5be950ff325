//! The schema `dlock`: made, or upgraded from version 3, by whoever comes first and may, or by an administrator.

use anyhow::Result;
use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use super::errors::explain;
use super::session::Session;
use crate::exit::Fault;

/// What dlock.version() says.
const VERSION: i32 = 5;
/// What upgrade.sql can begin with.
const UPGRADABLE: i32 = 3;
const UPGRADE: &str = include_str!("upgrade.sql");
const TABLES: &str = include_str!("tables.sql");
const FUNCTIONS: &str = include_str!("functions.sql");

/// What the server says of something by the name of what is to be made.
const IN_THE_WAY: [SqlState; 3] = [SqlState::DUPLICATE_TABLE, SqlState::DUPLICATE_FUNCTION, SqlState::DUPLICATE_OBJECT];

/// Everything but `CREATE SCHEMA`, for a schema of any name.
fn definitions(schema: &str) -> String {
    format!("{UPGRADE}\n{TABLES}\n{FUNCTIONS}").replace("dlock.", &format!("{schema}."))
}

/// The same as an administrator would run it, with psql.
pub fn script(schema: &str) -> String {
    format!(
        "-- Makes the schema, or upgrades it from version {UPGRADABLE}. For each role that is to take part:\n\
         --   GRANT USAGE ON SCHEMA {schema} TO role;\n\
         --   GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO role;\n\
         BEGIN;\nCREATE SCHEMA IF NOT EXISTS {schema};\n\n{}COMMIT;\n",
        definitions(schema)
    )
}

/// Makes what is missing. Two that come first at the same time wait for each other.
pub async fn install(session: &Session, schema: &str) -> Result<()> {
    // The key is the word "dlock" in ASCII. Calls of an older version that wait for each other end in this time.
    const ALONE: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '4s';
        SELECT pg_advisory_xact_lock(431131223915)";
    session.execute(ALONE).await.map_err(explain)?;
    let found =
        format!("SELECT to_regnamespace('{schema}') IS NULL, to_regprocedure('{schema}.version()') IS NOT NULL");
    let found = session.query_one(&found).await?;
    let version = match found.try_get(1)? {
        true => Some(session.query_one(&format!("SELECT {schema}.version()")).await?.try_get(0)?),
        false => None,
    };
    if let Some(version) = version.filter(|version| *version != UPGRADABLE) {
        check(version, schema)?;
    } else {
        let create = if found.try_get(0)? { format!("CREATE SCHEMA {schema};") } else { String::new() };
        match session.execute(&(create + &definitions(schema))).await {
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                return Err(not_allowed(session, schema, version, error).await);
            }
            Err(error) if error.code().is_some_and(|code| IN_THE_WAY.contains(code)) => {
                return Err(anyhow::Error::new(error).context(half_there(schema)).context(Fault::Config));
            }
            made => made.map_err(explain)?,
        }
    }
    session.execute("COMMIT").await.map_err(explain)
}

/// Whether a schema of this version is one that we can talk to.
pub fn check(version: i32, schema: &str) -> Result<()> {
    if version == VERSION {
        return Ok(());
    }
    Err(Fault::Config.because(format_args!(
        "the schema {schema} is of version {version}, and this dlock speaks version {VERSION}: update the older one"
    )))
}

/// What to do about a schema that has something of ours, but not all.
pub fn half_there(schema: &str) -> String {
    format!(
        "the schema {schema} is not all that this dlock needs: see what dlock doctor --print-schema would make, and \
         repair it, or choose another with ?prefix="
    )
}

async fn not_allowed(session: &Session, schema: &str, version: Option<i32>, error: Error) -> anyhow::Error {
    // The transaction has failed; a new one may still ask who we are.
    let _ = session.execute("ROLLBACK").await;
    let role = session.query_one("SELECT quote_ident(current_user)").await.and_then(|row| Ok(row.try_get(0)?));
    let role = role.unwrap_or_else(|_| "ROLE".to_owned());
    let (fault, advice) = match version {
        None => (
            Fault::Refused,
            format!(
                "role {role} may not create the schema {schema}; an administrator can: CREATE SCHEMA {schema} \
                 AUTHORIZATION {role}"
            ),
        ),
        Some(version) => (
            Fault::Config,
            format!(
                "the schema {schema} is of version {version}, and role {role} may not upgrade it to version {VERSION}; \
                 its owner can, with the SQL that dlock doctor --print-schema prints"
            ),
        ),
    };
    anyhow::Error::new(error).context(advice).context(fault)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_fits_into_a_database_of_any_encoding() {
        assert!(script("dlock").is_ascii());
    }

    #[test]
    fn the_schema_says_everywhere_of_which_version_it_is() {
        for place in [
            format!("version {VERSION}: tables"),
            format!("'SELECT {VERSION}'"),
            format!("version() <> {UPGRADABLE} "),
            format!("upgrades version {UPGRADABLE} to {VERSION}"),
        ] {
            assert_eq!(script("dlock").matches(&place).count(), 1, "{place}");
        }
    }
}
