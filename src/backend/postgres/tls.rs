//! TLS as libpq's `sslmode` asks for it, on rustls. SCRAM runs without channel binding.

use std::path::Path;
use std::sync::Arc;

use anyhow::Result;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, SignatureScheme};

use crate::backend::tls;

/// How much of the server's certificate is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    Nothing,
    /// Somebody we trust has signed it, for whatever name.
    Signer,
    SignerAndName,
}

/// `roots` is the file that `sslrootcert` names; without it, the system's own roots. `certificate` is the client's, and its
/// key.
pub fn config(check: Check, roots: Option<&Path>, certificate: Option<(&Path, &Path)>) -> Result<Arc<ClientConfig>> {
    let provider = Arc::new(ring::default_provider());
    let verifier = match check {
        Check::Nothing => None,
        Check::Signer | Check::SignerAndName => {
            Some(WebPkiServerVerifier::builder_with_provider(tls::roots(roots)?.into(), provider.clone()).build()?)
        }
    };
    let named = if verifier.is_some() { roots.map(tls::certificates).transpose()?.unwrap_or_default() } else { vec![] };
    let checker =
        Arc::new(Checker { provider: provider.clone(), verifier, named, by_name: check == Check::SignerAndName });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(checker);
    Ok(Arc::new(match certificate {
        Some((chain, key)) => tls::with_client_certificate(config, chain, key)?,
        None => config.with_no_client_auth(),
    }))
}

/// Without a verifier plain `require`, by name `verify-full`, else `verify-ca`.
#[derive(Debug)]
struct Checker {
    provider: Arc<CryptoProvider>,
    verifier: Option<Arc<WebPkiServerVerifier>>,
    /// Roots that were named, not the system's.
    named: Vec<CertificateDer<'static>>,
    by_name: bool,
}

impl ServerCertVerifier for Checker {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let Some(verifier) = &self.verifier else { return Ok(ServerCertVerified::assertion()) };
        match verifier.verify_server_cert(certificate, chain, name, ocsp, now) {
            // The name is what webpki looks at last, so a wrong name says that all the rest is right.
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.by_name => Ok(ServerCertVerified::assertion()),
            // And the dates are what it looks at before it finds that a server does not show a root of its own.
            Err(error) if is_own_root(&error) && self.named.iter().any(|root| root == certificate) => {
                if self.by_name {
                    verify_server_name(&ParsedCertificate::try_from(certificate)?, name)?;
                }
                Ok(ServerCertVerified::assertion())
            }
            other => other,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let known = &self.provider.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls12_signature(message, certificate, signed, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let known = &self.provider.signature_verification_algorithms;
        tokio_rustls::rustls::crypto::verify_tls13_signature(message, certificate, signed, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Whether the server has shown a root certificate instead of one that a root has signed; only the text says so.
fn is_own_root(error: &TlsError) -> bool {
    let TlsError::InvalidCertificate(CertificateError::Other(other)) = error else { return false };
    other.0.to_string() == "CaUsedAsEndEntity"
}
