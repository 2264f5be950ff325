//! TLS as libpq's `sslmode` asks for it, on rustls. SCRAM runs without channel binding.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Task, Poll};

use anyhow::{Context, Result};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::Socket;
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, InvalidDnsNameError, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
};

/// How much of the server's certificate is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    Nothing,
    /// Somebody we trust has signed it, for whatever name.
    Signer,
    SignerAndName,
}

/// Files named by `sslrootcert`, `sslcert` and `sslkey`; without the first, the system's own roots.
pub struct Files<'a> {
    pub roots: Option<&'a Path>,
    pub certificate: Option<(&'a Path, &'a Path)>,
}

/// Without anything to check by or to show, it is made when a server wants TLS: most on this machine do not.
#[derive(Clone)]
pub struct Connector(Option<Arc<ClientConfig>>);

impl Connector {
    pub fn new(check: Check, files: &Files) -> Result<Connector> {
        let wanted = check != Check::Nothing || files.certificate.is_some();
        Ok(Connector(wanted.then(|| Connector::config(check, files)).transpose()?))
    }

    fn config(check: Check, files: &Files) -> Result<Arc<ClientConfig>> {
        let provider = Arc::new(ring::default_provider());
        let roots = match check {
            Check::Nothing => None,
            Check::Signer | Check::SignerAndName => Some(Roots::of(files.roots, &provider)?),
        };
        let checker = Arc::new(Checker { provider: provider.clone(), roots, by_name: check == Check::SignerAndName });
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(checker);
        let config = match files.certificate {
            Some((certificate, key)) => {
                let chain = certificates(certificate)?;
                let key = PrivateKeyDer::from_pem_file(key)
                    .with_context(|| format!("cannot read a private key from {}", key.display()))?;
                config.with_client_auth_cert(chain, key).context("the client certificate is of no use")?
            }
            None => config.with_no_client_auth(),
        };
        Ok(Arc::new(config))
    }
}

/// What the server's certificate is checked by.
#[derive(Debug)]
struct Roots {
    verifier: Arc<WebPkiServerVerifier>,
    /// Those that were named, not the system's.
    named: Vec<CertificateDer<'static>>,
}

impl Roots {
    fn of(file: Option<&Path>, provider: &Arc<CryptoProvider>) -> Result<Roots> {
        let mut store = RootCertStore::empty();
        let named = file.map(certificates).transpose()?.unwrap_or_default();
        match file {
            Some(file) => {
                for root in &named {
                    let added = store.add(root.clone());
                    added.with_context(|| format!("a certificate in {} is of no use", file.display()))?;
                }
            }
            None => {
                store.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            }
        }
        let verifier = WebPkiServerVerifier::builder_with_provider(store.into(), provider.clone())
            .build()
            .context("there is no root certificate to check the server's by: name one with sslrootcert")?;
        Ok(Roots { verifier, named })
    }
}

fn certificates(file: &Path) -> Result<Vec<CertificateDer<'static>>> {
    CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .with_context(|| format!("cannot read certificates from {}", file.display()))
}

/// Without roots plain `require`, by name `verify-full`, else `verify-ca`.
#[derive(Debug)]
struct Checker {
    provider: Arc<CryptoProvider>,
    roots: Option<Roots>,
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
        let Some(roots) = &self.roots else { return Ok(ServerCertVerified::assertion()) };
        match roots.verifier.verify_server_cert(certificate, chain, name, ocsp, now) {
            // The name is what webpki looks at last, so a wrong name says that all the rest is right.
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.by_name => Ok(ServerCertVerified::assertion()),
            // And the dates are what it looks at before it finds that a server does not show a root of its own.
            Err(error) if is_own_root(&error) && roots.named.iter().any(|root| root == certificate) => {
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

impl MakeTlsConnect<Socket> for Connector {
    type Stream = Stream;
    type TlsConnect = Handshake;
    type Error = InvalidDnsNameError;

    fn make_tls_connect(&mut self, host: &str) -> Result<Handshake, InvalidDnsNameError> {
        // A unix socket has no host name, and never gets as far as a handshake.
        let host = if host.is_empty() { "localhost" } else { host };
        Ok(Handshake { config: self.0.clone(), host: ServerName::try_from(host.to_owned())? })
    }
}

pub struct Handshake {
    config: Option<Arc<ClientConfig>>,
    host: ServerName<'static>,
}

impl TlsConnect<Socket> for Handshake {
    type Stream = Stream;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Stream>> + Send>>;

    fn connect(self, socket: Socket) -> Self::Future {
        Box::pin(async move {
            let plain = || Connector::config(Check::Nothing, &Files { roots: None, certificate: None });
            let config = self.config.map_or_else(plain, Ok).map_err(io::Error::other)?;
            Ok(Stream(Box::new(TlsConnector::from(config).connect(self.host, socket).await?)))
        })
    }
}

pub struct Stream(Box<tokio_rustls::client::TlsStream<Socket>>);

impl TlsStream for Stream {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, task: &mut Task<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_read(task, buffer)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, task: &mut Task<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0).poll_write(task, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_flush(task)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, task: &mut Task<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0).poll_shutdown(task)
    }
}
