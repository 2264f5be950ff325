//! The members of a cluster: a connection to one of them at a time, and to the next when it fails. Leases, and watches
//! on keys. Knows no lock.
//!
//! The client library can spread requests over several endpoints, but goes on asking one that is frozen.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use etcd_client::{
    Certificate, Client, ConnectOptions, Error, Identity, LeaseGrantOptions, ResponseHeader, TlsOptions, Txn, TxnOp,
    TxnResponse, WatchFilterType, WatchOptions, WatchStream,
};
use futures_util::future::join_all;
use tokio::time::timeout;
use tonic::{Code, Status};

use super::errors::{LEASE_EXISTS, NO_SUCH_LEASE, explain, hung_up, is_an_answer, is_refusal, silence, summary};
use super::queue::Reads;
use crate::backend::{Address, Patience, tls};
use crate::clock::{self, Instant};
use crate::exit::Fault;
use crate::lock::Grant;

/// For a queue with very many waiters; the library's own limit of 4 MB is reached by some ten thousand.
const LARGEST_ANSWER: usize = 64 << 20;
/// How long a release waits for the end of its lease, which has no key any more.
const TIDY: Duration = Duration::from_millis(200);

pub struct Members {
    endpoints: Vec<String>,
    options: ConnectOptions,
    uses_tls: bool,
    patience: Patience,
    /// The member to connect to next.
    next: usize,
    /// Whether any member ever answered.
    answered: bool,
    /// The first verb was answered, all of it: from then on, members get the shorter patience of later requests.
    pub connected: bool,
    connection: Option<Connection>,
}

struct Connection {
    endpoint: String,
    client: Client,
    watch: Option<WatchStream>,
}

/// A key to watch, and for which of its changes.
pub type WatchedKey = (Vec<u8>, WatchOptions);

pub fn change_of(key: impl Into<Vec<u8>>) -> WatchedKey {
    (key.into(), WatchOptions::new())
}

pub fn end_of(key: impl Into<Vec<u8>>) -> WatchedKey {
    (key.into(), WatchOptions::new().with_filters([WatchFilterType::NoPut]))
}

/// What to watch, and from which revision on. Survives the streams it is watched on.
#[derive(Default)]
pub struct Watch {
    pub keys: Vec<WatchedKey>,
    pub from: i64,
}

impl Watch {
    async fn open(&self, mut client: Client) -> Result<WatchStream, Error> {
        let from_here = |(key, options): &WatchedKey| (key.clone(), options.clone().with_start_revision(self.from));
        let mut keys = self.keys.iter().map(from_here);
        let (key, options) = keys.next().ok_or_else(|| Error::WatchError("nothing to watch".to_owned()))?;
        let mut stream = client.watch(key, Some(options)).await?;
        for (key, options) in keys {
            stream.watch(key, Some(options)).await?;
        }
        Ok(stream)
    }
}

/// A lease that the server says it has set or extended.
pub struct Extended {
    pub lease: i64,
    grant: Grant,
    /// The leader's raft term; `None` for what a majority agreed on, as it does on a new lease.
    raft_term: Option<u64>,
}

impl Extended {
    fn new(lease: i64, from: Instant, ttl: i64, raft_term: Option<u64>) -> Extended {
        let ttl = Duration::from_secs(ttl.unsigned_abs());
        Extended { lease, grant: Grant { from, ttl, slack: Duration::ZERO }, raft_term }
    }

    /// The lease, if a later linearizable read shows that the same leader was in office all the time: a deposed one
    /// goes on confirming renewals that its successor knows nothing of.
    pub fn confirmed_in(self, raft_term: u64) -> Result<Grant> {
        if self.raft_term.is_some_and(|extended_in| extended_in != raft_term) {
            return Err(Fault::Unreachable.because("etcd changed its leader while the lease was renewed"));
        }
        Ok(self.grant)
    }
}

