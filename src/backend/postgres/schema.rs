//! The schema `dlock`: made by whoever comes first and may, or by an administrator.

use anyhow::{Context, Result};
use tokio_postgres::error::SqlState;

use super::explain::explain;
use super::session::Session;
use crate::exit::Fault;

/// What dlock.version() says.
const VERSION: i32 = 3;
const TABLES: &str = include_str!("tables.sql");
const PROTOCOL: &str = include_str!("protocol.sql");

/// What the server says of something by the name of what is to be made.
const IN_THE_WAY: [SqlState; 3] = [SqlState::DUPLICATE_TABLE, SqlState::DUPLICATE_FUNCTION, SqlState::DUPLICATE_OBJECT];

/// Everything but `CREATE SCHEMA`, for a schema of any name.
fn definitions(schema: &str) -> String {
    format!("{TABLES}\n{PROTOCOL}").replace("dlock.", &format!("{schema}."))
}

/// The same as an administrator would run it, with psql.
pub fn script(schema: &str) -> String {
    format!(
        "-- Then, for each role that is to take part:\n\
         --   GRANT USAGE ON SCHEMA {schema} TO role;\n\
         --   GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO role;\n\
         BEGIN;\nCREATE SCHEMA {schema};\n\n{}COMMIT;\n",
        definitions(schema)
    )
}

/// Makes what is missing. Two that come first at the same time wait for each other.
pub async fn install(session: &Session, schema: &str) -> Result<()> {
    let client = session.client();
    // The key is the word "dlock" in ASCII.
    client
        .batch_execute("BEGIN ISOLATION LEVEL READ COMMITTED; SELECT pg_advisory_xact_lock(431131223915)")
        .await
        .map_err(explain)?;
    let found =
        format!("SELECT to_regnamespace('{schema}') IS NOT NULL, to_regprocedure('{schema}.version()') IS NOT NULL");
    let found = session.query(&found, &[]).await.map_err(explain)?;
    let found = found.first().context("no answer about the schema")?;
    let (has_schema, has_functions): (bool, bool) = (found.try_get(0)?, found.try_get(1)?);
    if has_functions {
        check_version(session, schema).await?;
    } else {
        let create = if has_schema { String::new() } else { format!("CREATE SCHEMA {schema};") };
        let made = client.batch_execute(&(create + &definitions(schema))).await;
        match made {
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => {
                return Err(anyhow::Error::new(error).context(advice(session, schema).await).context(Fault::Refused));
            }
            Err(error) if error.code().is_some_and(|code| IN_THE_WAY.contains(code)) => {
                return Err(anyhow::Error::new(error).context(half_there(schema)).context(Fault::Config));
            }
            made => made.map_err(explain)?,
        }
    }
    client.batch_execute("COMMIT").await.map_err(explain)
}

async fn check_version(session: &Session, schema: &str) -> Result<()> {
    let version = session.query(&format!("SELECT {schema}.version()"), &[]).await.map_err(explain)?;
    check(version.first().context("no answer about the version")?.try_get(0)?, schema)
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

async fn advice(session: &Session, schema: &str) -> String {
    // The transaction has failed; a new one may still ask who we are.
    let asked = session.client().batch_execute("ROLLBACK").await.is_ok();
    let role = match session.query("SELECT quote_ident(current_user)", &[]).await {
        Ok(rows) if asked => rows.first().and_then(|row| row.try_get::<_, String>(0).ok()),
        _ => None,
    };
    let role = role.unwrap_or_else(|| "ROLE".to_owned());
    format!(
        "role {role} may not create the schema {schema}; an administrator can: CREATE SCHEMA {schema} AUTHORIZATION {role}"
    )
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
        for place in
            [format!("version {VERSION}: tables"), format!("'SELECT {VERSION}'"), format!("token, {VERSION} --")]
        {
            assert_eq!(script("dlock").matches(&place).count(), 1, "{place}");
        }
    }
}
