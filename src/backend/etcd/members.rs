//! The members of a cluster: one connection to one of them at a time, and the next when it fails.
//!
//! The client library can spread requests over several endpoints, but goes on asking one that is frozen.

use std::time::Duration;

use anyhow::{Context, Result};
use etcd_client::{Certificate, Channel, Client, ConnectOptions, Error, Identity, TlsOptions};
use futures_util::future::join_all;
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use super::failure::{Said, explain, hung_up, is_an_answer, silence, summary};
use super::watch::{Stream, Watch};
use super::wire;
use crate::backend::{Address, Patience, tls};
use crate::clock;
use crate::exit::Fault;

pub struct Members {
    endpoints: Vec<String>,
    options: ConnectOptions,
    tls: Option<TlsOptions>,
    patience: Patience,
    /// Whom to turn to when there is no connection.
    next: usize,
    /// Whether anybody ever answered.
    answered: bool,
    connection: Option<Connection>,
}

struct Connection {
    endpoint: String,
    client: Client,
    watch: Option<Stream>,
}

impl Members {
    pub fn at(address: &Address, patience: Patience) -> Result<Members> {
        let tls = match address.scheme() {
            "etcds" => Some(tls_options(address)?),
            _ => tls::refuse(address).map(|()| None)?,
        };
        let scheme = if tls.is_some() { "https" } else { "http" };
        let endpoints: Vec<_> =
            address.hosts().iter().map(|host| format!("{scheme}://{}", host.with_port(2379))).collect();
        if endpoints.is_empty() {
            return Err(Fault::Config.because("an etcd URL names a host: etcd://host1,host2,host3"));
        }
        let mut options = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        match (address.username(), address.password()?) {
            (Some(user), password) => options = options.with_user(user, password.unwrap_or_default()),
            (None, Some(_)) => return Err(Fault::Config.because("there is a password for etcd but no user name")),
            (None, None) => {}
        }
        Ok(Members { endpoints, options, tls, patience, next: 0, answered: false, connection: None })
    }

