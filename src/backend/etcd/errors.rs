//! What it means when a member does not do what it is asked, and how to say it.

use std::time::Duration;

use etcd_client::Error;
use tonic::{Code, Status};

use crate::exit::Fault;
use crate::lock::rounded;

/// How the members' own words end, where a lease is not as it was expected.
pub const NO_SUCH_LEASE: &str = "requested lease not found";
pub const LEASE_EXISTS: &str = "lease already exists";

/// Whether a member answered this.
pub fn is_refusal(error: &anyhow::Error, words: &str) -> bool {
    error.root_cause().to_string().ends_with(words)
}

/// Whether the member understood and answered, so that others would say the same.
pub fn is_an_answer(error: &Error) -> bool {
    use Code::{Aborted, Cancelled, DataLoss, DeadlineExceeded, Internal, Unavailable, Unknown};
    match error {
        // Codes of a member that could not answer, or of the library, which got no answer.
        Error::GRpcStatus(status) => !matches!(
            status.code(),
            Aborted | Cancelled | DataLoss | DeadlineExceeded | Internal | Unavailable | Unknown
        ),
        Error::InvalidArgs(_) | Error::InvalidUri(_) | Error::TransportError(_) => true,
        _ => false,
    }
}

pub fn explain(endpoint: &str, error: &Error) -> anyhow::Error {
    let (fault, text) = match error {
        Error::GRpcStatus(status) => (fault_of(status), innermost(status)),
        // These come from reading what we were given, before anything is sent.
        Error::InvalidArgs(_) | Error::InvalidUri(_) => (Fault::Config, error.to_string()),
        Error::TransportError(why) => (Fault::Config, innermost(why)),
        other => (Fault::Unreachable, other.to_string()),
    };
    fault.because(format_args!("etcd at {endpoint}: {text}"))
}

/// What all members did, and the fault that says most about why.
pub fn summary(failures: &[anyhow::Error], members: usize) -> anyhow::Error {
    let texts = failures.iter().map(|error| error.root_cause().to_string()).collect::<Vec<_>>().join("; ");
    if failures.iter().any(|error| Fault::of(error) == Fault::Refused) {
        return Fault::Refused.because(texts);
    }
    if members > 1 && failures.len() > members / 2 {
        return Fault::Unreachable.because(format_args!("no quorum of {members} members answers: {texts}"));
    }
    Fault::Unreachable.because(texts)
}

pub fn silence(endpoint: &str, waited: Duration) -> anyhow::Error {
    Fault::Unreachable.because(format_args!("etcd at {endpoint} did not answer within {}", rounded(waited)))
}

pub fn hung_up(endpoint: &str) -> anyhow::Error {
    let why = "as it does when it wants another certificate than ours: see tls-cert and tls-key";
    Fault::Refused.because(format_args!("etcd at {endpoint} hung up after the TLS handshake, {why}"))
}

fn fault_of(status: &Status) -> Fault {
    let text = innermost(status);
    let says = |words: &str| text.contains(words);
    match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => Fault::Refused,
        Code::InvalidArgument if says("authentication failed") || says("user name is empty") => Fault::Refused,
        Code::FailedPrecondition if says("authentication is not enabled") => Fault::Config,
        // Both sides of a TLS handshake may refuse: we their certificate, or they ours.
        _ if says("invalid peer certificate") || says("received fatal alert") => Fault::Refused,
        _ => Fault::Unreachable,
    }
}

/// The cause that says most: the library's own words are "transport error" and "tcp connect error".
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    match cause.downcast_ref::<Status>() {
        Some(status) => status.message().to_owned(),
        None => cause.to_string(),
    }
}
