//! What the server's errors mean to us.

use mysql_async::{DriverError, Error, IoError, TlsError};

use crate::backend::tls;
use crate::exit::Fault;

fn code(error: &Error) -> Option<u16> {
    match error {
        Error::Server(refusal) => Some(refusal.code),
        _ => None,
    }
}

fn code_of(error: &anyhow::Error) -> Option<u16> {
    error.downcast_ref().and_then(code)
}

/// Whether nothing was done and the same again may go well: a deadlock, a commit that a Galera cluster did not certify, a
/// row that somebody else was slow to release, a snapshot that is too old.
pub fn is_worth_repeating(error: &Error) -> bool {
    matches!(code(error), Some(1213 | 1205 | 1020))
}

/// Whether dlock's tables and procedures are not there, or not all of them.
pub fn is_missing(error: &Error) -> bool {
    matches!(code(error), Some(1305 | 1146 | 1054))
}

/// Whether something of this name is there already.
pub fn exists_already(error: &Error) -> bool {
    matches!(code(error), Some(1304 | 1050 | 1359))
}

/// Whether a trigger may not be made: for want of TRIGGER, or, where there is a binary log, of SUPER.
pub fn is_about_triggers(error: &Error) -> bool {
    matches!(code(error), Some(1419 | 1142 | 1227))
}

/// Whether a table or procedure may not be made.
pub fn is_not_allowed(error: &Error) -> bool {
    matches!(code(error), Some(1142 | 1044 | 1227 | 1370))
}

/// Whether the server has no connection left for us.
pub fn has_no_connection_left(error: &anyhow::Error) -> bool {
    matches!(code_of(error), Some(1040 | 1203))
}

/// Whether a login may have been refused for want of TLS.
pub fn may_want_tls(error: &anyhow::Error) -> bool {
    matches!(code_of(error), Some(1045 | 3159))
}

/// Whether the server has no TLS to offer.
pub fn has_no_tls(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Error::Driver(DriverError::NoClientSslFlagFromServer)))
}

/// Gives an error the exit code and the words it deserves.
pub fn explain(error: Error) -> anyhow::Error {
    let Some(code) = code(&error) else { return explain_client(error) };
    let (fault, words) = match code {
        1045 | 1698 | 1130 | 1251 => (Fault::Refused, "check the user, the host it may come from, and its password"),
        1044 => (Fault::Refused, "the user may not use this database: an administrator can GRANT EXECUTE ON … TO …"),
        1370 => (
            Fault::Refused,
            "the user may not call dlock's procedures, or they are not there: an administrator can make them with the SQL \
             that dlock doctor --print-schema prints, and GRANT EXECUTE ON … TO …",
        ),
        1142 | 1143 | 1449 => (
            Fault::Refused,
            "whoever made dlock's procedures is gone, or may not use dlock's tables any more: an administrator can make \
             them again with the SQL that dlock doctor --print-schema prints",
        ),
        1049 => (Fault::Config, "name an existing database in the URL"),
        1040 | 1203 | 1226 => (Fault::Unreachable, "the server has no connection left: raise max_connections"),
        1290 | 1792 | 1836 => (Fault::Unreachable, READ_ONLY),
        1047 => (Fault::Unreachable, "this node of the cluster is not in its majority, or is not ready yet"),
        3159 => (Fault::Refused, "the server insists on TLS: use sslmode=require, or better verify-full"),
        1077..=1081 | 1152..=1161 => return anyhow::Error::new(error).context(Fault::Unreachable),
        _ if UNABLE.contains(&code) => return anyhow::Error::new(error).context(Fault::Unreachable),
        _ => return error.into(),
    };
    anyhow::Error::new(error).context(words).context(fault)
}

/// Starting, stopping, out of memory or disk, killed by an administrator: it may well be better the next time. So are
/// those from 1077 to 1081 and from 1152 to 1161.
const UNABLE: [u16; 16] =
    [1021, 1028, 1037, 1041, 1053, 1105, 1114, 1129, 1135, 1180, 1205, 1213, 1317, 1927, 1969, 3024];
const READ_ONLY: &str = "the server is read-only, as a replica is: name the primary, or all servers";

pub fn read_only() -> anyhow::Error {
    Fault::Unreachable.because(READ_ONLY)
}

fn explain_client(error: Error) -> anyhow::Error {
    let fault = match &error {
        Error::Io(IoError::Tls(TlsError::Tls(_) | TlsError::InvalidDnsName(_))) => Fault::Refused,
        Error::Io(IoError::Io(error)) => tls::fault(error),
        // What the server wants to see is nothing that we have.
        Error::Driver(
            DriverError::NoClientSslFlagFromServer
            | DriverError::UnknownAuthPlugin { .. }
            | DriverError::MysqlOldPasswordDisabled
            | DriverError::CleartextPluginDisabled,
        ) => Fault::Refused,
        _ => Fault::Unreachable,
    };
    let has_no_tls = matches!(error, Error::Driver(DriverError::NoClientSslFlagFromServer));
    let error = anyhow::Error::new(error);
    if has_no_tls { error.context("the server does not support TLS").context(fault) } else { error.context(fault) }
}
