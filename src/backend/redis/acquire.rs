//! Asking for the lock: what `acquire.lua` is told and what its answers mean.

use std::time::Duration;

use anyhow::Result;

use super::answer::{self, Acquire};
use super::watch::Watch;
use super::{Redis, Script, flag, grant_from, millis, script, status};
use crate::backend::{Ask, Attempt, Busy, Lease};
use crate::clock::{self, Instant};
use crate::lock::messages;

static ACQUIRE: Script = script!("acquire.lua");

/// A waiter that has not asked again for this long is taken for dead.
pub(super) const PLACE: Duration = Duration::from_secs(6);
/// How often a waiter asks although nothing seems to change.
const BEAT: Duration = Duration::from_secs(2);
/// The second in the queue asks so often, to notice soon that the first does not come; the third half as often, and
/// so on.
const NEXT_BEAT: Duration = Duration::from_millis(500);
/// How often it asks a server that cannot push.
const BLIND_BEAT: Duration = Duration::from_millis(250);

impl Redis {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.server.connect().await?;
        let unheard = std::mem::replace(&mut self.unheard, true);
        let from = clock::now();
        let (mode, slots, ttl) = (ask.mode.to_string(), ask.mode.slots().to_string(), millis(ask.ttl));
        let once = ask.once.as_deref().unwrap_or("");
        let (place, who) = (millis(PLACE), ask.who.to_json());
        let us = [ask.who.owner.as_str(), &mode, &slots, &ttl, flag(ask.queue), &place, once, &who];
        let seen = match &self.seen {
            Some((asked, seen)) => {
                let (left, lasts) = (millis((*asked + seen.left).remaining()), millis(seen.lasts));
                [seen.token.clone(), seen.owner.clone(), seen.details.clone(), left, lasts]
            }
            None => ["0", "", "", "0", "0"].map(str::to_owned),
        };
        let args: Vec<&str> = us.into_iter().chain(seen.iter().map(String::as_str)).collect();
        let reply = self.server.run(&ACQUIRE, &self.keys(&ask.name), &args).await?;
        self.unheard = unheard;
        Ok(match reply {
            Acquire::Granted { token, slot, ttl, value } => {
                let keys = vec![self.keys(&ask.name).swap_remove(0), self.note(&ask.name, &ask.who.owner)];
                self.watch = Some(Watch { keys, seen: vec![Some(value), None] });
                if let Err(error) = self.replicated().await {
                    // We are going to ask again: there must be no word that we have left for good.
                    self.leave(ask, flag(false)).await.ok();
                    return Err(error);
                }
                let (name, owner, grant) = (ask.name.clone(), ask.who.owner.clone(), grant_from(from, ttl));
                Attempt::Granted(Lease { name, owner, token, slot, grant, descriptors: Vec::new() })
            }
            Acquire::Busy(busy) => Attempt::Busy(self.busy(ask, from, busy)),
            Acquire::AlreadyRan => Attempt::AlreadyRan,
            Acquire::OtherSlots(theirs) => {
                Attempt::OtherSlots(messages::other_slots("another contender", theirs, ask.mode))
            }
        })
    }

    fn busy(&mut self, ask: &Ask, from: Instant, reply: answer::Busy) -> Busy {
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
        if let Some((_, before)) = self.seen.take()
            && seen.details.is_empty()
            && before.owner == seen.owner
        {
            seen.lasts = seen.lasts.max(before.lasts);
        }
        let beat = match ahead {
            _ if self.server.deaf => BLIND_BEAT,
            // Often enough to see every renewal, so that one that the server loses is missed.
            0 if !seen.lasts.is_zero() => (seen.lasts / 3).clamp(BLIND_BEAT, BEAT),
            0 => BEAT,
            ahead => BEAT.min(NEXT_BEAT * ahead),
        };
        self.seen = Some((from, seen));
        // One millisecond more than the server said: it counts whole ones.
        let again = again.map_or(beat, |again| (again + Duration::from_millis(1)).min(beat));
        Busy { holder, ahead: usize::try_from(ahead).ok(), ask_again: clock::now() + again }
    }
}
