//! Our place in the queue, and how we learn that it is our turn: by the bell of who is before us, where both have
//! sessions of their own, else by notification; and at the latest by asking again.

use std::time::Duration;

use anyhow::Result;
use tokio_postgres::types::Type;

use super::answer::{PLACE, grace, lease, outcome, word};
use super::client::Answer;
use super::session::Parameters;
use super::{Held, Postgres, ascii, plain};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{LockName, OwnerId, Term, Token};

/// So many bells in a row that fell for nothing are no accident; then each is waited for a little longer.
const OFTEN: u32 = 5;
const BRAKE: Duration = Duration::from_millis(100);

/// A place in the queue, as far as we know.
pub(super) struct Place {
    name: LockName,
    owner: OwnerId,
    /// It counts from then.
    from: Instant,
    /// The latest grant there was; ours will have a greater token.
    after: i64,
    /// Whose bell to wait for, and how long; without, we are notified.
    pub(super) behind: Option<(i64, Duration)>,
    /// What we were granted when that fell.
    granted: Option<i64>,
}

/// Whether to be notified from then on.
pub(super) enum Ear {
    AsItIs,
    Open,
}

impl Postgres {
    /// What whoever let go has granted us while we waited: for as long as our place was worth, and so counted from the
    /// question that it was the answer to. If much of that has passed, we had better ask.
    pub(super) fn handed_over(&mut self, ask: &Ask) -> Option<Lease> {
        let (place, ttl) = (self.place.as_ref()?, ask.ttl.min(PLACE));
        let from = place.from;
        let token = place.granted.or_else(|| self.told(ask)).filter(|token| *token > place.after)?;
        if (from + ttl / 2).has_passed() {
            return None;
        }
        self.place = None;
        self.held = Held { ttl: Some(ask.ttl), contended: true, handed_over: true, ..Held::default() };
        Some(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: Token(i64::unsigned_abs(token)),
            slot: None,
            term: Term { from, ttl, slack: Duration::ZERO },
            descriptors: Vec::new(),
        })
    }

    /// What a notification says that we were granted.
    fn told(&self, ask: &Ask) -> Option<i64> {
        let grant = self.client.grant()?;
        let (token, to) = grant.split_once(' ')?;
        let ours = to.split_once(' ')? == (ask.name.as_str(), ask.who.owner.as_str());
        token.parse().ok().filter(|_| ours)
    }

    /// A lock that nobody contends for is ours at once. Otherwise `None`, and nothing has happened.
    pub(super) async fn take(&mut self, ask: &Ask) -> Result<Option<Lease>> {
        const SQL: &str = "SELECT token, version FROM dlock.take($1, $2, make_interval(secs => $3), $4::json, $5)";
        let (name, owner, ttl) = (ask.name.as_str(), ask.who.owner.as_str(), ask.ttl.as_secs_f64());
        let (who, wake) = (ascii(&ask.who.to_json()), self.client.channel());
        let with: &Parameters<'_> =
            &[(&name, Type::TEXT), (&owner, Type::TEXT), (&ttl, Type::FLOAT8), (&who, Type::TEXT), (&wake, Type::TEXT)];
        let answer = self.client.call_installed(SQL, with).await?;
        let row = answer.row()?;
        let Some(token) = row.try_get(0)? else { return Ok(None) };
        self.client.check_version(row.try_get(1)?)?;
        self.held = Held { ttl: Some(ask.ttl), ..Held::default() };
        Ok(Some(lease(ask, &answer, token, None)))
    }

    /// What `dlock.acquire` says, and what follows for our place.
    pub(super) async fn ask(&mut self, ask: &Ask, ear: Ear) -> Result<Attempt> {
        let again = self.place.is_some();
        let answer = self.call(ask, again, ear).await?;
        let row = answer.row()?;
        self.client.check_version(row.try_get(7)?)?;
        let attempt = outcome(ask, &answer)?;
        let granted = matches!(attempt, Attempt::Granted(_));
        self.held =
            if granted { Held { ttl: Some(ask.ttl), contended: again, ..Held::default() } } else { Held::default() };
        let Attempt::Busy(Busy { ahead, ask_again, .. }) = &attempt else {
            self.place = None;
            return Ok(attempt);
        };
        // Those far behind keep no connection between two questions, so that there is one left for others.
        let room = usize::try_from(row.try_get::<_, i32>(6)?)?;
        let far = ahead.is_some_and(|ahead| ahead >= room);
        let behind = row.try_get::<_, Option<i64>>(9)?.filter(|_| !far);
        if behind.is_some() && !again {
            self.rehearsed = self.client.known_process();
        }
        self.place = ask.queue.then_some(Place {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            from: answer.from,
            after: row.try_get::<_, Option<i64>>(8)?.unwrap_or(i64::MAX),
            behind: behind.map(|ticket| (ticket, ask_again.remaining().saturating_sub(grace(ask.ttl)))),
            granted: None,
        });
        if far {
            self.client.disconnect();
        }
        Ok(attempt)
    }

    async fn call(&mut self, ask: &Ask, again: bool, ear: Ear) -> Result<Answer> {
        const SQL: &str =
            "SELECT outcome, token, slot, ahead, extract(epoch FROM next_end)::float8, holder::text, room, version,
             latest, behind
             FROM dlock.acquire($1, $2, make_interval(secs => $3), $4, $5, $6, $7, $8::json, $9, $10, $11)";
        let (name, owner, mode) = (ask.name.as_str(), ask.who.owner.as_str(), word(ask.mode));
        let (slots, ttl) = (i32::try_from(ask.mode.slots())?, ask.ttl.as_secs_f64());
        let (who, wake) = (ascii(&ask.who.to_json()), self.client.channel());
        let once = ask.once.as_deref().map(plain);
        let process = self.process().await?;
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&ttl, Type::FLOAT8),
            (&mode, Type::TEXT),
            (&slots, Type::INT4),
            (&ask.queue, Type::BOOL),
            (&once, Type::TEXT),
            (&who, Type::TEXT),
            (&wake, Type::TEXT),
            (&again, Type::BOOL),
            (&process, Type::INT4),
        ];
        if let Ear::Open = ear
            && let Some(answer) = self.client.call_listening(SQL, with).await?
        {
            return Ok(answer);
        }
        self.client.call_installed(SQL, with).await
    }

    /// The server's process that is ours alone.
    pub(super) async fn process(&mut self) -> Result<Option<i32>> {
        if self.bells { self.client.process().await } else { Ok(None) }
    }

    /// Waits for the bell of who is before us. If the server does not let us, we go without from then on.
    pub(super) async fn wait_for_bell(&mut self) {
        const SQL: &str = "SELECT token FROM dlock.await($1, $2, $3, make_interval(secs => $4), $5)";
        let Some(Place { name, owner, behind: Some((behind, patience)), granted, .. }) = &mut self.place else {
            return;
        };
        let (name, owner, seconds) = (name.as_str(), owner.as_str(), patience.as_secs_f64());
        let process = self.client.known_process();
        let (rehearse, until) = (self.rehearsed != process, clock::now() + *patience);
        let with: &Parameters<'_> = &[
            (&name, Type::TEXT),
            (&owner, Type::TEXT),
            (&*behind, Type::INT8),
            (&seconds, Type::FLOAT8),
            (&rehearse, Type::BOOL),
        ];
        let token = self.client.call_waiting(SQL, with).await;
        match token.and_then(|answer| Ok(answer.row()?.try_get(0)?)) {
            Ok(token) => {
                (*granted, self.rehearsed) = (token, process);
                let in_vain = token.is_none() && !until.has_passed();
                self.in_vain = if in_vain { self.in_vain + 1 } else { 0 };
                if self.in_vain > OFTEN {
                    tokio::time::sleep(BRAKE).await;
                }
            }
            Err(_) => self.bells = !self.client.is_connected(),
        }
    }
}
