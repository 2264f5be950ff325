//! TLS for the backends whose streams we open ourselves: whom we trust (`tls-ca`, else what the system
//! trusts) and who we are (`tls-cert`, `tls-key`). The server is always verified.

use std::io;
use std::sync::Arc;

use anyhow::{Context, Result};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{ClientConfig, Error, RootCertStore};

use super::Address;
use crate::exit::Fault;

/// What the address says about TLS. Reads files, sends nothing.
pub fn client_config(address: &Address) -> Result<Arc<ClientConfig>> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .context("rustls and its provider share no TLS version")?
        .with_root_certificates(roots(address.param("tls-ca")).context(Fault::Config)?);
    let config = match (address.param("tls-cert"), address.param("tls-key")) {
        (None, None) => builder.with_no_client_auth(),
        (Some(cert), Some(key)) => {
            let chain = certificates(cert).context(Fault::Config)?;
            let key = PrivateKeyDer::from_pem_file(key)
                .with_context(|| format!("cannot read tls-key {key}"))
                .context(Fault::Config)?;
            builder.with_client_auth_cert(chain, key).context("tls-cert and tls-key").context(Fault::Config)?
        }
        _ => return Err(Fault::Config.because("tls-cert and tls-key come together")),
    };
    Ok(Arc::new(config))
}

/// For schemes without TLS: whoever names a certificate means another one.
pub fn refuse(address: &Address) -> Result<()> {
    match ["tls-ca", "tls-cert", "tls-key"].into_iter().find(|key| address.param(key).is_some()) {
        Some(key) => Err(Fault::Config.because(format_args!(
            "{address} has {key} but no TLS, which rediss://, redlocks://, etcds:// and zookeepers:// have"
        ))),
        None => Ok(()),
    }
}

fn roots(file: Option<&str>) -> Result<RootCertStore> {
    let mut roots = RootCertStore::empty();
    match file {
        Some(file) => {
            for certificate in certificates(file)? {
                roots.add(certificate).with_context(|| format!("{file} holds no usable certificate"))?;
            }
        }
        // One broken file among the system's certificates is no reason to trust none of them.
        None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
    }
    anyhow::ensure!(!roots.is_empty(), "no certificate authority to trust: name one with tls-ca");
    Ok(roots)
}

fn certificates(file: &str) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .with_context(|| format!("cannot read the certificates in {file}"))
}

/// Tells an error of the network from one side's refusal of the other's certificate.
pub fn fault(error: &io::Error) -> Fault {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(_) | Error::AlertReceived(_) | Error::NoCertificatesPresented) => Fault::Refused,
        _ => Fault::Unreachable,
    }
}