impl Members {
    pub fn at(address: &Address, patience: Patience) -> Result<Members> {
        let mut options = ConnectOptions::new().with_require_leader(true).with_auto_token_refresh(true);
        let uses_tls = address.scheme() == "etcds";
        // The library would notice only when it connects, and would not say what is wrong with which file.
        if tls::client_config(address, uses_tls)?.is_some() {
            options = options.with_tls(tls_options(address)?);
        }
        let scheme = if uses_tls { "https" } else { "http" };
        let endpoints: Vec<_> =
            address.hosts().iter().map(|host| format!("{scheme}://{}", host.with_port(2379))).collect();
        if endpoints.is_empty() {
            return Err(Fault::Config.because("an etcd URL names a host: etcd://host1,host2,host3"));
        }
        match (address.username(), address.password()?) {
            (Some(user), password) => options = options.with_user(user, password.unwrap_or_default()),
            (None, Some(_)) => return Err(Fault::Config.because("there is a password for etcd but no user name")),
            (None, None) => {}
        }
        Ok(Members {
            endpoints,
            options,
            uses_tls,
            patience,
            next: 0,
            answered: false,
            connected: false,
            connection: None,
        })
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
            let endpoint = kept.as_ref().map_or(&self.endpoints[self.next], |kept| &kept.endpoint).clone();
            let attempt = async {
                let connection = match kept {
                    Some(kept) => kept,
                    None => {
                        self.next = (self.next + 1) % self.endpoints.len();
                        let client = self.open(&endpoint).await?;
                        Connection { endpoint: endpoint.clone(), client, watch: None }
                    }
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
                Ok(Err(error)) if is_an_answer(&error) => return Err(explain(&endpoint, &error)),
                Ok(Err(error)) if self.was_hung_up_on(&error) => failures.push(hung_up(&endpoint)),
                Ok(Err(error)) => failures.push(explain(&endpoint, &error)),
                Err(_) => failures.push(silence(&endpoint, share)),
            }
        }
        Err(summary(&failures, self.endpoints.len()))
    }

    pub async fn transact(&mut self, txn: Txn) -> Result<TxnResponse> {
        let ask =
            async |client: Client| client.kv_client().max_decoding_message_size(LARGEST_ANSWER).txn(txn.clone()).await;
        self.call(ask).await
    }

    pub async fn read(&mut self, requests: impl Into<Vec<TxnOp>>) -> Result<Reads> {
        Reads::of(&self.transact(Txn::new().and_then(requests)).await?)
    }

    /// Asks every member there is at the same time, each on a connection of its own.
    pub async fn ask_each<T>(&self, ask: impl AsyncFn(Client) -> Result<T, Error>) -> Vec<(String, Result<T>)> {
        let (ask, share) = (&ask, self.share());
        let asked = self.endpoints.iter().map(|endpoint| async move {
            let attempt = async { ask(self.open(endpoint).await?).await };
            let answer = match timeout(share, attempt).await {
                Ok(answer) => answer.map_err(|error| explain(endpoint, &error)),
                Err(_) => Err(silence(endpoint, share)),
            };
            (endpoint.clone(), answer)
        });
        join_all(asked).await
    }

    /// Waits for a change of what is watched, on a stream that is opened if there is none; fails if that ends. May be
    /// dropped without missing anything. Where the server does not remember as far back as was asked for, something may
    /// have changed: the watch then goes on from where it does remember.
    pub async fn changed(&mut self, watch: &mut Watch) -> Result<()> {
        if self.connection.as_ref().is_none_or(|connection| connection.watch.is_none()) {
            let stream = self.call(async |client| watch.open(client).await).await?;
            self.connection.as_mut().context("connected just now")?.watch = Some(stream);
        }
        let connection = self.connection.as_mut().context("connected just now")?;
        let stream = connection.watch.as_mut().context("opened just now")?;
        loop {
            let answer = stream.message().await?.context("the watch ended")?;
            let compacted = answer.compact_revision();
            if compacted > 0 {
                (watch.from, connection.watch) = (compacted, None);
                return Ok(());
            }
            ensure!(!answer.canceled(), "the watch was cancelled");
            if !answer.events().is_empty() {
                return Ok(());
            }
        }
    }

