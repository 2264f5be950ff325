//! Asking for the lock: what `acquire.lua` is told and what its answers mean.

use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::resp::Value;
use super::script::{Script, script};
use super::watch::Watch;
use super::{Redis, WITHDRAW, flag, millis, status, term};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::{Mode, Token};

static ACQUIRE: Script = script!("acquire.lua");

/// A waiter that has not asked again for this long is taken for dead.
pub(super) const PLACE: Duration = Duration::from_secs(6);
/// So often a waiter asks although nothing seems to change.
const BEAT: Duration = Duration::from_secs(2);
/// The second in the queue asks so often, to notice soon that the first does not come; the third half as often, and
/// so on.
const NEXT_BEAT: Duration = Duration::from_millis(500);
/// So often it asks a server that cannot notify.
const BLIND_BEAT: Duration = Duration::from_millis(250);

/// What the server said when it was last busy. One that has lost its data since is told by it that a command may
/// still run under a lock that it knows nothing about.
pub(super) struct Seen {
    token: String,
    owner: String,
    details: String,
    /// Its lease does not end before this.
    ends: Instant,
    /// For how long it may last if it was renewed after we looked.
    lasts: Duration,
}

impl Redis {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.server.link().await?;
        let unheard = std::mem::replace(&mut self.unheard, true);
        let from = clock::now();
        let (mode, slots, ttl) = (ask.mode.to_string(), ask.mode.slots().to_string(), millis(ask.ttl));
        let once = ask.once.as_deref().unwrap_or("");
        let (place, who) = (millis(PLACE), ask.who.to_json());
        let us = [ask.who.owner.as_str(), &mode, &slots, &ttl, flag(ask.queue), &place, once, &who];
        let seen = match &self.seen {
            Some(seen) => {
                let (left, lasts) = (millis(seen.ends.remaining()), millis(seen.lasts));
                [seen.token.clone(), seen.owner.clone(), seen.details.clone(), left, lasts]
            }
            None => ["0", "", "", "0", "0"].map(str::to_owned),
        };
        let args: Vec<&str> = us.into_iter().chain(seen.iter().map(String::as_str)).collect();
        let reply = self.server.run(&ACQUIRE, &self.keys(&ask.name), &args).await?;
        self.unheard = unheard;
        let [verdict, rest @ ..] = reply.items() else { bail!("an acquire was answered with {reply:?}") };
        Ok(match verdict.text().as_deref() {
            Some("granted") => {
                let lease = self.granted(ask, from, rest)?;
                if let Err(error) = self.replicated().await {
                    self.give_back(ask).await.ok();
                    return Err(error);
                }
                Attempt::Granted(lease)
            }
            Some("busy") => Attempt::Busy(self.busy(ask, from, rest)?),
            Some("ran") => Attempt::AlreadyRan,
            Some("terms") => {
                let theirs = rest.first().and_then(Value::text).unwrap_or_default();
                Attempt::OtherTerms(format!("{} is in use with --slots {theirs}, not {slots}", ask.name))
            }
            _ => bail!("an acquire was answered with {reply:?}"),
        })
    }

    /// Gives back a grant that does not count. Unlike `withdraw` it leaves no word that we
    /// have gone: we are going to ask again.
    async fn give_back(&mut self, ask: &Ask) -> Result<()> {
        self.watch = None;
        self.server.run(&WITHDRAW, &self.keys(&ask.name), &[ask.who.owner.as_str(), flag(false)]).await?;
        Ok(())
    }

    fn granted(&mut self, ask: &Ask, from: Instant, reply: &[Value]) -> Result<Lease> {
        let [token, slot, ttl] = reply else { bail!("a grant that is none: {reply:?}") };
        let lock = match ask.mode {
            Mode::Exclusive => ask.who.owner.to_string(),
            together => format!("={together}"),
        };
        self.watch = Some(Watch {
            keys: vec![self.keys(&ask.name).swap_remove(0), self.note(&ask.name, &ask.who.owner)],
            seen: vec![Some(lock), None],
        });
        Ok(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: Token(token.number().context("a grant without a token")?),
            slot: slot.number(),
            term: term(from, Duration::from_millis(ttl.number().context("a grant without a ttl")?)),
            descriptors: Vec::new(),
        })
    }

    fn busy(&mut self, ask: &Ask, from: Instant, reply: &[Value]) -> Result<Busy> {
        let [ahead, again, value, holder, details, seen] = reply else { bail!("busy, but how: {reply:?}") };
        let ahead: u32 = ahead.number().context("a queue without a length")?;
        let note = self.note(&ask.name, &ask.who.owner);
        // Only the first in the queue need see the lock change; the others are told when it is their turn.
        self.watch = Some(if ahead == 0 {
            let lock = value.text().filter(|value| !value.is_empty());
            Watch { keys: vec![self.keys(&ask.name).swap_remove(0), note], seen: vec![lock, None] }
        } else {
            Watch { keys: vec![note], seen: vec![None] }
        });
        let details = details.text().unwrap_or_default();
        let seen = Seen::read(seen, &details, from, self.seen.as_ref()).context("busy, but by whom")?;
        let beat = match ahead {
            _ if self.server.deaf => BLIND_BEAT,
            // Often enough to see every renewal, so that one that the server loses is missed.
            0 if !seen.lasts.is_zero() => (seen.lasts / 3).clamp(BLIND_BEAT, BEAT),
            0 => BEAT,
            ahead => BEAT.min(NEXT_BEAT * ahead),
        };
        self.seen = Some(seen);
        // One millisecond more than the server said: it counts whole ones.
        let again = again.number::<u64>().map_or(beat, |ms| Duration::from_millis(ms.saturating_add(1)).min(beat));
        let holder = holder.text().filter(|owner| !owner.is_empty());
        let holder = holder.map(|owner| status::holder(owner, &details, None));
        Ok(Busy { holder, ahead: usize::try_from(ahead).ok(), ask_again: clock::now() + again })
    }
}

impl Seen {
    /// `from` is when the server was asked, or earlier.
    fn read(reply: &Value, details: &str, from: Instant, before: Option<&Seen>) -> Option<Seen> {
        let [token, owner, left, lasts] = reply.items() else { return None };
        let (left, lasts) = (Duration::from_millis(left.number()?), Duration::from_millis(lasts.number()?));
        let (token, owner) = (token.text()?, owner.text()?);
        // A foreign program may give a lock the time again that it had when we saw it first.
        let longest = before.filter(|before| before.owner == owner).map_or(lasts, |before| before.lasts.max(lasts));
        let lasts = if details.is_empty() { longest } else { lasts };
        Some(Seen { token, owner, details: details.to_owned(), ends: from + left, lasts })
    }
}
