//! Our session with the ensemble: which server serves it, since when the leader counts its timeout, and
//! how it is taken to another server. Knows no lock.
//!
//! Why no client library: a lease must be counted from an instant at which the *leader* is known to have
//! heard from us. A server that is not the leader passes on that a session is alive only with its own
//! pings, and answers pings and reads for `syncLimit` ticks (10 s by default) after it has lost the
//! leader: all the while a library reports a healthy session that the leader is about to expire. Taking
//! over a session to a new connection is different: the server asks the leader, which restarts the
//! timeout, before it answers. A transaction committed behind it on the same connection proves that
//! this leader still had its quorum. So [`Ensemble::attach`] and a committed transaction are what a
//! lease is extended by, and the instant before `attach` is what it counts from. No margin of a tick is
//! needed then: whichever leader expires the session, it began to count later than we did.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio_rustls::rustls::ClientConfig;

use super::wire::{Answer, Link, NO_SESSION, Refusal, Request};
use super::wire::{found, has_expired, read_children};
use crate::backend::address::Host;
use crate::backend::{Address, Patience, tls, within};
use crate::clock::{self, Instant};
use crate::exit::Fault;

#[derive(Clone, Debug)]
pub struct Session {
    pub id: i64,
    pub password: Vec<u8>,
    /// The least that any server granted: a new leader goes by what the first one noted down.
    pub ttl: Duration,
    /// Before the request was written with which a server last took the session over.
    pub attached: Instant,
    /// The latest of these instants that the leader is proven to have counted from.
    pub proven: Instant,
    /// The latest transaction seen; a server that is behind it turns us away.
    pub seen: i64,
}

pub struct Ensemble {
    pub hosts: Vec<Host>,
    tls: Option<Arc<ClientConfig>>,
    login: Option<(String, String)>,
    patience: Patience,
    /// The server to try first.
    next: usize,
    /// A verb has been answered: from then on, servers get the shorter patience of later requests.
    pub answered: bool,
    pub session: Option<Session>,
    /// `None` while a request is under way: if its future is dropped, nobody uses the connection again.
    link: Option<Link>,
}

impl Ensemble {
    pub fn new(address: &Address, patience: Patience) -> Result<Ensemble> {
        let hosts = address.hosts().to_vec();
        if hosts.is_empty() {
            return Err(Fault::Config.because("a zookeeper:// URL names at least one host"));
        }
        let tls = tls::client_config(address, address.scheme() == "zookeepers")?;
        let login = match (address.username(), address.password()?) {
            (Some(username), Some(password)) => Some((username.to_owned(), password)),
            (Some(_), None) => return Err(Fault::Config.because("a username needs a password")),
            (None, Some(_)) => return Err(Fault::Config.because("a password needs a username")),
            (None, None) => None,
        };
        // Spreads clients over the servers.
        let mut random = [0];
        getrandom::fill(&mut random).context("the kernel gave no random bytes")?;
        let next = usize::from(random[0]) % hosts.len();
        Ok(Ensemble { hosts, tls, login, patience, next, answered: false, session: None, link: None })
    }

    pub fn is_authenticated(&self) -> bool {
        self.login.is_some()
    }

    /// Brings our session, or a new one with this ttl, to a new connection, and the leader to restart its
    /// timeout. The connection before it is closed by the server, or by us once this one stands.
    pub async fn attach(&mut self, ttl: Duration) -> Result<()> {
        // Nobody may claim a lock by a session this old, even if a server still knows it. A server that lost its data
        // would turn it away for ever, because it has seen later transactions.
        if self.session.as_ref().is_some_and(|session| session.proven.elapsed() > 2 * session.ttl) {
            self.session = None;
            bail!(Refusal::SESSION_EXPIRED);
        }
        // If this is dropped half-way, nobody may use the old connection again. It is closed only after it is replaced:
        // the server then closes it itself, without a complaint in its log.
        let _previous = self.link.take();
        let hosts = self.hosts.len();
        let patience = match self.session {
            Some(_) if self.answered => self.patience.attempt,
            // All tries together take less than our caller waits, so that it learns what went wrong.
            _ => self.patience.connect.mul_f64(0.95) / hosts as u32,
        };
        let mut failure: Option<anyhow::Error> = None;
        // A server that refuses us says more than one that is down.
        let says =
            |error: &anyhow::Error| (Fault::of(error) == Fault::Refused, error.downcast_ref() == Some(&NO_SESSION));
        for _ in 0..hosts {
            let host = self.next;
            // Already now: should this attempt be dropped, the next one tries another server.
            self.next = (host + 1) % hosts;
            match within(patience, self.attach_to(host, ttl)).await {
                Ok(()) => {
                    self.next = host;
                    return Ok(());
                }
                Err(error) if has_expired(&error) => return Err(error),
                Err(error) if failure.as_ref().is_none_or(|other| says(&error) > says(other)) => failure = Some(error),
                Err(_) => {}
            }
        }
        Err(failure.unwrap_or_else(|| Fault::Internal.because("no host was tried")))
    }

