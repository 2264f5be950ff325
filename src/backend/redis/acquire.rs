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
/// So often it asks a server that cannot notify.
const BLIND_BEAT: Duration = Duration::from_millis(250);

/// Whom we saw hold the lock while we waited. A server that loses its data is told by it that a command
/// may still run under a lock that it knows nothing about.
pub(super) struct Before {
    owner: String,
    token: Token,
    ends: Instant,
}

impl Redis {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.server.link().await?;
        let unheard = std::mem::replace(&mut self.unheard, true);
        let from = clock::now();
        let (mode, slots, ttl) = (ask.mode.to_string(), ask.mode.slots().to_string(), millis(ask.ttl));
        let once = ask.once.as_deref().unwrap_or("");
        let (place, who) = (millis(PLACE), ask.who.to_json());
        let (owner, token, left) = match &self.before {
            Some(before) => (before.owner.as_str(), before.token, millis(before.ends.remaining())),
            None => ("", Token(0), millis(Duration::ZERO)),
        };
        let (us, token) = (ask.who.owner.as_str(), token.to_string());
        let args = [us, &mode, &slots, &ttl, flag(ask.queue), &place, once, &who, owner, &token, &left];
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
            Some("busy") => Attempt::Busy(self.busy(ask, rest)?),
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

    fn busy(&mut self, ask: &Ask, reply: &[Value]) -> Result<Busy> {
        let [ahead, again, value, holder, details, left] = reply else { bail!("busy, but how: {reply:?}") };
        let ahead: usize = ahead.number().context("a queue without a length")?;
        let note = self.note(&ask.name, &ask.who.owner);
        // Only the first in the queue need see the lock change; the others are told when it is their turn.
        self.watch = Some(if ahead == 0 {
            let lock = value.text().filter(|value| !value.is_empty());
            Watch { keys: vec![self.keys(&ask.name).swap_remove(0), note], seen: vec![lock, None] }
        } else {
            Watch { keys: vec![note], seen: vec![None] }
        });
        let beat = if self.server.deaf { BLIND_BEAT } else { BEAT };
        // One millisecond more than the server said: it counts whole ones.
        let again = again.number::<u64>().map_or(beat, |ms| Duration::from_millis(ms.saturating_add(1)).min(beat));
        let holder = holder.text().filter(|owner| !owner.is_empty());
        let holder = holder.map(|owner| status::holder(owner, &details.text().unwrap_or_default(), None));
        let seen = holder.as_ref().and_then(|holder| Some((holder.owner.clone()?, holder.fencing_token?)));
        let left = Duration::from_millis(left.number().unwrap_or(0));
        self.before = seen.map(|(owner, token)| Before { owner, token, ends: clock::now() + left });
        Ok(Busy { holder, ahead: Some(ahead), ask_again: clock::now() + again })
    }
}
