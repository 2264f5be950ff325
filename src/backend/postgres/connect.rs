//! The way to a session: which of several servers, a TCP or unix socket, TLS as libpq's `sslmode` asks for it, the log-in.
//! SCRAM runs without channel binding.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_postgres::config::{Host, SslMode, TargetSessionAttrs};
use tokio_postgres::{Client, Config, Error, NoTls};
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::{self, WebPkiSupportedAlgorithms, ring};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, SignatureScheme};

use super::errors::{MAY_WANT_TLS, explain_login, is_about, read_only};
use super::session::Session;
use super::settings::Server;
use crate::backend::net::{self, Bounded, Socket};
use crate::backend::sql::{two_can_be_written_to, writable};
use crate::backend::sslmode::Check;
use crate::backend::{tls, within};
use crate::exit::Fault;

/// What a server may send before we ask for more: otherwise it could fill our memory. A log-in is a few kilobytes, and
/// small messages take several times their size in memory.
const BEFORE_LOG_IN: usize = 1 << 20;
/// A page of `dlock status` may be large.
const AFTER_LOG_IN: usize = 32 << 20;

/// Connects to the one server that can be written to: two would each have a holder.
pub async fn open(servers: &[Server]) -> Result<Session> {
    if let [server] = servers {
        return begin(server.clone()).await;
    }
    let mut all = writable(servers, begin).await?;
    if all.len() == 1 { Ok(all.remove(0).1) } else { latest(all, servers).await }
}

async fn begin(mut server: Server) -> Result<Session> {
    let mut begun = log_in(&server).await;
    if server.allows_tls && begun.as_ref().is_err_and(|error| is_about(error, &MAY_WANT_TLS)) {
        server.config.ssl_mode(SslMode::Require);
        match log_in(&server).await {
            // A server without TLS has said all there is to say before.
            Err(error) if !error.is::<Error>() => {}
            encrypted => begun = encrypted,
        }
    }
    let session = begun.map_err(|error| error.context(server.label.clone()))?;
    if server.config.get_target_session_attrs() == TargetSessionAttrs::ReadWrite {
        let row = session.query_one("SHOW transaction_read_only").await?;
        if row.try_get::<_, &str>(0)? != "off" {
            return Err(read_only().context(server.label));
        }
    }
    Ok(session)
}

/// Which server it is that can be written to.
struct Identity {
    started: String,
    /// The same for a primary and its standbys.
    cluster: i64,
    /// One more after every promotion.
    timeline: i32,
}

/// The server of the latest timeline: a primary that has not noticed yet that a standby was promoted is the past, and all
/// who see both see that. One server may go by two names, or stand behind two poolers. Otherwise each of two servers
/// would have a holder of its own.
async fn latest(writable: Vec<(usize, Session)>, servers: &[Server]) -> Result<Session> {
    let mut all = Vec::new();
    for (place, session) in writable {
        all.push((identity(&session).await?, place, session));
    }
    all.sort_by_key(|(identity, place, _)| (Reverse(identity.timeline), *place));
    let (first, place, session) = all.remove(0);
    let is_another = |other: &Identity| {
        other.cluster != first.cluster || other.timeline == first.timeline && other.started != first.started
    };
    if let Some((_, other, _)) = all.iter().find(|(identity, ..)| is_another(identity)) {
        let labels = [place, *other].map(|place| (place, servers[place].label.as_str()));
        return Err(two_can_be_written_to(labels, "name only those of one cluster"));
    }
    Ok(session)
}

async fn identity(session: &Session) -> Result<Identity> {
    const SQL: &str = "SELECT pg_postmaster_start_time()::text, (SELECT system_identifier FROM pg_control_system()),
        ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int";
    let row = session.query_one(SQL).await?;
    Ok(Identity { started: row.try_get(0)?, cluster: row.try_get(1)?, timeline: row.try_get(2)? })
}

async fn log_in(server: &Server) -> Result<Session> {
    let socket = open_socket(&server.config, &server.tls).await?;
    let limit = Arc::new(AtomicUsize::new(BEFORE_LOG_IN));
    // The stream is encrypted already, if it is to be.
    let mut config = server.config.clone();
    config.ssl_mode(SslMode::Disable);
    let stream = Bounded::new(socket, limit.clone(), <[u8]>::len);
    let (client, connection) = config.connect_raw(stream, NoTls).await.map_err(explain_login)?;
    limit.store(AFTER_LOG_IN, Relaxed);
    let process = process_id(&client).await;
    Ok(Session::new(client, connection, process))
}

/// The server process that serves us, as it said at the log-in. The library writes it into a request to cancel, and
/// nowhere else. A pooler says something else, which is how we know one: behind it, nothing that belongs to a session is
/// ours.
async fn process_id(client: &Client) -> Option<i32> {
    let (mut request, stream) = tokio::io::duplex(64);
    client.cancel_token().cancel_query_raw(stream, NoTls).await.ok()?;
    // After its length and its code.
    request.read_u64().await.ok()?;
    request.read_i32().await.ok()
}

