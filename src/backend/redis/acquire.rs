//! Asking for the lock: what `acquire.lua` is told and what its answers mean.

use std::time::Duration;

use anyhow::Result;

use super::answer::{self, Acquire, Grant};
use super::script::{Script, script};
use super::watch::Watch;
use super::{Redis, flag, millis, status, term};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::messages;

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
        Ok(match answer::acquire(&reply, from)? {
            Acquire::Granted(grant) => {
                let lease = self.granted(ask, from, grant);
                if let Err(error) = self.replicated().await {
                    // We are going to ask again: there must be no word that we have left for good.
                    self.leave(ask, flag(false)).await.ok();
                    return Err(error);
                }
                Attempt::Granted(lease)
            }
            Acquire::Busy(busy) => Attempt::Busy(self.busy(ask, busy)),
            Acquire::AlreadyRan => Attempt::AlreadyRan,
            Acquire::OtherSlots(theirs) => {
                Attempt::OtherTerms(messages::other_slots("another contender", theirs, ask.mode))
            }
        })
    }

    fn granted(&mut self, ask: &Ask, from: Instant, grant: Grant) -> Lease {
        self.watch = Some(Watch {
            keys: vec![self.keys(&ask.name).swap_remove(0), self.note(&ask.name, &ask.who.owner)],
            seen: vec![Some(grant.value), None],
        });
        Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: grant.token,
            slot: grant.slot,
            term: term(from, grant.ttl),
            descriptors: Vec::new(),
        }
    }

    fn busy(&mut self, ask: &Ask, reply: answer::Busy) -> Busy {
        let answer::Busy { ahead, again, value, holder, mut seen } = reply;
        let note = self.note(&ask.name, &ask.who.owner);
        // Only the first in the queue need see the lock change; the others are told when it is their turn.
        self.watch = Some(if ahead == 0 {
            Watch { keys: vec![self.keys(&ask.name).swap_remove(0), note], seen: vec![value, None] }
        } else {
            Watch { keys: vec![note], seen: vec![None] }
        });
        let holder = holder.map(|owner| status::contender(owner, &seen.details, None).into_holder());
        // A foreign program may give a lock the time again that it had when we saw it first.
        if let Some(before) = self.seen.take().filter(|before| seen.details.is_empty() && before.owner == seen.owner) {
            seen.lasts = seen.lasts.max(before.lasts);
        }
        let beat = match ahead {
            _ if self.server.deaf => BLIND_BEAT,
            // Often enough to see every renewal, so that one that the server loses is missed.
            0 if !seen.lasts.is_zero() => (seen.lasts / 3).clamp(BLIND_BEAT, BEAT),
            0 => BEAT,
            ahead => BEAT.min(NEXT_BEAT * ahead),
        };
        self.seen = Some(seen);
        // One millisecond more than the server said: it counts whole ones.
        let again = again.map_or(beat, |again| (again + Duration::from_millis(1)).min(beat));
        Busy { holder, ahead: usize::try_from(ahead).ok(), ask_again: clock::now() + again }
    }
}