    /// Asks one member after the other until one answers. What is asked must be safe to ask twice.
    pub async fn call<T>(&mut self, ask: impl AsyncFn(Client) -> Result<T, Error>) -> Result<T> {
        let mut failures = Vec::new();
        let end = clock::now() + self.whole();
        for _ in 0..self.endpoints.len() + usize::from(self.connection.is_some()) {
            if end.has_passed() {
                break;
            }
            // If our caller's patience ends while we wait, the connection is not put back.
            let kept = self.connection.take();
            let share = self.share().min(end.remaining());
            let endpoint =
                kept.as_ref().map_or_else(|| self.endpoints[self.next].clone(), |kept| kept.endpoint.clone());
            let attempt = async {
                let connection = match kept {
                    Some(kept) => kept,
                    None => self.connect().await?,
                };
                let answer = ask(connection.client.clone()).await;
                if answer.as_ref().err().is_none_or(is_an_answer) {
                    self.answered = true;
                    self.connection = Some(connection);
                }
                answer
            };
            match timeout(share, attempt).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(error)) if is_an_answer(&error) => {
                    let (fault, text) = explain(&endpoint, &error);
                    return Err(anyhow::Error::new(Said(text)).context(fault));
                }
                Ok(Err(error)) if self.was_hung_up_on(&error) => failures.push(hung_up(&endpoint)),
                Ok(Err(error)) => failures.push(explain(&endpoint, &error)),
                Err(_) => failures.push(silence(&endpoint, share)),
            }
        }
        Err(summary(&failures, self.endpoints.len()))
    }

    /// Asks every member there is at the same time, each on a connection of its own.
    pub async fn ask_each<T>(&self, ask: impl AsyncFn(Client) -> Result<T, Error>) -> Vec<(String, Result<T>)> {
        let (ask, share) = (&ask, self.share());
        let asked = self.endpoints.iter().map(|endpoint| async move {
            let attempt = async { ask(self.open(endpoint).await?).await };
            let answer = match timeout(share, attempt).await {
                Ok(answer) => answer.map_err(|error| explain(endpoint, &error).1),
                Err(_) => Err(silence(endpoint, share).1),
            };
            (endpoint.clone(), answer.map_err(anyhow::Error::msg))
        });
        join_all(asked).await
    }

    /// Asks the member we are connected to, and no other. Unlike [`call`](Self::call), this may be dropped
    /// without harm to the connection: a command that ends at once ends in the middle of it.
    pub async fn beside<T>(&mut self, ask: impl AsyncFn(Client) -> Result<T, Error>) -> Result<T> {
        let share = self.share();
        let client = match &self.connection {
            Some(connection) => connection.client.clone(),
            None => {
                let connection = timeout(share, self.connect()).await??;
                self.connection.insert(connection).client.clone()
            }
        };
        Ok(timeout(share, ask(client)).await??)
    }

    /// For what nobody has to know the end of.
    pub fn client(&self) -> Option<Client> {
        self.connection.as_ref().map(|connection| connection.client.clone())
    }

    /// The stream of a watch, opened if it is not.
    pub async fn stream(&mut self, watch: &Watch) -> Result<&mut Stream> {
        if self.connection.as_ref().is_none_or(|connection| connection.watch.is_none()) {
            let stream = self.beside(async |client| watch.open(client).await).await?;
            self.connection.as_mut().context("connected just now")?.watch = Some(stream);
        }
        self.connection.as_mut().and_then(|connection| connection.watch.as_mut()).context("opened just now")
    }

    /// Ends a watch; the next [`stream`](Self::stream) is a new one.
    pub fn end_watch(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.watch = None;
        }
    }

    /// Turns to another member next time.
    pub fn leave(&mut self) {
        self.connection = None;
    }

    async fn connect(&mut self) -> Result<Connection, Error> {
        let endpoint = self.endpoints[self.next].clone();
        self.next = (self.next + 1) % self.endpoints.len();
        let client = self.open(&endpoint).await?;
        Ok(Connection { endpoint, client, watch: None })
    }

    /// Not the library's own `connect`, which puts a balancer between us and a member, even a single one.
    async fn open(&self, endpoint: &str) -> Result<Client, Error> {
        let mut endpoint = Endpoint::from_shared(endpoint.to_owned())?;
        if let Some(tls) = &self.tls {
            endpoint = endpoint.tls_config(tls.clone())?;
        }
        Client::from_channel(Channel::Tonic(wire::channel(&endpoint)), Some(self.options.clone())).await
    }

    /// In TLS 1.3 a server looks at our certificate after the handshake is done for us, and the library
    /// keeps the alert to itself: all we see is that a member hangs up before it ever answered.
    fn was_hung_up_on(&self, error: &Error) -> bool {
        let hung_up = |status: &Status| matches!(status.code(), Code::Cancelled | Code::Unknown);
        self.tls.is_some() && !self.answered && matches!(error, Error::GRpcStatus(status) if hung_up(status))
    }

    /// How long one member may take. A cluster that works at all has a majority alive, so that trying
    /// one more than half of its members meets one that answers.
    fn share(&self) -> Duration {
        self.whole() / (self.endpoints.len() as u32 / 2 + 1)
    }

    /// How long all of them may take: less than our callers wait, to whom we say what each of them did.
    fn whole(&self) -> Duration {
        let patience = if self.answered { self.patience.attempt } else { self.patience.connect };
        patience - patience / 20
    }
}

fn tls_options(address: &Address) -> Result<TlsOptions> {
    // The library would find out only when it connects, and not say what is wrong with which file.
    tls::client_config(address)?;
    let read = |key: &str| -> Result<Option<Vec<u8>>> {
        let Some(path) = address.param(key) else { return Ok(None) };
        let pem = std::fs::read(path).with_context(|| format!("cannot read {key} {path}")).context(Fault::Config)?;
        Ok(Some(pem))
    };
    let options = match read("tls-ca")? {
        Some(pem) => TlsOptions::new().ca_certificate(Certificate::from_pem(pem)),
        None => TlsOptions::new().with_enabled_roots(),
    };
    match (read("tls-cert")?, read("tls-key")?) {
        (Some(cert), Some(key)) => Ok(options.identity(Identity::from_pem(cert, key))),
        (None, None) => Ok(options),
        _ => Err(Fault::Config.because("tls-cert and tls-key are given together or not at all")),
    }
}