/// Connects to the one host of a configuration.
async fn open_socket(config: &Config, tls: &Arc<ClientConfig>) -> Result<Socket> {
    let port = config.get_ports()[0];
    let connecting = async {
        match &config.get_hosts()[0] {
            Host::Unix(dir) => net::unix(&dir.join(format!(".s.PGSQL.{port}"))).await,
            Host::Tcp(name) => {
                let at = format!("{name}:{port}");
                let socket = connect(config, name, port).await.with_context(|| format!("cannot connect to {at}"));
                encrypt(socket.context(Fault::Unreachable)?, &at, config.get_ssl_mode(), tls).await
            }
        }
    };
    match config.get_connect_timeout() {
        Some(limit) => within(*limit, connecting).await,
        None => connecting.await,
    }
}

/// With what lets the kernel find out that the other side is gone.
async fn connect(config: &Config, name: &str, port: u16) -> Result<TcpStream> {
    let given: Vec<_> = config.get_hostaddrs().iter().map(|ip| SocketAddr::new(*ip, port)).collect();
    let socket = match given[..] {
        [] => TcpStream::connect((name, port)).await?,
        _ => TcpStream::connect(&given[..]).await?,
    };
    let seconds = |span: Duration| u32::try_from(span.as_secs()).unwrap_or(u32::MAX).max(1);
    socket.set_nodelay(true)?;
    if let Some(limit) = config.get_tcp_user_timeout() {
        setsockopt(&socket, sockopt::TcpUserTimeout, &u32::try_from(limit.as_millis()).unwrap_or(u32::MAX))?;
    }
    if config.get_keepalives() {
        setsockopt(&socket, sockopt::KeepAlive, &true)?;
        setsockopt(&socket, sockopt::TcpKeepIdle, &seconds(config.get_keepalives_idle()))?;
        if let Some(interval) = config.get_keepalives_interval() {
            setsockopt(&socket, sockopt::TcpKeepInterval, &seconds(interval))?;
        }
        if let Some(count) = config.get_keepalives_retries().filter(|&count| count > 0) {
            setsockopt(&socket, sockopt::TcpKeepCount, &count)?;
        }
    }
    Ok(socket)
}

async fn encrypt(mut socket: TcpStream, at: &str, mode: SslMode, tls: &Arc<ClientConfig>) -> Result<Socket> {
    /// Length and code, as the protocol has it.
    const SSL_REQUEST: [u8; 8] = [0, 0, 0, 8, 4, 210, 22, 47];
    if mode == SslMode::Disable {
        return Ok(Box::new(socket));
    }
    let mut ask = async || {
        socket.write_all(&SSL_REQUEST).await?;
        socket.read_u8().await
    };
    match ask().await.context(Fault::Unreachable)? {
        b'S' => net::encrypt(socket, at, tls).await,
        _ if mode == SslMode::Prefer => Ok(Box::new(socket)),
        _ => Err(Fault::Refused.because("the server does not support TLS")),
    }
}

/// `roots` is the file that `sslrootcert` names; without it, the system's own roots. `certificate` is the client's, and its
/// key.
pub fn tls_config(
    check: Check,
    roots: Option<&Path>,
    certificate: Option<(&Path, &Path)>,
) -> Result<Arc<ClientConfig>> {
    let provider = Arc::new(ring::default_provider());
    let verifier = match check {
        Check::Nothing => None,
        Check::Signer | Check::SignerAndName => {
            Some(WebPkiServerVerifier::builder_with_provider(tls::roots(roots)?.into(), provider.clone()).build()?)
        }
    };
    let named = if verifier.is_some() { roots.map(tls::certificates).transpose()?.unwrap_or_default() } else { vec![] };
    let (known, by_name) = (provider.signature_verification_algorithms, check == Check::SignerAndName);
    let checker = Arc::new(Checker { known, verifier, named, by_name });
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .dangerous()
        .with_custom_certificate_verifier(checker);
    Ok(Arc::new(match certificate {
        Some((chain, key)) => tls::with_client_certificate(config, chain, key)?,
        None => config.with_no_client_auth(),
    }))
}

type Signed = Result<HandshakeSignatureValid, TlsError>;

/// Without a verifier plain `require`, by name `verify-full`, else `verify-ca`.
#[derive(Debug)]
struct Checker {
    known: WebPkiSupportedAlgorithms,
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

    fn verify_tls12_signature(&self, text: &[u8], by: &CertificateDer<'_>, how: &DigitallySignedStruct) -> Signed {
        crypto::verify_tls12_signature(text, by, how, &self.known)
    }

    fn verify_tls13_signature(&self, text: &[u8], by: &CertificateDer<'_>, how: &DigitallySignedStruct) -> Signed {
        crypto::verify_tls13_signature(text, by, how, &self.known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.known.supported_schemes()
    }
}

/// Whether the server has shown a root certificate instead of one that a root has signed; only the text says so.
fn is_own_root(error: &TlsError) -> bool {
    let TlsError::InvalidCertificate(CertificateError::Other(other)) = error else { return false };
    other.0.to_string() == "CaUsedAsEndEntity"
}
