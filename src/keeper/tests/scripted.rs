//! A backend that does what a test tells it to, call by call: answer well, late or not at all, refuse,
//! lose the lock, block the very thread it is called on.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Result;
use async_trait::async_trait;

use crate::backend::{
    Ask, Attempt, Backend, Busy, Checkup, Ending, Forget, Forgotten, Lease, Page, Reheld, Released, Renewal, Revoke,
    Revoked,
};
use crate::clock;
use crate::exit::Fault;
use crate::lock::{Grant, Holder, LockName, LockState, OwnerId, Token};

/// What the next call of a verb meets.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    Good,
    Busy,
    /// Grants it for no more than this until it is renewed.
    Brief(Duration),
    Hang,
    /// Answers, but only after this long.
    Late(Duration),
    Unreachable,
    Refuse,
    Lose,
    Revoke,
    Take,
    /// Does not give the thread back for this long.
    Block(Duration),
}

/// What was asked of the backend, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Acquire,
    Withdraw,
    Renew,
    NoteStart,
    Release,
}

pub struct Scripted {
    /// Once it is used up, every call goes well.
    script: VecDeque<Act>,
    pub calls: Arc<Mutex<Vec<Call>>>,
    ttl: Duration,
    /// How often a start cannot be noted before it can.
    pub unnoted: u32,
}

impl Scripted {
    pub fn new(ttl: Duration, script: &[Act]) -> Scripted {
        Scripted { script: script.iter().copied().collect(), calls: Arc::default(), ttl, unnoted: 0 }
    }

    async fn play(&mut self, call: Call) -> Result<Act> {
        self.calls.lock().unwrap().push(call);
        let act = self.script.pop_front().unwrap_or(Act::Good);
        match act {
            Act::Hang => pending().await,
            Act::Late(by) => tokio::time::sleep(by).await,
            Act::Block(span) => std::thread::sleep(span),
            Act::Unreachable => return Err(Fault::Unreachable.because("connection refused")),
            Act::Refuse => return Err(Fault::Refused.because("wrong password")),
            Act::Good | Act::Busy | Act::Brief(_) | Act::Lose | Act::Revoke | Act::Take => {}
        }
        Ok(act)
    }

    fn grant(&self, from: clock::Instant) -> Grant {
        Grant { from, ttl: self.ttl, slack: Duration::ZERO }
    }
}

#[async_trait(?Send)]
impl Backend for Scripted {
    async fn try_acquire(&mut self, ask: &Ask) -> Result<Attempt> {
        let mut grant = self.grant(clock::now());
        match self.play(Call::Acquire).await? {
            Act::Busy => {
                let ask_again = clock::now() + Duration::from_secs(1);
                return Ok(Attempt::Busy(Busy { holder: None, ahead: None, ask_again }));
            }
            Act::Brief(ttl) => grant.ttl = ttl,
            _ => {}
        }
        Ok(Attempt::Granted(Lease {
            name: ask.name.clone(),
            owner: ask.who.owner.clone(),
            token: Token(1),
            slot: None,
            grant,
            descriptors: Vec::new(),
        }))
    }

    async fn changed(&mut self) -> Result<()> {
        pending().await
    }

    async fn withdraw(&mut self, _ask: &Ask) -> Result<()> {
        self.play(Call::Withdraw).await?;
        Ok(())
    }

    async fn renew(&mut self, _lease: &Lease) -> Result<Renewal> {
        let from = clock::now();
        Ok(match self.play(Call::Renew).await? {
            Act::Lose => Renewal::Lost("somebody else has it".into()),
            Act::Revoke => Renewal::Revoked("because".into()),
            Act::Take => Renewal::ForceReleased("because".into()),
            _ => Renewal::Held(self.grant(from)),
        })
    }

    async fn note_start(&mut self, _lease: &Lease) -> Result<()> {
        self.calls.lock().unwrap().push(Call::NoteStart);
        match self.unnoted.checked_sub(1) {
            None => Ok(()),
            Some(left) => {
                self.unnoted = left;
                Err(Fault::Unreachable.because("connection refused"))
            }
        }
    }

    async fn release(&mut self, _lease: &Lease, _ending: &Ending) -> Result<Released> {
        Ok(match self.play(Call::Release).await? {
            Act::Lose => Released::NotOurs,
            Act::Take => Released::ForceReleased("because".into()),
            _ => Released::Done,
        })
    }

    async fn rehold(&mut self, _name: &LockName, _owner: &OwnerId, _ttl: Duration) -> Result<Reheld> {
        Ok(Reheld::NotOurs)
    }

    async fn inspect(&mut self, name: &LockName) -> Result<LockState> {
        Ok(LockState::free(name.clone(), "scripted"))
    }

    async fn forget(&mut self, _name: &LockName, _what: &Forget) -> Result<Forgotten> {
        Ok(Forgotten::Nothing)
    }

    async fn list(&mut self, _after: Option<String>) -> Result<Page> {
        Ok(Page::default())
    }

    async fn examine(&mut self) -> Result<Checkup> {
        Ok(Checkup::default())
    }

    async fn revoke(&mut self, _name: &LockName, _from: &Holder, _how: &Revoke) -> Result<Revoked> {
        Ok(Revoked::NotHeld)
    }
}