    async fn attach_to(&mut self, host: usize, ttl: Duration) -> Result<()> {
        let host = &self.hosts[host];
        let mut link = Link::open(host, self.tls.as_ref()).await?;
        let (id, password, seen, ttl) = match &self.session {
            Some(session) => (session.id, session.password.as_slice(), session.seen, session.ttl),
            None => (0, &[0; 16][..], 0, ttl),
        };
        let attached = clock::now();
        let connected = link.handshake(id, password, ttl, seen).await.with_context(|| host.name.clone())?;
        if connected.session == 0 {
            self.session = None;
            self.link = None;
            bail!(Refusal::SESSION_EXPIRED);
        }
        if let Some((username, password)) = &self.login {
            for answer in link.call(&[Request::digest_auth(username, password)]).await? {
                answer.context("digest authentication").context(Fault::Refused)?;
            }
        }
        let (ttl, proven) = match &self.session {
            Some(session) => (connected.ttl.min(session.ttl), session.proven),
            // A new session is a committed transaction itself.
            None => (connected.ttl, attached),
        };
        let (id, password) = (connected.session, connected.password);
        self.session = Some(Session { id, password, ttl, attached, proven, seen: link.seen });
        self.link = Some(link);
        Ok(())
    }

    /// A transaction was committed behind the last [`attach`](Self::attach).
    pub fn prove(&mut self) {
        if let Some(session) = &mut self.session {
            session.proven = session.attached;
        }
    }

    /// Attaches, unless requests can go out on a connection that is not due to be renewed.
    pub async fn refresh(&mut self, ttl: Duration) -> Result<()> {
        let recent = |session: &Session| session.proven.elapsed() < session.ttl / 3;
        if self.link.is_some() && self.session.as_ref().is_some_and(recent) {
            return Ok(());
        }
        self.attach(ttl).await
    }

    pub fn session(&self) -> Result<&Session> {
        self.session.as_ref().ok_or_else(|| Refusal::SESSION_EXPIRED.into())
    }

    /// Sends requests on the connection that [`attach`](Self::attach) made.
    pub async fn call(&mut self, requests: &[Request]) -> Result<Vec<Answer>> {
        if requests.is_empty() {
            return Ok(Vec::new());
        }
        let mut link = self.link.take().context("no connection is open").context(Fault::Unreachable)?;
        let patience = if self.answered { self.patience.attempt } else { self.patience.connect };
        let answers = within(patience, link.call(requests)).await?;
        for answer in &answers {
            match answer {
                Err(Refusal::SESSION_EXPIRED) => {
                    self.session = None;
                    bail!(Refusal::SESSION_EXPIRED);
                }
                Err(Refusal::SESSION_MOVED) => return Err(Fault::Unreachable.because(Refusal::SESSION_MOVED)),
                _ => {}
            }
        }
        if let Some(session) = &mut self.session {
            session.seen = link.seen;
        }
        self.link = Some(link);
        Ok(answers)
    }

    pub async fn call_one(&mut self, request: Request) -> Result<Answer> {
        self.call(&[request]).await?.pop().context("one request has one answer")
    }

    /// A node's children; none if there is no such node.
    pub async fn children(&mut self, path: &str) -> Result<Vec<String>> {
        let answer = self.call_one(Request::get_children(path)).await?;
        Ok(found(&answer, read_children, format_args!("cannot list {path}"))?.unwrap_or_default())
    }

    /// Returns when a watch fires, and once when the connection breaks; never while there is none.
    pub async fn changed(&mut self) {
        match &mut self.link {
            None => std::future::pending().await,
            Some(link) => {
                if link.changed().await.is_err() {
                    self.link = None;
                }
            }
        }
    }

    /// Whether the next [`changed`](Self::changed) returns at once.
    pub fn set_notified(&mut self, notified: bool) {
        if let Some(link) = &mut self.link {
            link.notified = notified;
        }
    }

    /// Ends a session that has no nodes any more, without waiting for the answer. If the session lives on for a ttl, that
    /// harms nobody.
    pub async fn end_unused(&mut self) {
        self.session = None;
        if let Some(mut link) = self.link.take() {
            let _ = within(self.patience.attempt, link.ask(&[Request::close_session()])).await;
        }
    }

    /// Ends our session, and with it all that is ephemeral of ours.
    pub async fn close(&mut self) -> Result<()> {
        let Some(session) = &self.session else { return Ok(()) };
        let ttl = session.ttl;
        if self.link.is_none() {
            match self.attach(ttl).await {
                Err(error) if has_expired(&error) => return Ok(()),
                attached => attached?,
            }
        }
        self.call_one(Request::close_session()).await??;
        self.link = None;
        self.session = None;
        Ok(())
    }
}
