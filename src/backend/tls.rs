//! TLS for the backends whose streams we open ourselves: whom we trust (`tls-ca`, else what the system
//! trusts) and who we are (`tls-cert`, `tls-key`). The server is always verified.

use std::io;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use tokio_rustls::rustls::client::WantsClientCert;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, ConfigBuilder, Error, RootCertStore};

use super::Address;
use crate::exit::Fault;

/// What the address says about TLS; `None` if its scheme has none. Reads files, sends nothing.
pub fn client_config(address: &Address, has_tls: bool) -> Result<Option<Arc<ClientConfig>>> {
    if has_tls {
        return read_config(address).context(Fault::Config).map(Some);
    }
    match ["tls-ca", "tls-cert", "tls-key"].into_iter().find(|key| address.param(key).is_some()) {
        Some(key) => Err(Fault::Config.because(format_args!(
            "{address} has {key} but no TLS, which rediss://, redlocks://, etcds:// and zookeepers:// have"
        ))),
        None => Ok(None),
    }
}

fn read_config(address: &Address) -> Result<Arc<ClientConfig>> {
    let file = |key| address.param(key).map(Path::new);
    let builder = trusting(roots(file("tls-ca"))?)?;
    Ok(Arc::new(match (file("tls-cert"), file("tls-key")) {
        (None, None) => builder.with_no_client_auth(),
        (Some(chain), Some(key)) => with_client_certificate(builder, chain, key)?,
        _ => bail!("tls-cert and tls-key come together"),
    }))
}

fn trusting(roots: RootCertStore) -> Result<ConfigBuilder<ClientConfig, WantsClientCert>> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions();
    Ok(builder.context("rustls and its provider share no TLS version")?.with_root_certificates(roots))
}

/// With the certificate that shows who we are, and its key.
pub fn with_client_certificate(
    builder: ConfigBuilder<ClientConfig, WantsClientCert>,
    chain: &Path,
    key: &Path,
) -> Result<ClientConfig> {
    let private = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("cannot read a private key from {}", key.display()))?;
    let both = || format!("{} and {} do not fit together", chain.display(), key.display());
    builder.with_client_auth_cert(certificates(chain)?, private).with_context(both)
}

/// Whether this certificate and its key can be used, for a client library that reads them only when it connects.
pub fn check_client_certificate(chain: &Path, key: &Path) -> Result<()> {
    with_client_certificate(trusting(RootCertStore::empty())?, chain, key).map(drop)
}

/// Whom we trust: the certificates in this file, or those of the system.
pub fn roots(file: Option<&Path>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match file {
        Some(file) => {
            for certificate in certificates(file)? {
                let added = roots.add(certificate);
                added.with_context(|| format!("{} holds no usable certificate", file.display()))?;
            }
        }
        // One broken file among the system's certificates is no reason to trust none of them.
        None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
    }
    ensure!(!roots.is_empty(), "no certificate authority to trust: name one with tls-ca");
    Ok(roots)
}

/// What the system trusts, as certificates: without those that rustls cannot use.
pub fn of_the_system() -> Result<Vec<CertificateDer<'static>>> {
    let mut certificates = rustls_native_certs::load_native_certs().certs;
    certificates.retain(|certificate| RootCertStore::empty().add(certificate.clone()).is_ok());
    ensure!(!certificates.is_empty(), "no certificate authority to trust: name one with tls-ca");
    Ok(certificates)
}

pub fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .with_context(|| format!("cannot read the certificates in {}", file.display()))
}

/// Tells an error of the network from one side's refusal of the other's certificate.
pub fn fault(error: &io::Error) -> Fault {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(_) | Error::AlertReceived(_) | Error::NoCertificatesPresented) => Fault::Refused,
        _ => Fault::Unreachable,
    }
}
