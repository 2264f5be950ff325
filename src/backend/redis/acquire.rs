//! Asking for the lock: what `acquire.lua` is told and what its answers mean.

use std::time::Duration;

use anyhow::Result;

use super::answer::{self, Acquire};
use super::{Redis, Script, flag, grant_from, millis, script, status};
use crate::backend::{Ask, Attempt, Busy};
use crate::clock::{self, Instant};
use crate::lock::messages;

static ACQUIRE: Script = script!("acquire.lua");

/// A waiter that has not asked again for this long is taken for dead.
pub(super) const PLACE: Duration = Duration::from_secs(6);
/// How often a waiter asks although nothing seems to change.
const ASK_EVERY: Duration = Duration::from_secs(2);
/// The second in the queue asks so often, to notice soon that the first does not come; the third half as often, and
/// so on.
const NEXT_ASKS_EVERY: Duration = Duration::from_millis(500);
/// How often it asks a server that cannot push.
const ASK_EVERY_WITHOUT_PUSHES: Duration = Duration::from_millis(250);

impl Redis {
    pub(super) async fn acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        self.server.connect().await?;
        let unanswered = std::mem::replace(&mut self.unanswered, true);
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
        self.unanswered = unanswered;
        Ok(match reply {
            Acquire::Granted { token, slot, ttl, value } => {
                self.watch = self.lock_and_note(ask, Some(value));
                if let Err(error) = self.replicated().await {
                    // We are going to ask again: there must be no word that we have left for good.
                    self.leave(ask, flag(false)).await.ok();
                    return Err(error);
                }
                Attempt::Granted(ask.lease(token, slot, grant_from(from, ttl)))
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
        self.watch = self.lock_and_note(ask, value);
        // Only the first in the queue need see the lock change; the others are told when it is their turn.
        if ahead > 0 {
            self.watch.remove(0);
        }
        let holder = holder.map(|owner| status::contender(owner, &seen.details, None).into_holder());
        // A foreign program may give a lock the time again that it had when we saw it first.
        if let Some((_, before)) = self.seen.take()
            && seen.details.is_empty()
            && before.owner == seen.owner
        {
            seen.lasts = seen.lasts.max(before.lasts);
        }
        let every = match ahead {
            _ if self.server.cannot_push => ASK_EVERY_WITHOUT_PUSHES,
            // Often enough to see every renewal, so that one that the server loses is missed.
            0 if !seen.lasts.is_zero() => (seen.lasts / 3).clamp(ASK_EVERY_WITHOUT_PUSHES, ASK_EVERY),
            0 => ASK_EVERY,
            ahead => ASK_EVERY.min(NEXT_ASKS_EVERY * ahead),
        };
        self.seen = Some((from, seen));
        // One millisecond more than the server said: it counts whole ones.
        let again = again.map_or(every, |again| (again + Duration::from_millis(1)).min(every));
        Busy { holder, ahead: usize::try_from(ahead).ok(), ask_again: clock::now() + again }
    }
}