    /// Ends a watch; the next [`changed`](Self::changed) opens a new one.
    pub fn end_watch(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.watch = None;
        }
    }

    /// With an id of 0 the server chooses one, and another one if the answer is lost.
    pub async fn grant_lease(&mut self, lease: i64, ttl: Duration) -> Result<Extended> {
        let granted = self.call(async |mut client| {
            let from = clock::now();
            // etcd counts in seconds.
            let seconds = i64::try_from(ttl.as_millis().div_ceil(1000)).unwrap_or(i64::MAX);
            let answer = client.lease_grant(seconds, Some(LeaseGrantOptions::new().with_id(lease))).await?;
            Ok(Extended::new(answer.id(), from, answer.ttl(), None))
        });
        match granted.await {
            // An earlier request of ours was applied at an unknown time, but not answered.
            Err(error) if is_refusal(&error, LEASE_EXISTS) => {
                self.keep_alive(lease).await?.context("our lease ran out while we asked for it")
            }
            granted => granted,
        }
    }

    /// Extends a lease; `None` if there is no such lease.
    pub async fn keep_alive(&mut self, lease: i64) -> Result<Option<Extended>> {
        let extended = self.call(async |mut client| {
            // The library keeps the first answer to itself, so we ask a second time.
            let (mut keeper, mut answers) = match client.lease_keep_alive(lease).await {
                Err(Error::LeaseKeepAliveError(why)) if why == "lease not found" => return Ok(None),
                opened => opened?,
            };
            let from = clock::now();
            keeper.keep_alive().await?;
            match answers.message().await? {
                Some(answer) if answer.ttl() > 0 => {
                    let raft_term = answer.header().map_or(0, ResponseHeader::raft_term);
                    Ok(Some(Extended::new(lease, from, answer.ttl(), Some(raft_term))))
                }
                Some(_) => Ok(None),
                None => Err(Error::LeaseKeepAliveError("the stream ended without an answer".to_owned())),
            }
        });
        extended.await
    }

    /// How much longer a lease lasts, and for how long it was granted; nothing if there is no such lease.
    pub async fn rest_of_lease(&mut self, lease: i64) -> Result<(Option<Duration>, Option<Duration>)> {
        let rest = self.call(async |mut client| client.lease_time_to_live(lease, None).await).await?;
        let seconds = |n: i64| u64::try_from(n).ok().map(Duration::from_secs);
        Ok((seconds(rest.ttl()), seconds(rest.granted_ttl())))
    }

    /// Ends a lease, and deletes all keys that are attached to it.
    pub async fn revoke_lease(&mut self, lease: i64) -> Result<()> {
        match self.call(async |mut client| client.lease_revoke(lease).await.map(drop)).await {
            Err(error) if !is_refusal(&error, NO_SUCH_LEASE) => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends a lease that has no key any more, so that it does not stay until its ttl is over. Whether that works makes no
    /// difference to any lock.
    pub async fn tidy(&mut self, lease: i64) {
        let _ = timeout(TIDY, self.revoke_lease(lease)).await;
    }

    async fn open(&self, endpoint: &str) -> Result<Client, Error> {
        Client::connect([endpoint], Some(self.options.clone())).await
    }

    /// In TLS 1.3 a server checks our certificate after our side of the handshake is done, and the library does not pass
    /// the alert on: all we see is that a member hangs up before it ever answered.
    fn was_hung_up_on(&self, error: &Error) -> bool {
        let hung_up = |status: &Status| matches!(status.code(), Code::Cancelled | Code::Unknown);
        self.uses_tls && !self.answered && matches!(error, Error::GRpcStatus(status) if hung_up(status))
    }

    /// How long one member may take. A cluster that works at all has a majority alive, so that trying
    /// one more than half of its members meets one that answers.
    fn share(&self) -> Duration {
        self.whole() / (self.endpoints.len() as u32 / 2 + 1)
    }

    /// How long all of them may take: less than our callers wait, so that they learn what each member did.
    fn whole(&self) -> Duration {
        let patience = if self.connected { self.patience.attempt } else { self.patience.connect };
        patience - patience / 20
    }
}

fn tls_options(address: &Address) -> Result<TlsOptions> {
    let read = |key: &str| -> Result<Option<Vec<u8>>> {
        let Some(path) = address.param(key) else { return Ok(None) };
        let pem = std::fs::read(path).with_context(|| format!("cannot read {key} {path}")).context(Fault::Config)?;
        Ok(Some(pem))
    };
    let options = match read("tls-ca")? {
        Some(pem) => TlsOptions::new().ca_certificate(Certificate::from_pem(pem)),
        None => TlsOptions::new().with_enabled_roots(),
    };
    Ok(match (read("tls-cert")?, read("tls-key")?) {
        (Some(cert), Some(key)) => options.identity(Identity::from_pem(cert, key)),
        _ => options,
    })
}
