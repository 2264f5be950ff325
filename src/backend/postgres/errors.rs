//! What the server's errors mean to us.

use tokio_postgres::Error;
use tokio_postgres::error::SqlState;

use crate::exit::Fault;

/// Nothing was done, and the same again may go well. With a default isolation level above READ COMMITTED, contenders that
/// meet get this.
pub const REPEATABLE: [SqlState; 2] = [SqlState::T_R_SERIALIZATION_FAILURE, SqlState::T_R_DEADLOCK_DETECTED];
/// The schema `dlock` is not there, or not all of it.
pub const MISSING: [SqlState; 4] = [
    SqlState::INVALID_SCHEMA_NAME,
    SqlState::UNDEFINED_FUNCTION,
    SqlState::UNDEFINED_TABLE,
    SqlState::UNDEFINED_COLUMN,
];
/// A text has a character that the database cannot keep.
pub const UNWRITABLE: [SqlState; 2] = [SqlState::UNTRANSLATABLE_CHARACTER, SqlState::CHARACTER_NOT_IN_REPERTOIRE];
pub const NO_CONNECTION_LEFT: [SqlState; 1] = [SqlState::TOO_MANY_CONNECTIONS];
/// A login may have been refused for want of TLS: by pg_hba.conf, or by a pooler.
pub const MAY_WANT_TLS: [SqlState; 2] = [SqlState::INVALID_AUTHORIZATION_SPECIFICATION, SqlState::PROTOCOL_VIOLATION];

/// Whether the server answered with one of these.
pub fn says(error: &Error, codes: &[SqlState]) -> bool {
    error.code().is_some_and(|code| codes.contains(code))
}

/// Whether that is what is behind an error.
pub fn is_about(error: &anyhow::Error, codes: &[SqlState]) -> bool {
    error.downcast_ref().is_some_and(|cause| says(cause, codes))
}

/// What keeps us from getting in.
pub fn explain_login(error: Error) -> anyhow::Error {
    let Some(refusal) = error.as_db_error() else { return explain(error) };
    // Poolers have no code for it.
    let says = |words| refusal.message().contains(words);
    let (fault, words) = match *refusal.code() {
        SqlState::INSUFFICIENT_PRIVILEGE => (Fault::Refused, "an administrator can: GRANT CONNECT ON DATABASE … TO …"),
        SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE => {
            (Fault::Unreachable, "an administrator can: ALTER DATABASE … ALLOW_CONNECTIONS true")
        }
        SqlState::TOO_MANY_CONNECTIONS => (
            Fault::Unreachable,
            match refusal.routine() {
                Some("InitializeSessionUserId") => "the role has no connection left: raise its CONNECTION LIMIT",
                Some("CheckMyDatabase") => "the database has no connection left: raise its CONNECTION LIMIT",
                _ => "the server has no connection left: raise max_connections, or use a pooler",
            },
        ),
        SqlState::PROTOCOL_VIOLATION if says("no such database") => {
            (Fault::Config, "name a database in the URL that the pooler knows")
        }
        SqlState::PROTOCOL_VIOLATION if says("unsupported startup parameter") => {
            (Fault::Config, "leave it out of the URL and PGOPTIONS, or let the pooler ignore_startup_parameters")
        }
        _ => return explain(error),
    };
    anyhow::Error::new(error).context(words).context(fault)
}

/// Gives an error the exit code and the words it deserves.
pub fn explain(error: Error) -> anyhow::Error {
    let Some(code) = error.code() else { return explain_client(error) };
    let (fault, words) = match *code {
        SqlState::INVALID_PASSWORD | SqlState::INVALID_AUTHORIZATION_SPECIFICATION => {
            (Fault::Refused, "check the role, its password and pg_hba.conf")
        }
        SqlState::INSUFFICIENT_PRIVILEGE => (
            Fault::Refused,
            "the role needs USAGE on dlock's schema, and SELECT, INSERT, UPDATE, DELETE on all tables in it",
        ),
        SqlState::INVALID_CATALOG_NAME => (Fault::Config, "name an existing database in the URL"),
        SqlState::READ_ONLY_SQL_TRANSACTION => (Fault::Unreachable, READ_ONLY),
        SqlState::LOCK_NOT_AVAILABLE => {
            (Fault::Unreachable, "a transaction that has not ended yet keeps the lock's row to itself")
        }
        SqlState::UNDEFINED_FUNCTION | SqlState::INVALID_SCHEMA_NAME => {
            (Fault::Config, "dlock's schema is not there, or is another version's")
        }
        // Nothing but the schema's name differs from what we were tested with.
        SqlState::SYNTAX_ERROR | SqlState::RESERVED_NAME => {
            (Fault::Config, "the server keeps this name to itself: give the schema another with ?prefix=")
        }
        // Starting, stopping, out of memory or disk, cancelled: it may well be better the next time.
        ref other if ["08", "53", "57"].iter().any(|class| other.code().starts_with(class)) => {
            return anyhow::Error::new(error).context(Fault::Unreachable);
        }
        _ => return error.into(),
    };
    anyhow::Error::new(error).context(words).context(fault)
}

const READ_ONLY: &str = "the server is read-only, as a standby is: name the primary, or all servers of the cluster";

pub fn read_only() -> anyhow::Error {
    Fault::Unreachable.because(READ_ONLY)
}

/// The client library tells its own errors apart only by their text.
fn explain_client(error: Error) -> anyhow::Error {
    let fault = match error.to_string().as_str() {
        // A password is wanted and there is none, or the server wants to see something else altogether.
        "invalid configuration" | "authentication error" => Fault::Refused,
        _ => Fault::Unreachable,
    };
    anyhow::Error::new(error).context(fault)
}
