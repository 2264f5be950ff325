//! Signs of life: one more ephemeral node of the same session beside every place, where nobody looks who tidies up the
//! queue by hand. It is made and removed in the transactions that make and remove the place.
//!
//! A sign without a place is somebody's whose place was deleted, and who may not have noticed yet: its command runs on
//! for as long as its session may live. Whoever would be next waits for that. Other programs know nothing of it.

use anyhow::Result;

use super::ZooKeeper;
use super::queue::sign_of;
use super::reply::{self, Answer, Refusal};
use super::request::Request;
use crate::backend::{Ask, Attempt, Busy};
use crate::lock::LockName;

impl ZooKeeper {
    /// Where the signs of a lock's contenders lie. No lock is named so.
    pub(super) fn signs_path(&self, name: &LockName) -> String {
        format!("{}/~alive/{}", self.meta, name.encoded())
    }

    /// The sign of whoever has, or is about to get, the place of this name.
    pub(super) fn sign_path(&self, name: &LockName, node: &str) -> String {
        format!("{}/{}", self.signs_path(name), sign_of(node))
    }

    /// It is our turn, but somebody whose place was deleted may still be running its command.
    pub(super) async fn mourn(&mut self, ask: &Ask, struck: &[String]) -> Result<Attempt> {
        let watch = |sign: &String| Request::exists(&self.sign_path(&ask.name, sign), true);
        let answers = self.ensemble.call(&struck.iter().map(watch).collect::<Vec<_>>()).await?;
        if answers.contains(&Err(Refusal::NoNode)) {
            self.ensemble.poke();
        }
        let ask_again = self.next_keep_alive()?;
        if !ask.queue {
            self.leave().await?;
        }
        Ok(Attempt::Busy(Busy { holder: None, ahead: Some(0), ask_again }))
    }
}

/// The names of the signs, from the answer about where they lie.
pub(super) fn read_signs(answer: &Answer) -> Result<Vec<String>> {
    match answer {
        Ok(children) => reply::read_children(children),
        Err(Refusal::NoNode) => Ok(Vec::new()),
        Err(why) => Err(super::refusal(*why, "cannot list who is alive")),
    }
}
